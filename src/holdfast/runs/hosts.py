"""Which ranks share a local directory: found by what they see there, not by the names of hosts."""

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..stores.base import Store

if TYPE_CHECKING:
    from ..group.base import Group

SEEN_PREFIX = ".rank-"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Of each rank, the lowest rank that shares its local directory: its lead."""

    leads: tuple[int, ...]
    rank: int

    @property
    def is_spread(self) -> bool:
        """Whether there are several directories."""
        return any(lead != COORDINATOR for lead in self.leads)

    @property
    def is_lead(self) -> bool:
        """Whether this rank is the lowest of its directory."""
        return self.leads[self.rank] == self.rank

    def here(self) -> frozenset[int]:
        """Return the ranks that share this rank's directory; empty: all."""
        mine = self.leads[self.rank]
        together = (rank for rank, lead in enumerate(self.leads) if lead == mine)
        return frozenset(together) if self.is_spread else frozenset()

    def of_coordinator(self) -> frozenset[int]:
        """Return the ranks that share the coordinator's directory."""
        return frozenset(rank for rank, lead in enumerate(self.leads) if lead == COORDINATOR)


def find_hosts(local: Store, ranks: "Group") -> Hosts:
    """Find out which ranks share a directory; on all ranks. Each leaves a file there meanwhile.

    Raises:
        StoreError: the directory cannot be written.
    """
    if ranks.world_size == 1:
        return Hosts((COORDINATOR,), COORDINATOR)
    with Phase(ranks) as named:
        if ranks.rank == COORDINATOR:
            named.answer = secrets.token_hex(8).encode()
    prefix = f"{SEEN_PREFIX}{named.answers[COORDINATOR].decode()}-"
    mine = f"{prefix}{ranks.rank}"
    try:
        with Phase(ranks):
            local.claim(mine, b"")
        with Phase(ranks) as seen:
            names = [entry.name for entry in local.list() if entry.name.startswith(prefix)]
            lead = min(int(name.removeprefix(prefix)) for name in names)
            seen.answer = str(lead).encode()
    finally:
        with contextlib.suppress(StoreError):  # what is left is swept with other old files
            local.remove(mine)
    return Hosts(tuple(int(answer) for answer in seen.answers), ranks.rank)
