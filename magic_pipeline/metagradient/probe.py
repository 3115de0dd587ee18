"""A numerical check of a model before hours are spent on it.

One Hessian-vector product along a random direction, as the walk would make it, is compared with central differences of the gradient
that the *ordinary* module gives by `.backward()`, in the training mode and with the same random draws; likewise the derivative by the
example weights, of the running buffers, and of one query's measurement. So an operation whose second derivative is missing or wrong
(an autograd.Function marked once_differentiable, gradient checkpointing under functional_call) is found, whatever it is called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.numerics import seeded, twice_differentiable_kernels
from magic_pipeline.metagradient.optimizers import SGD
from magic_pipeline.metagradient.pullback import ShardGraph, pull_lanes, shard_graph
from magic_pipeline.metagradient.state import Tensors
from magic_pipeline.metagradient.step import Shard, StepRecord, leaves

# Step sizes relative to the parameters. The smallest leave kinks (ReLU) and the jumps of a cast to bfloat16 alone, and two of them
# agree on what they see there; the larger drown the rounding of models that cast to float32 inside. A wrong derivative disagrees at
# all of them, so the best one counts.
_STEPS = {torch.float64: (1e-10, 1e-8, 1e-6, 1e-4, 1e-3), torch.float32: (1e-4, 1e-3, 1e-2)}
_TOLERANCE = {torch.float64: 2e-3, torch.float32: 5e-2}


@dataclass(frozen=True)
class ProbeReport:
    """How far each derivative is from its central difference, relative to the larger of the two as a whole.

    Attributes:
        errors: by name of the derivative; finite.
        tolerance: what they were compared with.
        dtype: in which the probe was made.
        batchable: whether several lanes can be pulled back in one call.
        inconclusive: derivatives that are beyond the tolerance where no two step sizes agree with each other either: the differences
            say nothing there (float32 differences across the kinks of a ReLU net).
    """

    errors: dict[str, float]
    tolerance: float
    dtype: torch.dtype
    batchable: bool
    inconclusive: tuple[str, ...] = ()


def probe(
    module: nn.Module,
    shard: Shard,
    *,
    example_losses: Callable[[nn.Module, Any], Tensor],
    measurement: Callable[[nn.Module, Callable[[Any], Any]], Tensor],
    train_mode: bool,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> ProbeReport:
    """Compares the derivatives that a walk uses with central differences of the ordinary module.

    Args:
        module: the model as the task built it; left as it is.
        shard: a micro-batch of the first step.
        measurement: `(module, place) -> scalar`, one query's; `place` moves a batch to the probe's dtype and device.
        dtype: float64 where a copy fits, else float32 with a wider tolerance.

    Raises:
        InputError: a derivative is missing, wrong or not finite; names it and how far it is off.
    """
    copied = copy.deepcopy(module)
    ordinary = _Ordinary(copied.to(dtype=dtype, device=device), example_losses, measurement, train_mode)
    model = FunctionalModel(
        copy.deepcopy(module), example_losses=example_losses, train_mode=train_mode, dtype=dtype, device=device
    )
    ordinary.place = model.place
    state = model.initial_state(SGD(), shard.batch)
    record = StepRecord(state, {}, (state.buffers,), (state.counters,), 0.0)
    generator = torch.Generator().manual_seed(shard.seed)
    _displace(model.module, torch.Generator().manual_seed(shard.seed + 1))
    graph = shard_graph(model, record, shard, 0, shard.denominator)
    along = {name: _direction(p, generator) for name, p in {**state.params, **state.buffers}.items()}
    results, batchable = _pull_two_lanes(
        graph, {n: along[n] for n in state.params}, {n: along[n] for n in state.buffers}
    )
    exact = _as_walked(graph, results, along, state.params, state.buffers)
    with torch.enable_grad():
        params, buffers = leaves(state.params), leaves(state.buffers)
        phi = model.measurement(params, buffers, lambda m: measurement(m, model.place))
        by_state: Sequence[Tensor | None] = torch.autograd.grad(
            phi, [*params.values(), *buffers.values()], allow_unused=True
        )
    exact["the query's measurement"] = _along([*params, *buffers], by_state, along)
    differences: dict[str, list[Tensor]] = {}
    for h in _STEPS[dtype]:
        for name, difference in ordinary.central_differences(shard, along, h).items():
            differences.setdefault(name, []).append(difference)
    errors = {
        name: min(_relative_error(exact[name].value, d, exact[name].typical) for d in found)
        for name, found in differences.items()
    }
    tolerance = _TOLERANCE[dtype]
    inconclusive = {
        name
        for name, found in differences.items()
        if tolerance < errors[name] < math.inf and not _agree(found, tolerance)
    }
    _refuse_if_wrong({name: error for name, error in errors.items() if name not in inconclusive}, tolerance)
    return ProbeReport(errors, tolerance, dtype, batchable, tuple(sorted(inconclusive)))


def _pull_two_lanes(
    graph: ShardGraph, along: Tensors, along_buffers: Tensors
) -> tuple[list[list[Tensor | None]], bool]:
    """Lane 0 pulls (along, 0), lane 1 pulls (0, along_buffers); in one call if that is possible."""
    lanes = []
    for name, tensor in graph.outputs.items():
        kind, _, short = name.partition("/")
        value = along[short] if kind == "grad" else along_buffers[short]
        zero = torch.zeros_like(value)
        lanes.append(torch.stack([value, zero] if kind == "grad" else [zero, value]).expand(2, *tensor.shape))
    inputs = graph.inputs
    cotangents = dict(zip(graph.outputs, lanes, strict=True))
    if not cotangents:
        return [[None] * (len(inputs) - len(graph.twins))] * 2, True
    try:
        both = pull_lanes(graph.outputs, inputs, cotangents, keep_graph=True)
        return [[None if r is None else r[lane] for r in graph.merged(both)] for lane in range(2)], True
    except RuntimeError:
        # An operation without a batching rule; if something else is wrong, one lane at a time says so.
        single = [
            pull_lanes(
                graph.outputs, inputs, {n: c[lane : lane + 1] for n, c in cotangents.items()}, keep_graph=lane == 0
            )
            for lane in range(2)
        ]
        return [[None if r is None else r[0] for r in graph.merged(results)] for results in single], False


def _as_walked(
    graph: ShardGraph, results: list[list[Tensor | None]], along: Tensors, params: Tensors, buffers: Tensors
) -> dict[str, _Derivative]:
    """What the walk's pullback gives for each quantity of `_Ordinary.central_differences`."""
    first, second = results
    count = len(params)
    hessian = [torch.zeros_like(p) if r is None else r for p, r in zip(params.values(), first[:count], strict=True)]
    weights = torch.zeros_like(graph.weights) if first[-1] is None else first[-1]
    # Central differences move the buffers too; the gradient's dependence on them is the Hessian product's mixed part.
    return {
        "the Hessian-vector product": _Derivative(torch.cat([h.flatten() for h in hessian])),
        "the derivative by example weights": _Derivative(weights.detach()),
        "the buffers that training changes": _along([*params, *buffers], second[:-1], along),
        "the gradient by buffers": _along(list(buffers), first[count:-1], along),
    }


