"""The codec table of a header (docs/format.md §6): how the chunks of tensors are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CorruptError
from ..layout import ROLES, Group, Tensor
from . import spec
from .fields import count, entries


@dataclass(frozen=True, slots=True)
class Coding:
    """An entry of the codec table.

    Attributes:
        groups: tensors that help to code each other; raw has none.
    """

    name: str
    groups: tuple[Group, ...] = ()


RAW = Coding(spec.CODEC_RAW)


def renumbered(groups: Sequence[Group], anew: Mapping[int, int]) -> tuple[Group, ...]:
    """Return groups of the tensors that are kept, by their new numbers."""
    kept = ({role: anew[n] for role, n in group.items() if n in anew} for group in groups)
    return tuple(group for group in kept if len(group) > 1)


def encode_coding(codec: Coding) -> dict[str, Any]:
    """Return an entry as values of JSON."""
    if codec.name == spec.CODEC_RAW:
        return {"name": codec.name}
    return {"name": codec.name, "groups": [dict(group) for group in codec.groups]}


def decode_coding(tensors: Sequence[Tensor], values: dict[str, Any]) -> Coding:
    """Check an entry.

    Raises:
        CorruptError: its groups are not of these tensors.
    """
    if values["name"] == spec.CODEC_RAW:
        return RAW
    groups = tuple(_decode_group(entry, tensors) for entry in entries(values, "groups")[0])
    members = [index for group in groups for index in group.values()]
    if len(set(members)) != len(members):
        raise CorruptError("a tensor is in two groups of a codec")
    return Coding(values["name"], groups)


def _decode_group(entry: dict[str, Any], tensors: Sequence[Tensor]) -> Group:
    if len(entry) < 2 or not set(entry) <= set(ROLES):
        raise CorruptError(f"a group of a codec has the roles {sorted(entry)!r:.80}")
    for role, index in entry.items():
        if count(index, 0, role) >= len(tensors):
            raise CorruptError(f"a group of a codec names tensor {index} of {len(tensors)}")
        dtypes = ("f32", "bf16", "f16") if role == "weight" else ("f32",)
        if tensors[index].dtype not in dtypes:
            raise CorruptError(f"the {role} of a group is of the dtype {tensors[index].dtype}")
    if len({tensors[index].shape for index in entry.values()}) > 1:
        raise CorruptError("the tensors of a group are of several shapes")
    return dict(entry)
