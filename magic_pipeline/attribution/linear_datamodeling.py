"""The linear datamodeling score: how well predicted changes rank what retraining on random subsets really does. No torch.

For each query, Spearman's correlation over the subsets between `- sum of the dropped units' scores` and the true change of the
query's measurement (Park et al. 2023, section 2). Exact scores promise magnitudes too, so Pearson's correlation and the slope of the
true change against the predicted one stand beside it: a slope of 1 means right magnitudes.

What cannot be told is never shown as a number: a query whose column is constant or not finite is *undefined*, named, counted and
left out of the mean; a bank that is not complete is labelled "n of m"; duplicated and foreign results are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magic_pipeline.attribution.bank import Bank
from magic_pipeline.attribution.rank_correlation import (
    Floats,
    bootstrap_interval,
    is_constant,
    pearson,
    slope,
    spearman,
)
from magic_pipeline.errors import InputError

# Fewer pairs make no correlation worth showing.
_FEWEST = 3
_nan = float("nan")


@dataclass(frozen=True)
class RunResult:
    """What one retraining gave.

    Attributes:
        digest: `Reweighting.digest`: which weights it was trained with.
        measurements: query key -> phi of the retrained model; a query that was not measured is missing.
        diverged_at: the step at which its loss was no longer finite; then there is no measurement.
    """

    label: str
    digest: str
    measurements: Mapping[str, float]
    diverged_at: int | None = None


@dataclass(frozen=True)
class QueryLDS:
    """One query's row: correlations with a bootstrap interval over the subsets, or why there are none."""

    query: str
    spearman: float
    low: float
    high: float
    pearson: float
    slope: float
    undefined: str | None = None


@dataclass(frozen=True)
class LinearDatamodelingScore:
    """The table of one bank.

    Attributes:
        subsets, of: how many of the bank's subsets are in it; fewer than all is a partial bank.
        diverged: labels of retrainings that did not stay finite; they are among the missing.
        mean, low, high: over the defined queries, with the interval over subsets (the same resamples for all queries).
        defined, undefined: numbers of queries.
        predicted, actual: `[queries][subsets]`, the points behind the numbers.
    """

    drop_fraction: float
    subsets: int
    of: int
    diverged: tuple[str, ...]
    mean: float
    low: float
    high: float
    defined: int
    undefined: int
    queries: tuple[QueryLDS, ...]
    labels: tuple[str, ...]
    predicted: tuple[tuple[float, ...], ...]
    actual: tuple[tuple[float, ...], ...]

    @property
    def is_partial(self) -> bool:
        return self.subsets < self.of

    @property
    def coverage(self) -> str:
        """`50 subsets`, or `46 of 50 subsets` where the bank is partial."""
        return f"{self.subsets} of {self.of} subsets" if self.is_partial else f"{self.subsets} subsets"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LinearDatamodelingScore:
        """The inverse, also of JSON, where None stands for NaN. Raises TypeError or KeyError where it is no such table."""
        fields = _with_nan(content)
        fields["queries"] = tuple(QueryLDS(**_with_nan(query)) for query in fields["queries"])
        for name in ("diverged", "labels"):
            fields[name] = tuple(fields[name])
        for name in ("predicted", "actual"):
            fields[name] = tuple(tuple(_nan if v is None else v for v in row) for row in fields[name])
        return cls(**fields)


