"""What a wheel says of the code inside: licences, and a bill of materials (CycloneDX, PEP 770)."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Something that is compiled in; the digest is that of the archive it came in."""

    name: str
    version: str
    sha256: str
    licence: str
    licence_file: Path | None


def write_notices(folder: Path, whole: Part, parts: list[Part], target: str) -> None:
    """Write both into a new folder, as they stand in a wheel's dist-info."""
    for part in parts:
        if part.licence_file is not None:
            path = folder / "licenses" / part.name / "LICENSE"
            path.parent.mkdir(parents=True)
            path.write_text(_licence_of(part.licence_file))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": _component(whole) | {"type": "application"},
            "properties": [{"name": "holdfast:target", "value": target}],
        },
        "components": [_component(part) for part in parts],
    }
    (folder / "sboms").mkdir()
    (folder / "sboms" / "holdfast.cdx.json").write_text(json.dumps(document, indent=1) + "\n")


def _component(part: Part) -> dict[str, Any]:
    return {
        "type": "library",
        "name": part.name,
        "version": part.version,
        "hashes": [{"alg": "SHA-256", "content": part.sha256}],
        "licenses": [{"expression": part.licence}],
    }


def _licence_of(path: Path) -> str:
    """Return a licence's text; that of a header is its first comment."""
    text = path.read_text()
    if path.suffix == ".h":
        comment = text.split("/**\n")[1].split(" */")[0]
        text = re.sub(r"^ \* ?", "", comment, flags=re.MULTILINE)
    return text
