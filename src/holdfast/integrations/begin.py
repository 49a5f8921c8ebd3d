"""How an integration begins a save in the background. Imports no framework."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .. import worker
from ..options import Options
from ..saving.handle import SaveHandle
from ..saving.request import SaveRequest
from ..saving.save import Records, start_save

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..group.base import Group

STAGES = ("eager", "lazy", "sync")  # as integrations name them; "sync" is `holdfast.save`


def begin(
    state: Mapping[Any, Any],
    path: str,
    ranks: "Group",
    *,
    stage: str = "eager",
    step: int | None = None,
    codec: "str | Codec" = "raw",
    options: Options,
    after: Callable[[Records], None] = lambda _: None,
) -> SaveHandle:
    """Copy a state, and save the copy in place of what stands at the path, with all ranks.

    Args:
        stage: "eager" or "lazy", as for `holdfast.save_async`.
        after: called in the save's thread when the checkpoint is committed, on every rank; the
            records are on the coordinator alone.

    Raises:
        HoldfastError: as `holdfast.save_async`.
    """
    deadline_s = options.deadline_s
    request = SaveRequest(path, step, None, codec, options, stage, "wait", deadline_s, True)
    start: Callable[[], SaveHandle] = lambda: start_save(state, request, ranks, after)  # noqa: E731
    return worker.run(start, dropped=SaveHandle.cancel)
