"""The training loop of an episode: it saves in one of the ways there are, and things happen."""

from collections.abc import Callable
from typing import Any

import holdfast

from . import ambient, events
from .episode import Call, Episode
from .exits import ENDINGS, Ending
from .states import OPTIONS, State, make_state, train

WAYS = ("Checkpointer", "Checkpointer", "save_async", "save")
STAGES, BUSY = ("eager", "lazy", "sync"), ("wait", "wait", "skip")
Saved = tuple[Any, int, str]


class Loop:
    """A loop that saves each step, and what it waits for."""

    def __init__(self, episode: Episode) -> None:
        rng = episode.rng
        self.episode = episode
        self.way = episode.pick(WAYS)
        self.stage = episode.pick(STAGES)
        self.busy = episode.pick(BUSY)
        self.state: State = make_state(rng.randrange(100), rng.choice([8, 8, 8, 4096]))
        self.run: holdfast.Checkpointer | None = None
        self.flights: list[tuple[Any, Saved]] = []  # handles
        self.pending: list[Saved] = []  # steps of the run that nobody has waited for
        if self.way == "Checkpointer":
            root, stage, busy = episode.place / "run", self.stage, self.busy
            self.run = holdfast.Checkpointer(
                root, every=1, stage=stage, busy=busy, emergency=rng.random() < 0.3, options=OPTIONS
            )
        episode.say(way=self.way, stage=self.stage, busy=self.busy)

    def play(self) -> None:
        """Train some steps; then wait for all that was saved."""
        for step in range(1, self.episode.rng.randrange(2, 6)):
            if not self.episode.guard("train", lambda: train(self.state))[0]:
                continue
            self.state["step"] = step
            name, around = ambient.choose(self.episode)
            self.episode.say(step=step, within=name)
            self.save(step, around)
            if self.episode.has(0.5, events.EVENTS):
                events.happen(self.episode)
        self.wait()

    def save(self, step: int, around: Callable[[Call], Any]) -> None:
        """Save a step, in the way of this loop, within what surrounds it."""
        episode, state = self.episode, self.state
        if self.run is not None:
            self._save_in_run(step, self.run, around)
        elif self.way == "save":
            episode.save(state, episode.new_path("step"), around)
        else:
            saved = episode.begin(episode.new_path("step"), state)
            stage = "eager" if self.stage == "sync" else self.stage
            call: Call = lambda: holdfast.save_async(  # noqa: E731
                state, saved[0], stage=stage, busy=self.busy, options=OPTIONS
            )
            done, handle = episode.guard("save_async", lambda: around(call))
            if done and not handle.skipped:
                self.flights.append((handle, saved))

    def _save_in_run(
        self, step: int, run: holdfast.Checkpointer, around: Callable[[Call], Any]
    ) -> None:
        saved = self.episode.begin(self.episode.place / f"run/step-{step:08d}", self.state)
        now = self.episode.rng.random() < 0.2
        save: Call = lambda: run.save(step, self.state) if now else run.step(step, self.state)  # noqa: E731
        done, due = self.episode.guard("Checkpointer.step", lambda: around(save))
        if not done:
            self.pending.clear()  # it may have raised for the one before, and may save yet
        elif now or self.stage == "sync":
            self.episode.acknowledge(saved)
        elif due:
            self.pending.append(saved)

    def wait(self) -> None:
        """Wait for what is in flight, and acknowledge what has come."""
        for handle, saved in self.flights:
            if self.episode.guard("result", handle.result)[0]:
                self.episode.acknowledge(saved)
        if self.run is None:
            return
        if self.episode.guard("Checkpointer.wait", self.run.wait)[0]:
            for saved in self.pending:
                self.episode.acknowledge(saved)
        if self.episode.rng.random() < 0.5:
            target = make_state(99, self.state["model"][0].in_features)
            run = self.run
            self.episode.guard("Checkpointer.restore", lambda: run.restore(target))
        self.episode.guard("Checkpointer.close", self.run.close)


def play(episode: Episode) -> Ending:
    """Play an episode up to its end; return how the process is to end."""
    episode.warm()
    Loop(episode).play()
    episode.settle()
    name = episode.pick(ENDINGS)
    episode.say(ending=name)
    return ENDINGS[name]
