"""Ray Train: what it is told of a run's checkpoints. It copies none of them, and deletes none.

`report` is `ray.train.report` with a pointer: a directory with one small file, which names a step
of the run. Ray keeps the metrics and the pointers. `holdfast.Keep` decides which steps are kept.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..errors import MismatchError
from ..group.base import COORDINATOR
from ..runs.checkpointer import Checkpointer
from .adapter import known_version, module

NAME, PACKAGE = "ray", "ray"
OLDEST, NEWEST_TESTED = "2.60.0", "2.60.0"
POINTER = "holdfast.json"  # the one file of what Ray takes for a checkpoint


def report(metrics: Mapping[str, Any], checkpointer: Checkpointer) -> None:
    """Report metrics to Ray Train, with a pointer to the newest durable step of a run.

    All workers call it, as often as each other: like ``ray.train.report``, it waits for them. Ray
    keeps metrics only with a checkpoint, so those of a run without a durable step are not kept.

    Args:
        metrics: as for ``ray.train.report``; those of rank 0 count.
        checkpointer: of the run.

    Raises:
        ImportError: Ray Train is not installed; the text has the command.
        OptionError: an untested version of it.
        StoreError: the directory of the run cannot be listed.
    """
    known_version(PACKAGE, OLDEST, NEWEST_TESTED, NAME)
    train = module("ray.train", NAME)
    is_first = train.get_context().get_world_rank() == COORDINATOR
    step = checkpointer.latest() if is_first else None
    with ExitStack() as ended:
        pointer = None
        if step is not None:
            place = ended.enter_context(tempfile.TemporaryDirectory())
            with open(os.path.join(place, POINTER), "w") as file:
                json.dump({"path": checkpointer.path(step), "step": step}, file)
            pointer = train.Checkpoint.from_directory(place)
        train.report(dict(metrics), checkpoint=pointer)


def path_of(checkpoint: Any) -> str:
    """Return the directory of the step that a checkpoint of Ray points to.

    ``path_of(result.checkpoint)`` → ``"runs/a/step-00000300"``

    Args:
        checkpoint: what `report` has given to Ray, such as ``result.checkpoint``.

    Returns:
        A path for `holdfast.open` and `holdfast.load`. The step may have been deleted since.

    Raises:
        MismatchError: another program has reported it.
    """
    with checkpoint.as_directory() as place:
        file = os.path.join(place, POINTER)
        if not os.path.isfile(file):
            raise MismatchError(
                f"{checkpoint.path} holds no {POINTER}: it was not reported by "
                "holdfast.integrations.ray.report. Read it as its program has written it"
            )
        with open(file) as found:
            path: str = json.load(found)["path"]
    return path
