"""An optimizer to fill → the state of its parameters, by their names.

Knows one optimizer at a time; what takes tensors and walks on is `target`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..format.names import dotted
from ..format.values import encode_value
from ..layout import Path, Tensor
from .ambient import ordinary_torch
from .assign import Assignment
from .filled import Target, Waiting
from .flat_optimizer import FlatPiece, bind_flat
from .modules import ParameterNames, group_tensors, optimizer_names
from .optimizers import ParameterState, holder, other_kind, owned_by
from .source import Source
from .tree import Setter, look_up, no_setter, rebuild

Maker = Callable[[Path, Path, Tensor], torch.Tensor]  # whole path, path below the object, form
MayKeep = Callable[[Path, Tensor, torch.Tensor], bool]

_OTHER_PARAMETER = "state of a parameter that has another shape in the target"


class OptimizerTarget(ABC):
    """The part of one pass over a target that binds optimizers."""

    target: Target
    source: Source
    names: dict[Path, ParameterNames]
    later: list[Waiting]
    skips: bool
    assignment: Assignment | None

    @abstractmethod
    def visit(self, value: Any, path: Path, setter: Setter) -> None:
        """Bind one node."""

    @abstractmethod
    def _filled(
        self,
        found: list[Path],
        path: Path,
        current: Any,
        make: Maker,
        may_keep: MayKeep = lambda *_: True,
    ) -> dict[Path, Any]:
        """Take everything below ``path``."""

    def _optimizer(self, optimizer: Optimizer, path: Path) -> None:
        listed = optimizer_names(optimizer, self.names)
        groups: dict[int, dict[str, Any]] = {}
        flat: dict[int, list[FlatPiece]] = {}
        owned = owned_by(optimizer)
        if self.assignment and any(entry.tensor.is_meta for entry in listed):
            self.target.conflicts.append(
                f"{dotted(path)} has parameters on the meta device, which this load replaces: load "
                "the module first, then create its optimizer"
            )
            return
        for entry in listed:
            name, group = entry.name, entry.group
            options = (*path, "param_groups", name)
            # They are one value; or several, where they were in a plain dict.
            parts = self.source.values_below(options)
            self.target.used.update((*options, *rest) for rest in parts)
            saved = rebuild(parts) if parts else None
            if not isinstance(saved, dict):
                self.target.missing.append(options)
                of = (*path, "state", name)
                if not self.source.below(of) and not self.source.gone_below(of):
                    continue  # else the options alone were lost, and stay as they are
                saved = {}
            else:
                if group not in groups:
                    fault = other_kind(optimizer.param_groups[group], saved, path)
                    self.target.conflicts += [fault] if fault else []
                known = groups.setdefault(group, saved)
                # Compared as encoded, so that NaN equals itself.
                if known != saved and encode_value(known, options) != encode_value(saved, options):
                    self.target.conflicts.append(
                        f"{dotted(path)}: group {group} holds {name}, saved with {saved}, "
                        f"and others saved with {groups[group]}"
                    )
            for key, tensor in group_tensors(optimizer.param_groups[group]).items():
                self.visit(tensor, (*path, "param_group_tensors", name, key), no_setter)
            if id(entry.tensor) not in owned:
                continue  # another rank has its state
            after = {**optimizer.param_groups[group], **saved}
            stored = self.source.tensors.get(entry.origin or ())
            form = ParameterState(entry.tensor, after, stored)
            if entry.run is None:
                self._parameter_state(optimizer, form, (*path, "state", name))
            else:
                wanted = FlatPiece(entry.run, (*path, "state", name), form)
                flat.setdefault(id(entry.tensor), []).append(wanted)
        for pieces in flat.values():
            self.later.append(partial(self._flat_state, optimizer, pieces))
        if not listed and path in self.source.objects:
            self.target.used.add(path)
        for index, chosen in groups.items():
            self.target.actions.append(partial(optimizer.param_groups[index].update, chosen))
        state = holder(optimizer).state
        listed_ids = {id(entry.tensor) for entry in listed}
        strays = [key for key in state if id(key) not in listed_ids]
        self.target.actions += [partial(state.pop, key) for key in strays]

    def _parameter_state(self, optimizer: Optimizer, form: ParameterState, path: Path) -> None:
        """Bind the state of one parameter; what the checkpoint lacks (a frozen one) is dropped.

        What a repair has lost a part of stays as it is: no optimizer can step with the rest.
        """
        found, state, parameter = self.source.below(path), holder(optimizer).state, form.parameter
        current = state.get(parameter, {})
        may_lack = self.source.is_repaired or self.source.gone or self.source.left_out
        if may_lack and (lost := self.source.gone_state(path, current)):
            self.target.missing += lost
            self.target.used.update(found)
            return
        if not found:
            self.target.actions.append(lambda: state.pop(parameter, None))
            return
        tensors = {leaf: self.source.tensors[leaf] for leaf in found if leaf in self.source.tensors}
        nows = {leaf: partial(look_up, current, leaf[len(path) :]) for leaf in tensors}
        skipped = self.target.skipped

        def judge() -> None:
            faults = form.faults(tensors, nows)
            if not self.skips:
                self.target.conflicts.extend(faults)
            elif faults or form.was_of_other_shape():
                skipped.update(dict.fromkeys(tensors, _OTHER_PARAMETER))

        def leave_out() -> None:
            for leaf in tensors.keys() & skipped.keys():
                del self.target.tensors[leaf]

        self.later.append(judge)
        make: Maker = lambda leaf, _, wanted: form.make(leaf, wanted)  # noqa: E731
        filled = self._filled(found, path, current, make, form.may_keep)
        if self.skips:
            self.later.append(leave_out)

        def put() -> None:
            if not tensors.keys() & skipped.keys():
                state[parameter] = rebuild(filled, current)

        self.target.actions.append(put)

    def _flat_state(self, optimizer: Optimizer, pieces: list[FlatPiece]) -> None:
        """Bind the state of a tensor that holds runs of parameters."""
        state, parameter = holder(optimizer).state, pieces[0].form.parameter
        flat = bind_flat(pieces, self.source, state.get(parameter, {}))
        self.target.used |= flat.used
        if lost := self.source.gone_below(*(piece.path for piece in pieces)):
            self.target.missing += lost
            return
        if flat.conflicts and self.skips:
            self.target.skipped |= dict.fromkeys(flat.used, _OTHER_PARAMETER)
            return
        self.target.tensors |= flat.tensors
        self.target.conflicts += flat.conflicts

        def put() -> None:
            with ordinary_torch():
                values = flat.joined()
            state.pop(parameter, None)
            if values:
                state[parameter] = values

        self.target.actions.append(put)
