"""What DCP does with directories, writers and readers, as documented and as frameworks use it."""

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from .behaviours import weights, zeros
from .stage import KINDS, LEFT, NONE, REFUSED, Stage, behaviour

SYNC = ("sync",)


class OwnReader(FileSystemReader):
    """A subclass, as frameworks have."""


class OwnFinish(FileSystemWriter):
    """A subclass that does something of its own when all is written."""

    def finish(self, *given: Any, **more: Any) -> None:
        super().finish(*given, **more)


class Xor(StreamTransformExtension):
    """Stands for an encryption."""

    @staticmethod
    def get_descriptor() -> str:
        return "xor/1"

    @classmethod
    def from_descriptor(cls, version: str) -> "Xor":
        return cls()

    @classmethod
    def registry_name(cls) -> str:
        return "xor"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def second(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value * 2 for key, value in state.items()}


@behaviour("a path is given as text or as a Path")
def paths(stage: Stage) -> Any:
    stage.save(weights(), checkpoint_id=str(stage.path("a")))
    stage.save(weights(), checkpoint_id=stage.path("b"))
    return [stage.load(zeros(weights()), checkpoint_id=str(stage.path(n))) for n in "ab"]


@behaviour("a writer and a reader are given")
def given(stage: Stage) -> Any:
    stage.save(weights(), storage_writer=FileSystemWriter(stage.path()))
    return stage.load(zeros(weights()), storage_reader=FileSystemReader(stage.path()))


@behaviour("one writer and one reader go from checkpoint_id to checkpoint_id")
def moved(stage: Stage) -> Any:
    writer, reader = FileSystemWriter(stage.path("0")), FileSystemReader(stage.path("0"))
    for number in range(3):
        state = {"w": torch.full((3,), float(number))}
        stage.save(state, storage_writer=writer, checkpoint_id=stage.path(str(number)))
    return [
        stage.load({"w": torch.zeros(3)}, storage_reader=reader, checkpoint_id=stage.path(n))
        for n in "021"
    ]


