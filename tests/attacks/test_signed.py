"""Signed checkpoints: what a trusted key has not signed is not loaded, whatever is forged.

The forger can do all but sign: he writes any file, with every checksum and digest right.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import holdfast
from damage.test_flips import flips
from format import reader
from format.forge import Forgery
from format.simulated_ranks import pieces, run_ranks, save_pieces
from holdfast import Options
from holdfast._core import xxh3_128
from holdfast.cli import main
from holdfast.engine.trust import read_private_key, read_public_key
from holdfast.errors import CorruptError, OptionError, TrustError
from holdfast.format.signature import decode_signature, encode_signature
from holdfast.testing import Fault, faulty

pytest.importorskip("blake3", reason="pip install 'holdfast-checkpoint[sign]'")
pytest.importorskip("cryptography", reason="pip install 'holdfast-checkpoint[sign]'")

NewPath = Callable[[], Path]
CHUNK = Options(chunk_elements=100, pool_bytes=32 << 20, io="buffered")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key pairs as SECURITY.md has them made: by openssl, by ssh-keygen, and a forger's."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    place = tmp_path_factory.mktemp("keys")
    for name, private in (
        ("mine", form.PrivateFormat.PKCS8),
        ("ssh", form.PrivateFormat.OpenSSH),
        ("forger", form.PrivateFormat.PKCS8),
    ):
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(form.Encoding.PEM, private, form.NoEncryption())
        ssh = name == "ssh"
        encoding = form.Encoding.OpenSSH if ssh else form.Encoding.PEM
        kind = form.PublicFormat.OpenSSH if ssh else form.PublicFormat.SubjectPublicKeyInfo
        (place / name).write_bytes(pem)
        (place / f"{name}.pub").write_bytes(key.public_key().public_bytes(encoding, kind))
    return place


@pytest.fixture
def signed(new_path: NewPath, keys: Path) -> Path:
    """A signed link of a chain of three, of two ranks each."""
    root = new_path()
    torch.manual_seed(1)
    w = torch.randn(20, 30)
    for step in range(3):
        first, second = pieces(w, [((0, 0), (11, 30)), ((11, 0), (9, 30))])
        save_pieces(
            at(root, step),
            [{("w",): first, ("v",): step}, {("w",): second}],
            codec="delta",
            options=CHUNK,
            step=step,
        )
        w = w + 1e-5 * torch.randn(20, 30)
    assert holdfast.sign(at(root, 2), key=keys / "mine") == [str(at(root, n)) for n in range(3)]
    return at(root, 2)


def at(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def trusting(keys: Path, *names: str) -> Options:
    named = tuple(keys / f"{name}.pub" for name in names or ("mine",))
    return Options(pool_bytes=32 << 20, io="buffered", trust=named)


def target() -> dict[str, Any]:
    return {"w": torch.zeros(20, 30), "v": None}


def check_refused(path: Path, keys: Path, text: str) -> None:
    """By a load in full and in part, and by verify; though all is well without a key."""
    holdfast.load(path, into=target())
    for part in (False, True):
        into = target()
        with pytest.raises(TrustError, match=text):
            holdfast.load(path, into=into, options=trusting(keys), partial=part)
    with pytest.raises(TrustError, match=text), holdfast.open(path, options=trusting(keys)) as it:
        if faults := it.verify():
            raise TrustError(faults[0].what)
        it.tensor("w")
    assert main(["verify", str(path), "--signature", "--public-key", str(keys / "mine.pub")]) == 1


def test_what_a_trusted_key_has_signed_is_loaded(signed: Path, keys: Path) -> None:
    for options in (trusting(keys), trusting(keys, "forger", "mine")):
        into = target()
        holdfast.load(signed, into=into, options=options)
        assert into["v"] == 2 and into["w"].any()
        with holdfast.open(signed, options=options) as checkpoint:
            assert checkpoint.verify(deep=True) == []
            assert torch.equal(checkpoint.tensor("w", ((3, 0), (9, 30))), into["w"][3:12])
    holdfast.load(signed, into=target())  # whoever asks for no key needs none
    assert len(reader.read(signed)["tensors"]) == 1
    line = holdfast.signer(signed)
    assert line is not None
    holdfast.load(signed, into=target(), options=Options(trust=line))
    reading = run_ranks(2, lambda g: load_as(signed, g, trusting(keys)))
    assert torch.equal(reading[0], reading[1])


def load_as(path: Path, group: Any, options: Options) -> torch.Tensor:
    into = target()
    holdfast.load(path, into=into, group=group, options=options)
    tensor: torch.Tensor = into["w"]
    return tensor


def test_keys_of_openssl_and_of_ssh_keygen_sign(signed: Path, keys: Path) -> None:
    for name in ("ssh", "mine"):
        made = holdfast.sign(signed, key=keys / name)
        assert len(made) == 3  # this key has signed none of them yet, or not this base
        holdfast.load(signed, into=target(), options=trusting(keys, name))
        assert holdfast.sign(signed, key=keys / name) == [str(signed)]


def test_the_commands_sign_and_verify(
    signed: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sign", str(signed), "--key", str(keys / "ssh")]) == 0
    assert main(["verify", str(signed), "--signature"]) == 0
    assert "signed by ssh-ed25519 AAAA" in capsys.readouterr().out
    assert main(["verify", str(signed.parent), "--signature"]) == 0
    named = ["--public-key", str(keys / "mine.pub")]
    assert main(["verify", str(signed), "--signature", *named]) == 1
    assert "signed, but not by the trusted key" in capsys.readouterr().out
    assert main(["verify", str(signed), *named]) == 2
    (signed / "SIGNATURE").unlink()
    assert main(["verify", str(signed), "--signature"]) == 1
    assert "is not signed" in capsys.readouterr().out


def test_what_is_not_signed_is_refused(signed: Path, keys: Path) -> None:
    (signed / "SIGNATURE").unlink()
    check_refused(signed, keys, "is not signed, and trust= accepts only signed checkpoints")


def test_what_another_has_signed_is_refused(signed: Path, keys: Path) -> None:
    holdfast.sign(signed, key=keys / "forger")
    check_refused(signed, keys, "not by the trusted key; its")


def test_of_several_keys_their_number_is_told(signed: Path, keys: Path) -> None:
    holdfast.sign(signed, key=keys / "forger")
    with pytest.raises(TrustError, match="by none of the 2 trusted keys"):
        holdfast.load(signed, into=target(), options=trusting(keys, "mine", "ssh"))


def test_another_statement_under_a_good_signature_is_refused(signed: Path, keys: Path) -> None:
    file = signed / "SIGNATURE"
    good = decode_signature(file.read_bytes())
    changed = bytes([*good.signed[:90], good.signed[90] ^ 1, *good.signed[91:]])
    file.write_bytes(encode_signature(changed, good.key, good.signature))
    check_refused(signed, keys, "signed, but not by the trusted key")


def test_a_trusted_key_beside_the_signature_of_another_is_refused(signed: Path, keys: Path) -> None:
    file = signed / "SIGNATURE"
    good = decode_signature(file.read_bytes())
    forged = read_private_key(keys / "forger").sign(good.signed)
    file.write_bytes(encode_signature(good.signed, good.key, forged))
    check_refused(signed, keys, "signed, but not by the trusted key")


def test_another_manifest_under_a_good_signature_is_refused(signed: Path, keys: Path) -> None:
    moved = signed.with_name("moved")
    forgery = Forgery.read(signed)
    for table in (forgery.manifest, *(file.footer for file in forgery.files)):
        table.header["step"] = 9
    forgery.write(moved)
    (moved / "SIGNATURE").write_bytes((signed / "SIGNATURE").read_bytes())
    check_refused(moved, keys, "MANIFEST is not the signed one")


def forge_payload(path: Path) -> bytes:
    """Change a payload in its file, under the same MANIFEST; return the bytes it had.

    To find another payload of the same XXH3-64 takes seconds; here the checksum is patched to
    accept it, which is the same to the reader.
    """
    file = sorted((path / "data").rglob("*.hf"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
    return content


class Forged(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def collide(*_: object) -> Forged:
    return Forged(0)


def test_a_payload_of_the_same_checksum_is_refused(signed: Path, keys: Path) -> None:
    with patch("holdfast.engine.read.checksum", collide):
        holdfast.load(signed, into=target(), options=trusting(keys))
        forge_payload(at(signed.parent, 0))
        check_refused(at(signed.parent, 0), keys, "not the signed ones")


def test_a_payload_of_a_base_that_was_changed_is_refused(signed: Path, keys: Path) -> None:
    with patch("holdfast.engine.read.checksum", collide):
        forge_payload(at(signed.parent, 0))
        with pytest.raises(TrustError, match=r"step-00000000.*not the signed ones"):
            holdfast.load(signed, into=target(), options=trusting(keys))


def test_a_payload_that_is_swapped_after_all_checks_is_refused(signed: Path, keys: Path) -> None:
    """The digest is taken of the memory that is decoded, so no moment is left to swap files."""
    from holdfast.loading import load as load_module

    key = at(signed.parent, 0)
    around = load_module._check_around

    def swap(*arguments: Any, **keywords: Any) -> None:
        around(*arguments, **keywords)
        forge_payload(key)

    with (
        patch("holdfast.engine.read.checksum", collide),
        patch.object(load_module, "_check_around", swap),
        pytest.raises(TrustError, match="not the signed ones"),
    ):
        holdfast.load(key, into=target(), options=trusting(keys))


def test_another_base_of_the_same_key_is_refused(signed: Path, keys: Path) -> None:
    """What a trusted key has signed elsewhere is no base of this."""
    base = at(signed.parent, 0)
    before = (base / "SIGNATURE").read_bytes()
    (base / "SIGNATURE").write_bytes((at(signed.parent, 1) / "SIGNATURE").read_bytes())
    with pytest.raises(TrustError, match="not the base that was signed"):
        holdfast.load(signed, into=target(), options=trusting(keys))
    (base / "SIGNATURE").unlink()
    with pytest.raises(TrustError, match="not the base that was signed"):
        holdfast.load(signed, into=target(), options=trusting(keys))
    (base / "SIGNATURE").write_bytes(before)
    holdfast.load(signed, into=target(), options=trusting(keys))


def test_every_flipped_bit_of_a_signature_is_found(signed: Path, keys: Path) -> None:
    """With a key and without, by load, verify and the other reader."""
    whole = holdfast.open(signed)
    count = 0
    for file, bit in flips(signed):
        if file.name != "SIGNATURE":
            continue
        count += 1
        with pytest.raises(CorruptError):
            holdfast.open(signed, options=trusting(keys))
        if bit % 7 == 0:
            with pytest.raises(CorruptError, match="SIGNATURE"):
                holdfast.load(signed, into=target(), options=CHUNK)
            assert whole.verify()
            with pytest.raises(reader.Corrupt):
                reader.read(signed)
    assert count == 8 * (signed / "SIGNATURE").stat().st_size


@pytest.mark.parametrize("size", [0, 1, 191, 192, 193, 224, 10_000])
def test_a_signature_of_another_size_is_refused(signed: Path, keys: Path, size: int) -> None:
    content = (signed / "SIGNATURE").read_bytes()
    (signed / "SIGNATURE").write_bytes(content[:size].ljust(size, b"\0"))
    for options in (Options(), trusting(keys)):
        with pytest.raises(CorruptError, match="SIGNATURE"):
            holdfast.load(signed, into=target(), options=options)
    with pytest.raises(reader.Corrupt):
        reader.read(signed)


@pytest.mark.parametrize("place", [0, 8, 12])  # magic, version, zero
def test_a_signature_that_begins_otherwise_is_refused(signed: Path, keys: Path, place: int) -> None:
    content = bytearray((signed / "SIGNATURE").read_bytes()[:-16])
    content[place] += 1
    (signed / "SIGNATURE").write_bytes(bytes(content) + xxh3_128(bytes(content)))
    for options in (Options(), trusting(keys)):
        with pytest.raises(CorruptError, match="it begins with"):
            holdfast.load(signed, into=target(), options=options)
    with pytest.raises(reader.Corrupt):
        reader.read(signed)


def test_a_giant_signature_is_refused_before_it_is_read(signed: Path, keys: Path) -> None:
    with (signed / "SIGNATURE").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="at most 1 GiB"):
        holdfast.load(signed, into=target(), options=trusting(keys))


def test_what_is_damaged_is_not_signed(signed: Path, keys: Path) -> None:
    before = (signed / "SIGNATURE").read_bytes()
    forge_payload(signed)
    with pytest.raises(CorruptError, match="checksum"):
        holdfast.sign(signed, key=keys / "mine")
    assert (signed / "SIGNATURE").read_bytes() == before


def test_rebase_says_that_it_removes_the_signature(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rebase", str(signed)]) == 0
    assert "SIGNATURE no longer matched, and was deleted" in capsys.readouterr().out
    assert main(["rebase", str(signed)]) == 0
    assert "SIGNATURE" not in capsys.readouterr().out


def test_a_rebased_checkpoint_is_signed_anew(signed: Path, keys: Path) -> None:
    middle = at(signed.parent, 1)
    holdfast.rebase(middle)
    assert not (middle / "SIGNATURE").exists()
    holdfast.load(signed, into=target())
    with pytest.raises(TrustError, match="After a rebase, sign the deltas of it again"):
        holdfast.load(signed, into=target(), options=trusting(keys))
    assert holdfast.sign(signed, key=keys / "mine") == [str(middle), str(signed)]
    holdfast.load(signed, into=target(), options=trusting(keys))


def test_a_run_restores_only_what_is_signed(new_path: NewPath, keys: Path) -> None:
    root = new_path()
    with holdfast.Checkpointer(root, stage="sync", group="alone") as run:
        for step in (1, 2):
            run.save(step, {"w": torch.full((9,), float(step))})
        holdfast.sign(run.path(1), key=keys / "mine")
    with holdfast.Checkpointer(
        root, stage="sync", group="alone", keep=holdfast.Keep.latest(1), options=trusting(keys)
    ) as run:
        into = {"w": torch.zeros(9)}
        with pytest.raises(TrustError, match="is not signed"):
            run.restore(into)  # and not step 1, silently
        assert run.restore(into, step=1) == 1
        run.save(3, into)  # retires both, the SIGNATURE with the rest
        assert run.steps() == [3] and [p.name for p in root.glob("step-*")] == ["step-00000003"]


def test_a_signature_appears_whole_or_not_at_all(signed: Path, keys: Path) -> None:
    before = (signed / "SIGNATURE").read_bytes()
    for operation in ("create", "write", "sync", "rename"):
        fault = Fault(operation)
        with faulty(fault), pytest.raises(holdfast.errors.StoreError):
            holdfast.sign(at(signed.parent, 0), key=keys / "ssh", options=CHUNK)
        assert (signed / "SIGNATURE").read_bytes() == before
        assert holdfast.open(signed, options=trusting(keys)).verify() == []


def test_what_is_signed_is_what_the_page_says(signed: Path) -> None:
    """Each digest once more, from the files, by the page alone."""
    import struct

    from blake3 import blake3

    below = bytes(32)
    for step in range(3):
        path = at(signed.parent, step)
        content, manifest = (path / "SIGNATURE").read_bytes(), (path / "MANIFEST").read_bytes()
        assert content[:16] == b"\x89HFS\r\n\x1a\n" + struct.pack("<2I", 1, 0)
        assert content[16:48] == blake3(manifest).digest() and content[48:80] == below
        digests = []
        for file in sorted((path / "data").rglob("*.hf")):
            stored = file.read_bytes()
            for _, size, start, _ in file_rows(path, file):
                digests.append(blake3(stored[start : start + size]).digest())
        assert content[80:-112] == b"".join(digests)
        below = blake3(content[:-112]).digest()


def file_rows(path: Path, file: Path) -> list[tuple[int, int, int, int]]:
    """The chunks of a data file as the other reader has them."""
    _, files = reader.read_table((path / "MANIFEST").read_bytes(), reader.MAGIC % b"M")
    rank, number = map(int, file.stem.split("-"))
    (found,) = (each for each in files if (each.rank, each.number) == (rank, number))
    rows: list[tuple[int, int, int, int]] = found.chunks
    return rows


@pytest.mark.parametrize("what", ["none", "text", "rsa", "private"])
def test_a_key_that_is_none_is_told(signed: Path, keys: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "key"
    if what == "text":
        path.write_text("hello")
    if what == "private":
        path.write_bytes((keys / "mine").read_bytes())
    if what == "rsa":
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048).public_key()
        kind = form.PublicFormat.SubjectPublicKeyInfo
        path.write_bytes(key.public_bytes(form.Encoding.PEM, kind))
    with pytest.raises(OptionError, match="key"):
        holdfast.load(signed, into=target(), options=Options(trust=path))
    if what != "private":
        with pytest.raises(OptionError, match="key"):
            holdfast.sign(signed, key=path)


def test_trust_that_is_no_key_is_an_option_error() -> None:
    for wrong in (5, (5,), [b"x"], "", ("",), ()):  # an empty setting trusts nobody
        with pytest.raises(OptionError, match="trust is"):
            Options(trust=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["blake3", "cryptography"])
@pytest.mark.parametrize("use", ["load", "sign", "signer"])
def test_without_the_extra_the_error_names_it(
    signed: Path, keys: Path, missing: str, use: str
) -> None:
    absent = {name: None for name in sys.modules if name.split(".")[0] == missing}
    uses: dict[str, Callable[[], object]] = {
        "load": lambda: holdfast.load(signed, into=target(), options=trusting(keys)),
        "sign": lambda: holdfast.sign(signed, key=keys / "mine"),
        "signer": lambda: holdfast.signer(signed),
    }
    if (use, missing) == ("signer", "blake3"):
        assert holdfast.signer(signed) is not None
        return
    with (
        patch.dict(sys.modules, absent | {missing: None}),
        pytest.raises(OptionError, match=r"pip install 'holdfast-checkpoint\[sign\]'"),
    ):
        uses[use]()


def test_a_key_may_be_named_by_a_path_or_a_string(keys: Path) -> None:
    assert read_public_key(keys / "mine.pub") == read_public_key(str(keys / "mine.pub"))


def test_nothing_of_signing_is_imported_without_a_key() -> None:
    code = "import sys, holdfast; holdfast.load; print('cryptography' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
