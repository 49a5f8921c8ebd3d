"""codec="lossless": every bit comes back, from fewer bytes, whatever wrote and reads them."""

import itertools
import os
import random
import threading
from collections.abc import Callable
from ctypes import memset
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import holdfast
from format.simulated_ranks import cut, pieces, run_ranks, save_pieces
from holdfast.codecs.base import Payload
from holdfast.codecs.groups import MOMENTS, find_groups
from holdfast.engine.decode import decode
from holdfast.engine.encode import Coded
from holdfast.errors import CorruptError, OptionError
from holdfast.layout import Tensor
from holdfast.options import SLOT_BYTES, Options

from .test_round_trip import bits_of, exactly
from .test_sharing import load_together

NewPath = Callable[[], Path]
PAGES_OF_A_CUT = 2 * 4096  # bytes that two runs have in common where one would be cut
CHUNK = 5000  # elements; small, so that shards have several, which cut rows


class Mixed(nn.Module):
    """Half-precision weights, whose masters an optimizer steps."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def trained(steps: int = 20) -> dict[str, Any]:
    """A state as mixed-precision training has it."""
    torch.manual_seed(3)
    model = Mixed()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(16, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = dict(model.named_parameters())
    moments = {name: dict(optimizer.state[value]) for name, value in masters.items()}
    return {
        "model": {name: value.detach().to(torch.bfloat16) for name, value in masters.items()},
        "master": {name: value.detach() for name, value in masters.items()},
        "optimizer": {"state": moments},
        "rng": torch.get_rng_state(),
        "step": steps,
    }


def bits(state: Any) -> Any:
    """A form in which two states are equal only when all their bits are."""
    if isinstance(state, torch.Tensor):
        return (str(state.dtype), tuple(state.shape), bits_of(state))
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return exactly(state)


def same(one: Any, other: Any) -> bool:
    return bool(bits(one) == bits(other))


def stored(checkpoint: holdfast.Checkpoint, *names: str) -> float:
    """Stored bytes of tensors over their own."""
    infos = [checkpoint.info(name) for name in names or checkpoint.names()]
    return sum(i.stored_bytes for i in infos) / sum(i.size_bytes for i in infos)


@pytest.mark.parametrize("verb", ["save", "eager", "lazy"])
def test_a_state_comes_back_bit_for_bit_and_is_smaller(new_path: NewPath, verb: str) -> None:
    state, path, options = trained(), new_path(), Options(chunk_elements=CHUNK)
    if verb == "save":
        holdfast.save(state, path, codec="lossless", options=options)
    else:
        holdfast.save_async(state, path, codec="lossless", stage=verb, options=options).result()
    with holdfast.open(path) as checkpoint:
        assert same(checkpoint.state(), state)
        assert not checkpoint.verify()
        assert {checkpoint.info(name).codec for name in checkpoint.names()} == {"lossless"}
        assert stored(checkpoint, "model.up.weight", "model.down.weight") == 0  # their masters say
        assert stored(checkpoint) < 0.75
    target = trained(1)
    holdfast.load(path, into=target)
    assert same(target, state)


def test_any_part_is_read_alone(new_path: NewPath) -> None:
    """A box, one tensor of a group: what decoding needs is read too, and nothing else."""
    state, path = trained(), new_path()
    holdfast.save(state, path, codec="lossless", options=Options(chunk_elements=CHUNK))
    with holdfast.open(path) as checkpoint:
        for name in ("model.up.weight", "optimizer.state.up.weight.exp_avg"):
            whole = checkpoint.tensor(name)
            box = ((17, 5), (100, 31))
            assert torch.equal(checkpoint.tensor(name, box), whole[17:117, 5:36])
        assert torch.equal(checkpoint.tensor("model.up.weight"), state["model"]["up.weight"])
    target = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    report = holdfast.load(path, into=target, partial=True)
    assert same(target["model"], state["model"])
    masters = sum(t.nbytes for t in state["master"].values())
    assert report.bytes_read < 1.3 * masters


def test_groups_are_found_by_name_and_shape() -> None:
    tensors = [
        Tensor(("model", "a"), "bf16", (3, 4)),
        Tensor(("master", "a"), "f32", (3, 4)),
        Tensor(("ema", "a"), "f32", (3, 4)),
        Tensor(("other", "a"), "f32", (4, 4)),
        Tensor(("optimizer", "state", "a", "exp_avg"), "f32", (3, 4)),
        Tensor(("optimizer", "state", "a", "exp_avg_sq"), "f32", (3, 4)),
        Tensor(("optimizer", "state", "a", "step"), "f32", ()),
        Tensor(("plain", "state", 0, "exp_avg"), "f32", (5,)),
        Tensor(("plain", "state", 0, "exp_avg_sq"), "f32", (5,)),
    ]
    assert find_groups(tensors) == (
        {"exp_avg_sq": 5, "exp_avg": 4, "master": 1, "weight": 0},
        {"exp_avg_sq": 8, "exp_avg": 7},
    )


@pytest.mark.parametrize("name", ["master", "master_param", "master_weight", "fp32_param"])
def test_a_master_beside_its_moments_is_found(name: str) -> None:
    above = ("optimizer", "state", "a")
    tensors = [
        Tensor(("model", "a"), "bf16", (3, 4)),
        Tensor((*above, "exp_avg"), "f32", (3, 4)),
        Tensor((*above, "exp_avg_sq"), "f32", (3, 4)),
        Tensor((*above, "max_exp_avg_sq"), "f32", (3, 4)),
        Tensor((*above, name), "f32", (3, 4)),
    ]
    group = {"exp_avg_sq": 2, "exp_avg": 1, "master": 4, "weight": 0}
    assert find_groups(tensors) == (group,)
    full = [Tensor(("model", "a"), "f32", (3, 4)), *tensors[1:]]
    assert find_groups(full) == ({"exp_avg_sq": 2, "exp_avg": 1, "weight": 0},)


@pytest.mark.parametrize("fewer", [0, 1])
def test_numbered_moments_go_with_weights_where_they_are_as_many(fewer: int) -> None:
    tensors = [Tensor(("model", name), "bf16", (3, 4)) for name in "ab"]
    tensors += [Tensor(("master", name), "f32", (3, 4)) for name in "ab"[fewer:]]
    for number in range(2 - fewer):
        above = ("optimizer", "state", number)
        tensors += [Tensor((*above, moment), "f32", (3, 4)) for moment in MOMENTS]
    found = find_groups(tensors)
    if fewer:  # which of them were stepped is not known
        assert found == ({"exp_avg_sq": 4, "exp_avg": 3}, {"master": 2, "weight": 1})
    else:
        assert found == (
            {"exp_avg_sq": 5, "exp_avg": 4, "master": 2, "weight": 0},
            {"exp_avg_sq": 7, "exp_avg": 6, "master": 3, "weight": 1},
        )


def test_replicas_write_whole_groups_in_equal_shares(new_path: NewPath) -> None:
    state, path = trained(), new_path()
    options = Options(chunk_elements=CHUNK)

    def save(group: Any) -> None:
        holdfast.save(state, path, codec="lossless", group=group, options=options)

    run_ranks(3, save)
    with holdfast.open(path) as checkpoint:
        assert same(checkpoint.state(), state)
        sizes = checkpoint.file_bytes
        assert len(sizes) == 3 and max(sizes) < 1.2 * sum(sizes) / 3
        assert stored(checkpoint, "model.up.weight", "model.down.weight") == 0
        assert stored(checkpoint) < 0.75


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_writes_and_any_reads(new_path: NewPath, seed: int) -> None:
    """Boxes of several ranks, cut alike or not, in chunks of any length."""
    chance = random.Random(seed)
    state, path, ranks = trained(3), new_path(), chance.randint(1, 4)
    states: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    kept: list[Any] = []
    for place, tensors in (
        *((("model",), state["model"]), (("master",), state["master"])),
        *((("optimizer", n), state["optimizer"]["state"][n]) for n in state["master"]),
    ):
        for key, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if key == "step" or chance.random() < 0.3 or not kept or kept[0] != shape:
                kept = [shape, cut(chance, (0,) * len(shape), shape, chance.randint(1, ranks))]
            for rank, piece in enumerate(pieces(tensor, kept[1])):
                states[rank][(*place, key)] = piece
    sizes = Options(chunk_elements=chance.choice([700, CHUNK, 1 << 20]))
    save_pieces(path, states, codec="lossless", options=sizes)
    with holdfast.open(path) as checkpoint:
        assert not checkpoint.verify()
        found = checkpoint.state()
    assert same(found["model"], state["model"])
    assert same(found["master"], state["master"])
    assert same(found["optimizer"], state["optimizer"]["state"])


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_that_share_a_load_read_each_chunk_once(new_path: NewPath, world_size: int) -> None:
    """What is decoded together is in one rank's share: nobody reads it a second time."""
    state, path = trained(), new_path()
    holdfast.save(state, path, codec="lossless", options=Options(chunk_elements=CHUNK))
    (_, once), *_ = load_together(path, 1, lambda _: trained(1))
    found = load_together(path, world_size, lambda _: trained(1))
    assert all(same(target, state) for target, _ in found)
    reports = [report for _, report in (*found, ((), once))]
    *read, alone = [r.bytes_read for r in reports if isinstance(r, holdfast.LoadReport)]
    assert len(read) == world_size
    assert sum(read) <= alone + PAGES_OF_A_CUT * (world_size - 1)


