"""Where a model is not smooth on its first batch: units that pass no gradient, and inputs close to a kink.

A score is a derivative. A unit that is flat on every example has none, though training may wake it; and where more or less of an
example moves an input across a kink, the derivative on one side says little about the other. What is seen here is what the forward
does, whether it is written as modules or as functions. Elementwise functions and max-pools are watched; sorting, `max` over a
dimension and recurrent nets with ReLU inside are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Shard, leaves

# An input is near a kink within this part of its unit's root mean square: 0.8 % of a normal distribution's are.
NEAR = 0.01


@dataclass(frozen=True)
class Kink:
    """What one function with kinks was given in the forwards of one batch.

    Attributes:
        function: its name, such as relu.
        module: the innermost module that called it, by name; empty for the model itself and for a loss.
        units: how many it has: channels of a pool and after a convolution, else the last dimension.
        dead: how many of them pass no gradient on any example.
        samples: inputs of each unit.
        near: share of all inputs that lie within `NEAR` of a kink, and not on it.
    """

    function: str
    module: str
    units: int
    dead: int
    samples: int
    near: float

    @property
    def dead_share(self) -> float:
        """Share of units that are dead beyond chance: of units that are flat on half of their inputs, 2^-samples are."""
        return self.dead / self.units - 0.5**self.samples


def observed_kinks(model: FunctionalModel, state: TrainState, shards: Sequence[Shard]) -> tuple[Kink, ...]:
    """Functions with kinks that depend on the parameters, in the order of their calls; only those that met more than one branch.

    Makes one forward of each shard at `state`, in the mode of training, and changes nothing.
    """
    params, watch = leaves(state.params), _Watch()
    with watch.names_of(model.module), torch.enable_grad(), watch:
        for shard in shards:
            watch.position = 0
            model.losses(params, state.buffers, state.counters, shard.batch, shard.seed)
    return tuple(seen.kink() for seen in watch.seen.values() if seen.bent or seen.flat.any())


@dataclass
class _Seen:
    """Counts of one call over the shards; flat [units]: whether all inputs so far were where the function is flat."""

    function: str
    module: str
    flat: Tensor
    inputs: int = 0
    near: int = 0
    bent: bool = False

    def kink(self) -> Kink:
        units = len(self.flat)
        near = self.near / max(1, self.inputs)
        return Kink(self.function, self.module, units, int(self.flat.sum()), self.inputs // units, near)


class _Watch(TorchFunctionMode):
    """Within, calls of functions with kinks are counted, by their position in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, str], _Seen] = {}
        self.position = 0
        self._inside = [""]
        self._after_convolution = False

    @contextmanager
    def names_of(self, module: nn.Module) -> Iterator[None]:
        """Within, calls are told by the names of the modules inside this one."""
        handles = [
            handle
            for name, child in module.named_modules()
            for handle in (
                child.register_forward_pre_hook(partial(self._enter_module, name)),
                child.register_forward_hook(self._leave_module, always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_module(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_").removesuffix("_with_indices")
        if name in _BRANCHES or name in _MAX_POOLS:
            self._count(name, *args, **(kwargs or {}))
        elif name.startswith("conv"):
            self._after_convolution = True
        elif name in ("linear", "addmm", "matmul", "bmm", "baddbmm", "einsum"):
            self._after_convolution = False
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, input: Any, *args: Any, **settings: Any) -> None:  # noqa: A002  (torch's name of it)
        if not (isinstance(input, Tensor) and input.requires_grad and input.dim() > 0 and input.numel()):
            return
        x = input.detach()
        if not x.isfinite().all():
            return
        axis = 1 if self._after_convolution and x.dim() > 2 else -1
        by_unit = x.movedim(-1 - _MAX_POOLS[name] if name in _MAX_POOLS else axis, 0)
        key, self.position = (self.position, name), self.position + 1
        if key not in self.seen:
            self.seen[key] = _Seen(name, self._inside[-1], torch.ones(len(by_unit), dtype=torch.bool, device=x.device))
        seen = self.seen[key]
        if name in _MAX_POOLS:
            _count_gaps(seen, x, *args, **settings)
        elif len(by_unit) == len(seen.flat):
            _count_branches(seen, by_unit, _BRANCHES[name](*args, **settings))


def _count_branches(seen: _Seen, x: Tensor, branches: Sequence[_Branch]) -> None:
    """x [units, ...]; the branches lie side by side, from the lowest."""
    reach = NEAR * x.square().mean(list(range(1, x.dim())), keepdim=True).sqrt()
    flat, near, met = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool), 0
    for branch in branches:
        inside = (x > branch.low) & (x <= branch.high) if branch is not branches[-1] else x > branch.low
        met += bool(inside.any())
        if branch.flat:
            # Torch's derivative at the kink itself is that of the flat side.
            flat |= (x >= branch.low) & (x <= branch.high)
        if branch.low > -inf:
            distance = (x - branch.low).abs()
            near |= (distance > 0) & (distance <= reach)
    seen.flat &= flat.flatten(1).all(1)
    seen.near += int(near.sum())
    seen.inputs += x.numel()
    seen.bent |= met > 1


def _count_gaps(
    seen: _Seen,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    *_: Any,
    **__: Any,
) -> None:
    """How far the second largest of each window is behind; equal ones are equal for a reason (a background, a ReLU's zeros)."""
    seen.flat &= False
    count = _MAX_POOLS[seen.function]
    kernel, steps, margins, spreads = (
        (value,) * count if isinstance(value, int) else tuple(value)
        for value in (kernel_size, stride or kernel_size, padding, dilation)
    )
    if prod(kernel) == 1:
        return
    axes = range(x.dim() - count, x.dim())
    windows = pad(x, [margin for margin in reversed(margins) for _ in range(2)], value=-inf)
    for axis, size, step, spread in zip(axes, kernel, steps, spreads, strict=True):
        windows = windows.unfold(axis, (size - 1) * spread + 1, step)[..., ::spread]
    largest, second = windows.flatten(x.dim()).topk(2, -1).values.unbind(-1)
    gap, reach = largest - second, NEAR * x.square().mean(list(axes), keepdim=True).sqrt()
    seen.near += int(((gap > 0) & (gap <= reach)).sum())
    seen.inputs += gap.numel()
    seen.bent = True


@dataclass(frozen=True)
class _Branch:
    """A stretch of inputs, from low (not included) to high, on which a function is smooth."""

    low: float
    high: float
    flat: bool = False


def _clamp(min: Any = None, max: Any = None) -> list[_Branch]:  # noqa: A002  (torch's names of them)
    low, high = (
        bound if bound is None else float(bound) if not isinstance(bound, Tensor) or bound.numel() == 1 else None
        for bound in (min, max)
    )
    branches = [] if low is None else [_Branch(-inf, low, flat=True)]
    branches.append(_Branch(-inf if low is None else low, inf if high is None else high))
    return branches if high is None else [*branches, _Branch(high, inf, flat=True)]


def _bent_at_zero(*_: Any, **__: Any) -> list[_Branch]:
    return [_Branch(-inf, 0.0), _Branch(0.0, inf)]


def _shrink(lambd: float = 0.5) -> list[_Branch]:
    return [_Branch(-inf, -lambd), _Branch(-lambd, lambd, flat=True), _Branch(lambd, inf)]


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> list[_Branch]:
    return _clamp(min_val, max_val)


def _elu(alpha: float = 1.0, inplace: bool = False) -> list[_Branch]:
    return [_Branch(-inf, inf)] if alpha == 1 else _bent_at_zero()


# By name, so that a function, its method and its form in place are one.
_BRANCHES: dict[str, Callable[..., list[_Branch]]] = {
    "relu": lambda inplace=False: _clamp(0.0),
    "relu6": lambda inplace=False: _clamp(0.0, 6.0),
    "threshold": lambda threshold, value, inplace=False: _clamp(threshold),
    "hardtanh": _hardtanh,
    "hardsigmoid": lambda inplace=False: _clamp(-3.0, 3.0),
    "hardswish": lambda inplace=False: [*_clamp(-3.0, 3.0)[:2], _Branch(3.0, inf)],
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": partial(_clamp, None),
    "hardshrink": _shrink,
    "softshrink": _shrink,
    "elu": _elu,
    **dict.fromkeys(("leaky_relu", "prelu", "rrelu", "selu", "abs", "absolute"), _bent_at_zero),
}
_MAX_POOLS = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}
