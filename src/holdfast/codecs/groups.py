"""Which tensors belong to one parameter, and in which order they are coded. Pure; knows names.

A group is a parameter's weight, its master copy and an optimizer's moments: of one shape, found by
their names. A wrong guess costs size, never a bit: a codec looks whether a relative helps.
"""

from collections.abc import Mapping, Sequence

from ..layout import ROLES, Group, Key, Path, Shape, Shard, Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
HALF = ("bf16", "f16")
# What optimizers call a master copy that they keep beside the moments.
MASTERS = ("master", "master_param", "master_params", "master_weight", "main_param", "fp32_param")

Unit = tuple[tuple[str, Shard], ...]  # (role, shard): the same box of a group's tensors
_Name = tuple[Key, Shape]


def find_groups(tensors: Sequence[Tensor]) -> tuple[Group, ...]:
    """Find the groups of two or more among tensors.

    Moments stand side by side: ``…, name, "exp_avg"`` and ``…, name, "exp_avg_sq"``. A weight has
    ``name`` as its last key elsewhere, and the same shape; where there is one of half precision and
    one of f32, that is its master; else what stands beside the moments under a name of `MASTERS`.
    Of several, the first goes with the first. Moments with numbers for names (of parameters that no
    module holds) go with the weights of their shape, in order, where these are as many.
    """
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    groups: dict[_Name, list[dict[str, int]]] = {}
    for number, tensor in enumerate(tensors):
        *above, last = tensor.path
        if last == "exp_avg_sq" and above and tensor.dtype == "f32":
            first = index.get((*above, "exp_avg"))
            group = {"exp_avg_sq": number}
            if first is not None and _form(tensors[first]) == _form(tensor):
                group["exp_avg"] = first
            for word in MASTERS:
                beside = index.get((*above, word))
                if beside is not None and _form(tensors[beside]) == _form(tensor):
                    group["beside"] = beside
            groups.setdefault((above[-1], tensor.shape), []).append(group)
    for dtypes, role in ((HALF, "half"), (("f32",), "full")):
        taken: dict[_Name, int] = {}
        for number, tensor in enumerate(tensors):
            if tensor.dtype not in dtypes or tensor.path[-1] in MOMENTS:
                continue
            name = (tensor.path[-1], tensor.shape)
            place = taken[name] = taken.get(name, -1) + 1
            known = groups.setdefault(name, [])
            if place == len(known):
                known.append({})
            known[place][role] = number
    _join_numbered(groups)
    found = (_roles(each) for known in groups.values() for each in known)
    return tuple(group for group in found if len(group) > 1)


def _join_numbered(groups: Mapping[_Name, Sequence[dict[str, int]]]) -> None:
    """Give weights without moments those of their shape that have numbers for names."""
    moments: dict[Shape, list[dict[str, int]]] = {}
    weights: dict[Shape, list[dict[str, int]]] = {}
    for (name, shape), known in groups.items():
        for group in known:
            if "exp_avg_sq" not in group:
                weights.setdefault(shape, []).append(group)
            elif str(name).isdigit() and not group.keys() & {"half", "full"}:
                moments.setdefault(shape, []).append(group)
    for shape, numbered in moments.items():
        lonely = sorted(weights.get(shape, []), key=lambda group: min(group.values()))
        if len(lonely) != len(numbered):
            continue
        numbered.sort(key=lambda group: group["exp_avg_sq"])
        for weight, moment in zip(lonely, numbered, strict=True):
            weight |= moment
            moment.clear()


def _roles(found: dict[str, int]) -> Group:
    half, full = found.pop("half", None), found.pop("full", None)
    beside = found.pop("beside", None)
    if half is not None:
        full = beside if full is None else full
        found |= {"weight": half} | ({"master": full} if full is not None else {})
    elif full is not None:
        found["weight"] = full
    return {role: found[role] for role in ROLES if role in found}


def _form(tensor: Tensor) -> tuple[str, Shape]:
    return tensor.dtype, tensor.shape


def units_of(
    shards: Sequence[Shard], tensors: Sequence[Tensor], groups: Sequence[Group]
) -> list[Unit]:
    """Join the shards that are the same box of a group's tensors, in the order of coding."""
    place: dict[Path, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        place |= {tensors[index].path: (number, role) for role, index in group.items()}
    units: dict[object, dict[str, Shard]] = {}
    for shard in shards:
        number, role = place.get(shard.tensor.path, (-1, "weight"))
        key = (number, shard.box) if number >= 0 else shard
        units.setdefault(key, {})[role] = shard
    return [
        tuple([(role, unit[role]) for role in ROLES if role in unit]) for unit in units.values()
    ]
