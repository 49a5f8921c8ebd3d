"""Codecs with loss in a run: what a reader has is what the next link is made from."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.simulated_ranks import run_ranks
from holdfast.codecs import Compact, Excp
from holdfast.engine.basis import forget_bases, take_basis
from holdfast.options import Options

from .test_chains import at, links, modes, stepped
from .test_lossless import same, stored, trained

NewPath = Callable[[], Path]
OPTIONS = Options(chunk_elements=5000)
CODECS: dict[str, Any] = {
    "excp": Excp(every=4),
    "balanced": Compact(every=4),
    "high": Compact("high", every=4),
    "bits": Compact(bits=1.5, every=4),
}
LOSSLESS_MODES = set(range(8))
MODES = {"excp": {13, 14, 15}, "balanced": {8, 12}, "high": {8, 10, 12}, "bits": {8, 12}}


def read(path: Path) -> Any:
    """What is at a path."""
    with holdfast.open(path) as checkpoint:
        assert not checkpoint.verify()
        return checkpoint.state()


def read_by_both(path: Path) -> Any:
    """What is at a path: the same for both readers."""
    found, state = reader.read(path)["tensors"], read(path)
    for place, tensors in (("master", state["master"]), ("model", state["model"])):
        for name, tensor in tensors.items():
            content = found[f'["{place}","{name}"]'][2]
            assert tensor.view(torch.uint8).numpy().tobytes() == content
    for name, moments in state["optimizer"]["state"].items():
        for key, tensor in moments.items():
            content = found[f'["optimizer","state","{name}","{key}"]'][2]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == content
    return state


def error(found: Any, state: Any, base: Any) -> float:
    """Squared error of the masters over the energy of their steps."""
    lost = moved = 0.0
    for name, master in state["master"].items():
        lost += float((found["master"][name] - master).double().square().sum())
        moved += float((master - base["master"][name]).double().square().sum())
    return lost / moved


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("verb", ["save", "eager", "forgotten"])
def test_a_run_of_links(new_path: NewPath, name: str, verb: str) -> None:
    """Keys are exact; links are small, near, and made from what a reader has."""
    root, state, before = new_path(), trained(3), trained(3)
    for step in range(6):
        state = stepped(state, step)
        if verb == "eager":
            path = at(root, step)
            holdfast.save_async(state, path, codec=CODECS[name], options=OPTIONS).result()
        else:
            holdfast.save(state, at(root, step), codec=CODECS[name], options=OPTIONS)
        if verb == "forgotten":
            forget_bases()
        found = read_by_both(at(root, step)) if step == 3 else read(at(root, step))
        assert same(found["rng"], state["rng"])
        if step % 4 == 0:
            assert links(at(root, step)) == 0 and modes(at(root, step)) <= LOSSLESS_MODES
            assert same(found, state)
        else:
            assert modes(at(root, step)) - LOSSLESS_MODES == MODES[name]
            assert 0 < error(found, state, before) < 1
            with holdfast.open(at(root, step)) as link:
                assert stored(link, *link.names()) < 0.2
        for key, master in found["master"].items():  # the weight is still its master's rounding
            assert torch.equal(found["model"][key], master.bfloat16())
        before = found


@pytest.mark.parametrize("name", CODECS)
def test_the_memory_and_the_disk_say_the_same_of_a_base(new_path: NewPath, name: str) -> None:
    """Links from what is kept and from what is read back hold the same, and are of one size.

    But for what has not changed: digests of a base are kept, and never read.
    """
    one, other = new_path(), new_path()
    state = trained(3)
    for step in range(4):
        state = stepped(state, step)
        for root in (one, other):
            holdfast.save(state, at(root, step), codec=CODECS[name], options=OPTIONS)
        take_basis(str(other), 0, OPTIONS.chunk_elements)
    for step in range(4):
        with holdfast.open(at(one, step)) as a, holdfast.open(at(other, step)) as b:
            assert same(a.state(), b.state())
            assert (modes(at(one, step)) ^ modes(at(other, step))) <= {1, 2, 7}
            assert payload_bytes(a) <= payload_bytes(b)


def payload_bytes(checkpoint: holdfast.Checkpoint) -> int:
    return sum(checkpoint.info(name).stored_bytes for name in checkpoint.names())


@pytest.mark.parametrize("name", CODECS)
def test_shares_of_several_ranks(new_path: NewPath, name: str) -> None:
    """Replicas write whole parameters; each rank has what it wrote, whoever wrote it before."""
    root, state, before = new_path(), trained(3), trained(3)
    for step in range(3):
        state = stepped(state, step)
        if step == 2:
            forget_bases()

        def save(group: Any, state: Any = state, step: int = step) -> None:
            path = at(root, step)
            holdfast.save(state, path, codec=CODECS[name], group=group, options=OPTIONS)

        run_ranks(step + 1, save)
        found = read(at(root, step))
        if step:
            assert 0 < error(found, state, before) < 1
        before = found


@pytest.mark.parametrize("name", CODECS)
def test_a_part_of_a_moment_is_read_alone(new_path: NewPath, name: str) -> None:
    """A second moment needs the first, that the weight, and that its base."""
    root, state = new_path(), trained(3)
    for step in range(3):
        state = stepped(state, step)
        holdfast.save(state, at(root, step), codec=CODECS[name], options=OPTIONS)
    whole = read(at(root, 2))
    with holdfast.open(at(root, 2)) as checkpoint:
        for kind in ("exp_avg", "exp_avg_sq"):
            box = ((17, 5), (100, 31))
            part = checkpoint.tensor(f"optimizer.state.up.weight.{kind}", box)
            assert torch.equal(part, whole["optimizer"]["state"]["up.weight"][kind][17:117, 5:36])
    shutil.rmtree(root)


@pytest.mark.parametrize("name", ["excp", "balanced"])
def test_a_codec_that_breaks_its_promise_loses_nothing(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, name: str, caplog: Any
) -> None:
    """A payload that does not decode to what the next link is made from is not stored."""
    root, state = new_path(), trained(3)
    holdfast.save(state, at(root, 0), codec=CODECS[name], options=OPTIONS)
    kind = type(CODECS[name])
    encode = kind.encode

    def wrong(codec: Any, role: str, *others: Any) -> Any:
        payload = encode(codec, role, *others)
        if role == "master" and payload.mode > max(LOSSLESS_MODES):
            ctypes.memset(others[-1] + 40, 7, 3)  # of what it says a reader will have
        return payload

    monkeypatch.setattr(kind, "encode", wrong)
    later = stepped(state, 1)
    holdfast.save(later, at(root, 1), codec=CODECS[name], options=OPTIONS)
    assert "is stored without loss" in caplog.text
    found = read_by_both(at(root, 1))
    assert same(found["master"], later["master"])


@pytest.mark.parametrize("name", CODECS)
def test_nan_and_inf_are_kept(new_path: NewPath, name: str) -> None:
    root, state = new_path(), trained(3)
    holdfast.save(state, at(root, 0), codec=CODECS[name], options=OPTIONS)
    later = stepped(state, 1)
    moments = later["optimizer"]["state"]["up.weight"]
    moments["exp_avg"][3, 4], moments["exp_avg_sq"][5, 6] = float("nan"), float("inf")
    later["master"]["down.weight"][7, 8] = float("-inf")
    later["model"]["down.weight"] = later["master"]["down.weight"].bfloat16()
    holdfast.save(later, at(root, 1), codec=CODECS[name], options=OPTIONS)
    found = read(at(root, 1))
    kept = found["optimizer"]["state"]["up.weight"]
    assert kept["exp_avg"][3, 4].isnan() and kept["exp_avg_sq"][5, 6].isposinf()
    assert found["master"]["down.weight"][7, 8].isneginf()
    tensors = [kept["exp_avg"], kept["exp_avg_sq"], found["master"]["down.weight"]]
    assert [int((~tensor.isfinite()).sum()) for tensor in tensors] == [1, 1, 1]


@pytest.mark.parametrize("residual", [None, False, True])
def test_second_moments_within_an_octave(new_path: NewPath, residual: bool | None) -> None:
    """Of a real optimizer, where the codec is told so."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 300)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999))
    raw, saved, again = new_path(), new_path(), new_path()
    codec = Compact("small", residual=residual, every=2)
    for step in range(2):
        for _ in range(3):
            model(torch.randn(8, 200)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        holdfast.save({"model": model, "optimizer": optimizer}, at(raw, step))
        holdfast.save({"model": model, "optimizer": optimizer}, at(saved, step), codec=codec)
        holdfast.recompress(at(raw, step), at(again, step), codec=codec)
    exact = optimizer.state[model.weight]["exp_avg_sq"]
    for root in (saved, again):
        square = read(at(root, 1))["optimizer"]["state"]["weight"]["exp_avg_sq"]
        assert (float((square / exact).log2().abs().max()) < 1.1) == (residual is True)


@pytest.mark.parametrize("quality", ["balanced", "high"])
def test_weights_that_keep_their_rounding(new_path: NewPath, quality: Any) -> None:
    """To bf16: what is computed in it is the same to the bit, with a master beside it or alone."""
    root, state = new_path(), trained(3)
    codec = Compact(quality, bf16_exact=True, every=8)
    sizes, errors = [], []
    for step in range(4):
        holdfast.save(state, at(root, step), codec=codec, options=OPTIONS)
        if step == 2:
            forget_bases()
        found = read_by_both(at(root, step))
        for name, master in state["master"].items():
            assert torch.equal(found["master"][name].bfloat16(), master.bfloat16())
        assert same(found["model"], state["model"])
        assert (17 in modes(at(root, step))) == (step > 0)
        sizes.append(sum(file.stat().st_size for file in (at(root, step) / "data").rglob("*.hf")))
        errors.append(
            max(float((found["master"][n] - m).abs().max()) for n, m in state["master"].items())
        )
        state = stepped(state, step)
    assert errors[0] == 0 < max(errors[1:]) and 3 * max(sizes[1:]) < sizes[0]


@pytest.mark.parametrize("name", CODECS)
def test_denormals_are_kept_whatever_the_process_has_set(new_path: NewPath, name: str) -> None:
    """Threads take over from who makes them that denormals are 0; payloads mean the same."""
    states = [trained(3)]
    for step in range(2):
        states.append(stepped(states[-1], step))
    for state in states:
        for moments in state["optimizer"]["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                words = moments[key].view(torch.int32)
                words[::2] = words[::2] % (1 << 20)  # too small to be anything else
    found = []
    for flushes in (False, True):
        root = new_path()
        forget_bases()
        assert torch.set_flush_denormal(flushes)
        try:
            for step, state in enumerate(states):
                holdfast.save(state, at(root, step), codec=CODECS[name], options=OPTIONS)
            # What the one has written, the other reads.
            read_back = [read(at(root, step)) for step in range(3)]
            assert torch.set_flush_denormal(not flushes)
            assert all(same(read(at(root, step)), read_back[step]) for step in range(3))
        finally:
            torch.set_flush_denormal(False)
        found.append(read_back)
    assert all(same(one, other) for one, other in zip(*found, strict=True))