@behaviour("options of how files are written do not change what is read")
def file_options(stage: Stage) -> Any:
    found = []
    for number, options in enumerate(
        [{"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}]
    ):
        place = stage.path(str(number))
        stage.save(weights(), storage_writer=FileSystemWriter(place, **options))
        found.append(stage.load(zeros(weights()), checkpoint_id=place))
    return found


@behaviour("a second save to a path replaces the first")
def replaced(stage: Stage) -> Any:
    stage.save({**weights(), "old": torch.ones(2)})
    stage.save(second(weights()))
    return stage.load(zeros(weights())), keys(stage)


def keys(stage: Stage) -> list[str]:
    return sorted(FileSystemReader(stage.path()).read_metadata().state_dict_metadata)


@behaviour("a second save by the same writer replaces the first")
def replaced_by_writer(stage: Stage) -> Any:
    writer = FileSystemWriter(stage.path())
    stage.save(weights(), storage_writer=writer)
    stage.save(second(weights()), storage_writer=writer)
    return stage.load(zeros(weights()))


@behaviour("overwrite=False refuses a second save, and keeps the first")
def not_replaced(stage: Stage) -> Any:
    stage.save(weights())
    text = ""
    try:
        stage.save(
            second(weights()), storage_writer=FileSystemWriter(stage.path(), overwrite=False)
        )
    except BaseException as error:
        text = str(error)
    return "Checkpoint already exists" in text, stage.load(zeros(weights()))


@behaviour("a save over a checkpoint that DCP wrote before")
def over_stock(stage: Stage) -> Any:
    own = FileSystemWriter(stage.path(), serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(weights(), storage_writer=own)
    stage.save(second(weights()))
    return stage.load(zeros(weights())), sorted(keys(stage))


@behaviour("other files in the directory stay, and disturb nothing")
def beside(stage: Stage) -> Any:
    stage.path().mkdir(exist_ok=True)
    (stage.path() / "config.json").write_text("{}")
    stage.save(weights())
    (stage.path() / f"meta{stage.rank}.pt").write_text("x")
    found = stage.load(zeros(weights()))
    return found, (stage.path() / "config.json").read_text()


@behaviour("a checkpoint is recognised by its file .metadata")
def marked(stage: Stage) -> Any:
    before = os.path.isfile(stage.path() / ".metadata")
    dist.barrier()
    stage.save(weights())
    return before, os.path.isfile(stage.path() / ".metadata")


@behaviour("save returns the metadata: version, keys, sizes, storage of each item")
def returned(stage: Stage) -> Any:
    found = stage.save({**weights(), "n": 1})
    described = {
        fqn: (type(item).__name__, getattr(item, "size", None))
        for fqn, item in sorted(found.state_dict_metadata.items())
    }
    stored = sorted((index.fqn, index.offset) for index in found.storage_data)
    meta = found.storage_meta
    return found.version, described, stored, str(meta.checkpoint_id) == str(stage.path())


@behaviour("read_metadata says the same, and can be pickled")
def metadata(stage: Stage) -> Any:
    stage.save({"model": weights(), "n": 1})
    found = pickle.loads(pickle.dumps(FileSystemReader(stage.path()).read_metadata()))
    described = {
        fqn: (type(item).__name__, getattr(item, "size", None))
        for fqn, item in sorted(found.state_dict_metadata.items())
    }
    stored = {index.fqn for index in found.storage_data}
    nested = {key: tuple(path) for key, path in found.planner_data.items()}
    return found.version, described, sorted(stored), dict(sorted(nested.items()))


@behaviour("without a path and a writer, save is an error", NONE, ways=SYNC)
def nowhere(stage: Stage) -> Any:
    return dcp.save(weights())


@behaviour("loading from a path without a checkpoint is an error", NONE, ways=SYNC)
def absent(stage: Stage) -> Any:
    return stage.load(zeros(weights()), "nothing")


@behaviour("a planner that fails on one rank fails the save on all")
def planner_fails(stage: Stage) -> Any:
    stage.save(weights(), "good")
    return stage.save(weights(), planner=Failing())


class Failing(DefaultSavePlanner):
    """Fails where it is asked for data."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("no data")


@behaviour("what changes after async_save has returned is not saved", ways=("thread", "process"))
def staged(stage: Stage) -> Any:
    state = {"w": torch.ones(64), "list": [1]}
    future: Any = dcp.async_save(
        state, checkpoint_id=stage.path(), async_checkpointer_type=KINDS[stage.way]
    )
    state["w"].zero_()
    future.result()
    return stage.load({"w": torch.zeros(64), "list": None})


@behaviour("no_dist: each rank saves to, and loads from, a path of its own")
def alone(stage: Stage) -> Any:
    place = stage.path(f"rank{stage.rank}")
    stage.save({"w": torch.full((2,), float(stage.rank))}, checkpoint_id=place, no_dist=True)
    return stage.load({"w": torch.zeros(2)}, checkpoint_id=place, no_dist=True)


@behaviour("a process group of some of the ranks", ranks=(2,), ways=SYNC)
def some_ranks(stage: Stage) -> Any:
    group = dist.new_group([1])
    if stage.rank == 1:
        stage.save(weights(), process_group=group)
    dist.barrier()
    return stage.load(zeros(weights()))


@behaviour("FsspecWriter and FsspecReader of a local path")
def fsspec(stage: Stage) -> Any:
    stage.save(weights(), storage_writer=FsspecWriter(str(stage.path())))
    return stage.load(zeros(weights()), storage_reader=FsspecReader(str(stage.path())))


@behaviour("a subclass of FileSystemReader")
def own_reader(stage: Stage) -> Any:
    stage.save(weights())
    return stage.load(zeros(weights()), storage_reader=OwnReader(stage.path()))


@behaviour("save_state_dict and load_state_dict, which are deprecated", ways=SYNC)
def deprecated(stage: Stage) -> Any:
    into = zeros(weights())
    dcp.save_state_dict(weights(), FileSystemWriter(stage.path()))
    dcp.load_state_dict(into, FileSystemReader(stage.path()))
    return into


@behaviour("torch_save_to_dcp and dcp_to_torch_save", ways=SYNC)
def converted(stage: Stage) -> Any:
    mine = stage.path(f"rank{stage.rank}")
    torch.save({**weights(), "n": 4}, f"{mine}.pt")
    torch_save_to_dcp(f"{mine}.pt", mine)
    dcp_to_torch_save(mine, f"{mine}-back.pt")
    return torch.load(f"{mine}-back.pt")


@behaviour("the class _Checkpointer", ways=SYNC)
def checkpointer(stage: Stage) -> Any:
    both = _Checkpointer(FileSystemWriter(stage.path()), FileSystemReader(stage.path()))
    both.async_save(weights()).result()
    into = zeros(weights())
    both.load(into)
    return into


@behaviour("a writer with `_extensions`, such as an encryption", LEFT, why="they are DCP's own")
def extensions(stage: Stage) -> Any:
    stage.save(weights(), storage_writer=FileSystemWriter(stage.path(), _extensions=[Xor()]))
    return [name.endswith(".distcp") for name in os.listdir(stage.path())].count(True)


@behaviour("serialization_format=SAFETENSORS", LEFT, why="other programs read the files")
def safetensors(stage: Stage) -> Any:
    form = SerializationFormat.SAFETENSORS
    stage.save(weights(), storage_writer=FileSystemWriter(stage.path(), serialization_format=form))
    return len(os.listdir(stage.path())) > 0


@behaviour("use_collectives=False", LEFT, why="it makes a checkpoint for each rank")
def without_collectives(stage: Stage) -> Any:
    stage.save(weights(), use_collectives=False)
    return stage.load(zeros(weights()))


@behaviour("a subclass of FileSystemWriter with its own `finish`", LEFT, why="only it knows what")
def own_finish(stage: Stage) -> Any:
    stage.save(weights(), storage_writer=OwnFinish(stage.path()))
    return stage.load(zeros(weights()))


@behaviour(
    "such a subclass saves over a checkpoint of holdfast",
    REFUSED,
    why="loads name both checkpoints; DCP alone returns the newer",
)
def stale(stage: Stage) -> Any:
    stage.save(weights())
    stage.save(second(weights()), storage_writer=OwnFinish(stage.path()))
    return stage.load(zeros(weights()))
