"""What a local run says of the store behind it: which steps are there, and which wait.

It asks the local disk alone: its mark, and the uploads in metrics.jsonl.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import StoreError
from ..format import spec
from ..format.lag import lag_of
from ..format.local_mark import MARK_BYTES_MAX, MARK_NAME, LocalMark, decode_mark
from ..format.measured import TAIL_BYTES, decode_lines
from ..format.names import all_metrics, some, step_name, step_of
from ..stores.base import Store
from ..stores.tail import read_tails
from .text import cut, printable, show_bytes, width_of

Document = dict[str, Any]

PLACE_MIN = 24  # columns


def behind(local: Store, names: Iterable[str]) -> Document | None:
    """Describe the store behind a local run; None: it is no local run.

    ``since`` is when the first step became durable that the store lacks, in seconds since 1970.

    Args:
        names: in its directory, of steps and of files.
    """
    mark = mark_of(local)
    if not mark.store:
        return None
    known = sorted(set(names))
    records = [*decode_lines(read_tails(local, all_metrics(known), TAIL_BYTES))]
    uploads = [record for record in records if record.get("verb") == "upload"]
    done = {record["step"] for record in uploads}
    steps = sorted(step for name in known if (step := step_of(name)) is not None)
    last = uploads[-1] if uploads else None
    oldest = lag_of(records).oldest
    return {
        "store": mark.store,
        "uploaded": last["step"] if last else None,
        "bytes_s": _rate(last) if last else None,
        "waiting": [s for s in steps if s not in done and _is_committed(local, s)],
        "since": oldest[1] if oldest else None,
    }


def lacks_manifest(step: Store) -> bool:
    """Return whether the MANIFEST of a local step is on the disk of another host."""
    return mark_of(step.above()).lacks_manifests


def mark_of(local: Store) -> LocalMark:
    """Read what a local run says of itself; nothing where it is none."""
    try:
        return decode_mark(local.get(MARK_NAME, MARK_BYTES_MAX)) or LocalMark()
    except StoreError:
        return LocalMark()


def _is_committed(local: Store, step: int) -> bool:
    try:
        return local.exists(f"{step_name(step)}/{spec.MANIFEST_NAME}")
    except StoreError:
        return True  # for all that is known


def _rate(upload: Document) -> float | None:
    seconds = upload.get("seconds")
    took_s = seconds.get("total") if isinstance(seconds, dict) else None
    size = upload.get("bytes")
    is_known = isinstance(took_s, float) and isinstance(size, int) and took_s > 0 and size > 0
    return size / took_s if is_known else None  # type: ignore[operator]


def behind_text(found: Mapping[str, Any] | None, width: int | None = None) -> list[str]:
    """Show that in a line; nothing for what is no local run.

    Args:
        width: of the line; what is too long is the place. None: it may be any.
    """
    if found is None:
        return []
    text = ""
    if found["uploaded"] is not None:
        text += f", last upload: step {found['uploaded']:,}"
        if found["bytes_s"] is not None:
            text += f" at {show_bytes(int(found['bytes_s']))}/s"
    if found["waiting"]:
        text += f"; not there yet: {some([f'{step:,}' for step in found['waiting']])}"
    place = f"behind it: {printable(found['store'])}"
    return [(place if width is None else cut(place, max(width - width_of(text), PLACE_MIN))) + text]
