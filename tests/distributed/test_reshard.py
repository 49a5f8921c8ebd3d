"""Any layout into any other, with real processes: FSDP2, DDP, tensor parallel, N → M."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast import Options
from holdfast.errors import HoldfastError, MismatchError

from .ranks import run_ranks

WIDTH = 13  # uneven over two, three and four ranks


class Net(nn.Module):
    """A net with a tied head, an uneven width and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Linear(WIDTH, 29)
        self.decoder = nn.Linear(29, WIDTH, bias=False)
        self.head = nn.Linear(29, WIDTH, bias=False)
        self.head.weight = self.decoder.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.arange(5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(batch))
        return (self.decoder(hidden) + self.head(hidden)) * self.scale


def state_of(shard: bool) -> dict[str, Any]:
    model = Net()
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (state["model"](batch) - batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] = step
        losses.append(loss.item())
    return losses


def save_trained(rank: int, path: str, shard: bool) -> dict[str, torch.Tensor]:
    state = state_of(shard)
    train(state, range(1, 4))
    holdfast.save(state, path, step=3)
    full = {f"model.{k}": dense(v) for k, v in state["model"].state_dict().items()}
    names = {p: n for n, p in state["model"].named_parameters()}
    for parameter, values in state["optimizer"].state.items():
        for key, value in values.items():
            full[f"optimizer.state.{names[parameter]}.{key}"] = dense(value)
    return {**full, "losses": torch.tensor(train(state, range(4, 7)))}


def dense(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value.clone()


def load_and_train(rank: int, path: str, shard: bool) -> dict[str, torch.Tensor]:
    state = state_of(shard)
    report = holdfast.load(path, into=state)
    assert (report.missing, report.unexpected, state["step"]) == ((), (), 3)
    full = {f"model.{k}": dense(v) for k, v in state["model"].state_dict().items()}
    names = {p: n for n, p in state["model"].named_parameters()}
    for parameter, values in state["optimizer"].state.items():
        for key, value in values.items():
            full[f"optimizer.state.{names[parameter]}.{key}"] = dense(value)
    return {**full, "losses": torch.tensor(train(state, range(4, 7)))}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"losses"}:
        assert torch.equal(found[name], expected[name]), name
    # Another layout adds up in another order: the same losses to float tolerance.
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (4, 2), (1, 4), (3, 1), (2, 2)])
def test_fsdp_reshards_bit_exact(tmp_path: Path, writers: int, readers: int) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(writers, save_trained, path, True)[0]
    for found in run_ranks(readers, load_and_train, path, True):
        assert_same(found, expected)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.world_size == writers
        for name in expected.keys() - {"losses"}:
            assert torch.equal(checkpoint.tensor(name), expected[name]), name
        assert checkpoint.info("model.head.weight").tied_to == "model.decoder.weight"
        assert checkpoint.verify() == []


