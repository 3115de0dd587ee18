"""The stored runs of tests/oracle as problems, and the scores that come with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference import models
from tests.reference.families import mean_measurement, target_tokens, token_losses
from tests.reference.problem import SGD, AdamW, MicroBatch, Problem

FOLDER = Path(__file__).parent.parent / "oracle"
NAMES = ("tiny_f64", "tiny_sgd_f64", "s64small_f64")


@dataclass(frozen=True)
class Oracle:
    """A stored run: the problem, the trained weights and the scores `[units, queries]`."""

    problem: Problem
    final: dict[str, Tensor]
    scores: Tensor


def load(name: str) -> Oracle:
    with np.load(FOLDER / f"{name}.npz") as stored:
        settings = json.loads(str(stored["meta"]))
        arrays = {key: torch.from_numpy(stored[key]) for key in stored.files if stored[key].dtype.kind in "fi"}
    tokens, queries = arrays["tokens"], arrays["query_tokens"]
    rows = tokens.shape[1]
    steps = [
        (MicroBatch(batch, torch.arange(rows) + step * rows, target_tokens(batch), seed=0),)
        for step, batch in enumerate(tokens)
    ]
    problem = Problem(
        partial(_model, settings, _named(arrays, "init/")),
        token_losses,
        steps,
        _optimizer(settings),
        settings["lr_per_step"],
        [mean_measurement(token_losses, target_tokens, query.unsqueeze(0)) for query in queries],
        units=len(tokens) * rows,
        train_mode=False,
    )
    return Oracle(problem, _named(arrays, "final/"), arrays["scores"])


def _named(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def _model(settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    model = models.gpt2(
        layers=settings["layers"],
        width=settings["d_model"],
        heads=settings["heads"],
        vocabulary=settings["vocab"],
        context=settings["seq"],
        tied=settings["tie"],
    )
    model.load_state_dict(weights)
    return model


def _optimizer(settings: dict[str, Any]) -> SGD | AdamW:
    if settings["optimizer"] == "sgd":
        return SGD(settings["momentum"], weight_decay=settings["weight_decay"])
    betas = (settings["beta1"], settings["beta2"])
    return AdamW(betas, settings["eps"], settings["eps_root"], settings["weight_decay"])
