"""All bytes of a run read again from the disk, slowly, and where it stopped when it is interrupted.

What it knows lies in two files in the run: `.scrub.json`, how far this pass has come (it goes when
the pass ends), and `scrub.jsonl`, a line for each checkpoint that was verified, and for each pass.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..arguments import is_positive
from ..brief import brief
from ..engine.other_hosts import files_elsewhere
from ..engine.retire import sweep_pending
from ..errors import (
    CorruptError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    StoreError,
    VersionError,
    shown,
)
from ..faults.damage import (
    Damage,
    Lost,
    find_base_damage,
    find_lost_manifest,
    find_misnamed,
    of_fault,
)
from ..faults.survey import START, survey
from ..format import spec
from ..loading.checkpoint import Checkpoint
from ..options import SLOT_BYTES, Options, options_of
from ..stores.base import Store
from ..stores.url import open_store
from ..worker import in_worker

STATE_NAME = ".scrub.json"
PENDING_PREFIX = ".scrub-"
REPORT_NAME = "scrub.jsonl"
STATE_BYTES_MAX = 64 << 20
STEP_PREFIX = "step-"
SAVE_EVERY_S = 5.0  # so much is read again after a SIGKILL
BURST_S = 1.0  # what was not read in time is not caught up with, but for so much
# Two slots: little is read ahead of what the rate allows.
OPTIONS = Options(pool_bytes=2 * SLOT_BYTES)

Report = Callable[[int], None]


@dataclass(slots=True)
class Pass:
    """Results of `scrub`: one pass over a run, as its state file holds it.

    Attributes:
        location: directory of the run.
        started: time when the pass began.
        todo: steps not yet verified; the first one is in progress.
        save_id: save of the step in progress.
        place: (file, offset) where that step continues.
        verified: number of verified steps.
        read_bytes: encoded bytes read, of all steps.
        retired: steps that were deleted during the pass.
        steps: number of steps when the pass began.
        step_bytes: encoded bytes read, of the step in progress.
        unread: (step, reason) of steps that could not be read; these may be whole.
        damage: (step, fault) of all faults.

    Example::

        result = holdfast.scrub("runs/a")
        print(result.verified, result.damage)
    """

    location: str
    started: str
    todo: list[str]
    save_id: str = ""
    place: tuple[int, int] = START
    verified: int = 0
    read_bytes: int = 0
    retired: list[str] = field(default_factory=list)
    steps: int = 0
    step_bytes: int = 0
    unread: list[tuple[str, str]] = field(default_factory=list)
    damage: list[tuple[str, Damage]] = field(default_factory=list)

    __repr__ = brief


@in_worker
def scrub(
    path: "str | os.PathLike[str]",
    *,
    bytes_per_s: float | None = None,
    options: Options | None = None,
    report: Report = lambda _: None,
) -> Pass:
    """Verify every checkpoint of a run from the disk, past the page cache.

    If it is interrupted (by Ctrl-C, for example), it keeps its position in the run, and the next
    call continues there. Steps that are deleted meanwhile are no faults.

    Args:
        path: directory of the run.
        bytes_per_s: largest number of bytes read per second; default: no limit.
        options: settings such as ``io``.
        report: called with the bytes read since the last call.

    Returns:
        All faults, in ``damage``; it is empty if the run is whole.

    Raises:
        NotCommittedError: there is no run, or it has no checkpoint.
        OptionError: an invalid argument, or ``path`` is one checkpoint.
        StoreError: the position cannot be kept in the run.

    Example:
        ``print(holdfast.scrub("runs/a", bytes_per_s=50e6).damage)``
    """
    if bytes_per_s is not None and not is_positive(bytes_per_s):
        raise OptionError(f"bytes_per_s is {shown(bytes_per_s)}; expected a number above 0")
    options = OPTIONS if options is None else options_of(options)
    store = open_store(path)
    if store.exists(spec.MANIFEST_NAME):
        raise OptionError(f"{store.location} is one checkpoint, not a run; use 'holdfast verify'")
    state = _load(store)
    if state is None:
        state = Pass(store.location, _now(), steps := _steps(store), steps=len(steps))
    if not (state.todo or state.verified or state.retired):
        if not _names(store):
            Checkpoint(store.location)  # says why it is none
        raise NotCommittedError(f"{store.location} has no committed step; give a run with steps")
    sweep_pending(store, 0, PENDING_PREFIX)
    _save(store, state)  # now, while nothing is read in vain
    pace = _Pace(bytes_per_s)
    try:
        while state.todo:
            _scrub_step(store, state, options, pace, report)
            state.todo.pop(0)
            state.save_id, state.place, state.step_bytes = "", START, 0
            _save(store, state)
    except BaseException as error:
        with contextlib.suppress(StoreError):
            _save(store, state)
            error.add_note(_progress(state))
        raise
    told = {"steps": state.verified, "read_bytes": state.read_bytes, "faults": len(state.damage)}
    _note(store, {"verb": "pass", "started": state.started, **told})
    store.remove(STATE_NAME)
    return state


def _progress(state: Pass) -> str:
    faults = f"{len(state.damage)} fault{'s' * (len(state.damage) != 1)}"
    done = max(state.steps - len(state.todo), 0)
    return f"stopped after {done} of {state.steps} steps; {faults} so far; call again to go on"


def _scrub_step(run: Store, state: Pass, options: Options, pace: "_Pace", report: Report) -> None:
    """Verify the step that is next, from where it is."""
    name, started = state.todo[0], time.monotonic()
    known = len(state.damage)
    store = run.sibling(os.path.join(os.path.basename(run.location), name))
    # Payloads are read past the page cache where the file system can; headers and footers are not.
    store.forget_cached()
    try:
        store.exists("")  # a name that is no text is no path either
        checkpoint = Checkpoint(store.location, options)
    except NotCommittedError:
        if (lost := find_lost_manifest(store)) is None:
            state.retired.append(name)
            return
        state.damage.append((name, lost))
    except CorruptError as error:
        where = f"{store.location}/{spec.MANIFEST_NAME}"
        state.damage.append((name, Damage(where, error.args[0])))
    except (StoreError, VersionError) as error:
        state.unread.append((name, str(error)))
        return
    else:
        if state.save_id != checkpoint.save_id:
            state.save_id, state.place, state.step_bytes = checkpoint.save_id, START, 0
        if not _read(run, state, checkpoint, pace, report):
            del state.damage[known:]
            state.retired.append(name)
            return
    state.verified += 1
    faults = [asdict(fault) for _, fault in state.damage[known:]]
    seconds = round(time.monotonic() - started, 3)
    told = {"save_id": state.save_id, "read_bytes": state.step_bytes, "seconds": seconds}
    _note(run, {"verb": "scrub", "step": name, **told, "good": not faults, "damage": faults})


def _read(run: Store, state: Pass, checkpoint: Checkpoint, pace: "_Pace", report: Report) -> bool:
    """Read a checkpoint from where it is; return whether it is the same at the end."""
    name, subject = state.todo[0], checkpoint.subject
    saved_s, told = time.monotonic(), {fault for step, fault in state.damage if step == name}
    try:
        if state.place == START:
            found = find_misnamed(subject)
            found += find_base_damage(subject) if checkpoint.base is not None else []
            state.damage += [(name, fault) for fault in found if fault not in told]
        parts = survey(
            subject.store, subject.manifest, subject.options, start=state.place, patient=True
        )
        with contextlib.closing(parts):
            for part in parts:
                absent = files_elsewhere(subject.store, subject.manifest) if part.faults else ()
                here = [fault for fault in part.faults if fault.where not in absent]
                faults = [of_fault(subject, fault) for fault in here]
                state.damage += [(name, fault) for fault in faults if fault not in told]
                state.place, state.read_bytes = part.end, state.read_bytes + part.size_bytes
                state.step_bytes += part.size_bytes
                report(part.size_bytes)
                pace.wait(part.size_bytes)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    _save(run, state)
                    saved_s = time.monotonic()
    except HoldfastError as error:
        if _is_still(checkpoint):
            state.unread.append((name, str(error)))
            return True
        return False
    return all(step != name for step, _ in state.damage) or _is_still(checkpoint)


def _is_still(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is there yet: one that was retired, or rebased, looks damaged."""
    try:
        return Checkpoint(checkpoint.location).save_id == checkpoint.save_id
    except NotCommittedError:
        return False
    except HoldfastError:
        return True


