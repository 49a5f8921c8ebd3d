"""Panels and data → one HTML file that needs nothing else. Knows the template; no run.

The page has a content security policy: it may load nothing, and run only its own script. Data comes
in as JSON in which no markup can begin.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from .. import __version__
from .data import Finding
from .panels import findings
from .words import shown


def page(
    *,
    kind: str,
    heading: str,
    found: Sequence[Finding],
    sections: Sequence[tuple[str, str, str]],
    data: dict[str, Any],
    made: float,
) -> str:
    """Return the whole file.

    Args:
        kind: what the report is of, in a few words.
        heading: name of the run or checkpoint.
        sections: (id, title, HTML) of each panel; those without HTML are left out.
        data: what the script draws, as values of JSON.
        made: when it was made, in seconds since 1970.
    """
    kept = [(name, title, body) for name, title, body in sections if body]
    script = _file("page.js").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made))
    parts = {
        "HASH": digest,
        "TITLE": shown(f"{heading} · holdfast"),
        "STYLE": _file("page.css").strip(),
        "KIND": shown(kind),
        "HEADING": shown(heading),
        "FINDINGS": findings(found),
        "NAV": "".join(f'<a href="#{name}">{shown(title)}</a>' for name, title, _ in kept),
        "BODY": "\n".join(body for *_, body in kept),
        "FOOTER": shown(f"Made by holdfast {__version__} at {when}."),
        "DATA": script_json(data),
        "SCRIPT": script,
    }
    text, *rest = _file("page.html").split("@")
    for place, part in enumerate(rest):  # names and texts between: a value is never looked at again
        text += parts[part] if place % 2 == 0 else part
    return text


def script_json(data: Any) -> str:
    """Return JSON that ends no script element, and has no other characters than ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
