"""Training as everybody writes it (nn.Module, torch.optim, backward), and central differences of it.

No graph of the run, no functional form, stock BatchNorm: it shares nothing with the unrolled reference but the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.reference.problem import SGD, AdamW, Problem, denominator


class AdamWWithEpsRoot(torch.optim.Optimizer):
    """`torch.optim.AdamW`, which has no eps_root, with one: in place and without a graph."""

    def __init__(self, params: Iterable[Tensor], setting: AdamW) -> None:
        super().__init__(params, {"lr": 0.0})
        self._setting = setting

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (beta1, beta2), setting = self._setting.betas, self._setting
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                if not held:
                    held.update(count=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
                held["count"] += 1
                held["first"].lerp_(p.grad, 1 - beta1)
                held["second"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (held["second"] / (1 - beta2 ** held["count"]) + setting.eps_root).sqrt_()
                p.mul_(1 - group["lr"] * setting.weight_decay)
                p.addcdiv_(held["first"], root + setting.eps, value=-group["lr"] / (1 - beta1 ** held["count"]))


def torch_optimizer(setting: SGD | AdamW, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    if isinstance(setting, SGD):
        return torch.optim.SGD(
            params, lr=0.0, momentum=setting.momentum, nesterov=setting.nesterov, weight_decay=setting.weight_decay
        )
    if setting.eps_root:
        return AdamWWithEpsRoot(params, setting)
    return torch.optim.AdamW(params, lr=0.0, betas=setting.betas, eps=setting.eps, weight_decay=setting.weight_decay)


def train(problem: Problem, weights: Tensor) -> nn.Module:
    """The module after all steps. A parameter without a gradient is given zeros, so that weight decay reaches it."""
    module = copy.deepcopy(problem.build()).double().train(problem.train_mode)
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch_optimizer(problem.optimizer, params)
    for parts, lr in zip(problem.steps, problem.learning_rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p in params:
            p.grad = torch.zeros_like(p)
        for part in parts:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(part.seed)
                losses = problem.example_losses(module, part.batch)
            ((weights[part.units] * losses).sum() / denominator(parts)).backward()  # type: ignore[no-untyped-call]
        if problem.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, problem.clip_norm)
        optimizer.step()
    return module


@torch.no_grad()
def measure(problem: Problem, module: nn.Module) -> Tensor:
    """`[queries]`"""
    module.eval()
    return torch.stack([measurement(module) for measurement in problem.measurements])


@dataclass(frozen=True)
class Differences:
    """Central differences of the retrained measurements.

    Attributes:
        scores: `[rows, queries]`, for the units asked for.
        uncertainty: of `scores`, the largest entry's: curvature that is left, plus rounding.
    """

    scores: Tensor
    uncertainty: float


def slope(problem: Problem, unit: int, h: float) -> Tensor:
    """`[queries]`: the central difference in one unit's weight."""
    ends = []
    for sign in (1.0, -1.0):
        weights = problem.weights
        weights[unit] += sign * h
        ends.append(measure(problem, train(problem, weights)))
    return (ends[0] - ends[1]) / (2 * h)


def rounding_noise(problem: Problem, draws: int = 3) -> float:
    """How much the measurements move when the weights change in their last bits: training amplifies rounding."""
    generator = torch.Generator().manual_seed(0)
    undisturbed = measure(problem, train(problem, problem.weights))
    noise = torch.finfo(torch.float64).eps * undisturbed.abs().max().item()
    for _ in range(draws):
        bits = 4e-16 * torch.randn(problem.units, generator=generator, dtype=torch.float64)
        moved = measure(problem, train(problem, problem.weights + bits))
        noise = max(noise, (moved - undisturbed).abs().max().item())
    return noise


def central_differences(
    problem: Problem, units: Iterable[int], steps: tuple[float, float] = (1e-4, 1e-5)
) -> Differences:
    """Richardson extrapolation of central differences at two step sizes `H > h`, and what it does not know.

    `D(h) = f' + a h^2 + b h^4 + ...`, so `R(H, h) = (H^2 D(h) - h^2 D(H)) / (H^2 - h^2)` has no h^2 term; its own error
    is `b H^2 h^2`. With a third size m between them, `R(H, m)` errs by `b H^2 m^2`, ten times as much for m^2 = H h, so
    that `|R(H, m) - R(H, h)|` bounds the error of `R(H, h)`.
    """
    coarse, fine = steps
    middle = (coarse * fine) ** 0.5
    rows, curvature = [], 0.0
    for unit in units:
        at_coarse, at_middle, at_fine = (slope(problem, unit, h) for h in (coarse, middle, fine))
        rough = (coarse * at_middle - fine * at_coarse) / (coarse - fine)
        extrapolated = (coarse**2 * at_fine - fine**2 * at_coarse) / (coarse**2 - fine**2)
        curvature = max(curvature, (extrapolated - rough).abs().max().item())
        rows.append(extrapolated)
    return Differences(torch.stack(rows), curvature + 2 * rounding_noise(problem) / fine)
