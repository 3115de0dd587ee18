"""Every ready-made model has the derivatives that a walk needs, by central differences of the ordinary module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from magic_pipeline.metagradient.probe import probe
from magic_pipeline.metagradient.step import Shard
from magic_pipeline.tasks.protocol import QuerySource, denominator, load_task, query_measurement

LM = {"text_folder": "text", "documents": 3, "layers": 2, "d_model": 16, "heads": 2, "context": 24, "min_bytes": 1}
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "mlp": ("digits_classifier", {"model": "mlp", "hidden": 8}, "test"),
    "conv": ("digits_classifier", {"model": "conv", "hidden": 3}, "test"),
    "linear regression": ("linear_regression", {}, "test"),
    "causal LM, eager": ("causal_lm_text", {**LM, "attention": "eager"}, "held_out"),
    "causal LM, SDPA": ("causal_lm_text", {**LM, "attention": "sdpa"}, "held_out"),
    "causal LM, untied, dropout": ("causal_lm_text", {**LM, "tied": False, "dropout": 0.2}, "held_out"),
    "causal LM, SDPA, dropout": ("causal_lm_text", {**LM, "attention": "sdpa", "dropout": 0.2}, "held_out"),
    "one's own": ("own_model:WineClassifier", {}, None),
}
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("case", CASES)
def test_a_models_second_derivatives_are_right_and_batched(case: str, tmp_path: Path) -> None:
    name, settings, split = CASES[case]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join("ragged verse " + "la" * n for n in range(40)))
    source = None if split is None else QuerySource(split=split, count=1)
    task = load_task(name, settings, folder=EXPERIMENTS if split is None else tmp_path, queries=source)
    torch.manual_seed(0)
    batch = task.collate([task.training_data()[index] for index in range(3)])
    report = probe(
        task.build_model(),
        Shard(batch, torch.arange(3), denominator(task, batch), seed=1),
        example_losses=task.example_losses,
        measurement=lambda module, place: query_measurement(task, module, task.queries()[0], place),
        train_mode=True,
    )
    assert max(report.errors.values()) < 1e-6
    assert report.batchable
