"""Leave-one-out: retrain without an example and see what the scores predicted.

The retraining takes the same data order and the same steps as the trajectory, with the example's weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magic_pipeline.attribution.opening import OpenExperiment, OpenQuery
from magic_pipeline.attribution.trajectory import required_trajectory
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import train_step


@dataclass(frozen=True)
class LeftOut:
    """One retraining: what the query's measurement was predicted to change by (`- score`), and what it did."""

    unit: str
    predicted: float
    actual: float


@dataclass(frozen=True)
class LeaveOneOut:
    """How well the scores predict retraining; correlations over `rows`, NaN where either side is constant."""

    query: str
    rows: tuple[LeftOut, ...]
    pearson: float
    spearman: float


def leave_one_out(
    opened: OpenExperiment,
    key: str,
    scores: Sequence[float],
    rows: Sequence[int],
    *,
    observe: Callable[[int, int], None] = lambda done, of: None,
) -> LeaveOneOut:
    """Retrains once per row of `rows` without that unit.

    Args:
        scores: `[units]`, the query's scores.
        rows: score rows to leave out.
        observe: called with how many retrainings are done, of how many.

    Raises:
        InputError: a row is not one of the scores'.
    """
    query, threads = opened.query(key), required_trajectory(opened).threads
    outside = [row for row in rows if not 0 <= row < len(opened.units)]
    if outside:
        raise InputError(f"row {outside[0]} is not one of the {len(opened.units)} scores'")
    with exact_numerics(threads):
        base = _phi(opened, query, retrain(opened, torch.ones(len(opened.units))))
        results = []
        for done, row in enumerate(rows, start=1):
            weights = torch.ones(len(opened.units))
            weights[row] = 0
            change = _phi(opened, query, retrain(opened, weights)) - base
            results.append(LeftOut(opened.units[row], -float(scores[row]), change))
            observe(done, len(rows))
    predicted, actual = [r.predicted for r in results], [r.actual for r in results]
    return LeaveOneOut(
        query.id, tuple(results), _pearson(predicted, actual), _pearson(_ranks(predicted), _ranks(actual))
    )


def influential_and_random(scores: Sequence[float], count: int, seed: int = 0) -> list[int]:
    """The `count` rows of the largest absolute scores, then `count` other rows drawn by `seed`."""
    order = np.argsort(-np.abs(np.asarray(scores, dtype=np.float64)), kind="stable")
    rest = np.random.default_rng(seed).permutation(order[count:])
    return [int(row) for row in [*order[:count], *rest[:count]]]


def retrain(opened: OpenExperiment, weights: torch.Tensor) -> TrainState:
    """The final state of the same run with these weights `[units]`."""
    state = opened.initial_state
    for step in range(opened.steps):
        state, _ = train_step(opened.recipe, state, opened.data(step), weights)
    return state


def _phi(opened: OpenExperiment, query: OpenQuery, state: TrainState) -> float:
    with torch.no_grad():
        return float(opened.phi(query, state.params, state.buffers))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties sharing their mean."""
    array = np.asarray(values)
    return [float((array < value).sum() + ((array == value).sum() + 1) / 2) for value in array]


def _pearson(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
