"""Scores of every model of the zoo are central differences of an ordinary training with torch.optim, to 1e-6 of the largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.metagradient.numerics import shard_seed
from tests.attribution.running import open_small, run
from tests.zoo.tasks import BUILD, EXAMPLES

STEP = 1e-4
TRAINING: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "optimizer": {"name": "adamw", "lr": 0.02, "betas": [0.8, 0.9], "eps": 1e-2, "eps_root": 0.0, "weight_decay": 0.1},
    "schedule": {"name": "constant"},
    "clip_norm": 1.0,
}
CAST = ("llama-gqa", "qwen3", "gemma")  # whose stock norms compute in float32


def open_model(folder: Path, name: str, **settings: Any) -> OpenExperiment:
    return open_small(folder, task={"type": "tests.zoo.tasks:Zoo", "model": name, **settings}, training=TRAINING)


def trained_queries(opened: OpenExperiment, weights: Tensor) -> Tensor:
    """`[queries]`: measurements after an ordinary training in which the examples have these weights."""
    task: Any = opened.task
    torch.manual_seed(0)
    model = task.build_model().double()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in {**opened.initial_state.params, **opened.initial_state.buffers}.items():
            tensors[name].copy_(value)
    frozen = dict(opened.module.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in opened.initial_state.params:
                parameter.copy_(frozen[name])
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=0.02, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1)
    model.train()
    with sdpa_kernel(SDPBackend.MATH):
        for step, batch in enumerate(opened.order):
            optimizer.zero_grad()
            torch.manual_seed(shard_seed(0, step, 0, 0))  # of dropout
            losses = task.example_losses(model, task.collate([opened.dataset[index] for index in batch]))
            ((weights[list(batch)] * losses).sum() / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return torch.stack([task.example_losses(model, task.collate(q.query.examples))[0] for q in opened.queries])


def differences(opened: OpenExperiment) -> Tensor:
    """`[examples, queries]` by Richardson's extrapolation."""

    def slope(example: int, h: float) -> Tensor:
        ends = []
        for sign in (1, -1):
            weights = torch.ones(EXAMPLES, dtype=torch.float64)
            weights[example] += sign * h
            ends.append(trained_queries(opened, weights))
        return (ends[0] - ends[1]) / (2 * h)

    return torch.stack([(4 * slope(i, STEP / 2) - slope(i, STEP)) / 3 for i in range(EXAMPLES)])


@pytest.mark.parametrize("name", BUILD)
def test_scores_are_central_differences_of_an_ordinary_training(name: str, tmp_path: Path) -> None:
    opened = open_model(tmp_path, name)
    found, expected = run(opened), differences(opened)
    largest = float(expected.abs().max())
    assert largest > 1e-3, "degenerate: the scores are all tiny"
    assert float((found - expected).abs().max()) <= 1e-6 * largest
    if name in CAST:
        stock = run(open_model(tmp_path / "stock", name, without_casts=False))
        assert float((stock - found).abs().max()) <= 2e-5 * largest
