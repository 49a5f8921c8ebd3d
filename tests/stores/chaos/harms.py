"""What can be done to one request on its way, as the driver tells the proxy. Knows no sockets.

A harm waits for the request with its number, of one sender, since the last "begin".
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

FOREVER = 1 << 30

# Each with what it does to the one request.
ACTIONS = {
    "cut": "the connection breaks before anything is forwarded",
    "cut-request": "the server gets half of the request",
    "lost": "the server answers, and nobody hears it",
    "cut-reply": "half of the answer arrives",
    "slow-down": "503 SlowDown",
    "expired": "403 ExpiredToken",
    "quota": "507 InsufficientStorage, with the code QuotaExceeded",
    "delay": "it is forwarded after a while",
    "late": "the connection breaks; it is forwarded when the driver releases it",
    "kill-before": "victims die by SIGKILL; it is not forwarded",
    "kill-after": "it is forwarded; when the answer is here, victims die by SIGKILL",
    "kill-late": "victims die by SIGKILL; it is forwarded when the driver releases it",
    "hold-before": "victims are stopped; it is forwarded when the driver releases it",
    "hold-after": "it is forwarded; victims are stopped; the answer goes on when released",
}
HOLDS = ("hold-before", "hold-after")
KILLS = ("kill-before", "kill-after", "kill-late")
ONCE = ("cut", "cut-request", "lost", "cut-reply", "slow-down", "delay", "late")


@dataclass(slots=True)
class Harm:
    """One harm, or many of one kind.

    Attributes:
        sender: whose requests are counted; -1: all of all.
        at: the number of the request, from 1; with `chance` the first that may be hit.
        times: so many requests from there on, such as the same one sent again.
        seconds: of a delay.
        victims: process ids.
        chance: each request is hit with this chance, by one of `actions` at random.
    """

    action: str = "cut"
    sender: int = -1
    at: int = 1
    times: int = 1
    seconds: float = 0.3
    victims: list[int] = field(default_factory=list)
    chance: float = 1.0
    actions: list[str] = field(default_factory=list)
    seed: int = 0

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        who = f"sender {self.sender}" if self.sender >= 0 else "any sender"
        if self.chance < 1:
            return f"{self.chance:.0%} of the requests of {who}"
        times = "" if self.times == 1 else " on" if self.times == FOREVER else f" ({self.times})"
        return f"{self.action} at request {self.at}{times} of {who}"


class Counter:
    """Counts requests, and says which harm is for each."""

    def __init__(self) -> None:
        self.harms: list[Harm] = []
        self.counts: dict[int, int] = {}
        self.is_counting = False
        self._random = random.Random(0)

    def arm(self, harms: list[Harm]) -> None:
        """Take new harms; nothing counts before `begin`."""
        self.harms, self.counts, self.is_counting = harms, {}, False
        self._random = random.Random(harms[0].seed if harms else 0)

    def begin(self) -> None:
        """Count from here on."""
        self.counts, self.is_counting = {}, True

    def end(self) -> None:
        """Harm nothing more."""
        self.is_counting = False

    def next(self, sender: int) -> tuple[int, Harm | None]:
        """Count a request of a sender; return its number, and what harms it."""
        if not self.is_counting:
            return 0, None
        number = self.counts[sender] = self.counts.get(sender, 0) + 1
        in_all = sum(self.counts.values())
        for harm in self.harms:
            if harm.sender not in (-1, sender):
                continue
            at = in_all if harm.sender == -1 else number
            if not harm.at <= at < harm.at + harm.times:
                continue
            if harm.chance >= 1:
                return number, harm
            if self._random.random() < harm.chance:
                action = self._random.choice(harm.actions)
                return number, Harm(action, seconds=self._random.uniform(0.01, harm.seconds))
        return number, None
