"""The steps of a run that is on a local disk and in the store behind it: which, where, how read.

Knows ranks and files; saves and uploads are in `tiers.py`.
"""

import contextlib
import json
import logging
import time
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine import epochs
from ..engine.transfer import is_same, present
from ..errors import (
    CorruptError,
    HoldfastError,
    MismatchError,
    OptionError,
    StoreError,
    VersionError,
)
from ..format import spec
from ..format.local_mark import LocalMark
from ..format.manifest import decode_manifest
from ..format.names import named, step_name
from ..group.base import COORDINATOR, sends
from ..group.phase import Phase
from ..loading.reach import Reach
from ..plan.share_plan import holders_of
from ..stores.base import Store
from ..stores.layered import layered
from ..stores.url import is_remote, open_store
from .directory import Run
from .hosts import Hosts, find_hosts
from .local_mark import check_order, read_mark
from .metrics_file import MetricsFile
from .missing_manifests import MissingManifests
from .place import GONE, Lack, Place
from .retention import Keep

if TYPE_CHECKING:
    from ..group.base import Group
    from .uploader import Uploader

logger = logging.getLogger("holdfast")

AWAY_S = 30.0  # after the store did not answer, a restore does not ask it again

Result = TypeVar("Result")


class TierSteps(ABC):
    """See `TieredRun`."""

    local: Run
    store: Run
    durable: str
    is_ready: bool
    uploader: "Uploader | None"
    _ranks: "Group"
    _here: Store
    _there: Store
    _hosts: Hosts | None
    _reach: Reach | None = None
    _past: set[int]  # steps of this disk that this run goes on without
    _left: frozenset[int]  # of these, those of another past, as the ranks last found
    _elsewhere: frozenset[int]  # local steps of the run, of which another host has MANIFEST
    _lacking: set[int]  # steps of which files are on no host that is here
    _only_here: Sequence[int] = ()  # local steps that the store lacked, at the last look
    _is_restored = False  # by this job, to train on
    _away_until = 0.0  # the store has not answered a moment ago, and need not
    _before: str | None = None  # the job that had the store when this one looked
    _is_store_known = True  # or it could not be read then
    _missing: MissingManifests

    @property
    def root(self) -> str:
        """Where it is in the store."""
        return self.store.root

    @property
    def keep(self) -> Keep:
        """The policy of the store."""
        return self.store.keep

    @property
    def damaged(self) -> set[int]:
        """Steps of the local disk that could not be restored."""
        return self.local.damaged

    @property
    def metrics(self) -> MetricsFile:
        """What saves, restores and uploads have measured."""
        return self.local.metrics

    def steps(self) -> list[int]:
        """List the committed steps of both, ascending; of other hosts' disks, as last told."""
        self._away_until = 0.0
        return self._all_steps()

    def _all_steps(self) -> list[int]:
        here = ({*self.local.steps()} - self._left) | self._elsewhere
        return sorted((here - self._lost) | {*(self._store_steps() or ())})

    @property
    def _lost(self) -> set[int]:
        """Steps that all ranks go on without, since files of them are on no host that is here."""
        return self._past & self._lacking

    def path(self, step: int) -> str:
        """Return the directory of a step: on the local disk, if all its files are there."""
        here = self.local.path(step)
        return here if self._is_whole_here(step) else self.store.path(step)

    def manifest_path(self, step: int) -> str:
        """Return the directory of a step: on the local disk, if its MANIFEST is there."""
        here = self.local.path(step)
        is_left_out = step in self._left | self._lost
        is_here = self._here.exists(f"{step_name(step)}/{spec.MANIFEST_NAME}")
        return here if is_here and not is_left_out else self.store.path(step)

    def _is_whole_here(self, step: int) -> bool:
        if step in self._left | self._lost:
            return False
        here = self._here.below(step_name(step))
        try:
            data = here.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
            return all(present(here, decode_manifest(data, here.location)))
        except HoldfastError:
            return False  # it is in the store, or who reads it there is told what is wrong

    def _note_elsewhere(self, steps: Iterable[int]) -> None:
        """Take note of the local steps of the run, where this rank's own disk does not say it.

        Once this job has begun, the coordinator's disk has all of them.
        """
        sees_all = self.is_ready and self._ranks.rank in self.found_hosts().of_coordinator()
        self._elsewhere = frozenset() if sees_all else frozenset(steps)

    def found(self, ranks: "Group", *, anew: bool = True) -> dict[int, list[Place]]:
        """Return the steps of both with their places, on every rank: the local disk comes first.

        Args:
            anew: False: the store is left out, if it was when this was asked before.

        Raises:
            MismatchError: a step is another checkpoint here than there.
            OptionError: a local run belongs to another store, or does not say to which.
            StoreError: the store cannot be read, and a save has to reach it.
        """
        hosts = self.found_hosts()
        store, job = self._look_at_store(ranks, anew)
        with Phase(ranks) as listed:
            # After the store: a job is named on its disks before it has the store.
            told: dict[str, Any] = {}
            if hosts.is_lead:
                steps = self.local.steps()  # first: who saves one has said before whose disk it is
                mark = self.checked_mark()
                told = {"steps": steps, "of": mark.store, "jobs": sorted(mark.jobs)}
                told |= self._missing.reply(self.local, mark)
            listed.answer = json.dumps(told).encode()
        replies = [json.loads(answer) for answer in listed.answers]
        self._before, self._is_store_known = job, store is not None
        if self.uploader is not None:
            known = {name for reply in replies for name in reply.get("jobs", ())}
            self.uploader.unseen = known if store is None else None
        with Phase(ranks) as compared:
            left = self._left_behind(replies[ranks.rank], store, job)
            self._past |= left
            compared.answer = json.dumps(sorted(left)).encode()
            if self.uploader is not None:
                self._note(left, store or [])
        lead = hosts.leads[ranks.rank]
        self._left = frozenset(json.loads(compared.answers[lead]))
        result: dict[int, list[Place]] = {}
        for rank, (reply, answer) in enumerate(zip(replies, compared.answers, strict=True)):
            left = set(json.loads(answer))
            for step in reply.get("steps", ()):
                if step not in left and step not in result:
                    second = self.store.path(step) if step in (store or ()) else ""
                    result[step] = [Place(self.local.path(step), second, rank)]
        if self.uploader is not None:
            self._only_here = sorted(result.keys() - {*(result if store is None else store)})
            self._missing.say(self.local.root, replies, [*result, *(store or ())], job)
        here = {*replies[lead]["steps"]} - self._left
        self._note_elsewhere({*result} - here)
        for step in store or ():
            result.setdefault(step, []).append(Place(self.store.path(step)))
        return dict(sorted(result.items()))

    def reach(self, step: int, place: Place) -> Reach | None:
        """Return what this rank can read of a place that lacks nothing."""
        return self._reach

    def lacks(self, step: int, place: Place) -> Lack | None:
        """Find out what can be read of a place; on all ranks.

        Returns:
            Why it cannot be restored: most often, a host is not here.
        """
        self._reach = None
        self._lacking.discard(step)
        if place.path == self.store.path(step):
            return None
        first = open_store(place.path)
        second = open_store(place.second) if place.second else None
        ranks = self._ranks
        with Phase(ranks) as told:
            if ranks.rank == place.owner:
                with contextlib.suppress(StoreError):  # it has just been deleted, or is unreadable
                    told.answer = first.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        data = told.answers[place.owner]
        try:
            manifest = decode_manifest(data, f"{place.path}/{spec.MANIFEST_NAME}")
        except (CorruptError, VersionError) as error:
            if not data and self._is_gone(place):
                return GONE
            if second is None and isinstance(error, VersionError):
                raise
            return Lack(str(error) if data else "its MANIFEST cannot be read", is_damage=True)
        with Phase(ranks) as seen:
            seen.answer = bytes(present(first, manifest))
        holders = holders_of([[bool(byte) for byte in answer] for answer in seen.answers])
        missing = int((holders.of_file < 0).sum())
        if missing and second is None:
            if self._is_gone(place):
                return GONE
            self._lacking.add(step)
            why = "does not have this step" if self._is_store_known else "cannot be read"
            return Lack(
                f"{missing} of its {len(manifest.file_names)} files are on no host that is here, "
                f"and {self.store.root} {why}"
            )
        is_spread = self.found_hosts().is_spread
        if is_spread and second is None and not sends(ranks):
            return Lack(
                "it lies on the disks of several hosts, and these ranks cannot send to each other. "
                "Create the process group with a backend for the CPU: "
                "init_process_group('cpu:gloo,cuda:nccl')",
                is_damage=True,
            )
        given = {spec.MANIFEST_NAME: data}
        self._reach = Reach(layered(first, second, given), holders if is_spread else None)
        return None

    def _is_gone(self, place: Place) -> bool:
        """Return whether a step was deleted since it was found; on all ranks."""
        with Phase(self._ranks) as asked:
            if self._ranks.rank == place.owner:
                with contextlib.suppress(StoreError):  # what cannot be asked is not gone
                    there = open_store(place.path).exists(spec.MANIFEST_NAME)
                    asked.answer = b"" if there else b"1"
        return bool(asked.answers[place.owner])

    def leave(self) -> None:
        """Let `begin` be called again: both places may have changed, as the state has."""
        self.is_ready, self._is_restored = False, True
        self._past.clear()
        self._lacking.clear()
        self._left = self._elsewhere = frozenset()

    def note(self, step: int, place: Place, *, is_damaged: bool) -> None:
        """Take note of whether a step could be restored from a place.

        The store is read last: what is damaged there is good on no disk that is here.
        """
        tier = self.store if place.path == self.store.path(step) else self.local
        if is_damaged:
            tier.damaged.add(step)
            self.local.damaged.add(step)
            self._past |= self._lacking & {step}
        else:
            tier.damaged.discard(step)
            self._past.discard(step)

    def lost(self) -> str | None:
        """Say that a newer step than all has lost its MANIFEST; None: no."""
        steps = self._all_steps()
        if (lost := self.local.lost(steps)) is not None:
            return lost
        try:
            return self._ask_store(lambda: self.store.lost(steps))
        except StoreError:
            return None  # it was read a moment ago; what is there cannot be told

    def found_hosts(self) -> Hosts:
        """Return which ranks share a local disk; on all ranks, the first time."""
        if self._hosts is None:
            self._hosts = find_hosts(self._here, self._ranks)
        return self._hosts

    def checked_mark(self) -> LocalMark:
        """Read what the local directory says of itself.

        Raises:
            OptionError: it belongs to another store.
        """
        mark = read_mark(self._here)
        if mark.store and mark.store != self.store.root:
            raise OptionError(
                f"local is {self.local.root}, which holds steps of {mark.store}; expected a "
                f"directory of {self.store.root}, or a new one. If that run was moved there, give "
                "a new one, and copy the steps that the store lacks: "
                f"holdfast copy {self.local.root} {self.store.root}"
            )
        if not is_remote(self.store.root):
            with contextlib.suppress(StoreError):  # `found` says it, or goes on without
                check_order(self.local.root, self._there)
        return mark

    def _store_steps(self) -> list[int] | None:
        """List the steps of the store; None: it cannot be read, and need not be."""
        return self._ask_store(self.store.steps)

    def _look_at_store(self, ranks: "Group", anew: bool) -> tuple[list[int] | None, str | None]:
        """Return the steps of the store and the newest job there; on all ranks. None: not known."""

        def look() -> tuple[list[int], str | None]:
            return self.store.steps(), epochs.newest_job(self._there)

        with Phase(ranks) as asked:
            if self.uploader is not None:
                asks = anew or self.uploader.unseen is None
                seen = self._ask_store(look) if asks else None
                asked.answer = json.dumps(seen or (None, None)).encode()
        steps, job = json.loads(asked.answers[COORDINATOR])
        return steps, job

    def _ask_store(self, read: Callable[[], Result]) -> Result | None:
        if time.monotonic() < self._away_until:
            return None
        try:
            if not self.store.fence.has_looked:
                self.store.look()  # first: whoever takes an epoch after this is a newer job
            return read()
        except StoreError as error:
            if self.durable == "store":
                raise
            self._away_until = time.monotonic() + AWAY_S
            logger.warning(
                "%s cannot be read, so only the steps of %s are looked at; uploads begin when it "
                "can. If another job has trained there, this job then ends with FencedError: %s",
                *(self.store.root, self.local.root, error),
            )
            return None

    def _left_behind(
        self, reply: Mapping[str, Any], store: list[int] | None, job: str | None
    ) -> set[int]:
        """Return the steps of this local disk that another job has left behind in the store.

        Then a step that is in both counts only if it is the same. If one of them cannot be read
        now, that is not known: the step may be of another past, and the store has it.

        Raises:
            OptionError: the local run has steps, and does not say of which store.
            MismatchError: a step is another checkpoint here than there, of the same job.
        """
        here = set(reply.get("steps", ()))
        alone = here - set(store or ())
        if alone and not reply["of"]:  # a run by itself, which would go but for its newest steps
            raise OptionError(
                f"local is {self.local.root}, which holds {named(alone)} and does not say which "
                "store they belong to. Give a new directory; or first bring these steps to the "
                f"store: holdfast copy {self.local.root} {self.store.root}"
            )
        if store is None or not here:
            return set()
        same = {step: self._is_same(step) for step in sorted(here & set(store))}
        if job is not None and job not in reply["jobs"]:
            return alone | {step for step, is_so in same.items() if not is_so}
        other = {step for step, is_so in same.items() if is_so is False}
        for step in other - self.local.damaged - self.store.damaged:
            raise MismatchError(
                f"step {step} is not the same checkpoint in {self.local.path(step)} as in "
                f"{self.store.path(step)}. Compare them with holdfast diff, and delete the one "
                "that is not of this run"
            )
        return set()

    def _is_same(self, step: int) -> bool | None:
        """Compare a step; None: one is damaged, which who restores it finds, or has gone."""
        below = step_name(step)
        return is_same(self._here.below(below), self._there.below(below))

    def _note(self, old: set[int], store: list[int]) -> None:
        """Leave the steps of another past out, and take note of those of the store."""
        assert self.uploader is not None
        if old - self.uploader.ignored:
            logger.warning(
                "%s of %s: left out, since another job has trained on in %s without them. They "
                "are deleted when this run begins to save",
                *(named(old), self.local.root, self.store.root),
            )
        self.uploader.ignored = frozenset(old)
        self.uploader.forget(store)
