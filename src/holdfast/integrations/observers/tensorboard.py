"""Saves as scalars in TensorBoard, at the step that was saved.

``Checkpointer("runs/a", observe=[TensorBoard(writer)])``
"""

from typing import Protocol

from ... import Event


class Writer(Protocol):
    """What is used of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int, walltime: float
    ) -> object: ...
    def add_text(self, tag: str, text_string: str, global_step: int, walltime: float) -> object: ...
    def flush(self) -> object: ...


class TensorBoard:
    """An observer that writes what rank 0 measures: ``holdfast/seconds``, ``holdfast/stall_s``.

    Other tags are ``holdfast/stored_bytes`` and ``holdfast/part/NAME``, for the seconds of each
    part of a save. Failures and alerts are texts.

    Args:
        writer: a ``SummaryWriter``, of torch or of tensorboardX; whoever made it closes it, after
            the Checkpointer.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """See `holdfast.Checkpointer`."""
        if event.rank != 0 or event.step is None:
            return
        step, now = event.step, event.time_s
        if event.kind == "committed":
            stored = sum(rank.get("stored_bytes", 0) for rank in event.ranks)
            values = {"seconds": event.seconds.get("total", 0.0), "stall_s": event.stall_s}
            values |= {"stored_bytes": float(stored)}
            parts = {name: value for name, value in event.seconds.items() if name != "total"}
            values |= {f"part/{name}": value for name, value in parts.items()}
            for name, value in values.items():
                self._writer.add_scalar(f"holdfast/{name}", value, step, now)
        elif event.kind in ("failed", "alert"):
            quoted = "    " + event.text.replace("\n", "\n    ")  # markdown shows it as it is
            self._writer.add_text(f"holdfast/{event.kind}", quoted, step, now)
        else:
            return
        self._writer.flush()
