"""`holdfast check-run`: whether a run needs somebody, for cron and for probes."""

import textwrap
from typing import Any

from .. import check_run as check
from ..stores.url import open_store
from .text import printable, screen_size

Document = dict[str, Any]


def check_run(path: str, **limits: float | None) -> Document:
    """Apply the rules of `holdfast.check_run`.

    Raises:
        NotCommittedError: this is no run.
    """
    found = check(path, **limits)
    alerts = [{"rule": one.rule, "step": one.step, "text": one.text} for one in found]
    return {"path": open_store(path).location, "ok": not alerts, "alerts": alerts}


def render(document: Document) -> list[str]:
    """Show a line for each alert."""
    where = printable(document["path"])
    if document["ok"]:
        return [f"{where}: ok"]
    lines = [where]
    for alert in document["alerts"]:
        step = "" if alert["step"] is None else f"step {alert['step']}: "
        head = f"  ALERT  {alert['rule']:10}"
        text = f"{step}{printable(alert['text'])}"
        room = max(screen_size()[0] - len(head), 20)
        parts = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        lines += [f"{head}{parts[0]}", *(" " * len(head) + part for part in parts[1:])]
    return lines
