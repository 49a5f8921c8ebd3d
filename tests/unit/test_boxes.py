"""Many boxes at once, beside the same done one by one."""

import random
from itertools import product
from math import prod

import numpy as np

from format.simulated_ranks import cut
from holdfast.boxes import (
    PRIME,
    Boxes,
    are_inside,
    measure,
    random_keys,
    reach_into,
    strides_of,
    unflatten,
)
from holdfast.layout import Box, Shape, boxes_of_range


def columns(boxes: list[Box], dimensions: int = 0) -> tuple[Boxes, np.ndarray]:
    flat = np.array([n for box in boxes for n in (*box.offset, *box.shape)], np.int64)
    ndim = np.array([len(box.shape) for box in boxes], np.int64)
    return unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim, dimensions), ndim


def random_box(chance: random.Random, shape: Shape) -> Box:
    offset = tuple(chance.randrange(n) for n in shape)
    return Box(offset, tuple(chance.randint(1, n - a) for a, n in zip(offset, shape, strict=True)))


def test_boxes_are_filled_up_behind() -> None:
    boxes, ndim = columns([Box((), ()), Box((1, 2), (3, 4)), Box((5,), (6,))])
    assert boxes.offset.tolist() == [[0, 0], [1, 2], [5, 0]]
    assert boxes.shape.tolist() == [[1, 1], [3, 4], [6, 1]]
    assert (boxes.elements.tolist(), ndim.tolist()) == ([1, 12, 6], [0, 2, 1])
    assert strides_of(boxes.shape).tolist() == [[1, 1], [4, 1], [1, 1]]
    assert columns([Box((7,), (1,))], 3)[0].shape.tolist() == [[1, 1, 1]]


def test_what_leaves_an_array_or_is_empty_is_not_inside() -> None:
    shape = np.array([[4, 5]])
    for offset, extent, inside in [
        ((0, 0), (4, 5), True),
        ((3, 4), (1, 1), True),
        ((0, 0), (0, 5), False),
        ((-1, 0), (1, 1), False),
        ((4, 0), (1, 1), False),
        ((0, 1), (4, 5), False),
        ((-(2**63), 0), (2**63 - 1, 1), False),
        ((2**63 - 1, 0), (2**63 - 1, 1), False),
    ]:
        box = Boxes(np.array([offset]), np.array([extent]))
        assert are_inside(box, shape).tolist() == [inside], box


def test_measures_add_up_only_to_a_tiled_whole() -> None:
    chance = random.Random(3)
    verdicts = {True: 0, False: 0}
    for _ in range(2000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randrange(4)))
        boxes = [Box(*pair) for pair in cut(chance, (0,) * len(shape), shape, chance.randint(1, 6))]
        if chance.random() < 0.5:
            boxes[chance.randrange(len(boxes))] = random_box(chance, shape)
        counted = np.zeros(shape, int)
        for box in boxes:
            counted[box.slices()] += 1
        keys = random_keys(6)
        # Among boxes of more dimensions, which do not count.
        filled = chance.choice([0, 6])
        total = measure(*columns(boxes, filled), keys).sum(axis=0) % np.uint64(PRIME)
        whole = measure(*columns([Box((0,) * len(shape), shape)]), keys)[0]
        tiled = bool((counted == 1).all())
        assert bool((total == whole).all()) == tiled
        verdicts[tiled] += 1
    assert min(verdicts.values()) > 300


def test_runs_that_reach_into_a_box_are_told_from_those_that_do_not() -> None:
    chance = random.Random(4)
    boxes, shapes, starts, ends, expected = [], [], [], [], []
    for _ in range(5000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 4)))
        box = random_box(chance, shape)
        start = chance.randrange(prod(shape))
        end = chance.randint(start + 1, prod(shape))
        boxes.append(box)
        shapes.append(Box((0,) * len(shape), shape))
        starts.append(start)
        ends.append(end)
        parts = boxes_of_range(shape, start, end - start)
        expected.append(any(part.intersect(box) for _, part in parts))
    found = reach_into(columns(boxes)[0], columns(shapes)[0].shape, *map(np.array, (starts, ends)))
    assert found.tolist() == expected
    assert 500 < sum(expected) < 4500


def test_a_run_in_a_column_of_a_huge_array() -> None:
    shape = np.array([[2**20, 2**40]])
    column = Boxes(np.array([[0, 2**39]]), np.array([[2**20, 1]]))
    for row, (before, behind) in product((0, 5, 2**20 - 1), ((1, 1), (0, 1), (2**30, 2))):
        at = row * 2**40 + 2**39
        run = np.array([at - before]), np.array([at + behind])
        assert reach_into(column, shape, *run).tolist() == [True]
        missed = np.array([at + 1]), np.array([at + 2**39])
        assert reach_into(column, shape, *missed).tolist() == [False]