def _with_nan(content: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("mean", "low", "high", "spearman", "pearson", "slope")
    return {key: _nan if value is None and key in numbers else value for key, value in content.items()}


def linear_datamodeling_score(
    bank: Bank,
    results: Sequence[RunResult],
    *,
    base: Mapping[str, float],
    scores: NDArray[np.floating[Any]],
    queries: Mapping[str, str],
    seed: int = 0,
) -> LinearDatamodelingScore:
    """The table of a bank of random subsets.

    Args:
        results: of the bank's retrainings, in any order; some may be missing.
        base: query key -> phi of the model trained on everything.
        scores: `[units, queries]`, columns in the order of `queries`.
        queries: key -> id of each query that has scores.
        seed: of the bootstrap.

    Raises:
        InputError: a result is given twice, or is none of this bank's.
    """
    refuse_duplicates_and_strangers(bank, results)
    by_label = {result.label: result for result in results if result.diverged_at is None}
    diverged = tuple(sorted(result.label for result in results if result.diverged_at is not None))
    runs = [run for run in bank.runs if run.label in by_label]
    predicted = np.stack([run.predicted_change(scores) for run in runs], 1) if runs else np.zeros((len(queries), 0))
    actual = np.array([[_change(by_label[run.label], base, key) for run in runs] for key in queries])
    actual = actual.reshape(len(queries), len(runs))
    rows = [_row(id_, p, a, seed) for id_, p, a in zip(queries.values(), predicted, actual, strict=True)]
    defined = [index for index, row in enumerate(rows) if row.undefined is None]
    mean, low, high = _mean(predicted[defined], actual[defined], [rows[index].spearman for index in defined], seed)
    return LinearDatamodelingScore(
        drop_fraction=float(bank.settings["drop_fraction"]),
        subsets=len(runs),
        of=len(bank.runs),
        diverged=diverged,
        mean=mean,
        low=low,
        high=high,
        defined=len(defined),
        undefined=len(rows) - len(defined),
        queries=tuple(rows),
        labels=tuple(run.label for run in runs),
        predicted=tuple(tuple(row) for row in predicted.tolist()),
        actual=tuple(tuple(row) for row in actual.tolist()),
    )


def refuse_duplicates_and_strangers(bank: Bank, results: Sequence[RunResult]) -> None:
    """Raises InputError where a result is there twice, or was not trained with the bank's weights of its label."""
    seen: dict[str, str] = {}
    for result in results:
        if result.digest != bank.run(result.label).digest:
            raise InputError(
                f"retraining {result.label}: its weights are not this bank's (expected {bank.run(result.label).digest}, "
                f"found {result.digest}); it belongs to another bank"
            )
        if result.digest in seen:
            raise InputError(
                f"retraining {result.label} is there twice (the other is named {seen[result.digest]}): counting it twice "
                "would make the interval too narrow"
            )
        seen[result.digest] = result.label


def _change(result: RunResult, base: Mapping[str, float], key: str) -> float:
    if key not in result.measurements or key not in base:
        return _nan
    return result.measurements[key] - base[key]


def _row(query: str, predicted: Floats, actual: Floats, seed: int) -> QueryLDS:
    reason = _why_undefined(predicted, actual)
    if reason is not None:
        return QueryLDS(query, _nan, _nan, _nan, _nan, _nan, reason)
    low, high = bootstrap_interval(lambda at: spearman(predicted[at], actual[at]), len(actual), seed=seed)
    return QueryLDS(
        query,
        float(spearman(predicted, actual)),
        low,
        high,
        float(pearson(predicted, actual)),
        slope(predicted, actual),
    )


def _why_undefined(predicted: Floats, actual: Floats) -> str | None:
    if len(actual) < _FEWEST:
        return f"only {len(actual)} subsets"
    for name, column in (("predicted", predicted), ("true", actual)):
        missing = int((~np.isfinite(column)).sum())
        if missing:
            return f"{missing} {name} changes are not finite or were not measured"
        if is_constant(column):
            return f"the {name} change is the same for all subsets"
    return None


def _mean(predicted: Floats, actual: Floats, values: Sequence[float], seed: int) -> tuple[float, float, float]:
    if not values:
        return _nan, _nan, _nan

    def mean_of(at: NDArray[np.int64]) -> Floats:
        found: Floats = np.stack([spearman(p[at], a[at]) for p, a in zip(predicted, actual, strict=True)])
        # A resample in which a query is constant says nothing about that query.
        with np.errstate(invalid="ignore"):
            mean: Floats = np.nansum(found, 0) / np.isfinite(found).sum(0)
        return mean

    low, high = bootstrap_interval(mean_of, predicted.shape[1], seed=seed)
    return float(np.mean(values)), low, high
