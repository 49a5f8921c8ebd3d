"""Where a text of JSON has a tag of further values (`natives`). Knows no values."""

import re

from .spec import VALUE_TAGS

_TAG = re.compile(r'(?<!\\)"(\$[a-z0-9_]+)":')


# Where there may be one, in a header as anybody may write it: by one call that is no Python.
MAY_BE_NATIVE = re.compile(
    rb'"\$(?:%s)"|\\u' % "|".join(sorted(t[1:] for t in VALUE_TAGS)).encode()
)


def has_native(text: str) -> bool:
    """Return whether the JSON text of values, as `write_json` writes it, has a tag of `natives`."""
    return not VALUE_TAGS.isdisjoint(_TAG.findall(text))
