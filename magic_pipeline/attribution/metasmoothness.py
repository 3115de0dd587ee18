"""Metasmoothness: whether training answers steadily when the data weights move.

Definition 2 of "Optimizing ML Training with Metagradient Descent" (arXiv 2503.13751): with theta_0, theta_h and theta_2h trained with
data weights moved by 0, h and 2h along a direction, and d = |theta_2h - theta_0|,

    S = sign(theta_h - theta_0)^T diag(d / ||d||_1) sign(theta_2h - theta_h),

from -1 to 1: near 1 where the parameters move on in the direction in which they began to move. Scores are derivatives; where S is
small they say little about retraining, however exact they are. Values within 0.02 of each other are noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magic_pipeline.attribution.bank import Bank, Reweighting
from magic_pipeline.attribution.bank_results import kept_models
from magic_pipeline.attribution.experiment_settings import SmoothnessSettings
from magic_pipeline.attribution.observing import Observe, ShouldStop, never, unobserved
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.retraining import open_bank, retrain

NOISE = 0.02


@dataclass(frozen=True)
class Metasmoothness:
    """The mean over directions, and each; NaN where a training did not stay finite or no parameter moved."""

    h: float
    mean: float
    directions: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"noise": NOISE}


def metasmoothness(
    opened: OpenExperiment,
    settings: SmoothnessSettings | None = None,
    *,
    observe: Observe = unobserved,
    should_stop: ShouldStop = never,
) -> Metasmoothness:
    """Trains 1 + 2 x directions times (sealed, resumable) and compares the parameters. Needs no trajectory and no scores.

    Raises: as `retrain`.
    """
    settings = settings or SmoothnessSettings()
    of = open_bank(
        opened,
        smoothness_bank(opened.weighted, len(opened.units), settings),
        needs_trajectory=False,
        keep_models=True,
    )
    retrain(of, observe=observe, should_stop=should_stop)
    models = kept_models(of)
    values = tuple(
        smoothness_of(models["base"], models[f"h-{direction:03d}"], models[f"2h-{direction:03d}"])
        for direction in range(settings.directions)
    )
    return Metasmoothness(settings.h, float(np.mean(values)), values)


def smoothness_bank(training: str, units: int, settings: SmoothnessSettings) -> Bank:
    """The trainings: as it is, and for each direction of random signs with all weights moved by h and by 2h."""
    everything = np.arange(units, dtype=np.int64)
    runs = [Reweighting("base", everything[:0], np.zeros(0))]
    for direction in range(settings.directions):
        signs = np.random.default_rng([settings.seed, direction, units]).choice([-1.0, 1.0], units)
        runs.append(Reweighting(f"h-{direction:03d}", everything, 1 + settings.h * signs))
        runs.append(Reweighting(f"2h-{direction:03d}", everything, 1 + 2 * settings.h * signs))
    return Bank("smoothness", training, settings.model_dump(mode="json"), tuple(runs))


def smoothness_of(
    theta_0: Mapping[str, Tensor], theta_h: Mapping[str, Tensor], theta_2h: Mapping[str, Tensor]
) -> float:
    """S of three trained models' parameters.

    >>> zero, one, two = ({"w": torch.tensor([0.0, x, x])} for x in (0.0, 1.0, 2.0))
    >>> smoothness_of(zero, one, two), smoothness_of(zero, one, {"w": torch.tensor([0.0, 2.0, 0.5])})
    (1.0, 0.6)
    """
    zero, first, second = (
        torch.cat([theta[name].flatten().to(torch.float64) for name in theta_0])
        for theta in (theta_0, theta_h, theta_2h)
    )
    moved = (second - zero).abs()
    if not bool(torch.isfinite(moved).all()) or float(moved.sum()) == 0:
        return float("nan")
    agreement = torch.sign(first - zero) * torch.sign(second - first)
    return float((agreement * moved).sum() / moved.sum())
