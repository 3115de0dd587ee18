"""Removal curves: what a query loses when training goes without its k most helpful examples, against k random ones.

The query-level test of an attribution: its own top examples are removed for each query, where the linear datamodeling score only
removes random ones. Helpful examples have negative scores, so their removal is predicted to raise the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magic_pipeline.attribution.bank import Bank, Reweighting
from magic_pipeline.attribution.experiment_settings import RemovalSettings
from magic_pipeline.attribution.linear_datamodeling import RunResult, refuse_duplicates_and_strangers
from magic_pipeline.errors import InputError

Scores = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RemovalPoint:
    """One query at one count.

    Attributes:
        predicted, actual: change of the measurement without the `removed` most helpful examples; NaN where it is not there.
        random: the true changes of the random removals of the same count.
    """

    removed: int
    predicted: float
    actual: float
    random: tuple[float, ...]

    @property
    def beats_random(self) -> bool:
        """Whether the measurement rises more than under every random removal."""
        return len(self.random) > 0 and self.actual > max(self.random)


@dataclass(frozen=True)
class RemovalCurve:
    """One query's points, by count."""

    query: str
    points: tuple[RemovalPoint, ...]


@dataclass(frozen=True)
class RemovalCurves:
    """The curves of a bank; `retrainings` of `of` are in it."""

    curves: tuple[RemovalCurve, ...]
    retrainings: int
    of: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def removal_bank(
    training: str, scores: Scores, keys: Sequence[str], settings: RemovalSettings, walks: Sequence[str] = ()
) -> Bank:
    """Without the k most helpful examples of each query, and without k random ones, for every k.

    Args:
        scores: `[units, queries]`, columns as `keys`.
        walks: digests of the walks that the scores come from, for the record.

    Raises:
        InputError: a count leaves nothing to train on.
    """
    units = len(scores)
    if max(settings.counts) >= units:
        raise InputError(
            f"leaving out {max(settings.counts)} of {units} units leaves nothing to train on",
            field="validation.removal.counts",
        )
    counts = sorted(set(settings.counts))
    runs = [
        Reweighting.dropping(_helpful(key, count), np.argsort(scores[:, column], kind="stable")[:count].tolist())
        for column, key in enumerate(keys)
        for count in counts
    ]
    for draw in range(settings.random):
        order = np.random.default_rng([settings.seed, draw, units]).permutation(units)
        runs += [Reweighting.dropping(_random(draw, count), order[:count].tolist()) for count in counts]
    # Two queries with the same top examples share a retraining; each keeps its label.
    content = settings.model_dump(mode="json") | {"queries": list(keys), "walks": list(walks), "counts": counts}
    return Bank("removal", training, content, tuple(runs))


def removal_curves(
    bank: Bank,
    results: Sequence[RunResult],
    *,
    base: Mapping[str, float],
    scores: Scores,
    queries: Mapping[str, str],
) -> RemovalCurves:
    """The curves of what is finished.

    Args: as `linear_datamodeling_score`.

    Raises:
        InputError: a result is none of this bank's.
    """
    distinct = {result.digest: result for result in results}
    for label in {result.label: result for result in results}:
        bank.run(label)
    refuse_duplicates_and_strangers(bank, list(distinct.values()))
    by_label = {result.label: result for result in results}

    def change(label: str, key: str) -> float:
        result = by_label.get(label)
        if result is None or key not in result.measurements:
            return float("nan")
        return result.measurements[key] - base[key]

    curves = []
    for column, (key, id_) in enumerate(queries.items()):
        points = []
        for count in bank.settings["counts"]:
            predicted = float(bank.run(_helpful(key, count)).predicted_change(scores[:, column]))
            drawn = [change(_random(draw, count), key) for draw in range(bank.settings["random"])]
            known = tuple(value for value in drawn if value == value)
            points.append(RemovalPoint(count, predicted, change(_helpful(key, count), key), known))
        curves.append(RemovalCurve(id_, tuple(points)))
    return RemovalCurves(tuple(curves), len(by_label), len(bank.runs))


def _helpful(key: str, count: int) -> str:
    return f"{key}-helpful-{count}"


def _random(draw: int, count: int) -> str:
    return f"random-{draw:03d}-{count}"
