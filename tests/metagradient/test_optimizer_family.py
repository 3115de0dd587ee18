"""Every optimizer of an experiment file: fifty updates equal torch.optim's, and the pullback is autograd's of the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from magic_pipeline.metagradient import optimizers
from magic_pipeline.metagradient.optimizers import Optimizer
from magic_pipeline.metagradient.parameter_groups import Group, Grouped
from tests.metagradient.test_optimizers import LANES, random

SHAPES = random(0)
TorchOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def case(name: str, theirs: Callable[..., torch.optim.Optimizer], **settings: Any) -> tuple[Any, TorchOptimizer]:
    """(our optimizer with torch's settings, torch's)."""
    return getattr(optimizers, name)(**settings), lambda params: theirs(params, lr=0.1, **settings)


CASES = {
    "sgd dampened": case("SGD", torch.optim.SGD, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd nesterov": case("SGD", torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": case("Adam", torch.optim.Adam, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
    "adamw": case("AdamW", torch.optim.AdamW, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    "adagrad": case("Adagrad", torch.optim.Adagrad, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    "adagrad from zero": case("Adagrad", torch.optim.Adagrad),
    "rmsprop": case("RMSprop", torch.optim.RMSprop, alpha=0.9, weight_decay=0.1),
    "rmsprop momentum": case("RMSprop", torch.optim.RMSprop, alpha=0.9, momentum=0.8),
    "rmsprop centered": case("RMSprop", torch.optim.RMSprop, alpha=0.9, momentum=0.8, centered=True, weight_decay=0.1),
}


def without_eps_root(optimizer: Any) -> Optimizer:
    fields = vars(optimizer)
    changed: Optimizer = type(optimizer)(**fields | ({"eps_root": 0.0} if "eps_root" in fields else {}))
    return changed


def fifty_updates(mine: Optimizer, theirs: torch.optim.Optimizer, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters after the same fifty gradients as theirs; learning rates fall in proportion."""
    params: Mapping[str, Tensor] = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    slots, first = mine.init(params), [group["lr"] for group in theirs.param_groups]
    for step in range(50):
        grads = random(100 + step)
        for group, lr in zip(theirs.param_groups, first, strict=True):
            group["lr"] = lr / (step + 1)
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        theirs.step()
        params, slots = mine.update(params, slots, grads, 0.1 / (step + 1), step)
    return dict(params)


@pytest.mark.parametrize("name", CASES)
def test_fifty_updates_equal_torch_optim(name: str) -> None:
    mine, theirs = CASES[name]
    leaves = {n: p.clone().requires_grad_() for n, p in random(1).items()}
    found = fifty_updates(without_eps_root(mine), theirs(leaves.values()), leaves)
    for n, leaf in leaves.items():
        torch.testing.assert_close(found[n], leaf.detach(), rtol=1e-12, atol=1e-12)


def grouped(make: Callable[..., Optimizer]) -> Grouped:
    """No decay on `bias`, a tenth of the learning rate and a decay of its own for `weight`; `scale` is the rest."""
    return Grouped((Group("bias|norm", make(weight_decay=0.0)), Group("^w", make(weight_decay=0.5), 0.1)), make())


@pytest.mark.parametrize("rank", ["", "3:"])
def test_groups_are_torchs_parameter_groups(rank: str) -> None:
    def make(weight_decay: float = 0.1) -> Optimizer:
        return optimizers.AdamW(eps_root=0.0, weight_decay=weight_decay)

    leaves = {n: p.clone().requires_grad_() for n, p in random(1).items()}
    groups: list[dict[str, Any]] = [
        {"params": [leaves["bias"]], "weight_decay": 0.0},
        {"params": [leaves["weight"]], "weight_decay": 0.5, "lr": 0.01},
        {"params": [leaves["scale"]]},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    found = fifty_updates(grouped(make), theirs, leaves)
    for n, leaf in leaves.items():
        torch.testing.assert_close(found[n], leaf.detach(), rtol=1e-12, atol=1e-12)
    # A rank's piece of a parameter is of the parameter's group.
    assert [grouped(make).group_of(f"{rank}{name}").pattern for name in leaves] == ["^w", "bias|norm", ""]


def random_slots(optimizer: Optimizer, params: Mapping[str, Tensor], seed: int) -> dict[str, dict[str, Tensor]]:
    """As a run has them: whatever stands below a square root is large enough."""
    slots = {slot: random(seed + at) for at, slot in enumerate(optimizer.init(params))}
    for slot in ("exp_avg_sq", "square_avg", "sum"):
        if slot in slots:
            slots[slot] = {name: value**2 + 1 for name, value in slots[slot].items()}
    if "grad_avg" in slots:
        slots["grad_avg"] = {name: value.tanh() / 2 for name, value in slots["grad_avg"].items()}
    return slots


@pytest.mark.parametrize("step", [0, 1, 40])
@pytest.mark.parametrize("name", [*CASES, "groups"])
def test_the_pullback_is_autograds_of_the_update(name: str, step: int) -> None:
    optimizer = grouped(optimizers.RMSprop) if name == "groups" else CASES[name][0]
    params, grads, cot_params = random(11), random(12), random(13, LANES)
    slots = random_slots(optimizer, params, 21)
    cot_slots = {slot: random(31 + at, LANES) for at, slot in enumerate(slots)}
    to_params, to_slots, to_grads = optimizer.pull_back(params, slots, grads, 0.1, step, cot_params, cot_slots)
    leaves = [
        {n: t.clone().requires_grad_() for n, t in tensors.items()} for tensors in (params, grads, *slots.values())
    ]
    after, new_slots = optimizer.update(leaves[0], dict(zip(slots, leaves[2:], strict=True)), leaves[1], 0.1, step)
    outputs = [*after.values(), *(t for slot in slots for t in new_slots[slot].values())]
    inputs = [t for tensors in leaves for t in tensors.values()]
    for lane in range(LANES):
        cotangents = [
            *(cot_params[n][lane] for n in after),
            *(cot_slots[slot][n][lane] for slot in slots for n in new_slots[slot]),
        ]
        expected = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
        found = [tensors[n][lane] for tensors in (to_params, to_grads, *(to_slots[s] for s in slots)) for n in SHAPES]
        for one, other in zip(found, expected, strict=True):
            right = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("sgd")])
def test_a_coordinate_whose_gradient_was_always_zero_stays_finite(name: str) -> None:
    mine = without_eps_root(CASES[name][0])
    optimizer: Optimizer = type(mine)(**vars(mine) | {"weight_decay": 0.0})
    zero = {"dead": torch.zeros(2, dtype=torch.float64)}
    slots = dict.fromkeys(optimizer.init(zero), zero)
    ones = {"dead": torch.ones(1, 2, dtype=torch.float64)}
    to_params, to_slots, to_grads = optimizer.pull_back(zero, slots, zero, 0.1, 3, ones, dict.fromkeys(slots, ones))
    everything = [to_params["dead"], to_grads["dead"], *(tensors["dead"] for tensors in to_slots.values())]
    assert all(torch.isfinite(tensor).all() for tensor in everything)
    assert torch.equal(to_params["dead"], ones["dead"])
