"""`holdfast check-run`: whether a run needs somebody, for cron and for probes."""

import math
import textwrap
from typing import Any

from .. import check_run as check
from ..errors import OptionError
from ..stores.url import open_store
from .text import printable, screen_size

Document = dict[str, Any]


def check_run(path: str, **limits: float | None) -> Document:
    """Apply the rules of `holdfast.check_run`.

    Raises:
        OptionError: a limit is not a number above 0.
        NotCommittedError: this is no run.
    """
    for name, value in limits.items():
        if value is not None and not 0 < value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is {value:g}; expected a number above 0")
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