def test_odd_elements_survive(new_path: NewPath) -> None:
    """NaN payloads, infinities, -0, denormals, zero rows, in every dtype, shape and stride."""
    torch.manual_seed(1)
    odd = torch.tensor([0x7FC12345, -1, 1, -(1 << 31), 0x7F800000, 0], dtype=torch.int32)
    noise = torch.randn(50, 60)
    noise.view(torch.int32)[torch.randint(50, (40,)), torch.randint(60, (40,))] = odd[
        torch.randint(6, (40,))
    ]
    noise[7], noise[9:12] = 0, float("nan")
    state = {
        "plain": noise,
        "turned": noise.T,
        "strided": noise[::3, 1::2],
        "half": noise.to(torch.float16),
        "wide": noise.double(),
        "complex": torch.complex(noise, noise.flip(0)),
        "f8": noise.nan_to_num(0).to(torch.float8_e4m3fn),
        "flags": noise > 0,
        "counts": torch.arange(5000).reshape(5, -1),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "optimizer": {"w": {"exp_avg": noise, "exp_avg_sq": noise.square()}},
    }
    path = new_path()
    holdfast.save(state, path, codec="lossless", options=Options(chunk_elements=700))
    with holdfast.open(path) as checkpoint:
        assert same(checkpoint.state(), state)
    turned = {"turned": torch.zeros(60, 50)[:, ::1]}
    holdfast.load(path, into=turned, partial=True)
    assert same(turned["turned"].contiguous(), noise.T.contiguous())


