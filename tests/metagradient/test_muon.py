"""Muon equals torch.optim.Muon without its cast to bfloat16, its pullback is autograd's, and its AdamW part is AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.attribution.optimizer import muon_matrices
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.muon import Muon, newton_schulz, newton_schulz_pull_back
from magic_pipeline.metagradient.optimizers import AdamW
from tests.reference import models
from tests.reference.optimizers import without_the_cast

SHAPES = {"wide": (3, 5), "bias": (3,), "tall": (6, 2), "square": (4, 4)}
MATRICES = frozenset({"wide", "tall", "square"})
ADAMW = AdamW(betas=(0.8, 0.9), eps_root=0.0, weight_decay=0.2)
LANES = 3
CASES: dict[str, dict[str, Any]] = {
    "muon": {},
    "muon plain momentum": {"nesterov": False, "weight_decay": 0.0},
    "muon no momentum": {"momentum": 0.0},
    "muon match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
    "muon other coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 1e-5},
}


def random(seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn((*lead, *s), generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def after_fifty(settings: Mapping[str, Any], *, cast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(ours, torch's) parameters after the same fifty gradients."""
    mine = Muon(MATRICES, **settings, adamw=ADAMW, adamw_lr_factor=0.5)
    params: Mapping[str, Tensor] = random(1)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    muon = torch.optim.Muon([leaves[n] for n in SHAPES if n in MATRICES], **{"lr": 0.1, **settings})
    adamw = torch.optim.AdamW([leaves["bias"]], lr=0.05, betas=(0.8, 0.9), weight_decay=0.2)
    slots = mine.init(params)
    for step in range(50):
        grads, lr = random(100 + step), 0.1 / (step + 1)
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = lr, lr / 2
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        with nullcontext() if cast else without_the_cast():
            muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
        params, slots = mine.update(params, slots, grads, lr, step)
    return dict(params), {n: leaf.detach() for n, leaf in leaves.items()}


@pytest.mark.parametrize("name", CASES)
def test_fifty_updates_equal_torch_optim_without_its_cast(name: str) -> None:
    found, expected = after_fifty(CASES[name], cast=False)
    for n in SHAPES:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-12, atol=1e-12)


def test_fifty_updates_are_stock_muons_at_the_tolerance_of_bfloat16() -> None:
    """Its rounding, 2^-8, of moves of about 1 times the learning rates, whose sum is 0.45."""
    found, expected = after_fifty({}, cast=True)
    worst = max(float((found[n] - expected[n]).abs().max()) for n in MATRICES)
    assert 1e-6 < worst < 0.45 * 2**-4


@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize("name", CASES)
def test_the_pullback_is_autograds_of_the_update(name: str, step: int) -> None:
    mine = Muon(MATRICES, **CASES[name], adamw=ADAMW, adamw_lr_factor=0.5)
    params, grads, cot_params = random(11), random(12), random(13, LANES)
    slots = {s: {n: random(20 + at)[n] for n in of} for at, (s, of) in enumerate(mine.init(params).items())}
    slots["exp_avg_sq"] = {n: value**2 + 1 for n, value in slots["exp_avg_sq"].items()}
    cot_slots = {s: {n: random(30 + at, LANES)[n] for n in of} for at, (s, of) in enumerate(slots.items())}
    pulled = mine.pull_back(params, slots, grads, 0.1, step, cot_params, cot_slots)
    leaves = [{n: t.clone().requires_grad_() for n, t in of.items()} for of in (params, grads, *slots.values())]
    after, new = mine.update(leaves[0], dict(zip(slots, leaves[2:], strict=True)), leaves[1], 0.1, step)
    outputs = [*after.values(), *(t for s in slots for t in new[s].values())]
    for lane in range(LANES):
        cots = [*(cot_params[n][lane] for n in after), *(cot_slots[s][n][lane] for s in slots for n in new[s])]
        inputs = [t for of in leaves for t in of.values()]
        expected = torch.autograd.grad(outputs, inputs, cots, retain_graph=True, allow_unused=True)
        flat = [pulled[0], pulled[2], *(pulled[1][s] for s in slots)]
        found = [of[n][lane] for of, names in zip(flat, leaves, strict=True) for n in names]
        for one, other in zip(found, expected, strict=True):
            right = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, right, rtol=1e-11, atol=1e-11)


def test_a_matrix_of_zeros_stays_and_its_pullback_is_finite() -> None:
    zero = torch.zeros(3, 5, dtype=torch.float64)
    move, iterates = newton_schulz(zero, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(move, zero)
    back = newton_schulz_pull_back(zero, iterates, (3.4445, -4.7750, 2.0315), 1e-7, torch.ones_like(zero))
    assert bool(back.isfinite().all())


def test_several_runs_at_once_move_as_each_alone() -> None:
    mine, params, grads = Muon(MATRICES, adamw=ADAMW), random(1, 4), random(2, 4)
    together, _ = mine.update(params, mine.init(params), grads, 0.1, 0)
    for run in range(4):
        own = {n: p[run] for n, p in params.items()}
        alone, _ = mine.update(own, mine.init(own), {n: g[run] for n, g in grads.items()}, 0.1, 0)
        for n in SHAPES:
            torch.testing.assert_close(together[n][run], alone[n], rtol=1e-12, atol=1e-12)


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)


@pytest.mark.parametrize(
    ("module", "match", "expected"),
    [
        (Untied(), None, ["hidden.weight"]),
        (Untied(), "hidden|head", ["hidden.weight", "head.weight"]),
        (models.gpt2(), None, None),
    ],
)
def test_muons_matrices_are_the_hidden_ones(module: nn.Module, match: str | None, expected: list[str] | None) -> None:
    model = FunctionalModel(module, example_losses=lambda m, b: b)
    found = muon_matrices(model, match)
    if expected is None:
        assert found and all(".h." in name for name in found)
        assert {n for n, p in model.params.items() if p.dim() == 2 and ".h." in n} == set(found)
    else:
        assert found == expected
