"""Where the steps of a run are: in one place, or on a local disk and in the store behind it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arguments import is_positive
from ..engine.registry import find_codec, show_codec
from ..errors import OptionError, shown
from ..options import Options
from .commit_hook import CommitHook
from .directory import Run
from .schedule import UploadTimes
from .settings import DURABLE
from .tiers import TieredRun
from .upload_thread import Told

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..group.base import Group
    from .emergency import Beside


DRAIN_S = 600.0  # what `drain_s` is when it is not given
START_S = 30.0  # that a store which is away holds up a job that saves to its local disk


@dataclass(frozen=True, slots=True)
class LocalDisk:
    """What a `holdfast.Checkpointer` is given of a local disk; see there."""

    path: "str | os.PathLike[str] | None"
    durable: str
    drain_s: float
    upload_bytes_s: float | None

    def limit_s(self, deadline_s: float) -> float:
        """Return how long a request to the store may take: training that needs none begins soon."""
        return min(deadline_s, START_S) if self.durable == "local" else deadline_s

    def upload_limit_s(self, deadline_s: float) -> float:
        """Return how long a save may wait for its upload; 0: it does not."""
        return deadline_s if self.path is not None and self.durable == "store" else 0.0

    def check(self, store: Run, codec: "str | Codec") -> None:
        """Check it.

        Raises:
            OptionError: an invalid argument; or deltas, where the store cannot hold any.
        """
        if self.durable not in DURABLE:
            one_of = ", ".join(DURABLE)
            raise OptionError(f"durable is {shown(self.durable)}; expected one of {one_of}")
        if not is_positive(self.drain_s):
            raise OptionError(
                f"drain_s is {shown(self.drain_s)}; expected a number of seconds above 0"
            )
        rate = self.upload_bytes_s
        if rate is not None and not is_positive(rate):
            raise OptionError(
                f"upload_bytes_s is {shown(rate)}; expected a number of bytes above 0, or None"
            )
        _check_directory("root", store.root)
        if isinstance(self.path, (str, os.PathLike)):
            _check_directory("local", self.path)
        given = {
            "Keep.local": store.keep.local_count > 0,
            'durable="local"': self.durable == "local",
            "upload_bytes_s": rate is not None,
            "drain_s": self.drain_s != DRAIN_S,
        }
        if self.path is None and (alone := [name for name, is_given in given.items() if is_given]):
            raise OptionError(
                f"{alone[0]} is given without local; expected a directory of a local disk beside "
                'it, such as local="/nvme/run"'
            )
        chosen = find_codec(codec)
        if self.path is not None and not store.can_link and chosen.every > 1:
            raise OptionError(
                f"codec is {show_codec(chosen)}, and {store.root} cannot hold chains of deltas. "
                'Choose a codec without a base, such as "lossless"'
            )


def _check_directory(argument: str, path: "str | os.PathLike[str]") -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise OptionError(
            f"{argument} is {os.fsdecode(path)}, which is a file; expected a directory, which need "
            "not exist yet. Give another path, or move that file away"
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run is.

    Attributes:
        run: all of it.
        disk: the part that saves are written to.
        tiers: the run, where it has a local disk.
        hook: told of each step that is durable where saves are written to.
        beside: what runs in threads of its own.
    """

    run: Run | TieredRun
    disk: Run
    tiers: TieredRun | None
    hook: "CommitHook | TierHook"
    beside: "tuple[Beside, ...]" = ()


def places_of(
    store: Run,
    local: LocalDisk,
    ranks: "Group",
    options: Options,
    codec: "str | Codec",
    hook: CommitHook,
    event: Callable[..., object],
    uploads: UploadTimes,
) -> Places:
    """Return where a run is; nothing is read or written yet.

    Args:
        hook: told of each step that is durable where its caller asks for it.
        event: told of what happens to uploads, as `Observers.tell`.
        uploads: measures them.
    """
    if local.path is None:
        return Places(store, store, None, hook)
    committed = hook.tell if local.durable == "store" else lambda *_: None
    told = Told(event, committed, uploads.measure)
    rate, durable = local.upload_bytes_s, local.durable
    given = (ranks, options, durable, rate, told)
    tiers = TieredRun(local.path, store, *given, chains=find_codec(codec).every > 1)
    beside = (tiers.beside if tiers.uploader is None else tiers.uploader,)
    return Places(tiers, tiers.local, tiers, TierHook(tiers, hook.tell), beside)


class TierHook:
    """Stands for ``on_commit`` where a save ends on the local disk."""

    def __init__(
        self, run: TieredRun, call: Callable[[str, int, Mapping[str, float] | None], object]
    ) -> None:
        self._run, self._call = run, call

    def tell(self, path: str, step: int, metrics: Mapping[str, float] | None) -> None:
        """Let the step go up; tell of it now, where the local disk is what was asked for."""
        if self._run.durable == "local":
            self._call(path, step, metrics)
        if self._run.uploader is not None:
            self._run.uploader.committed(step, metrics)
