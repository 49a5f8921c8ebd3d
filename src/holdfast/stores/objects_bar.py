"""The bar: an object that has a name so that nothing is published there. Readers do not see it."""

import secrets

BAR_MAGIC = b"holdfast bars this name\n"
BAR_BYTES = len(BAR_MAGIC) + 33  # and a random number, so that each has an ETag of its own


def new_bar() -> bytes:
    """Return the content of a bar that is like no other."""
    return BAR_MAGIC + secrets.token_hex(16).encode() + b"\n"
