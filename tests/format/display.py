"""The names shown to people, written from docs/format.md §6 alone, for the independent reader."""

import re
from collections import Counter


def dotted(paths):
    """The names shown to people, in the order of the paths."""
    special, marks = r'[\\"\[\]()\x00-\x1f\x7f]', {"list": "[{}]", "tuple": "({})"}

    def escape(key):
        if not isinstance(key, str):
            return marks[key[0]].format(key[1]) if isinstance(key, list) else str(key)
        text = re.sub(r'([\\."\[\]()])', r"\\\1", key)
        text = re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text)
        return f'"{text}"' if re.fullmatch("(-?[0-9]+)?", key) else text

    plain = [[key[1] if isinstance(key, list) else key for key in path] for path in paths]
    names = [".".join(map(str, path)) for path in plain]
    times = Counter(names)
    for index, name in enumerate(names):
        if times[name] > 1 or re.search(special, name):
            names[index] = ".".join(map(escape, paths[index]))
    return names