@dataclass(frozen=True)
class _Derivative:
    """A derivative as autograd gives it.

    Attributes:
        typical: how large a derivative along one random direction usually is. By chance it can be far smaller, and rounding must not be
            held against that; 0 for vectors.
    """

    value: Tensor
    typical: float = 0.0


def _along(names: Sequence[str], gradients: Sequence[Tensor | None], along: Tensors) -> _Derivative:
    """The derivative along the direction, from the gradients by name (None: zero)."""
    terms = [(g * along[n]).flatten() for n, g in zip(names, gradients, strict=True) if g is not None]
    if not terms:
        return _Derivative(torch.zeros(()))
    together = torch.cat(terms)
    return _Derivative(together.sum(), float(together.norm()))


class _Ordinary:
    """The module as its author wrote it, differentiated by `.backward()` alone."""

    def __init__(
        self,
        module: nn.Module,
        example_losses: Callable[[nn.Module, Any], Tensor],
        measurement: Callable[[nn.Module, Callable[[Any], Any]], Tensor],
        train_mode: bool,
    ) -> None:
        self.module, self.example_losses, self.measurement, self.train_mode = (
            module,
            example_losses,
            measurement,
            train_mode,
        )
        self.place: Callable[[Any], Any] = lambda batch: batch
        self._params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._buffers = dict(module.named_buffers())
        self._start = {n: t.detach().clone() for n, t in {**self._params, **self._buffers}.items()}
        self._recurrent = any(isinstance(child, nn.RNNBase) for child in module.modules())

    def central_differences(self, shard: Shard, along: Tensors, h: float) -> dict[str, Tensor]:
        """Fourth-order central differences along `along`, named as `_as_walked` names the same quantities."""
        moved = {f: self._evaluate(shard, {n: along[n] for n in self._params}, f * h) for f in (-2, -1, 1, 2)}

        def difference(values: Callable[[dict[str, Any]], Tensor]) -> Tensor:
            return (8 * (values(moved[1]) - values(moved[-1])) - (values(moved[2]) - values(moved[-2]))) / (12 * h)

        changed = [n for n in self._buffers if n in along]
        result = {
            "the Hessian-vector product": difference(lambda e: e["gradient"]),
            "the derivative by example weights": difference(lambda e: e["losses"]) / shard.denominator,
            "the query's measurement": self._measurement_difference(along, h),
        }
        if changed:
            by_buffers = {f: self._evaluate(shard, {n: along[n] for n in changed}, f * h) for f in (-2, -1, 1, 2)}
            for f, evaluated in by_buffers.items():
                moved[f]["both"] = evaluated
            weigh = torch.cat([along[n].flatten() for n in self._params])
            result["the gradient by buffers"] = difference(lambda e: (e["both"]["gradient"] * weigh).sum())
            result["the buffers that training changes"] = difference(
                lambda e: sum(((e["buffers"][n] + e["both"]["buffers"][n]) * along[n]).sum() for n in changed)
            )
        return result

    def _evaluate(self, shard: Shard, along: Tensors, h: float) -> dict[str, Any]:
        self._move(along, h)
        self.module.train(self.train_mode)
        for parameter in self._params.values():
            parameter.grad = None
        device = next(iter(self._params.values())).device
        with torch.enable_grad(), twice_differentiable_kernels(recurrent=self._recurrent), seeded(shard.seed, device):
            losses = self.example_losses(self.module, self.place(shard.batch))
            torch.autograd.backward(losses.sum() / shard.denominator)
        gradient = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self._params.values()]
        )
        buffers = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        # The derivative by a row's weight is that of its losses' sum.
        by_unit = losses if losses.dim() == shard.score_places.dim() else losses.flatten(1).sum(1)
        return {"gradient": gradient, "losses": by_unit.detach(), "buffers": buffers}

    def _measurement_difference(self, along: Tensors, h: float) -> Tensor:
        values = {}
        for f in (-2, -1, 1, 2):
            self._move(along, f * h)
            self.module.eval()
            with torch.no_grad(), twice_differentiable_kernels(recurrent=self._recurrent):
                values[f] = self.measurement(self.module, self.place).detach()
        return (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * h)

    def _move(self, along: Tensors, h: float) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                start = self._start[name]
                tensor.copy_(start + h * along[name] if name in along else start)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._params.items()
        yield from self._buffers.items()


