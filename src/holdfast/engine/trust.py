"""Is a checkpoint what somebody trusted has signed? Keys, digests and SIGNATURE files.

What is checked is what is used: MANIFEST before it is parsed, each payload in the memory that it
is decoded from. So nothing that is swapped between a check and a read is loaded.
"""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError, OptionError, StoreError, TrustError, shown
from ..format import spec
from ..format.signature import Signature, Statement, decode_signature
from ..options import Keys
from ..stores.base import NOT_A_FILE, Store
from ..stores.url import absolute
from ..version import needs

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Gives the statement that binds a MANIFEST, or raises.
Check = Callable[[Store, bytes], Statement]
SSH = "ssh-ed25519 "


def check_of(trust: Keys | None) -> Check | None:
    """Return what checks a MANIFEST against the keys that are trusted; None where none are.

    Raises:
        OptionError: a key cannot be read, or what checks signatures is not installed.
    """
    if trust is None:
        return None
    keys = (trust,) if isinstance(trust, (str, os.PathLike)) else trust
    return partial(_check_signature, [read_public_key(key) for key in keys])


def check_of_base(link: Statement) -> Check:
    """Return what checks the MANIFEST of the base of a link that is signed."""
    return partial(_check_bound, link.base)


def digest(data: "bytes | memoryview") -> bytes:
    """Return the BLAKE3 digest of bytes."""
    return bytes(_imported("blake3").blake3(data).digest())


def read_signature(store: Store) -> Signature | None:
    """Read the SIGNATURE of a checkpoint, if it has one; who signed it is not looked at.

    Raises:
        CorruptError: it is damaged, or no file.
    """
    where = f"{store.location}/{spec.SIGNATURE_NAME}"
    try:
        data = store.get(spec.SIGNATURE_NAME, spec.SIGNATURE_BYTES_MAX)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno in (*NOT_A_FILE, errno.EFBIG):
            raise CorruptError(f"{where} is not a regular file of at most 1 GiB") from error
        raise
    try:
        return decode_signature(data)
    except CorruptError as error:
        raise CorruptError(f"{where}: {error}") from error


def is_signed_by(found: Signature, key: bytes) -> bool:
    """Return whether this key has signed the statement."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(found.signature, found.signed)
    except InvalidSignature:
        return False
    return found.key == key


def read_public_key(key: "str | os.PathLike[str]") -> bytes:
    """Read an Ed25519 key: a PEM or OpenSSH file, or the text of the latter.

    Raises:
        OptionError: it is none.
    """
    keys = _imported("cryptography.hazmat.primitives.serialization")
    text = str(key).encode(errors="replace") if str(key).startswith(SSH) else _read(key, "trust")
    load = keys.load_pem_public_key if text.startswith(b"-----") else keys.load_ssh_public_key
    try:
        return bytes(load(text).public_bytes_raw())
    except Exception as error:  # of many classes, among them those of other kinds of keys
        raise OptionError(
            f"{shown(str(key))} is not an Ed25519 public key ({error}); expected a PEM file "
            "(openssl pkey -pubout), an OpenSSH one (ssh-keygen -t ed25519), or its line"
        ) from error


def read_private_key(path: "str | os.PathLike[str]") -> "Ed25519PrivateKey":
    """Read the key that signs: a PEM or OpenSSH file without a password.

    Raises:
        OptionError: it is none.
    """
    keys = _imported("cryptography.hazmat.primitives.serialization")
    kind = _imported("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey
    text = _read(path, "key")
    load = keys.load_ssh_private_key if b"OPENSSH" in text[:40] else keys.load_pem_private_key
    try:
        found = load(text, password=None)
    except Exception as error:  # of many classes; none of them shows the key
        raise OptionError(
            f"{path} is not an Ed25519 private key without a password ({error}); make one with "
            "'openssl genpkey -algorithm ed25519'"
        ) from error
    if not isinstance(found, kind):
        raise OptionError(
            f"{path} is a {type(found).__name__}; expected an Ed25519 key, made with "
            "'openssl genpkey -algorithm ed25519'"
        )
    private: Ed25519PrivateKey = found
    return private


def show_key(key: bytes) -> str:
    """Return a public key as the line that OpenSSH has for it."""
    form = _imported("cryptography.hazmat.primitives.serialization")
    kind = _imported("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PublicKey
    public = kind.from_public_bytes(key)
    text: bytes = public.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return text.decode()


def _check_signature(keys: Sequence[bytes], store: Store, manifest: bytes) -> Statement:
    found = read_signature(store)
    if found is None:
        raise TrustError(
            f"{store.location} is not signed, and trust= accepts only signed checkpoints. If you "
            "know where it comes from, sign it with 'holdfast sign'"
        )
    if not any(is_signed_by(found, key) for key in keys):
        one, count = "not by the trusted key", len(keys)
        by = one if count == 1 else f"by none of the {count} trusted keys"
        raise TrustError(
            f"{store.location} is signed, but {by}; its SIGNATURE names {show_key(found.key)}. "
            "Get the right public key from the publisher"
        )
    return _check_manifest(found.statement, store, manifest)


def _check_bound(expected: bytes, store: Store, manifest: bytes) -> Statement:
    found = read_signature(store)
    if found is None or digest(found.signed) != expected:
        raise TrustError(
            f"{store.location} is not the base that was signed with its delta, or has lost its "
            "SIGNATURE. After a rebase, sign the deltas of it again"
        )
    return _check_manifest(found.statement, store, manifest)


def _check_manifest(statement: Statement, store: Store, manifest: bytes) -> Statement:
    if digest(manifest) != statement.manifest:
        raise TrustError(
            f"{store.location}/{spec.MANIFEST_NAME} is not the signed one; if you rebased this "
            "checkpoint, sign it again"
        )
    return statement


def _imported(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise OptionError(needs(module.split(".")[0], "sign", "a signature")) from error


def _read(path: "str | os.PathLike[str]", named: str) -> bytes:
    place = absolute(path, named, "the file of a key")
    try:
        with open(place, "rb") as file:
            return file.read(1 << 16)
    except OSError as error:
        raise OptionError(f"the key {place:.200} cannot be read: {error.strerror}") from error