def test_a_payload_that_no_codec_writes_is_refused(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right: only decoding tells. Nothing that comes of it is handed out."""
    path = new_path()
    torch.manual_seed(2)

    def wrong(piece: Any, digests: Any, *others: Any) -> dict[str, Coded]:
        noise = others[-1].take(64)
        memset(noise, 7, 64)
        payload = Payload(noise, 64, 2)
        return {role: Coded(payload, b.address, b"0" * 16) for role, b in piece.blocks.items()}

    monkeypatch.setattr("holdfast.engine.task.encode", wrong)
    holdfast.save({"w": torch.randn(100, 100)}, path, codec="delta:replay")
    target = {"w": torch.zeros(100, 100)}
    with pytest.raises(CorruptError, match=r"w, elements 0 to 10000.*mode 2 of lossless"):
        holdfast.load(path, into=target)
    assert not target["w"].any()


def test_an_unknown_codec_is_refused_with_those_there_are(new_path: NewPath) -> None:
    with pytest.raises(OptionError, match="codec is 'zip'; expected one of raw, lossless"):
        holdfast.save({"w": torch.ones(2)}, new_path(), codec="zip")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads need two cores")
def test_runs_are_decoded_while_others_are(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots = Options(pool_bytes=3 * SLOT_BYTES)
    state = {f"{n}": torch.randn(SLOT_BYTES // 5) for n in range(6)}  # more runs than slots
    holdfast.save(state, path := new_path(), codec="lossless", options=few_slots)
    together, calls = threading.Barrier(2), itertools.count()

    def decode_two_together(*values: Any) -> bool:
        if next(calls) < 2:
            together.wait(timeout=20)
        return decode(*values)

    monkeypatch.setattr("holdfast.engine.ahead.decode", decode_two_together)
    holdfast.load(
        path,
        into=(into := {name: torch.zeros_like(t) for name, t in state.items()}),
        options=few_slots,
    )
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_a_child_that_was_forked_saves_in_memory_of_its_own(tmp_path: Path) -> None:
    state = {"weight": torch.randn(1 << 16)}
    holdfast.save(state, tmp_path / "before", codec="lossless")  # its memory stays for the next
    child = os.fork()
    if child == 0:
        status = 1
        try:
            holdfast.save(state, tmp_path / "after", codec="lossless")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found = {"weight": torch.zeros(1 << 16)}
    holdfast.load(tmp_path / "after", into=found)
    assert torch.equal(found["weight"], state["weight"])
