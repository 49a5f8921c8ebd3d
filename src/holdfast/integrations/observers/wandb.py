"""Checkpoints as artifacts of Weights & Biases that refer to them: nothing is uploaded.

``Checkpointer("runs/a", observe=[WandB(wandb.init(project="p"))])``
"""

import hashlib
import os
from typing import Any

import wandb  # type: ignore[import-not-found, unused-ignore]

from ... import Event

_BAD = frozenset('/\\:*?"<>|#% ')


class WandB:
    """An observer on rank 0: each durable step is a version of one artifact, with its metrics.

    The artifact is of the type ``checkpoint``, and has one reference: ``holdfast://`` and the path
    of the step. The alias ``latest`` is the newest; each version also has the alias ``step-N``.
    Failures and alerts are alerts of the run.

    Args:
        run: what ``wandb.init`` returned, on rank 0; ``mode="offline"`` works too.
        name: of the artifact; default: the name of the run's directory, with a digest of its path.
    """

    def __init__(self, run: Any, name: str | None = None) -> None:
        self._run, self._name = run, name

    def __call__(self, event: Event) -> None:
        """See `holdfast.Checkpointer`."""
        if event.rank != 0:
            return
        if event.kind == "committed":
            stored = sum(rank.get("stored_bytes", 0) for rank in event.ranks)
            known = {"step": event.step, "stored_bytes": stored, "stall_s": event.stall_s}
            known |= {"seconds": dict(event.seconds), "metrics": dict(event.metrics)}
            artifact = wandb.Artifact(
                self._name or artifact_name(event.run), type="checkpoint", metadata=known
            )
            # W&B would walk through a file:// or s3://, which may be retired by then.
            place = event.path if "://" not in event.path else f"/{event.path}"
            artifact.add_reference(f"holdfast://{place}", name="step", checksum=False)
            self._run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])
        elif event.kind in ("failed", "alert"):
            self._run.alert(title=f"holdfast: {event.rule or event.kind}", text=event.text)


def artifact_name(run: str) -> str:
    """Return a name that an artifact may have: ``/data/runs/a`` → ``a-1f0c2d3e``."""
    last = "".join("_" if c in _BAD or not c.isprintable() else c for c in os.path.basename(run))
    return f"{last[:80] or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
