"""Who writes which bytes: all of them once, in equal shares, the same whoever plans."""

import random
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from itertools import chain, combinations, pairwise
from math import prod

import pytest

from holdfast.layout import Box, Path, Shape, Shard, Tensor, size_of, tiling_fault, whole
from holdfast.plan.balance import CUT_BYTES_MIN, assign, chosen_writers
from holdfast.plan.dedup import merge_tensors
from holdfast.plan.local_states import (
    Values,
    decode_local_states,
    encode_local_state,
    local_state_of,
)

CHUNK = 1 << 20
EVEN = 1.05  # the fullest rank, of the mean
Held = list[list[Shard]]  # for each rank


def all_of(tensor: Tensor) -> Shard:
    return Shard(tensor, whole(tensor.shape))


def rows_of(tensor: Tensor, parts: int) -> list[Shard]:
    """What FSDP2 gives each rank: as many rows as all but the last ones, which may have none."""
    count = -(-tensor.shape[0] // parts)
    firsts = [min(part * count, tensor.shape[0]) for part in range(parts + 1)]
    return [
        Shard(tensor, Box((a, *(0 for _ in tensor.shape[1:])), (b - a, *tensor.shape[1:])))
        for a, b in pairwise(firsts)
    ]


def columns_of(tensor: Tensor, parts: int) -> list[Shard]:
    width = tensor.shape[1] // parts
    return [
        Shard(tensor, Box((0, part * width), (tensor.shape[0], width))) for part in range(parts)
    ]


def training_state(width: int) -> list[Tensor]:
    """A small GPT with the moments and steps of AdamW."""
    shapes: dict[str, Shape] = {"embedding": (41 * width, width)}
    for layer in range(3):
        shapes |= {
            f"{layer}.norm": (width,),
            f"{layer}.attention": (3 * width, width),
            f"{layer}.up": (4 * width, width),
            f"{layer}.up.bias": (4 * width,),
            f"{layer}.down": (width, 4 * width),
        }
    model = [Tensor(("model", name), "bf16", shape) for name, shape in shapes.items()]
    kinds = [("exp_avg", "f32"), ("exp_avg_sq", "f32"), ("step", "f32")]
    return model + [
        Tensor((name, kind), dtype, () if kind == "step" else shape)
        for name, shape in shapes.items()
        for kind, dtype in kinds
    ]


def ddp(state: list[Tensor], ranks: int) -> Held:
    return [[all_of(tensor) for tensor in state] for _ in range(ranks)]


def fsdp(state: list[Tensor], ranks: int) -> Held:
    return mesh(state, 1, ranks)


def hsdp(state: list[Tensor], ranks: int) -> Held:
    return mesh(state, 2, ranks // 2)


def mesh(state: list[Tensor], replicas: int, parts: int) -> Held:
    held: Held = [[] for _ in range(parts)]
    for tensor in state:
        pieces = rows_of(tensor, parts) if tensor.shape else [all_of(tensor)] * parts
        for rank, piece in enumerate(pieces):
            held[rank].append(piece)
    return held * replicas


def tensor_parallel(state: list[Tensor], ranks: int) -> Held:
    """Data parallel x tensor parallel, 2 in a row: norms and steps are on all ranks."""
    held: Held = [[], []]
    for tensor in state:
        pieces = [all_of(tensor)] * 2
        if "down" in str(tensor.path) and tensor.shape:
            pieces = columns_of(tensor, 2)
        elif "norm" not in str(tensor.path) and tensor.shape:
            pieces = rows_of(tensor, 2)
        for rank, piece in enumerate(pieces):
            held[rank].append(piece)
    return held * (ranks // 2)


def plan(held: Held, chosen: Sequence[int] | None = None) -> tuple[tuple[Shard, ...], ...]:
    return share_out(held, {}, range(len(held)) if chosen is None else chosen, CHUNK)


def share_out(
    held: Held, forced: Mapping[Path, int], chosen: Container[int], chunk_elements: int
) -> tuple[tuple[Shard, ...], ...]:
    """`assign`, from shards to shards."""
    boxes = [[(shard.tensor, (shard.box,)) for shard in shards] for shards in held]
    encoded = [encode_local_state(local_state_of(b, {}, None, Values({}, {}), "")) for b in boxes]
    tensors, rows = merge_tensors(decode_local_states(encoded))
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    kept = rows[rows.boxes.elements > 0]
    ranks = {index[path]: rank for path, rank in forced.items()}
    share = assign(tensors, kept, len(held), ranks, chosen, chunk_elements)
    written: list[list[Shard]] = [[] for _ in held]
    sides = (share.boxes.offset.tolist(), share.boxes.shape.tolist())
    for rank, number, offset, shape in zip(
        share.writer.tolist(), share.tensor.tolist(), *sides, strict=True
    ):
        ndim = len(tensors[number].shape)
        box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
        written[rank].append(Shard(tensors[number], box))
    return tuple(map(tuple, written))


def evenness(shards_by_rank: Sequence[Sequence[Shard]]) -> float:
    loads = [size_of(shards) for shards in shards_by_rank]
    return max(loads) * len(loads) / sum(loads)


def faults(held: Held, found: Sequence[Sequence[Shard]]) -> list[str]:
    """What is wrong with a plan: gaps, overlaps, what its writer does not hold."""
    written: dict[Tensor, list[Box]] = defaultdict(list)
    wrong = []
    for rank, shards in enumerate(found):
        boxes = {shard.tensor: shard.box for shard in held[rank]}
        for shard in shards:
            written[shard.tensor].append(shard.box)
            if boxes[shard.tensor].intersect(shard.box) != shard.box:
                wrong.append(f"rank {rank} does not hold {shard}")
    tensors = {shard.tensor: None for shards in held for shard in shards}
    for tensor in tensors:
        fault = tiling_fault(tensor.shape, written[tensor]) if prod(tensor.shape) else None
        wrong += [f"{tensor.path}: {fault}"] if fault else []
    return wrong


LAYOUTS = {"DDP": ddp, "FSDP2": fsdp, "HSDP": hsdp, "TP x DP": tensor_parallel}


@pytest.mark.parametrize("width", [16, 64, 1024, 8192])
@pytest.mark.parametrize("ranks", [2, 4, 6, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_writes_an_equal_share(layout: str, ranks: int, width: int) -> None:
    held = LAYOUTS[layout](training_state(width), ranks)
    found = plan(held)
    assert faults(held, found) == []
    # FSDP2 gives the last ranks fewer rows; what a rank alone holds nobody else can write.
    parts = {"FSDP2": ranks, "HSDP": ranks // 2}.get(layout, 1)
    assert evenness(found) <= max(EVEN, evenness(fsdp(training_state(width), parts)))


def test_one_huge_tensor_is_cut_for_all_ranks() -> None:
    held = ddp([Tensor(("w",), "f32", (2, 2**33))], 7)
    found = plan(held)
    assert faults(held, found) == []
    assert evenness(found) <= 1.01


def test_what_can_be_cut_nowhere_is_written_whole() -> None:
    state = [Tensor((name,), "f64", ()) for name in "abc"] + [Tensor(("none",), "u8", (0, 3))]
    held = ddp(state, 5)
    found = plan(held)
    assert faults(held, found) == []
    assert sorted(shard.tensor.path for shards in found for shard in shards) == [
        ("a",),
        ("b",),
        ("c",),
    ]


def test_cuts_are_few_and_small_tensors_whole() -> None:
    state = training_state(256)
    held = ddp(state, 16)
    found = plan(held)
    pieces = [shard for shards in found for shard in shards]
    assert len(pieces) <= len(state) + 2 * 15, "a cut for each rank but one, in two dimensions"
    mean = size_of(state) / 16
    cut = [shard for shard in pieces if shard.box != whole(shard.tensor.shape)]
    assert cut and min(shard.tensor.size_bytes for shard in cut) > 2 * mean / 200
    assert all(shard.box.shape[1:] == shard.tensor.shape[1:] for shard in cut), "whole rows"


def test_a_share_is_consecutive_in_the_order_of_the_state() -> None:
    state = training_state(64)
    found = plan(ddp(state, 4))
    order = [shard.tensor for shards in found for shard in shards]
    assert [tensor for tensor in dict.fromkeys(order)] == state
    assert order == sorted(order, key=state.index)


def test_large_shares_end_at_whole_chunks() -> None:
    held = ddp([Tensor(("w",), "f32", (40_000, 4096)), Tensor(("v",), "bf16", (2**33,))], 3)
    found = plan(held)
    cut = [shards[-1] for shards in found[:-1]]
    assert [shard.box.elements % CHUNK for shard in cut] == [0, 0]
    assert evenness(found) <= 1.01


def subsets(ranks: int) -> list[tuple[int, ...]]:
    sizes = range(1, ranks + 1)
    return list(chain.from_iterable(combinations(range(ranks), size) for size in sizes))


def random_holding(
    chance: random.Random, ranks: int, sets: Sequence[tuple[int, ...]], elements: int
) -> Held:
    """Tensors of any shape and dtype, in boxes, each on one of the sets of ranks."""
    held: Held = [[] for _ in range(ranks)]
    for number in range(chance.randint(1, 12)):
        shape = random_shape(chance, elements)
        tensor = Tensor((number,), chance.choice(["u8", "bf16", "f32", "c128"]), shape)
        apart: list[tuple[int, ...]] = []  # a rank holds one box of a tensor
        for ranks_of_box in chance.sample(sets, len(sets)):
            if not set(ranks_of_box) & set(chain(*apart)):
                apart.append(ranks_of_box)
        apart = apart[: chance.randint(1, len(apart))]
        boxes = rows_of(tensor, len(apart)) if shape else [all_of(tensor)]
        for ranks_of_box, box in zip(apart, boxes, strict=False):
            for rank in ranks_of_box:
                held[rank].append(box)
    return held


def random_shape(chance: random.Random, elements: int) -> Shape:
    shape: list[int] = []
    for _ in range(chance.randrange(4)):
        shape.append(chance.choice([1, chance.randint(1, max(1, elements))]))
        elements = max(1, elements // shape[-1])
    return tuple(shape)


@pytest.mark.parametrize("seed", range(300))
def test_every_element_is_written_once_by_a_rank_that_holds_it(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(1, 6)
    held = random_holding(chance, ranks, subsets(ranks), chance.choice([10, 3000, 10**6, 2**40]))
    chosen = chance.sample(range(ranks), chance.randint(1, ranks))
    found = share_out(held, {}, chosen, chance.choice([1, 7, CHUNK]))
    assert faults(held, found) == []
    holders = holders_of(held)
    for rank, shards in enumerate(found):
        boxes = {shard.tensor: shard for shard in held[rank]}
        for shard in shards:
            assert rank in chosen or not holders[boxes[shard.tensor]] & set(chosen)


def holders_of(held: Held) -> dict[Shard, set[int]]:
    holders: dict[Shard, set[int]] = defaultdict(set)
    for rank, shards in enumerate(held):
        for shard in shards:
            holders[shard].add(rank)
    return holders


def least_possible(held: Held) -> int:
    """The load of the fullest rank at best: some ranks must write what only they hold.

    The bytes that only ranks of a set hold, over the ranks of the set, for the set where that is
    most: Hall's condition for shares, or the duality of flows and cuts.
    """
    holders = holders_of(held)
    return max(
        size_of(shard for shard, found in holders.items() if found <= set(ranks)) // len(ranks)
        for ranks in subsets(len(held))
    )


NESTED = [(0,), (1,), (4,), (0, 1), (2, 3), (0, 1, 2, 3), (4, 5), tuple(range(6))]
ROWS_AND_COLUMNS = [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5), tuple(range(6)), (0,), (5,)]


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("sets", [NESTED, ROWS_AND_COLUMNS, subsets(6)], ids=len)
def test_no_rank_writes_more_than_it_must(sets: list[tuple[int, ...]], seed: int) -> None:
    held = random_holding(random.Random(seed), 6, sets, 2**34)
    loads = [size_of(shards) for shards in plan(held)]
    within = 0.05 * sum(loads) / 6 + 6 * CUT_BYTES_MIN
    assert max(loads) <= least_possible(held) + within


def test_a_plan_is_the_same_whoever_makes_it() -> None:
    for layout in LAYOUTS.values():
        one, other = (plan(layout(training_state(64), 4)) for _ in range(2))
        assert one == other


def test_a_tensor_that_has_to_be_one_ranks_is_that_ranks() -> None:
    state = training_state(16)
    first: Path = state[0].path
    found = share_out(ddp(state, 3), {first: 2}, [0], CHUNK)
    assert found[2] == (all_of(state[0]),)
    assert evenness(found) > 1.5 and found[1] == (), "the rest is the chosen rank's"


NODES = ["a", "a", "b", "b", "b", "a", "c"]


@pytest.mark.parametrize(
    ("writers", "expected"),
    [
        ("rank", [0, 1, 2, 3, 4, 5, 6]),
        ("node", [0, 2, 6]),
        (1, [0]),
        (2, [0, 3]),
        (3, [0, 2, 4]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (100, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_writers_are_all_one_a_node_or_so_many(writers: str | int, expected: list[int]) -> None:
    chosen = chosen_writers(writers, NODES)
    assert [rank for rank in range(len(NODES)) if rank in chosen] == expected


def test_chosen_writers_share_and_others_write_what_only_they_hold() -> None:
    state = training_state(64)
    held = hsdp(state, 8)  # rank 0 holds what rank 4 does, 1 what 5 does, …
    found = plan(held, [0, 4, 6])
    assert faults(held, found) == []
    loads = [size_of(shards) for shards in found]
    assert loads[2] == 0 < loads[6], "6 is chosen, 2 holds the same"
    assert max(loads[0], loads[4]) <= EVEN * min(loads[0], loads[4])
    assert max(loads[1], loads[5]) <= EVEN * min(loads[1], loads[5]), "as if all were chosen"
