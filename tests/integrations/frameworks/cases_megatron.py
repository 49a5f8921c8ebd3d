"""Megatron-Core's `dist_checkpointing` with holdfast, in one process."""

import enum
import multiprocessing
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .megatron_cpu import prepare

prepare()

from megatron.core import dist_checkpointing as checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import (  # noqa: E402
    AsyncCallsQueue,
    AsyncRequest,
)

import holdfast  # noqa: E402
from holdfast.errors import HoldfastError, MismatchError, OptionError, StateError  # noqa: E402
from holdfast.integrations.adapter import install, is_committed, mark  # noqa: E402


class Kind(enum.Enum):
    LEARNED = 1


@pytest.fixture(autouse=True, scope="session")
def _group() -> Iterator[None]:
    url = "tcp://127.0.0.1:29535"
    torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def hook() -> Iterator[Any]:
    with install("megatron") as active:
        yield active


def tensor(key: str, data: torch.Tensor, **given: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **given)


def state_of(scale: float = 1.0) -> dict[str, Any]:
    """Return a state with every kind of leaf."""
    return {
        "model": {
            "w": tensor("w", torch.arange(32.0).reshape(8, 4) * scale),
            "half": tensor("half", torch.ones(4, dtype=torch.bfloat16) * scale),
            "extra": ShardedObject("extra", {"amax": torch.ones(3) * scale}, (1,), (0,)),
        },
        "local": LocalNonpersistentObject([scale]),
        "args": Namespace(lr=0.1 * scale, betas=(0.9, 0.95)),
        "step": int(scale),
    }


def place_in(tmp_path: Path, name: str = "iter_0000001") -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    checkpointing.save(state_of(3), place := place_in(tmp_path), content_metadata={"kind": "a"})
    assert not [*Path(place).glob("*.distcp")] and not (Path(place) / "common.pt").exists()
    found = checkpointing.load(state_of(0), place, strict="raise_all")
    expected = state_of(3)["model"]
    assert torch.equal(found["model"]["w"], expected["w"].data)
    assert torch.equal(found["model"]["half"], expected["half"].data)
    assert torch.equal(found["model"]["extra"]["amax"], torch.full((3,), 3.0))
    assert found["args"] == Namespace(lr=0.1 * 3, betas=(0.9, 0.95)) and found["step"] == 3
    assert found["local"] == [0]  # it is the program's own
    assert checkpointing.load_content_metadata(place) == {"kind": "a"}
    assert not holdfast.verify(Path(place) / "holdfast").damage


def test_what_a_checkpoint_holds_is_told_without_loading_it(tmp_path: Path) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    shapes = {k: t.global_shape for k, t in checkpointing.load_tensors_metadata(place).items()}
    assert shapes == {"w": (8, 4), "half": (4,)}
    keys = {each.key for each in load_sharded_metadata(place).values()}
    assert keys == {"w", "half", "extra"}
    plain = checkpointing.load_plain_tensors(place)
    assert torch.equal(plain["w"], torch.arange(32.0).reshape(8, 4))
    assert checkpointing.load_common_state_dict(place)["step"] == 1


def test_other_keys_are_told_as_megatron_tells_them(tmp_path: Path) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    asked = {"w": tensor("w", torch.zeros(8, 4)), "new": tensor("new", torch.zeros(2))}
    found, missing, unexpected = checkpointing.load(asked, place, strict="return_all")
    assert (missing, unexpected) == ({"half", "extra"}, {"new"}) and "new" not in found
    assert torch.equal(found["w"], torch.arange(32.0).reshape(8, 4))
    with pytest.raises(CheckpointingException, match="new"):
        checkpointing.load({"new": tensor("new", torch.zeros(2))}, place, strict="raise_all")


