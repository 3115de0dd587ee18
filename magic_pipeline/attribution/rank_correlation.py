"""Correlations between predicted and true changes, and their bootstrap intervals. NumPy only.

NaN stands for "undefined": fewer than three pairs, a value that is not finite, or one side constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_RESAMPLES = 2000


def average_ranks(values: Floats) -> Floats:
    """Ranks from 1 along the last axis; ties share the mean of their ranks.

    >>> average_ranks(np.array([3.0, 1.0, 3.0, 2.0]))
    array([3.5, 1. , 3.5, 2. ])
    """
    count = values.shape[-1]
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    position = np.broadcast_to(np.arange(count), values.shape)
    changes = ordered[..., 1:] != ordered[..., :-1]
    edge = np.ones((*values.shape[:-1], 1), dtype=bool)
    begins, ends = np.concatenate([edge, changes], -1), np.concatenate([changes, edge], -1)
    first = np.maximum.accumulate(np.where(begins, position, 0), -1)
    last = np.minimum.accumulate(np.where(ends, position, count)[..., ::-1], -1)[..., ::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, -1)
    return ranks


def pearson(a: Floats, b: Floats) -> Floats:
    """The correlation along the last axis, over all axes before it."""
    if a.shape[-1] < 3:
        return np.full(a.shape[:-1], np.nan)
    # Scaled first, so that tiny numbers do not underflow when squared.
    a, b = _standard(a), _standard(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        norms = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
        found: Floats = np.where(norms > 0, (a * b).sum(-1) / norms, np.nan)
    return np.clip(found, -1, 1)


def spearman(a: Floats, b: Floats) -> Floats:
    """The rank correlation along the last axis, ties by average ranks."""
    found = pearson(average_ranks(a), average_ranks(b))
    finite = np.isfinite(a).all(-1) & np.isfinite(b).all(-1)
    return np.where(finite, found, np.nan)


def slope(predicted: Floats, actual: Floats) -> float:
    """Of the least-squares line `actual = slope * predicted + constant`: 1 where magnitudes are right too."""
    if pearson(predicted, actual) != pearson(predicted, actual):
        return float("nan")
    centred = predicted - predicted.mean()
    scale = np.abs(centred).max()
    centred = centred / scale
    return float((centred * (actual - actual.mean())).sum() / (centred * centred).sum() / scale)


def bootstrap_interval(
    statistic: Callable[[NDArray[np.int64]], Floats], count: int, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of a statistic over resamples of `count` items with replacement.

    Args:
        statistic: maps indices `[resamples, count]` to values `[resamples]`; values that are NaN are left out.
    """
    indices = np.random.default_rng(seed).integers(count, size=(_RESAMPLES, count))
    values = statistic(indices)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return float("nan"), float("nan")
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def is_constant(values: NDArray[np.floating[Any]]) -> bool:
    return bool(np.ptp(values) == 0) if values.size else True


def _standard(values: Floats) -> Floats:
    """Centred, and scaled to at most 1; a constant becomes exactly 0."""
    values = values - np.where(
        (values == values[..., :1]).all(-1, keepdims=True), values[..., :1], values.mean(-1, keepdims=True)
    )
    scale = np.abs(values).max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return values / np.where(scale > 0, scale, 1)