def wide_state(shard: bool) -> dict[str, Any]:
    """Tensors large enough for groups, means and references of the lossless codec."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 256))
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    for step in range(3):
        batch = torch.randn(32, 256, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
    return state


def save_lossless(rank: int, path: str) -> dict[str, torch.Tensor]:
    state = wide_state(True)
    holdfast.save(state, path, codec="lossless", options=Options(chunk_elements=1 << 14))
    return dense_of(state)


def load_lossless(rank: int, path: str, shard: bool) -> dict[str, torch.Tensor]:
    state = wide_state(shard)
    with torch.no_grad():
        for parameter, values in state["optimizer"].state.items():
            for value in (parameter, *values.values()):
                value.zero_()
    holdfast.load(path, into=state)
    return dense_of(state)


def dense_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: dense(value) for name, value in state["model"].state_dict().items()}
    for number, values in enumerate(state["optimizer"].state.values()):
        found |= {f"{number}.{key}": dense(value) for key, value in values.items()}
    return found


@pytest.mark.parametrize(("readers", "shard"), [(2, True), (3, True), (3, False), (1, False)])
def test_a_lossless_checkpoint_reshards_bit_exact(
    tmp_path: Path, readers: int, shard: bool
) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(2, save_lossless, path)[0]
    for found in run_ranks(readers, load_lossless, path, shard):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with holdfast.open(path) as checkpoint:
        stored = sum(checkpoint.info(name).stored_bytes for name in checkpoint.names())
        assert stored < 0.85 * sum(value.nbytes for value in expected.values())


def save_evaluated(rank: int, path: str) -> None:
    state = state_of(True)
    train(state, range(1, 4))
    with torch.no_grad():  # leaves gathered parameters in the place of shards
        state["model"](torch.ones(1, WIDTH))
    holdfast.save(state, path, step=3)
    train(state, range(4, 5))


def test_an_evaluation_before_a_save_changes_nothing_in_it(tmp_path: Path) -> None:
    path, other = str(tmp_path / "c"), str(tmp_path / "d")
    run_ranks(2, save_evaluated, path)
    expected = run_ranks(2, save_trained, other, True)[0]
    with holdfast.open(path) as checkpoint, holdfast.open(other) as same:
        assert checkpoint.names() == same.names()
        for name in expected.keys() - {"losses"}:
            assert torch.equal(checkpoint.tensor(name), expected[name]), name


def test_a_checkpoint_of_fsdp_loads_without_it(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(2, save_trained, path, True)[0]
    assert_same(load_and_train(0, path, False), expected)


def test_a_checkpoint_of_one_process_loads_sharded(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    expected = save_trained(0, path, False)
    for found in run_ranks(3, load_and_train, path, True):
        assert_same(found, expected)


def save_ddp(rank: int, path: str) -> int:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    holdfast.save({"model": model}, path)
    return sum(f.stat().st_size for f in Path(path).glob(f"data/*/{rank:05d}-*.hf"))


def test_ddp_writes_each_replica_once_and_shares_the_writing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    sizes = run_ranks(2, save_ddp, str(path))
    stored = sum(holdfast.open(path).info(n).stored_bytes for n in holdfast.open(path).names())
    assert stored == 4 * 2 * (64 * 64 + 64)
    assert min(sizes) > stored / 4, "both ranks write"
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for name, parameter in plain.named_parameters():
        assert torch.equal(holdfast.open(path).tensor(f"model.{name}"), parameter)


def two_dimensions(rank: int, path: str, shape: tuple[int, int], seed: int) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    values = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    layouts = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
    ]
    state = {
        f"w{i}": distribute_tensor(values + i, mesh, layout) for i, layout in enumerate(layouts)
    }
    if seed:
        for value in state.values():
            value.to_local().zero_()
        holdfast.load(path, into=state)
        for i, value in enumerate(state.values()):
            assert torch.equal(value.full_tensor(), values + i)
    else:
        holdfast.save(state, path)


@pytest.mark.parametrize("other", [(2, 2), (1, 3), (3, 1), (1, 1)])
def test_meshes_of_two_dimensions_reshard(tmp_path: Path, other: tuple[int, int]) -> None:
    path = str(tmp_path / "c")
    run_ranks(4, two_dimensions, path, (2, 2), 0)
    run_ranks(other[0] * other[1], two_dimensions, path, other, 1)
    checkpoint = holdfast.open(path)
    assert checkpoint.mesh == {"shape": [2, 2], "names": ["dp", "tp"]}
    stored = sum(checkpoint.info(name).stored_bytes for name in checkpoint.names())
    assert stored == 5 * 7 * 10 * 4, "replicas are stored once"


def strided(rank: int, path: str, rows: int, loading: bool) -> None:
    """FSDP over tensor parallel on one dimension: each rank's part lies in strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = nn.Linear(8, rows, bias=False)
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    expected = dense(model.weight)
    if loading:
        with torch.no_grad():
            model.weight.zero_()
        holdfast.load(path, into={"model": model})
        assert torch.equal(dense(model.weight), expected)
    else:
        holdfast.save({"model": model}, path)