def test_a_factory_saves_and_merges_its_parts(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> Any:
        return [
            tensor(f"{key}.{n}", part, replica_id=replica_id)
            for n, part in enumerate(data.chunk(2))
        ]

    def gate(data: torch.Tensor) -> dict[str, Any]:
        return {"fc": ShardedTensorFactory("fc", data, build, torch.cat)}

    whole = torch.arange(8.0).reshape(4, 2)
    checkpointing.save(gate(whole), place := place_in(tmp_path))
    assert {*checkpointing.load_tensors_metadata(place)} == {"fc.0", "fc.1"}
    assert torch.equal(checkpointing.load(gate(torch.zeros(4, 2)), place)["fc"], whole)


def test_a_save_over_a_checkpoint_replaces_it(tmp_path: Path) -> None:
    checkpointing.save(state_of(1), place := place_in(tmp_path))
    checkpointing.save(state_of(2), place)
    assert checkpointing.load(state_of(0), place)["step"] == 2
    assert len([*(Path(place) / "holdfast" / "data").iterdir()]) == 1


def test_what_is_no_plain_value_is_stored_only_on_request(tmp_path: Path, hook: Any) -> None:
    state = {"w": tensor("w", torch.ones(2)), "kind": Kind.LEARNED}
    with pytest.raises(StateError, match="the common state has a value that is not plain: kind"):
        checkpointing.save(state, place_in(tmp_path))
    hook.remove()
    with install("megatron", pickles=True):
        checkpointing.save(state, place := place_in(tmp_path, "b"))
        with torch.serialization.safe_globals([Kind, getattr]):
            found = checkpointing.load({"w": tensor("w", torch.zeros(2))}, place)
    assert found["kind"] is Kind.LEARNED


def test_a_checkpoint_of_megatron_is_loaded_by_megatron(tmp_path: Path, hook: Any) -> None:
    hook.remove()
    checkpointing.save(state_of(2), place := place_in(tmp_path))
    assert [*Path(place).glob("*.distcp")]
    with install("megatron"), torch.serialization.safe_globals([Namespace]):
        found = checkpointing.load(state_of(0), place)
    assert found["step"] == 2 and torch.equal(found["model"]["w"], state_of(2)["model"]["w"].data)


def test_without_the_hook_megatron_names_the_backend_that_it_lacks(
    tmp_path: Path, hook: Any
) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    hook.remove()
    with pytest.raises(CheckpointingException, match=r"load_sharded.*'holdfast'"):
        checkpointing.load(state_of(0), place)


def test_only_one_integration_is_active(hook: Any) -> None:
    with pytest.raises(OptionError, match="megatron has holdfast installed already"):
        install("megatron", pickles=True)


def test_a_checkpoint_of_another_framework_is_refused(tmp_path: Path) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    other = {"model": torch.nn.Linear(2, 2), **mark("lightning", "2.6.6")}
    holdfast.save(other, f"{place}/holdfast", replace=True)
    with pytest.raises(MismatchError, match=r"saved by lightning 2\.6\.6; megatron cannot"):
        checkpointing.load(state_of(0), place)


def test_a_changed_model_is_refused_with_its_name(tmp_path: Path) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    changed = state_of(0) | {"model": {"w": tensor("w", torch.zeros(8, 5))}}
    with pytest.raises((MismatchError, CheckpointingException), match=r"\bw\b"):
        checkpointing.load(changed, place)


def test_tensors_cannot_be_taken_out_of_a_checkpoint(tmp_path: Path) -> None:
    checkpointing.save(state_of(), place := place_in(tmp_path))
    with pytest.raises(OptionError, match="which does not change"):
        checkpointing.remove_sharded_tensors(place, "w")


def test_a_save_in_the_background_is_of_the_state_as_it_was(tmp_path: Path) -> None:
    state, queue = state_of(2), AsyncCallsQueue()
    request = checkpointing.save(state, place := place_in(tmp_path), async_sharded_save=True)
    state["model"]["w"].data.zero_()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    found = checkpointing.load(state_of(0), place, strict="raise_all")
    assert torch.equal(found["model"]["w"], state_of(2)["model"]["w"].data)


def test_a_save_in_the_background_does_not_fork_the_training(tmp_path: Path) -> None:
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    queue = AsyncCallsQueue()
    request = checkpointing.save(state_of(2), place_in(tmp_path), async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert not forks
    queue.schedule_async_request(AsyncRequest(int, (), []))  # not of holdfast
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert forks


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_worker_process_waits_for_the_end_of_a_background_save(tmp_path: Path, how: str) -> None:
    request = checkpointing.save(state_of(2), place := place_in(tmp_path), async_sharded_save=True)
    worker = multiprocessing.get_context(how).Process(target=request.async_fn)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert is_committed(f"{place}/holdfast")
    request._replace(async_fn=None).execute_sync()
    assert checkpointing.load(state_of(0), place)["step"] == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_background_save_that_fails_leaves_the_older_one(tmp_path: Path, small: Path) -> None:
    checkpointing.save(state_of(2), place := place_in(small))
    queue, large = AsyncCallsQueue(), {"w": tensor("w", torch.ones(8 << 20))}
    request = checkpointing.save(large, other := place_in(small, "b"), async_sharded_save=True)
    queue.schedule_async_request(request)
    with pytest.raises(HoldfastError, match="No space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert not (Path(other) / "metadata.json").exists()
    assert checkpointing.load(state_of(0), place)["step"] == 2
    shutil.rmtree(other)
    request = checkpointing.save(state_of(3), place_in(small, "c"), async_sharded_save=True)
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    from .engines import small_disk

    with small_disk(tmp_path / "disk", 8 << 20):
        yield tmp_path / "disk"
