"""Whole experiments with every optimizer: scores are central differences of an ordinary loop with torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.errors import InputError
from tests.attribution.running import open_small, run
from tests.reference.optimizers import without_the_cast

STEP = 1e-4
TorchOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class TorchMuon(torch.optim.Optimizer):
    """torch.optim.Muon, without its cast to bfloat16, for the first layer's matrix, and torch.optim.AdamW for everything else."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        every = list(params)
        super().__init__(every, {"lr": lr})
        matrices = [p for p in every if p.shape == (4, 5)]
        others = [p for p in every if p.shape != (4, 5)]
        self.muon = torch.optim.Muon(matrices, lr=lr, momentum=0.8, weight_decay=0.1)
        self.adamw = torch.optim.AdamW(others, lr=lr / 2, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        lr = self.param_groups[0]["lr"]
        self.muon.param_groups[0]["lr"], self.adamw.param_groups[0]["lr"] = lr, lr / 2
        with without_the_cast():
            self.muon.step()  # type: ignore[no-untyped-call]
        self.adamw.step()


# An experiment file's optimizer, and torch's with the same numbers. eps_root is 0, as torch has none; the eps keep it smooth.
OPTIMIZERS: dict[str, tuple[dict[str, Any], TorchOptimizer]] = {
    "sgd": (
        {"name": "sgd", "lr": 0.2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
        lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, dampening=0.2, weight_decay=0.01),
    ),
    "adam": (
        {"name": "adam", "lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-2, "eps_root": 0.0, "weight_decay": 0.05},
        lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.05),
    ),
    "adamw": (
        {"name": "adamw", "lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-2, "eps_root": 0.0, "weight_decay": 0.1},
        lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1),
    ),
    "adagrad": (
        {"name": "adagrad", "lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-2, "eps_root": 0.0},
        lambda params: torch.optim.Adagrad(params, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.1, eps=1e-2),
    ),
    "rmsprop": (
        {"name": "rmsprop", "lr": 0.03, "alpha": 0.9, "momentum": 0.5, "centered": True, "eps": 1e-1, "eps_root": 0.0},
        lambda params: torch.optim.RMSprop(params, lr=0.03, alpha=0.9, momentum=0.5, centered=True, eps=1e-1),
    ),
    "muon": (
        {
            "name": "muon",
            "lr": 0.05,
            "momentum": 0.8,
            "adamw": {"lr": 0.025, "betas": [0.8, 0.9], "eps": 1e-2, "eps_root": 0.0, "weight_decay": 0.1},
        },
        lambda params: TorchMuon(params, lr=0.05),
    ),
}


def measured(opened: OpenExperiment, make: TorchOptimizer, weights: Tensor, groups: bool = False) -> Tensor:
    """`[queries]`: the queries' losses after an ordinary loop in which the examples have these weights."""
    task: Any = opened.task
    model = task.build_model().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(opened.initial_state.params[name])
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    others = [p for n, p in model.named_parameters() if "bias" not in n]
    optimizer = make([{"params": biases, "weight_decay": 0.0}, {"params": others}] if groups else model.parameters())
    for step, batch in enumerate(opened.order):
        for group in optimizer.param_groups:
            group["lr"] = opened.recipe.learning_rates[step]
        optimizer.zero_grad()
        losses = losses_of(model, task.collate([opened.dataset[index] for index in batch]))
        loss = (weights[list(batch)] * losses).sum() / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return torch.stack([losses_of(model, task.collate(q.query.examples)).mean() for q in opened.queries])


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def differences(opened: OpenExperiment, make: TorchOptimizer, examples: int, *, groups: bool = False) -> Tensor:
    """`[examples, queries]` by Richardson's extrapolation of central differences."""

    def slope(example: int, h: float) -> Tensor:
        ends = []
        for sign in (1, -1):
            weights = torch.ones(len(opened.dataset), dtype=torch.float64)
            weights[example] += sign * h
            ends.append(measured(opened, make, weights, groups))
        return (ends[0] - ends[1]) / (2 * h)

    return torch.stack([(4 * slope(i, STEP / 2) - slope(i, STEP)) / 3 for i in range(examples)])


@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in OPTIMIZERS for r in (1, 2) if (n, r) != ("muon", 2)])
def test_scores_are_central_differences_of_an_ordinary_training(tmp_path: Path, name: str, ranks: int) -> None:
    settings, make = OPTIMIZERS[name]
    opened = open_small(tmp_path, training={"optimizer": settings}, ranks=ranks, processes=1)
    found, expected = run(opened)[:6], differences(opened, make, 6)
    assert float(expected.abs().max()) > 1e-3
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_by_pattern_are_torchs_parameter_groups(tmp_path: Path, ranks: int) -> None:
    settings, make = OPTIMIZERS["adamw"]
    grouped = settings | {"groups": [{"match": "bias$", "weight_decay": 0.0}]}
    opened = open_small(tmp_path / "grouped", training={"optimizer": grouped}, ranks=ranks, processes=1)
    found, expected = run(opened)[:6], differences(opened, make, 6, groups=True)
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    without = run(open_small(tmp_path / "without", training={"optimizer": settings}))[:6]
    assert float((found - without).abs().max()) > 1e-4 * float(expected.abs().max())


def test_what_says_nothing_new_leaves_the_fingerprint_as_it_was(tmp_path: Path) -> None:
    plain = {"name": "sgd", "lr": 0.1}
    one = open_small(tmp_path / "one", training={"optimizer": plain}).fingerprint
    assert (
        open_small(tmp_path / "two", training={"optimizer": plain | {"dampening": 0.0, "groups": []}}).fingerprint
        == one
    )
    groups = [{"match": "weight", "lr_factor": 0.5}]
    assert open_small(tmp_path / "three", training={"optimizer": plain | {"groups": groups}}).fingerprint != one


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "lion", "lr": 0.1}, "lion moves by the sign of an average, which has no derivative.*take adamw"),
        ({"name": "rprop"}, "the sign of the gradient"),
        ({"name": "adamax"}, "running maximum, which has a kink"),
        ({"name": "adamw", "amsgrad": True}, "running maximum, which has a kink"),
        ({"name": "muon", "match": "norm"}, "'norm' is found in the name of no trainable matrix; there are 0.weight"),
        ({"name": "muon", "match": "("}, "is no regular expression"),
        ({"name": "sgd", "groups": [{"match": "("}]}, "is no regular expression"),
        (
            {"name": "sgd", "groups": [{"match": "bias", "betas": [0.9, 0.9]}]},
            r"groups\[0\] sets betas, which this optimizer has not; a group may set lr, lr_factor, weight_decay, momentum",
        ),
        (
            {"name": "sgd", "groups": [{"match": "bias", "lr": 0.1, "lr_factor": 2.0}]},
            "takes lr or lr_factor, not both",
        ),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "groups": [{"match": "bias", "momentum": 0.0}]},
            "nesterov needs a momentum above 0",
        ),
        (
            {"name": "sgd", "groups": [{"match": "norm"}]},
            "'norm' is found in no trainable parameter's name; the first is",
        ),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True, "dampening": 0.1}, "no dampening"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(tmp_path: Path, optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_small(tmp_path, training={"optimizer": optimizer})


def test_muon_needs_whole_matrices(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ranks: muon orthogonalises whole matrices.*take ranks: 1, or adamw"):
        open_small(tmp_path, training={"optimizer": {"name": "muon"}}, ranks=2)
