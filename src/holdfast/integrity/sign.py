"""Sign a checkpoint: prove that its bytes come from the owner of a key."""

import os
import secrets
from collections.abc import Callable

from ..engine.chain import Link, open_chain
from ..engine.check import check_files, check_names
from ..engine.pool import lease
from ..engine.read import DataFileReader, still_there
from ..engine.trust import digest, is_signed_by, read_private_key, read_signature, show_key
from ..errors import CorruptError, ReplacedError
from ..format import spec
from ..format.manifest import Manifest, decode_manifest
from ..format.signature import encode_signature, statement_of
from ..layout import whole
from ..options import SLOT_BYTES, Options, options_of
from ..plan.load_plan import plan_load
from ..stores.base import Store
from ..stores.url import open_store
from ..worker import in_worker

Report = Callable[[int], None]
NO_BASE = bytes(spec.SIGNED_DIGEST_BYTES)


@in_worker
def sign(
    path: "str | os.PathLike[str]",
    *,
    key: "str | os.PathLike[str]",
    options: Options | None = None,
    report: Report = lambda _: None,
) -> list[str]:
    """Check every byte of a checkpoint, and sign it; return the directories that were signed.

    The bases of a delta checkpoint are signed too, unless this key has signed them already. An
    existing SIGNATURE is replaced. An Ed25519 key signs BLAKE3 digests of the MANIFEST and of all
    data (docs/format.md, Signature).

    Args:
        path: directory of the checkpoint.
        key: file of the private key, PEM or OpenSSH, without a password.
        options: settings such as ``io``.
        report: called with the bytes read since the last call.

    Raises:
        NotCommittedError: there is no checkpoint, or another one by now (`ReplacedError`).
        CorruptError: the checkpoint or a base is damaged, and is not signed.
        OptionError: the key is invalid, or ``holdfast-checkpoint[sign]`` is not installed.

    Example:
        ``holdfast.sign("runs/a/step-00001000", key="release.pem")``
    """
    private = read_private_key(key)
    public = private.public_key().public_bytes_raw()
    signed, below = [], NO_BASE
    options = options_of(options)
    chain = open_chain(open_store(path))
    for link in chain:
        store = link.store
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        if link is not chain[-1] and (made := _signed_before(store, public, digest(data), below)):
            below = digest(made)
            continue
        statement = _statement(link, data, below, options, report)
        content = encode_signature(statement, public, private.sign(statement))
        pending = f"{spec.PENDING_MANIFEST_PREFIX}signature-{secrets.token_hex(8)}"
        store.prepare(pending, content)
        store.replace(pending, spec.SIGNATURE_NAME)
        if store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX) != data:
            store.remove(spec.SIGNATURE_NAME)  # of nothing
            raise ReplacedError(
                f"{store.location} was replaced by another checkpoint while it was signed. Sign "
                "the new one"
            )
        signed.append(store.location)
        below = digest(statement)
    return signed


def signer(path: "str | os.PathLike[str]") -> str | None:
    """Return the public key that the SIGNATURE of a checkpoint names, as an OpenSSH line, or None.

    This proves nothing. To load only signed checkpoints, give ``Options(trust=…)``.

    Args:
        path: directory of the checkpoint.

    Raises:
        CorruptError: the SIGNATURE is damaged.

    Example:
        ``print(holdfast.signer("runs/a/step-00001000") or "unsigned")``
    """
    found = read_signature(open_store(path))
    return show_key(found.key) if found else None


def _signed_before(store: Store, key: bytes, manifest: bytes, below: bytes) -> bytes:
    """Return what this key has signed here, if that is of this MANIFEST and this base."""
    try:
        found = read_signature(store)
    except CorruptError:
        return b""
    if found is None or not is_signed_by(found, key):
        return b""
    told = (found.statement.manifest, found.statement.base)
    return found.signed if told == (manifest, below) else b""


def _statement(link: Link, data: bytes, below: bytes, options: Options, report: Report) -> bytes:
    """Check all of a checkpoint but its SIGNATURE, and list the digests of what was checked."""
    store = link.store
    manifest = decode_manifest(data, f"{store.location}/{spec.MANIFEST_NAME}")
    with still_there(store):
        check_names(store, manifest)
        check_files(store, manifest, range(len(manifest.file_names)))
        payloads = _digest_payloads(link, manifest, options, report)
    return statement_of(digest(data), below, payloads).encode()


def _digest_payloads(
    link: Link, manifest: Manifest, options: Options, report: Report
) -> list[bytes]:
    tensors = manifest.table.header.tensors
    wanted = {t.path: (i, [whole(t.shape)]) for i, t in enumerate(tensors)}
    digests = [digest(b"")] * len(manifest.chunk_start)  # those of no bytes are not read
    with (
        lease(link.store, options) as leased,
        DataFileReader(link.store, leased, manifest) as reader,
    ):
        for run, slot in reader.stream(plan_load(manifest, wanted, SLOT_BYTES)):
            view = leased.pool.view(slot)
            if not reader.is_whole(run, slot):
                for read in run.chunks:
                    reader.check(run, read, slot)
            for row in run.reads.rows.tolist():
                start = int(manifest.chunk_start[row]) - run.extent.offset
                size = int(manifest.chunk_bytes[row])
                if size:
                    digests[row] = digest(view[start : start + size])
            report(run.extent.size_bytes)
    return digests