@pytest.mark.parametrize("rows", [12, 10, 3], ids=["even", "uneven", "some empty"])
def test_strided_shards_of_fsdp_over_tensor_parallel(tmp_path: Path, rows: int) -> None:
    path = str(tmp_path / "c")
    run_ranks(4, strided, path, rows, False)
    torch.manual_seed(3)
    expected = nn.Linear(8, rows, bias=False).weight
    assert torch.equal(holdfast.open(path).tensor("model.weight"), expected)
    run_ranks(4, strided, path, rows, True)


INTERLEAVED: dict[str, list[Any]] = {
    "fused": [Replicate(), _StridedShard(0, split_factor=3)],
    "in both dimensions": [_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=2)],
    "one over the other": [Shard(0), _StridedShard(0, split_factor=2)],
}


def interleaved(rank: int, path: str, kind: str, loading: bool) -> None:
    """Parts that are several boxes: rows of each third of a fused projection."""
    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(12.0 * 5).reshape(12, 5)
    local, coordinate = values, mesh.get_coordinate()
    for ranks, at, placement in zip((2, 2), coordinate, INTERLEAVED[kind], strict=True):
        if isinstance(placement, _StridedShard):
            outer = local.chunk(placement.split_factor, placement.dim)
            parts = [part.chunk(ranks, placement.dim)[at] for part in outer]
            local = torch.cat(parts, placement.dim)
        elif isinstance(placement, Shard):
            local = local.chunk(ranks, placement.dim)[at]
    held = local.clone()
    placed = {"shape": values.shape, "stride": values.stride(), "run_check": False}
    state = {"w": DTensor.from_local(held, mesh, INTERLEAVED[kind], **placed)}
    if not loading:
        holdfast.save(state, path)
        return
    held.zero_()
    holdfast.load(path, into=state)
    assert torch.equal(held, local)


@pytest.mark.parametrize("kind", INTERLEAVED)
def test_strided_shards_of_several_boxes(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "c")
    run_ranks(4, interleaved, path, kind, False)
    expected = torch.arange(12.0 * 5).reshape(12, 5)
    assert torch.equal(holdfast.open(path).tensor("w"), expected)
    run_ranks(4, interleaved, path, kind, True)


def raised(action: Any) -> tuple[str, str]:
    try:
        action()
    except HoldfastError as error:
        return type(error).__name__, str(error)
    return "", ""


def bad_saves(rank: int, path: str) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    part = torch.arange(4.0)
    halves = distribute_tensor(part, mesh, [Shard(0)])
    only_here = {"w": halves} if rank == 0 else {}
    states = {
        "one bad rank": {"x": object()} if rank else {"x": 1},
        "a pending reduction": {"w": partial},
        "shapes differ": {"w": torch.ones(3 + rank)},
        "dtypes differ": {"w": torch.ones(3, dtype=[torch.float32, torch.int32][rank])},
        "values differ": {"seed": rank},
        "random states differ": {"rng": torch.tensor([rank], dtype=torch.uint8)},
        "a shard is missing": only_here,
    }
    return [
        raised(lambda what=what, state=state: holdfast.save(state, f"{path}/{what}"))
        for what, state in states.items()
    ]


def test_every_rank_raises_when_one_fails(tmp_path: Path) -> None:
    one, other = run_ranks(2, bad_saves, str(tmp_path))
    names = [[name for name, _ in found] for found in (one, other)]
    assert names[0] == ["PeerError", *["StateError"] * 6]
    assert names[1] == ["StateError"] * 7
    assert "rank 1 failed: StateError: x is a object" in one[0][1]
    assert "pending reduction" in one[1][1]
    assert "w is f32 [4] on rank 1, f32 [3]" in one[2][1]
    assert "w is i32 [3] on rank 1, f32 [3]" in one[3][1]
    assert "seed is 1 on rank 1, 0" in one[4][1]
    assert "different values of rng" in one[5][1]
    assert "of rank 0 cover 2 of 4 elements, no rank holds [2:4]" in one[6][1]
    assert one[6] == other[6], "found before anything is written, by all"
    assert list(tmp_path.rglob("MANIFEST")) == []
    assert list(tmp_path.rglob("*.hf")) == [], "nothing is left of a failed save"


