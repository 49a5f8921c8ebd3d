"""Uploads from the disks of several hosts: the coordinator asks, each host brings its own files.

They meet in the store: the coordinator names the step in a small file of the run, beside a copy of
the step's MANIFEST, and waits until all files are there. Leads of other hosts look for that file,
and answer with others that say which files they have, and how that has ended. Each time it asks,
the coordinator gives another name, which the answers have too: an older answer counts for nothing.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from .. import worker
from ..brief import show_bytes
from ..engine import epochs
from ..engine.transfer import bring, present
from ..errors import CorruptError, HoldfastError, StoreError, writable
from ..format import spec
from ..format.manifest import Manifest, decode_manifest
from ..format.names import is_save_id, step_name
from ..options import Options
from ..stores.base import Store, list_if_there
from ..stores.url import open_store
from .throttle import upload_options
from .upload_thread import UploadThread

logger = logging.getLogger("holdfast")

ASKED_NAME = ".uploading"
ASKED_PREFIX = ".uploading-"
LOOK_S = 1.0  # between two looks into the store
QUIET_LOOKS = 3  # without anything asked for: the coordinator asks for no more
STALLED_S = 300.0  # without a further file: a host is gone, or its disk or network hang
# Which files a host has; that they are in the store, durably; or why they never will be.
_KINDS = ("held", "done", "failed")
_BYTES_MAX = 4096
_ANSWER_BYTES_MAX = 16 << 20


class OtherHosts:
    """Asks other hosts for their files of one step, and waits for them; for the coordinator."""

    def __init__(
        self, run: Store, step: int, leads: frozenset[int], check: Callable[[], object]
    ) -> None:
        """Prepare.

        Args:
            run: in the store.
            leads: the ranks that answer.
            check: called at every look; raises when the upload is to end.
        """
        self._run, self._step, self._leads, self._check = run, step, leads, check
        self._asked = b""
        self._name = f"{ASKED_PREFIX}{os.urandom(8).hex()}"  # answers to another call are not ours

    def ask(self, manifest: Manifest, data: bytes) -> None:
        """Name the step."""
        asked = {
            "step": self._step,
            "save_id": manifest.table.header.save_id,
            "name": self._name,
            "job": epochs.this_job(),
        }
        self._asked = f"{json.dumps(asked)}\n".encode()
        put(self._run, self._name, data)
        put(self._run, ASKED_NAME, self._asked)

    def wait(self, manifest: Manifest, files: Sequence[int]) -> None:
        """Wait until their files are there, durably.

        What a file's size says is not enough: on a disk it is there before its bytes are.

        Raises:
            CorruptError: no host that is here has some of them, or those of one are damaged.
            StoreError: none has come for long.
        """
        left, since = len(files) + 1, time.monotonic()
        while missing := sorted(set(files) - self._answers("done")[0]):
            self._check_failed()
            held, have_all = self._answers("held")
            if have_all and (nowhere := [n for n in missing if n not in held]):
                raise CorruptError(
                    f"{len(nowhere)} of its data files are on hosts that are not here, such as "
                    f"{manifest.file_names[nowhere[0]]}"
                )
            if len(missing) < left:
                left, since = len(missing), time.monotonic()
            if time.monotonic() - since > STALLED_S:
                raise StoreError(
                    f"{self._run.location}/{step_name(self._step)}: {len(missing)} data files of "
                    f"other hosts have not come for {STALLED_S:g} s, such as "
                    f"{manifest.file_names[missing[0]]}"
                )
            until = time.monotonic() + LOOK_S
            while time.monotonic() < until:
                self._check()
                time.sleep(0.02)
            with contextlib.suppress(StoreError):  # the next look finds it
                if not self._run.exists(ASKED_NAME):  # an older job took it back as its own
                    put(self._run, ASKED_NAME, self._asked)

    def _answers(self, kind: str) -> tuple[set[int], bool]:
        """Return the files of all answers of a kind, and whether all leads have given one."""
        found, count = set[int](), 0
        for lead in self._leads:
            name = answer_name(self._name, kind, lead)
            with contextlib.suppress(StoreError, ValueError, TypeError):  # it is being written
                if self._run.exists(name):
                    found |= {int(n) for n in json.loads(self._run.get(name, _ANSWER_BYTES_MAX))}
                    count += 1
        return found, count == len(self._leads)

    def _check_failed(self) -> None:
        for lead in sorted(self._leads):
            name = answer_name(self._name, "failed", lead)
            with contextlib.suppress(StoreError):  # the next look finds it
                if self._run.exists(name):
                    text = self._run.get(name, _ANSWER_BYTES_MAX).decode(errors="replace")
                    raise CorruptError(text)

    def take_back(self) -> None:
        """Take the step's name back, if it was given; not that of a newer job."""
        if not self._asked:
            return
        if self._run.exists(ASKED_NAME) and self._run.get(ASKED_NAME, _BYTES_MAX) == self._asked:
            self._run.remove(ASKED_NAME)
        names = [answer_name(self._name, kind, n) for kind in _KINDS for n in self._leads]
        for name in (self._name, *names):
            self._run.remove(name)


