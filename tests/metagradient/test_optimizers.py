"""Updates equal torch.optim's, and pullbacks equal autograd of independently written updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from magic_pipeline.metagradient.optimizers import clip, clip_pull_back
from tests.metagradient import cases, running
from tests.reference import optimizers as formulas
from tests.reference.ordinary import torch_optimizer
from tests.reference.problem import SGD, AdamW

SHAPES = {"weight": (4, 3), "bias": (3,), "scale": ()}
LANES = 3


def random(seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn((*lead, *s), generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def random_slots(setting: SGD | AdamW, seed: int, *lead: int) -> dict[str, dict[str, Tensor]]:
    """Slots as a run would have them (second moments are not negative), or cotangents of slots."""
    initial = running.optimizer(setting).init(random(0))
    values: dict[str, dict[str, Tensor]] = {slot: random(seed + index, *lead) for index, slot in enumerate(initial)}
    if not lead and "exp_avg_sq" in values:
        values["exp_avg_sq"] = {name: value**2 for name, value in values["exp_avg_sq"].items()}
    return values


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_fifty_updates_equal_torch_optim(name: str) -> None:
    setting = cases.OPTIMIZERS[name]
    if isinstance(setting, AdamW):
        setting = dataclasses.replace(setting, eps_root=0.0)
    mine = running.optimizer(setting)
    params: Mapping[str, Tensor] = random(1)
    slots = mine.init(params)
    theirs = {n: p.clone().requires_grad_() for n, p in params.items()}
    ordinary = torch_optimizer(setting, theirs.values())
    for step in range(50):
        lr, grads = 0.1 / (step + 1), random(100 + step)
        params, slots = mine.update(params, slots, grads, lr, step)
        ordinary.param_groups[0]["lr"] = lr
        for n, p in theirs.items():
            p.grad = grads[n].clone()
        ordinary.step()
    for n, p in theirs.items():
        torch.testing.assert_close(params[n], p.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 3.0, 1e6])
def test_clipping_equals_torch(max_norm: float) -> None:
    grads = random(7)
    theirs = {n: torch.zeros_like(g).requires_grad_() for n, g in grads.items()}
    for n, p in theirs.items():
        p.grad = grads[n].clone()
    torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    for n, clipped in clip(grads, max_norm).items():
        torch.testing.assert_close(clipped, theirs[n].grad, rtol=1e-14, atol=0)


def formula_pull_back(
    setting: SGD | AdamW,
    state: tuple[dict[str, Tensor], ...],
    slots: dict[str, dict[str, Tensor]],
    step: int,
    lane: int,
) -> list[Tensor]:
    """Autograd of the reference's update, for one lane of the cotangents: (params, slots, grads) of every parameter."""
    params, grads, cot_params = state
    results: list[Tensor] = []
    for n in SHAPES:
        held = {slot: values[n].clone().requires_grad_() for slot, values in slots.items()}
        p, g = params[n].clone().requires_grad_(), grads[n].clone().requires_grad_()
        if isinstance(setting, AdamW):
            new, after = formulas.adamw(setting, p, held, g, 0.1, step)
        else:
            new, after = formulas.sgd(setting, p, held or {"momentum_buffer": torch.zeros_like(p)}, g, 0.1)
        outputs = [new, *(after[slot] for slot in held)]
        cotangents = [cot_params[n][lane], *(random_slots(setting, 31, LANES)[slot][n][lane] for slot in held)]
        results += torch.autograd.grad(outputs, [p, *held.values(), g], cotangents)
    return results


@pytest.mark.parametrize("zeros", ["no-zeros", "a-zero", "always-zero"])
@pytest.mark.parametrize("step", [0, 1, 40])
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_the_pullback_equals_autograd_of_the_update(name: str, step: int, zeros: str) -> None:
    setting, params, grads, cot_params = cases.OPTIMIZERS[name], random(11), random(12), random(13, LANES)
    slots, cot_slots = random_slots(setting, 21), random_slots(setting, 31, LANES)
    if step == 0:
        slots = {slot: {n: torch.zeros_like(v) for n, v in values.items()} for slot, values in slots.items()}
    if zeros != "no-zeros":
        grads["weight"][1], grads["scale"] = 0.0, torch.zeros((), dtype=torch.float64)
    if zeros == "always-zero":
        for values in slots.values():
            values["weight"][1], values["scale"] = 0.0, torch.zeros((), dtype=torch.float64)
    pulled = running.optimizer(setting).pull_back(params, slots, grads, 0.1, step, cot_params, cot_slots)
    for lane in range(LANES):
        expected = formula_pull_back(setting, (params, grads, cot_params), slots, step, lane)
        found = [
            part[lane] for n in SHAPES for part in (pulled[0][n], *(s[n] for s in pulled[1].values()), pulled[2][n])
        ]
        for one, other in zip(found, expected, strict=True):
            assert torch.isfinite(one).all()
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_coordinate_whose_gradient_was_always_zero_contributes_nothing_through_the_square_root() -> None:
    setting = AdamW(eps_root=0.0, eps=1e-8, betas=(0.9, 0.99))
    zero, one = {"dead": torch.zeros(1, dtype=torch.float64)}, {"dead": torch.ones(1, 1, dtype=torch.float64)}
    nothing = {"exp_avg": {"dead": torch.zeros(1, 1)}, "exp_avg_sq": {"dead": torch.zeros(1, 1)}}
    slots = {"exp_avg": zero, "exp_avg_sq": zero}
    to_params, to_slots, to_grads = running.optimizer(setting).pull_back(zero, slots, zero, 0.1, 3, one, nothing)
    assert to_slots["exp_avg_sq"]["dead"].item() == 0
    assert to_params["dead"].item() == pytest.approx(1 - 0.1 * setting.weight_decay)
    assert to_grads["dead"].item() == pytest.approx(-0.1 * 0.1 / (1 - 0.9**4) / 1e-8)


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1.0, 1e6])
def test_the_clipping_pullback_equals_autograd(max_norm: float | None) -> None:
    grads, cotangents = random(41), random(42, LANES)
    found = clip_pull_back(grads, max_norm, cotangents)
    for lane in range(LANES):
        leaves = {n: g.clone().requires_grad_() for n, g in grads.items()}
        coefficient = 1.0 if max_norm is None else formulas.clip_coefficient(list(leaves.values()), max_norm)
        outputs = [coefficient * g for g in leaves.values()]
        expected = torch.autograd.grad(outputs, list(leaves.values()), [c[lane] for c in cotangents.values()])
        for n, value in zip(SHAPES, expected, strict=True):
            torch.testing.assert_close(found[n][lane], value, rtol=1e-12, atol=1e-13)


def test_clipping_a_gradient_of_zeros_is_finite_and_so_is_its_pullback() -> None:
    zeros = {n: torch.zeros_like(value) for n, value in random(0).items()}
    assert all((value == 0).all() for value in clip(zeros, 1.0).values())
    cotangents = random(43, LANES)
    assert all(torch.equal(value, cotangents[n]) for n, value in clip_pull_back(zeros, 1.0, cotangents).items())
