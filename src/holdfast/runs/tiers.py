"""One run in two places: a local disk, where saves are durable first, and the store behind it.

The local disk may be one for all ranks, or one of each host. Which steps there are, and how they
are read, is in `tier_steps.py`; who waits for uploads, in `tier_waits.py`. The coordinator uploads
(`uploader.py`), and asks the leads of other hosts for their files (`host_uploads.py`).
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine import epochs
from ..engine.retire import let_go
from ..engine.transfer import take_manifest
from ..errors import HoldfastError, OptionError, StoreError, shown
from ..format import spec
from ..format.local_mark import LocalMark
from ..format.local_room import LOCAL_ROOM
from ..format.names import step_name, step_of
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..options import Options
from ..saving.request import SaveRequest
from ..stores.url import absolute, is_remote, open_store
from .directory import Run
from .host_uploads import HostUploads
from .hosts import Hosts
from .local_mark import check_apart, lost_marks, write_mark
from .missing_manifests import MissingManifests
from .place import Place
from .retention import Keep, Metrics
from .tier_waits import TierWaits
from .upload_thread import Told
from .uploader import Uploader

if TYPE_CHECKING:
    from ..group.base import Group

logger = logging.getLogger("holdfast")


class TieredRun(TierWaits):
    """See the module. All ranks make one; of those methods that write, the coordinator's count.

    Attributes:
        local: the run on the local disk, which is saved to.
        store: the run behind it.
        durable: the tier that a save has to reach before its caller goes on.
        uploader: on the coordinator; ``beside``: what brings the files of other hosts, on the
            lead of each.
        is_ready: whether `begin` was called.
    """

    def __init__(
        self,
        local: "str | os.PathLike[str]",
        store: Run,
        ranks: "Group",
        options: Options,
        durable: str,
        rate: float | None,
        told: Told,
        *,
        chains: bool,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            rate: bytes a second that uploads of one host take at most.
            chains: whether saves may be deltas of others.

        Raises:
            OptionError: the local directory is a URL, or that of the store.
        """
        if is_remote(local):
            raise OptionError(f"local is {shown(local)}; expected a directory of a local disk")
        local = absolute(local, "local")
        self.store, self._ranks, self.durable = store, ranks, durable
        self.uploader: Uploader | None = None
        self._chains = chains
        self.beside = HostUploads(local, store.root, options, rate)
        self.local = Run(local, self._local_keep(store.keep))
        self.local.room = LOCAL_ROOM
        check_apart(local, store.root, local, store.root)
        self._here, self._there = open_store(local), open_store(store.root)
        store.fence.is_whole = True
        if ranks.rank == COORDINATOR:
            given = (self.local, store, store.keep, options, rate, told)
            self.uploader = Uploader(*given)
        self.is_ready = self._was_ready = False
        self._word, self._waits = "", 0  # of the meetings of waits, and how many there were
        self._hosts: Hosts | None = None
        self._missing = MissingManifests()
        self._past, self._lacking = set(), set()
        self._left = self._elsewhere = frozenset()
        self._marked: list[str] = []  # the jobs that the disk of this rank is to name

    def look(self) -> None:
        """Take note of which jobs have both places now; on the coordinator."""
        assert self.uploader is not None, "the coordinator alone looks"
        self._away_until = 0.0
        self.uploader.until_unawaited()  # from here on it uploads nothing until `begin`
        with self.uploader.paused():
            self.uploader.renew()
            self.local.look()
            with contextlib.suppress(StoreError):  # `found` says it, or goes on without
                self._ask_store(self.store.look)

    def look_beside(self) -> None:
        """Take note of which jobs have the disks of other hosts; on all ranks."""
        hosts = self.found_hosts()
        with Phase(self._ranks):
            if self.uploader is None and hosts.is_lead:
                self.local.look()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the uploader from both places meanwhile."""
        with contextlib.nullcontext() if self.uploader is None else self.uploader.paused():
            yield

    def retire(self, step: int) -> None:
        """Remove a step from both places; on the coordinator."""
        assert self.uploader is not None, "the coordinator alone removes"
        with self.uploader.paused():
            self.local.retire(step)
            self.store.retire(step)
            self.uploader.forget(self.store.steps())

    def check_seen(self) -> None:
        """Check, on all ranks, that this run goes on from the steps of the store.

        Raises:
            StoreError: it could not be read.
        """
        with Phase(self._ranks):
            if self.uploader is not None and self.uploader.unseen is not None:
                raise StoreError(
                    f"{self.store.root} could not be read, so its steps are not known and none is "
                    "deleted. Call restore() again when it can be read"
                )

    def retire_damaged(self, step: int) -> None:
        """Remove a step that could not be restored, so that it is saved again; on the coordinator.

        Other hosts let go of it after that. It goes from the store too, if it is damaged there: a
        job that begins before the upload would find two steps of one number. But not before this
        job has the store.

        Raises:
            FencedError: another job has the store.
            AlreadyCommittedError: the store has this step, and nothing says that it is damaged.
        """
        assert self.uploader is not None, "the coordinator alone removes"
        with self.uploader.paused():
            self.uploader.check(step)
            self.local.retire(step)
            if step not in self.store.damaged or not self.uploader.has_entered:
                return
            try:
                self.store.retire(step)
            except StoreError as error:
                if self.durable == "store":
                    raise
                logger.warning("step %d, which is damaged, stays for now: %s", step, error)
            else:
                self.store.damaged.discard(step)
                self.uploader.forget(self.store.steps())

    def retire_elsewhere(self, steps: Sequence[int], ranks: "Group") -> None:
        """Remove what other hosts have of steps that the coordinator has retired; on all ranks.

        Durably, before one of them is saved again: if a host kept the old MANIFEST, it would have
        another checkpoint of that number than the store.
        """
        self._elsewhere -= {*steps}
        with Phase(ranks):
            if self.uploader is None and self.found_hosts().is_lead:
                self.local.fence.hold()
                # First, or it would say that MANIFEST is lost.
                self.local.drop_latest({*self.local.steps()} - {*steps})
                for step in steps:
                    self._let_go(step, None)

    def begin(self) -> None:
        """Check both places before the first save, and go on with uploads; on all ranks, once.

        Raises:
            OptionError: as `found`; or deltas on the disks of several hosts.
            FencedError: another job has taken the store since this one looked.
            StoreError: the store cannot be used, and a save has to reach it.
        """
        self.found(self._ranks, anew=False)  # before anything is written to a disk of another run
        hosts = self.found_hosts()
        with Phase(self._ranks) as begun:
            if self.uploader is not None:
                begun.answer = f"{epochs.this_job()} {os.urandom(8).hex()}".encode()
            if hosts.is_lead:
                self.local.fence.hold()  # each disk is one job's
        job, self._word = begun.answers[COORDINATOR].decode().split()
        # Until then an older job may have published a step, also on another host than rank 0's.
        found = self.found(self._ranks, anew=False)
        with Phase(self._ranks):
            if hosts.is_lead:
                self._drop_past()
                self.checked_mark()
                # Until this job has an epoch, the newest is of the job whose past it shares.
                self._marked = [self._before, job] if self._before else [job]
                write_mark(self._here, self._says(), self._marked, forgets=bool(self._before))
            if self._chains and hosts.is_spread:
                raise OptionError(
                    f"local is {self.local.root}, which each host has for itself, and the codec "
                    'makes deltas, which need one disk. Choose a codec such as "lossless", or a '
                    "local directory that all ranks share"
                )
        self._adopt(found)
        with Phase(self._ranks):
            if self.uploader is not None:
                self._enter(self.uploader)
        self.is_ready = self._was_ready = True
        self._note_elsewhere(self._elsewhere - self._lost)
        self._past.clear()  # not before: it says which steps are lost
        self._left = frozenset()
        if self.uploader is not None:
            self.uploader.leads = frozenset(hosts.leads) - {COORDINATOR}
            self.uploader.begin()
        elif hosts.is_lead:
            self.beside.begin(self._ranks.rank, job)

    def _adopt(self, found: Mapping[int, Sequence[Place]]) -> None:
        """Have the coordinator's disk lead the local steps of which another host has MANIFEST.

        It was of the coordinator of an earlier job. From here on they are uploaded and retired as
        others are.
        """
        for step, (first, *_) in found.items():
            if first.owner == COORDINATOR or first.second:
                continue
            with Phase(self._ranks) as told:
                if self._ranks.rank == first.owner:
                    told.answer = self._manifest_of(step)
            data = told.answers[first.owner]
            with Phase(self._ranks):
                if self.uploader is not None and data:
                    take_manifest(self._here.below(step_name(step)), data)

    def _manifest_of(self, step: int) -> bytes:
        """Read MANIFEST of a step on this disk; empty: it has just been deleted.

        Raises:
            StoreError: it cannot be read. Were it passed over, the next save would delete the step.
        """
        try:
            return self._here.get(
                f"{step_name(step)}/{spec.MANIFEST_NAME}", spec.MANIFEST_BYTES_MAX
            )
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return b""

    def _enter(self, uploader: Uploader) -> None:
        uploader.may_enter = True
        if uploader.unseen is not None:
            return  # the store was away: the uploader's thread looks again and again
        with uploader.paused():
            try:
                uploader.enter()
            except StoreError as error:
                if self.durable == "store":
                    raise
                logger.warning("%s is not this job's yet: %s", self.store.root, error)

    def _drop_past(self) -> None:
        """Delete the steps that this run goes on without, before it says that this disk is its."""
        for step in sorted(self._past & {step_of(name) for name in self.local.step_names()}):
            logger.warning("deleting step %d of %s", step, self.local.root)
            if self.uploader is not None:
                self.local.retire(step)
            else:
                self._let_go(step, None)
        if self._past:
            self.local.drop_latest(self.local.steps())
        if self.uploader is not None:
            self.uploader.ignored = frozenset()

    def shared(self, request: SaveRequest) -> SaveRequest:
        """Add to a request how ranks on the disks of several hosts save."""
        hosts = self.found_hosts()
        if not hosts.is_spread:
            return request
        here = hosts.of_coordinator()
        request = replace(request, here=here, tell_ranks=self._tell_ranks, heed=self._heed)
        return request if hosts.is_lead else replace(request, check_last=bytes)

    def has_one_disk(self) -> bool:
        """Return whether all ranks share the local directory."""
        return not self.found_hosts().is_spread

    def _tell_ranks(self) -> bytes:
        """Tell the leads of other hosts which steps the local disks keep; never raises."""
        try:
            steps = self.local.steps()
            kept = {step: self.local.described.save_id(step) for step in steps}
            return json.dumps(kept).encode()
        except HoldfastError as error:
            logger.debug("other hosts keep all local steps this time: %s", error)
            return b""

    def _heed(self, data: bytes) -> None:
        """Remove from this host's disk what is of no step that is kept; never raises.

        On the coordinator's too: its disk may have files of steps whose MANIFEST another had.
        """
        if not data:
            return
        kept = {int(step): save_id for step, save_id in json.loads(data).items()}
        self._note_elsewhere(kept)
        if not self.found_hosts().is_lead:
            return
        try:
            self._mark()
            for name in self.local.step_names():
                if (step := step_of(name)) is not None:
                    self._let_go(step, kept.get(step))
            self.local.drop_latest(kept)
        except HoldfastError as error:
            logger.warning("old local steps of this host stay for now: %s", error)

    def _let_go(self, step: int, kept: str | None) -> None:
        """Remove what this disk has of a step but for one save, unless a newer job has the disk."""
        self.local.fence.hold()
        let_go(self._here.below(step_name(step)), kept)

    def check(self, step: int) -> None:
        """Check that a step may be saved; on the coordinator.

        Raises:
            FencedError: a newer job has the store.
            AlreadyCommittedError: the store has this step already.
        """
        assert self.uploader is not None
        self._mark()
        self.uploader.check(step)

    def check_ours(self) -> None:
        """Check, on the coordinator, that no newer job has the store, as far as that can be told.

        Raises:
            FencedError: one has.
        """
        if self.uploader is not None and self.uploader.has_entered:
            with contextlib.suppress(StoreError):
                self.store.fence.hold()

    def _mark(self) -> None:
        """Write again what the local disk says of itself, if that was deleted."""
        if lost := lost_marks(self._here, self._marked):
            logger.warning("%s lacks %s; writing it again", self.local.root, ", ".join(lost))
            write_mark(self._here, self._says(), self._marked)

    def _says(self) -> LocalMark:
        return LocalMark(self.store.root, self.found_hosts().here(), self._ranks.world_size)

    def _local_keep(self, keep: Keep) -> Keep:
        """Return the policy of the local disk."""

        def rule(steps: Sequence[int], metrics: Metrics) -> set[int]:
            if self.uploader is None:
                return set(steps)
            return self.uploader.kept_here(list(steps), metrics, is_full=self.local.is_full)

        text = f"{keep!r}, with {keep.local_steps} steps on the local disk"
        return Keep((rule,), text, keep.metrics, keep.bests, keep.intervals)
