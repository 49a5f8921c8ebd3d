"""Saves as metrics of an MLflow run, and a small file that says where each step is.

``Checkpointer("runs/a", observe=[MLflow(mlflow.active_run().info.run_id)])``
"""

import math
from typing import Any

from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

from ... import Event


class MLflow:
    """An observer on rank 0. Nothing of a checkpoint is uploaded: a reference to it is.

    Metrics are ``holdfast/seconds``, ``holdfast/stall_s`` and ``holdfast/stored_bytes``, at the
    step. The artifact ``holdfast/step-N.json`` has the path, the metrics and what each rank
    measured. The tag ``holdfast.latest`` is the path of the newest step, ``holdfast.failed`` the
    last error, and ``holdfast.alert`` the last alert.

    Args:
        run_id: of the run.
        tracking_uri: where MLflow stores it; default: as MLflow is set up.
    """

    def __init__(self, run_id: str, tracking_uri: str | None = None) -> None:
        self._run_id = run_id
        self._client: Any = MlflowClient(tracking_uri)

    def __call__(self, event: Event) -> None:
        """See `holdfast.Checkpointer`."""
        if event.rank != 0:
            return
        if event.kind == "committed":
            stored = sum(rank.get("stored_bytes", 0) for rank in event.ranks)
            values = {"seconds": event.seconds.get("total", 0.0), "stall_s": event.stall_s}
            for name, value in (values | {"stored_bytes": float(stored)}).items():
                now_ms, step = int(event.time_s * 1000), event.step or 0
                self._client.log_metric(self._run_id, f"holdfast/{name}", value, now_ms, step)
            record = event.as_dict()
            finite = {n: v if math.isfinite(v) else str(v) for n, v in event.metrics.items()}
            self._client.log_dict(
                self._run_id, record | {"metrics": finite}, f"holdfast/step-{event.step}.json"
            )
            self._client.set_tag(self._run_id, "holdfast.latest", event.path)
        elif event.kind in ("failed", "alert"):
            self._client.set_tag(self._run_id, f"holdfast.{event.kind}", event.text[:5000])
