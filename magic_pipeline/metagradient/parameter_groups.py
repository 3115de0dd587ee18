"""Parameter groups: several optimizers of one kind, each for the parameters whose names match its pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from magic_pipeline.metagradient.optimizers import Optimizer
from magic_pipeline.metagradient.state import Slots, Tensors


@dataclass(frozen=True)
class Group:
    """Parameters whose name has a match of the pattern are updated by `optimizer`, at `lr_factor` times the learning rate."""

    pattern: str
    optimizer: Optimizer
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Grouped:
    """Several optimizers of one kind, each for its own parameters: the first group whose pattern is found in the name, or `rest`."""

    groups: tuple[Group, ...]
    rest: Optimizer

    def init(self, params: Tensors) -> Slots:
        merged: dict[str, dict[str, Tensor]] = {}
        for group, own in self._split(params):
            _merge(merged, group.optimizer.init(own))
        return merged

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        new_params: dict[str, Tensor] = {}
        new_slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in slots}
        for group, own in self._split(params):
            moved, kept = group.optimizer.update(own, _of(slots, own), _only(grads, own), lr * group.lr_factor, step)
            new_params |= moved
            _merge(new_slots, kept)
        return {name: new_params[name] for name in params}, new_slots

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        to_params: dict[str, Tensor] = {}
        to_slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in slots}
        to_grads: dict[str, Tensor] = {}
        for group, own in self._split(params):
            pulled = group.optimizer.pull_back(
                own,
                _of(slots, own),
                _only(grads, own),
                lr * group.lr_factor,
                step,
                _only(cot_params, own),
                _of(cot_slots, own),
            )
            to_params |= pulled[0]
            _merge(to_slots, pulled[1])
            to_grads |= pulled[2]
        ordered = ({name: tensors[name] for name in params} for tensors in (to_params, to_grads))
        return next(ordered), to_slots, next(ordered)

    def group_of(self, name: str) -> Group:
        """The group of a parameter, or of a rank's piece of it ("rank:name")."""
        rank, _, rest = name.partition(":")
        name = rest if rank.isdecimal() else name
        return next((g for g in self.groups if re.search(g.pattern, name)), Group("", self.rest))

    def _split(self, params: Tensors) -> list[tuple[Group, dict[str, Tensor]]]:
        """Every group that has parameters, with them, in the order of the first of each."""
        split: dict[Group, dict[str, Tensor]] = {}
        for name, p in params.items():
            split.setdefault(self.group_of(name), {})[name] = p
        return list(split.items())


def eps_root_of(optimizer: Optimizer) -> float | None:
    """The term inside the optimizer's square root; None where it has no square root."""
    inner = optimizer.rest if isinstance(optimizer, Grouped) else optimizer
    found: float | None = getattr(inner, "eps_root", None)
    return found


def _merge(into: dict[str, dict[str, Tensor]], slots: Slots) -> None:
    for slot, tensors in slots.items():
        into.setdefault(slot, {}).update(tensors)


def _only(tensors: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def _of(slots: Slots, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The slots of these parameters; a slot that their optimizer does not have is left out."""
    found = {slot: {name: tensors[name] for name in names if name in tensors} for slot, tensors in slots.items()}
    return {slot: tensors for slot, tensors in found.items() if tensors}
