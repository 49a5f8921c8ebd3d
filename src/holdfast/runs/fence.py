"""One job writes to a run: the one that took its newest epoch; an older one is refused.

A job that was frozen, or cut off, may come back when another has taken its place. An epoch is a
file ``.epoch-<number>`` in the run's directory, made by one exclusive step:

  1. A job looks at the newest epoch when it restores.
  2. Before it first writes it takes the next one, if that is still the newest; else it is refused.
  3. Then it removes all pending manifests of the run: what an older job has not published by now
     it never will, since `link` does not find it any more, or the look before it finds the epoch.
  4. It looks again right before it publishes a step, and before it removes one.

No clock decides. Knows no ranks: one of those that share a disk holds an epoch of it. Epochs belong
to a process, so that several Checkpointers of one go together.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Collection
from datetime import UTC, datetime

from ..engine import epochs
from ..engine.epochs import NO_EPOCH, Epoch, epoch_name, epochs_of, is_same, newest_epoch
from ..engine.retire import LEAVING_PREFIX, is_pending
from ..errors import FencedError, NoSpaceError, StoreError
from ..format.names import step_of
from ..format.spec import MANIFEST_NAME
from ..stores.base import Store, list_if_there
from ..stores.local_paths import device_of

logger = logging.getLogger("holdfast")

PENDING_EPOCH_PREFIX = ".taking-"


class Fence:
    """What a job knows of the epochs of one run. Threads may share it for `hold`.

    Attributes:
        has_entered: whether `enter` has been called since the last `look`.
        inherits: whether an epoch that it takes goes by the name of the job before, which saves no
            step and so leaves nobody's behind.
        is_whole: whether the file of an epoch is to say whose it is after a power cut, too; that
            takes an fsync.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()  # of threads: one takes an epoch for all
        self._seen: Epoch | None = None  # the newest when this job looked
        self._disk: int | None = None  # where that was
        self.has_entered = self.inherits = self.is_whole = False

    def look(self) -> None:
        """Take note of the newest epoch: whoever takes a later one from here on comes after us."""
        self._note(newest_epoch(self._store))
        self.has_entered = False

    def _note(self, newest: Epoch) -> None:
        self._seen, self._disk = newest, device_of(self._store.location)

    @property
    def has_looked(self) -> bool:
        """Whether this job knows which epoch was the newest when it began."""
        return self._seen is not None

    def check_past(self, jobs: Collection[str]) -> None:
        """Check, in a job that could not look at first, that it goes on from what is there.

        Args:
            jobs: whose past it shares.

        Raises:
            FencedError: there are steps of another job.
        """
        job = epochs.newest_job(self._store)
        if job in jobs or (job is None and not self._steps()):
            return
        raise FencedError(
            f"{self._store.location} has steps of another job, and could not be read when this one "
            "began without them. End this job. Start it again to continue from those steps, or "
            "give it a new run"
        )

    def enter(self) -> None:
        """Take the next epoch with the first step of training, where there is a run already.

        Not with its first save, which may be an hour later. What fails is told by that save.
        """
        if self.has_entered:
            return
        self.has_entered = True
        try:
            if self._steps():
                self.hold()
        except (FencedError, StoreError) as error:
            logger.warning("%s", error)

    def hold(self) -> None:
        """Check that this job may write, and take the next epoch when it has none.

        Raises:
            FencedError: another job has taken a newer epoch than this one has seen.
            StoreError: that cannot be found out, or the disk of the run is not mounted.
        """
        with self._turn:
            newest = newest_epoch(self._store)
            held = epochs.held.get(self._store.location)
            if newest != NO_EPOCH and is_same(newest, held):
                self._note(newest)
                return
            if self._seen is None:
                self._note(newest)
            if newest == NO_EPOCH:
                self._check_gone()
            elif not (is_same(newest, self._seen) or self._is_ours(newest)):
                raise self._refusal(newest)
            self._take(newest[0] + 1)

    def _check_gone(self) -> None:
        """Where there is no epoch, look whether there was one, and whether its disk still is."""
        where, (seen, _) = self._store.location, self._seen or NO_EPOCH
        if not seen:
            return
        if self._disk not in (None, device_of(where)):
            raise StoreError(
                f"cannot write to {where}: its disk is not mounted: another disk is there, without "
                f"{epoch_name(seen)}. Mount it; the next save then works. To go on without the "
                "steps there, start this job again"
            )
        logger.warning(
            "%s was deleted, or its file %s, since this job began. This job goes on",
            where,
            epoch_name(seen),
        )

    def _take(self, epoch: int) -> None:
        job = epochs.job_of(self._store, epoch - 1) if self.inherits else epochs.this_job()
        note = f"{json.dumps(_description(epoch) | {'job': job})}\n".encode()
        if not self._make(epoch, note):
            raise self._refusal((epoch, ""))
        newest = newest_epoch(self._store)
        if newest[0] != epoch:  # we came so late that the next one is there, and this one was free
            self._store.remove(epoch_name(epoch))
            raise self._refusal(newest)
        self._note(newest)
        self._revoke()
        self._remove_older(epoch)
        epochs.held[self._store.location] = newest
        logger.debug("this job may write to %s, in epoch %d", self._store.location, epoch)

    def _is_ours(self, epoch: Epoch) -> bool:
        """Whether this job has made the file of an epoch, if not all that is done after it."""
        return epochs.job_of(self._store, epoch[0]) == epochs.this_job()

    def _make(self, epoch: int, note: bytes) -> bool:
        """Make the file of an epoch in one exclusive step; return False when it is there already.

        On a full disk without what it says: it may be what lets old steps go.
        """
        name = epoch_name(epoch)
        if not (self.is_whole and self._store.shows_pending):
            return self._store.claim(name, note)
        pending = f"{PENDING_EPOCH_PREFIX}{os.urandom(8).hex()}"
        try:
            self._store.prepare(pending, note)
        except NoSpaceError:
            return self._store.claim(name, note)
        try:
            return self._store.publish(pending, name)
        except StoreError:
            if epochs.job_of(self._store, epoch) != epochs.this_job():
                raise
            return True  # it is there, if not durably, which nobody needs

    def _remove_older(self, epoch: int) -> None:
        """Remove the files of older epochs, which say nothing any more; where one stays, it stays.

        A directory may keep its users from removing what is another's, or anything.
        """
        for older in filter(epoch.__gt__, epochs_of(self._store)):
            try:
                self._store.remove(epoch_name(older))
            except StoreError as error:
                logger.info("the file of an older job stays: %s", error)

    def _revoke(self) -> None:
        """Remove what older jobs have not published; beside a MANIFEST too, which may be let go."""
        for step in self._steps():
            if not self._store.shows_pending:
                self._store.revoke("", f"{step}/{MANIFEST_NAME}")
                continue
            for entry in self._store.list(step):
                # Nothing is published through a bar or a mark.
                is_other = entry.kind == "directory" or entry.name.startswith(LEAVING_PREFIX)
                if is_pending(entry.name) and not is_other:
                    self._store.remove(f"{step}/{entry.name}")

    def _steps(self) -> list[str]:
        """List the directories of steps, committed or not."""
        entries = list_if_there(self._store) or []
        return [e.name for e in entries if e.kind == "directory" and step_of(e.name) is not None]

    def _refusal(self, newest: Epoch) -> FencedError:
        held, (seen, _) = epochs.held.get(self._store.location), self._seen or NO_EPOCH
        mine = f"this one has epoch {held[0]}" if held else f"this one saw epoch {seen}"
        return FencedError(
            f"{self._store.location} belongs to a newer job: "
            f"{epochs.describe(self._store, newest[0])}; {mine}, and may no longer write there. "
            "End this job. To continue with this one instead, end the newer job and call restore() "
            "again"
        )


def _description(epoch: int) -> dict[str, object]:
    """Describe this job, for people."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"epoch": epoch, "host": socket.gethostname(), "pid": os.getpid(), "started": started}
