"""The training state and its cotangent: the two points between which everything in this room maps.

`TrainState` is what one training step takes and gives. `Cotangent` is the gradient of the queries with respect to it, with a
leading axis of *lanes*, one query a lane. Neither is ever changed in place, so a snapshot is a reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Slots = Mapping[str, Tensors]


@dataclass(frozen=True)
class TrainState:
    """The state before training step `step`; every tensor is detached.

    Attributes:
        step: how many steps have been made.
        params: the trainable leaves by name; tied weights appear once, frozen ones not at all.
        slots: the optimizer's slots, `{"exp_avg": {parameter name: tensor}}`.
        buffers: float buffers that training changes (BatchNorm's running statistics); differentiated.
        counters: integer buffers (`num_batches_tracked`); carried, not differentiated.
    """

    step: int
    params: Tensors
    slots: Slots
    buffers: Tensors
    counters: Tensors

    def flat(self) -> dict[str, Tensor]:
        """All tensors under `params/<name>`, `slots/<slot>/<name>`, `buffers/<name>`, `counters/<name>`."""
        return _flatten(self.params, self.slots, self.buffers) | {f"counters/{n}": t for n, t in self.counters.items()}

    @classmethod
    def from_flat(cls, step: int, flat: Tensors) -> TrainState:
        """The inverse of `flat`.

        Raises:
            ValueError: a name has none of the four prefixes.
        """
        params, slots, buffers, counters = _unflatten(flat)
        return cls(step, params, slots, buffers, counters)


@dataclass(frozen=True)
class Cotangent:
    """d(query) / d(state) for several queries at once; every tensor is `[lanes, *shape]`."""

    params: Tensors
    slots: Slots
    buffers: Tensors

    @classmethod
    def zeros(cls, state: TrainState, lanes: int) -> Cotangent:
        """The zero cotangent of `state`."""

        def zero(tensors: Tensors) -> dict[str, Tensor]:
            return {name: tensor.new_zeros((lanes, *tensor.shape)) for name, tensor in tensors.items()}

        return cls(zero(state.params), {slot: zero(t) for slot, t in state.slots.items()}, zero(state.buffers))

    def lane(self, index: int) -> dict[str, Tensor]:
        """One query's cotangent, named as `TrainState.flat` names the state. The tensors are views."""
        return {name: tensor[index] for name, tensor in self._flat().items()}

    def with_lane(self, index: int, flat: Tensors) -> Cotangent:
        """A copy in which lane `index` is `flat`.

        Raises:
            ValueError: `flat` has other names, shapes or dtypes than this cotangent's lanes.
        """
        mine = self._flat()
        expected = {name: (tuple(t.shape[1:]), t.dtype) for name, t in mine.items()}
        found = {name: (tuple(t.shape), t.dtype) for name, t in flat.items()}
        if expected != found:
            different = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
            raise ValueError(f"the cotangent does not fit the state at {', '.join(different[:5])}")
        changed = {}
        for name, tensor in mine.items():
            changed[name] = tensor.clone()
            changed[name][index] = flat[name]
        params, slots, buffers, _ = _unflatten(changed)
        return Cotangent(params, slots, buffers)

    def rows(self, start: int, stop: int) -> Cotangent:
        """Lanes `start` to `stop`, as views."""

        def cut(tensors: Tensors) -> dict[str, Tensor]:
            return {name: tensor[start:stop] for name, tensor in tensors.items()}

        return Cotangent(cut(self.params), {s: cut(t) for s, t in self.slots.items()}, cut(self.buffers))

    def is_finite(self) -> Tensor:
        """`[lanes]` of booleans: whether everything in a lane is finite."""
        tensors = list(self._flat().values())
        # A sum is finite only if all its terms are; terms too large for the sum are as useless as an infinity.
        sums = torch.stack([tensor.flatten(1).sum(1) for tensor in tensors])
        return torch.isfinite(sums).all(0)

    def _flat(self) -> dict[str, Tensor]:
        return _flatten(self.params, self.slots, self.buffers)


def _flatten(params: Tensors, slots: Slots, buffers: Tensors) -> dict[str, Tensor]:
    flat = {f"params/{name}": tensor for name, tensor in params.items()}
    for slot, tensors in slots.items():
        flat |= {f"slots/{slot}/{name}": tensor for name, tensor in tensors.items()}
    return flat | {f"buffers/{name}": tensor for name, tensor in buffers.items()}


def _unflatten(
    flat: Tensors,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    buffers: dict[str, Tensor] = {}
    counters: dict[str, Tensor] = {}
    for full_name, tensor in flat.items():
        kind, _, name = full_name.partition("/")
        if kind == "params":
            params[name] = tensor
        elif kind == "slots":
            slot, _, name = name.partition("/")
            slots.setdefault(slot, {})[name] = tensor
        elif kind == "buffers":
            buffers[name] = tensor
        elif kind == "counters":
            counters[name] = tensor
        else:
            raise ValueError(f"{full_name!r} is no part of a training state")
    return params, slots, buffers, counters
