"""The states of the random number generators of a process, as part of a state.

Knows no files; a checkpoint holds those of all ranks, and each takes its own.
"""

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .. import worker
from ..errors import MismatchError, OptionError, StateError, shown
from ..group.base import COORDINATOR
from ..group.phase import find_group
from ..state.ambient import ordinary_torch

logger = logging.getLogger("holdfast")

_MERSENNE = "MT19937"  # what np.random draws from unless np.random.set_bit_generator was called


class RandomState:
    """The global random number generators of Python, NumPy, torch's CPU and the CUDA device.

    Put one into the state, best as its last item, so that nothing draws after it is restored. Each
    rank saves its own. Of CUDA it covers the current device, if the process has used one.

    Restored on the same number of ranks, each rank continues its own random numbers exactly. On
    another number, each generator gets a new seed, from the saved state of rank 0, the new number
    of ranks and the rank. The seeds differ between ranks, and are the same at each such restore; a
    warning is logged once.

    Generators of your own (`torch.Generator`, `np.random.Generator`) are not covered: save their
    ``get_state()`` or ``bit_generator.state``.

    Args:
        rank, world_size: rank and number of ranks; default: those of the default process group.
            Ranks that must draw the same numbers (tensor parallelism) give the same rank, such as
            the data-parallel one, and the number of those.

    Raises:
        OptionError: only one of the two is given, or the rank is invalid.

    Example::

        random_state = holdfast.RandomState()
        state = {"model": model, "optimizer": optimizer, "random": random_state}
        saved = random_state.state_dict()  # `holdfast.save` calls it, and `load` the other
        random_state.load_state_dict(saved)
    """

    def __init__(self, *, rank: int | None = None, world_size: int | None = None) -> None:
        """Check and keep the rank."""
        self._place = checked_place(rank, world_size)

    @worker.in_worker
    @ordinary_torch()
    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's generators.

        Raises:
            StateError: NumPy draws from another bit generator than its default.
        """
        rank, world_size = self._place or place_of_group()
        return {"world_size": world_size, "ranks": {str(rank): _capture()}}

    @worker.in_worker
    @ordinary_torch()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's generators.

        Args:
            state: the result of `state_dict`, with the states of all ranks.

        Raises:
            MismatchError: the state of this rank, or of rank 0, is missing.
        """
        rank, world_size = self._place or place_of_group()
        saved, ranks = state["world_size"], state["ranks"]
        source = rank if saved == world_size else 0
        if str(source) not in ranks:
            raise MismatchError(
                f"{saved} ranks saved this checkpoint, and the RandomState of rank {source} is "
                "missing. Save with a RandomState in the state of all ranks; or restore without it"
            )
        if saved == world_size:
            _restore(ranks[str(rank)])
            return
        if rank == COORDINATOR:
            logger.warning(
                "%d ranks saved the random states, and %d restore them: each generator gets a new "
                "seed, from the saved state of rank 0 and its own rank",
                *(saved, world_size),
            )
        _seed(ranks["0"], f"{rank} of {world_size}")


def checked_place(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return (rank, number of ranks) as given, or None.

    Raises:
        OptionError: they are invalid.
    """
    if rank is None and world_size is None:
        return None
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise OptionError(
            f"rank is {shown(rank)} and world_size {shown(world_size)}; expected neither, or both "
            "with 0 <= rank < world_size"
        )
    return rank, world_size


def place_of_group() -> tuple[int, int]:
    """Return (rank, number of ranks) of the default process group, or of this process alone."""
    ranks = find_group(None, writing=True)
    return ranks.rank, ranks.world_size


def derived_seed(saved: Mapping[str, Any], whose: str) -> int:
    """Return a seed of 64 bits from saved states; another for each text."""
    digest = hashlib.blake2b(whose.encode(), digest_size=8)
    for kind in sorted(saved):
        digest.update(kind.encode())
        digest.update(saved[kind]["state"].numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _capture() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != _MERSENNE:
        raise StateError(
            f"np.random draws from {numpy_state['bit_generator']}; expected {_MERSENNE}, the "
            "default. Use a generator of your own, and save its bit_generator.state"
        )
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    position = numpy_state["state"]["pos"]
    result: dict[str, Any] = {
        "python": {
            "state": torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            "version": version,
            "gauss": gauss,
        },
        "numpy": {
            "state": key,
            "position": position,
            # Of a pair of normal numbers, the one that is still to be drawn.
            "gauss": numpy_state["gauss"] if numpy_state["has_gauss"] else None,
        },
        "torch": {"state": torch.get_rng_state()},
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        result["cuda"] = {"state": torch.cuda.get_rng_state()}
    return result


def _restore(saved: Mapping[str, Any]) -> None:
    python, numpy_state = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    gauss = numpy_state["gauss"]
    np.random.set_state(
        {
            "bit_generator": _MERSENNE,
            "state": {
                "key": numpy_state["state"].numpy().astype(np.uint32),
                "pos": numpy_state["position"],
            },
            "has_gauss": int(gauss is not None),
            "gauss": gauss or 0.0,
        }
    )
    torch.set_rng_state(saved["torch"]["state"])
    if "cuda" not in saved:
        return
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"]["state"])
    else:
        logger.warning("the saved random state of CUDA is unused: there is no CUDA device here")


def _seed(saved: Mapping[str, Any], whose: str) -> None:
    # A seed each: Python and NumPy would make the same numbers of the same one.
    random.seed(derived_seed(saved, f"python, {whose}"))
    numpy_seed = derived_seed(saved, f"numpy, {whose}")
    np.random.seed([numpy_seed & 0xFFFFFFFF, numpy_seed >> 32])
    torch.manual_seed(derived_seed(saved, f"torch, {whose}"))  # of CUDA too, when it is used