def _displace(module: nn.Module, generator: torch.Generator) -> None:
    """Moves the module's own parameters away from the state, where training leaves them too after its first step.

    So whatever reads them instead of the state's (recomputing a forward after functional_call has ended) shows.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(_direction(parameter, generator))


def _direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction as large as the tensor itself, so that a relative step means the same everywhere."""
    scale = float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    return noise * max(scale, 1e-2)


def _relative_error(exact: Tensor, difference: Tensor, typical: float = 0.0) -> float:
    """Relative to the largest of the three; infinite where one of the first two is not finite."""
    if not (exact.isfinite().all() and difference.isfinite().all()):
        return math.inf
    scale = max(float(difference.norm()), float(exact.norm()), typical)
    return float((exact - difference).norm()) / scale if scale > 1e-9 else 0.0


def _agree(differences: Sequence[Tensor], tolerance: float) -> bool:
    """Whether two neighbouring step sizes give the same derivative."""
    return any(_relative_error(a, b) <= tolerance for a, b in pairwise(differences))


def _refuse_if_wrong(errors: dict[str, float], tolerance: float) -> None:
    name, error = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
    if error == math.inf:
        raise InputError(
            f"{name} is not finite at the untrained model, though training may run: an operation of the model or its loss has no "
            "finite derivative there (a norm or a square root at 0), so no score would be a number",
            field="task",
        )
    if error > tolerance:
        raise InputError(
            f"{name} is {error:.2g} off its central difference (tolerance {tolerance:.0e}): some operation of the model or "
            "its loss has no correct second derivative here (an autograd.Function marked once_differentiable, gradient "
            "checkpointing, a detach, a cast to a lower precision), so the scores would be silently wrong",
            field="task",
        )