def disjoint(rank: int, path: str) -> tuple[str, str]:
    """Pipeline stages: each rank has names of its own."""
    mine = {f"stage{rank}": torch.full((3,), float(rank)), "shared": torch.ones(2)}
    holdfast.save(mine, f"{path}/c")
    target = {name: torch.zeros_like(value) for name, value in mine.items()}
    report = holdfast.load(f"{path}/c", into=target)
    assert report.unexpected == ()
    assert all(torch.equal(target[name], mine[name]) for name in mine)
    return raised(lambda: holdfast.load(f"{path}/c", into={"shared": torch.zeros(2), "odd": rank}))


def test_ranks_may_have_names_of_their_own(tmp_path: Path) -> None:
    for name, text in run_ranks(2, disjoint, str(tmp_path)):
        assert name == MismatchError.__name__
        assert "missing in the checkpoint: odd" in text
        assert "missing in the target: stage0, stage1" in text


def statistics(rank: int, path: str) -> None:
    """BatchNorm's running statistics differ on every rank under DDP."""
    holdfast.save({"mean": torch.tensor([1.0 + rank])}, path)


def test_statistics_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_ranks(2, statistics, str(tmp_path / "c"))
    assert holdfast.open(tmp_path / "c").tensor("mean").item() == 1.0


def damaged(rank: int, path: str) -> tuple[list[str], int | None]:
    state = {"w": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    with holdfast.Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
        torch.distributed.barrier()
        if rank == 0:
            file = next(Path(checkpointer.path(2)).glob("data/*/00001-0.hf"))
            data = bytearray(file.read_bytes())
            data[64] ^= 1
            file.write_bytes(data)
        torch.distributed.barrier()
        name, _ = raised(lambda: holdfast.load(checkpointer.path(2), into=state))
        return [name], checkpointer.restore(state)


def test_all_ranks_restore_the_same_older_step_when_one_finds_damage(tmp_path: Path) -> None:
    found = run_ranks(2, damaged, str(tmp_path / "run"))
    assert sorted(name for names, _ in found for name in names) == ["CorruptError", "PeerError"]
    assert [step for _, step in found] == [1, 1]


def replicated() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {f"w{i}": torch.randn(1 << 20, generator=chance) for i in range(8)}


def load_replica(rank: int, path: str) -> tuple[holdfast.LoadReport, int]:
    """Load what all ranks need; return what holdfast and the kernel have counted."""
    into = {name: torch.zeros_like(value) for name, value in replicated().items()}
    options = holdfast.Options(io="direct")
    holdfast.load(path, into=into, options=options)  # what is read once, such as code, is read now
    before = bytes_read_by_the_process()
    report = holdfast.load(path, into=into, options=options)
    counted = bytes_read_by_the_process() - before
    for name, value in replicated().items():
        assert torch.equal(into[name], value)
    return report, counted


def bytes_read_by_the_process() -> int:
    """All that its threads asked the kernel for, from whatever file."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_read_the_checkpoint_once_between_them(tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "c"
    holdfast.save(replicated(), path)
    stored = sum(holdfast.open(path).file_bytes)
    found = run_ranks(world_size, load_replica, str(path))
    assert stored <= sum(report.bytes_read for report, _ in found) + 4096 <= 1.02 * stored
    assert sum(counted for _, counted in found) <= 1.02 * stored, "the kernel has counted more"
    for report, _ in found:
        assert report.bytes_read <= 1.05 * stored / world_size + (4 << 20)
        assert report.bytes_sent == (world_size - 1) * report.bytes_read
