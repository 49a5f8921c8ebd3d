"""Tests play jobs one after the other in one process: what a process holds ends between them."""

from holdfast.engine import epochs
from holdfast.runs import upload_thread


def next_job() -> None:
    """Go on as another process would."""
    epochs.held.clear()
    epochs._names.clear()


def end_uploads() -> None:
    """End what uploads, as the end of a process does: later tests would find its words logged."""
    upload_thread._end_all()