def answer_name(asked: str, kind: str, lead: int) -> str:
    """Name the file of an answer."""
    return f"{asked}-{kind}-{lead}"


def forget_asked(run: Store) -> None:
    """Remove what older jobs have asked and answered."""
    for entry in list_if_there(run) or ():
        if entry.name == ASKED_NAME or entry.name.startswith(ASKED_PREFIX):
            run.remove(entry.name)


class HostUploads(UploadThread):
    """Brings the files of one host, in a thread of its lead; see the module."""

    def __init__(self, local: str, run: str, options: Options, rate: float | None) -> None:
        self._local, self._run = local, open_store(run)
        super().__init__(rate)
        self._root, self._options = run, upload_options(options, self._run)
        self._rank, self._job = -1, ""
        self._answered = ""  # what was asked last, if it is done
        self._said = ""

    def begin(self, rank: int, job: str) -> None:
        """Start the thread of a lead, which answers one job's coordinator alone."""
        self._rank, self._job = rank, job
        if not self._start():
            logger.error("no thread can be started, so nothing of this host is uploaded")

    def wait_idle(self, until: float) -> None:
        """Wait until nothing is asked for, for a while, but no longer than to a time."""
        quiet = 0
        while quiet < QUIET_LOOKS and time.monotonic() < until and not self._ended.is_set():
            worker.check()
            try:
                quiet = 0 if self._run.exists(ASKED_NAME) else quiet + 1
            except StoreError:
                quiet = 0
            time.sleep(LOOK_S)

    def say_left(self) -> None:
        """Do nothing: the coordinator says it."""

    def _serve(self) -> None:
        while not self.is_stopped:
            try:
                self._turn()
                self._said = ""
            except HoldfastError as error:
                if str(error) != self._said:
                    logger.warning("the files of this host are not uploaded yet: %s", error)
                self._said = str(error)
            except Exception:
                logger.exception("the files of this host are not uploaded")
            until = time.monotonic() + LOOK_S
            while not self.is_stopped and time.monotonic() < until:
                time.sleep(0.05)

    def _turn(self) -> None:
        """Bring the files that are asked for, if this host has any."""
        if not self._run.exists(ASKED_NAME):
            return
        try:
            asked = json.loads(self._run.get(ASKED_NAME, _BYTES_MAX))
            step, save_id, name = int(asked["step"]), str(asked["save_id"]), str(asked["name"])
            is_ours = asked["job"] == self._job and is_save_id(save_id)
        except (StoreError, ValueError, KeyError, TypeError):
            return  # it is being taken back, or torn
        if not (is_ours and name.startswith(ASKED_PREFIX) and "/" not in name):
            return
        if name == self._answered or not self._run.exists(name):
            return
        data = self._run.get(name, spec.MANIFEST_BYTES_MAX)
        manifest = decode_manifest(data, f"{self._root}/{name}")
        here = open_store(f"{self._local}/{step_name(step)}")
        there = open_store(f"{self._root}/{step_name(step)}")
        held = json.dumps([n for n, has in enumerate(present(here, manifest)) if has]).encode()
        put(self._run, answer_name(name, "held", self._rank), held)
        try:
            size = bring(here, there, manifest, self._options, self._pace, "upload")
        except CorruptError as error:  # to try again would not help
            text = writable(f"on host {socket.gethostname()}: {error}")
            put(self._run, answer_name(name, "failed", self._rank), text.encode())
            self._answered = name
            logger.error("step %d of this host is not uploaded: %s", step, error)
            return
        put(self._run, answer_name(name, "done", self._rank), held)
        self._answered = name
        if size:
            logger.info("uploaded this host's files of step %d: %s", step, show_bytes(size))

    def _look_up(self) -> None:
        if self.is_stopped:
            raise StoreError("this job ends; the next one goes on")


def put(run: Store, name: str, data: bytes) -> None:
    pending = f"{ASKED_PREFIX}{os.urandom(8).hex()}"
    run.prepare(pending, data)
    run.rename(pending, name)