class _Pace:
    """Lets so many bytes pass in a second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s, self._due_s = bytes_per_s, time.monotonic()

    def wait(self, count_bytes: int) -> None:
        """Sleep until what was read may have been."""
        if self._bytes_per_s is None:
            return
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - BURST_S) + count_bytes / self._bytes_per_s
        if self._due_s > now_s:
            time.sleep(self._due_s - now_s)


def _steps(store: Store) -> list[str]:
    """List the committed steps, and those that have lost their MANIFEST, ascending."""
    steps = (store.below(name) for name in _names(store))
    committed = (os.path.basename(step.location) for step in steps if _is_committed(step))
    return sorted(committed, key=lambda name: (len(name), name))


def _names(store: Store) -> list[str]:
    """List the directories of steps; of what cannot be listed, none."""
    try:
        entries = store.list()
    except StoreError:
        return []
    return [e.name for e in entries if e.kind == "directory" and e.name.startswith(STEP_PREFIX)]


def _is_committed(store: Store) -> bool:
    try:
        return store.exists(spec.MANIFEST_NAME) or find_lost_manifest(store) is not None
    except StoreError:
        return True  # for all that is known; opening it says why it cannot be read


def _load(store: Store) -> Pass | None:
    """Return the pass that was interrupted; None: there is none, or its state cannot be read."""
    if not store.exists(STATE_NAME):
        return None
    try:
        values: dict[str, Any] = json.loads(store.get(STATE_NAME, STATE_BYTES_MAX))
        values["damage"] = [(step, _as_damage(fault)) for step, fault in values["damage"]]
        values["unread"] = [(str(step), str(why)) for step, why in values["unread"]]
        file, offset = values["place"]
        values["place"] = (int(file), int(offset))
        values["todo"] = [str(name) for name in values["todo"] if _is_name(name)]
        return Pass(**values | {"location": store.location})
    except (StoreError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # it only says what need not be read again


def _is_name(name: Any) -> bool:
    """Whether a name leads to a step of the run, and nowhere else."""
    return isinstance(name, str) and name.startswith(STEP_PREFIX) and not {"/", "\0"} & set(name)


def _as_damage(values: dict[str, Any]) -> Damage:
    lost = tuple(
        Lost(part["tensor"], tuple((tuple(a), tuple(b)) for a, b in part["boxes"]))
        for part in values["lost"]
    )
    return Damage(values["where"], values["what"], values["tensor"], lost)


def _save(store: Store, state: Pass) -> None:
    data = json.dumps(asdict(state)).encode()
    pending = f"{PENDING_PREFIX}{os.urandom(8).hex()}"
    store.prepare(pending, data)
    store.replace(pending, STATE_NAME)


def _note(store: Store, told: dict[str, Any]) -> None:
    """Add a line to the report."""
    store.append(REPORT_NAME, f"{json.dumps({'time': _now()} | told)}\n".encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
