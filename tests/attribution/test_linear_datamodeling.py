"""The linear datamodeling score: right numbers for whole banks, and no number for what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]

from magic_pipeline.attribution.bank import Bank, Reweighting, random_subsets
from magic_pipeline.attribution.linear_datamodeling import (
    LinearDatamodelingScore,
    RunResult,
    linear_datamodeling_score,
)
from magic_pipeline.attribution.rank_correlation import Floats, average_ranks, pearson, spearman
from magic_pipeline.attribution.validation_tables import lds_lines, lds_markdown, summary
from magic_pipeline.errors import InputError

UNITS, SUBSETS = 40, 10
QUERIES = {"a-1": "query a", "b-2": "query b", "c-3": "query c"}
SCORES = np.random.default_rng(1).normal(size=(UNITS, len(QUERIES)))
BASE = {"a-1": 1.0, "b-2": 2.0, "c-3": 3.0}


def bank(subsets: int = SUBSETS, fraction: float = 0.1) -> Bank:
    return random_subsets("training", UNITS, fraction=fraction, subsets=subsets, seed=0)


def results(of: Bank, noise: float = 0.02) -> list[RunResult]:
    """Retrainings that do what the scores predict, but for noise."""
    drawn = np.random.default_rng(2).normal(size=(len(of.runs), len(QUERIES))) * noise
    changes = [run.predicted_change(SCORES) + off for run, off in zip(of.runs, drawn, strict=True)]
    return [
        RunResult(run.label, run.digest, {key: BASE[key] + change for key, change in zip(QUERIES, row, strict=True)})
        for run, row in zip(of.runs, changes, strict=True)
    ]


def score(of: Bank, found: Sequence[RunResult]) -> LinearDatamodelingScore:
    return linear_datamodeling_score(of, found, base=BASE, scores=SCORES, queries=QUERIES)


def changed(result: RunResult, **measurements: float) -> RunResult:
    return replace(
        result, measurements=dict(result.measurements) | {k.replace("_", "-"): v for k, v in measurements.items()}
    )


def test_correlations_are_scipys_and_the_mean_is_over_queries() -> None:
    of = bank(30)
    table = score(of, results(of, noise=0.5))
    for row, predicted, actual in zip(table.queries, table.predicted, table.actual, strict=True):
        assert row.spearman == pytest.approx(scipy.stats.spearmanr(predicted, actual).statistic, abs=1e-12)
        assert row.pearson == pytest.approx(scipy.stats.pearsonr(predicted, actual).statistic, abs=1e-12)
        assert row.slope == pytest.approx(scipy.stats.linregress(predicted, actual).slope, abs=1e-12)
        assert row.low < row.spearman < row.high < 1
    assert table.mean == pytest.approx(np.mean([row.spearman for row in table.queries]))
    assert table.low < table.mean < table.high
    assert (table.subsets, table.of, table.defined, table.undefined, table.is_partial) == (30, 30, 3, 0, False)


def test_a_negative_score_means_that_leaving_the_example_out_raises_the_measurement() -> None:
    run = Reweighting.dropping("x", [3, 1])
    assert run.rows.tolist() == [1, 3]
    assert run.predicted_change(SCORES) == pytest.approx(-(SCORES[1] + SCORES[3]))
    moved = Reweighting("y", np.array([2]), np.array([1.5]))
    assert moved.predicted_change(SCORES) == pytest.approx(0.5 * SCORES[2])


def test_a_bank_with_four_of_ten_missing_is_scored_and_labelled() -> None:
    of = bank()
    table = score(of, results(of)[:6])
    assert (table.subsets, table.of, table.is_partial) == (6, 10, True)
    assert table.coverage == "6 of 10 subsets"
    for shown in (summary(table), "\n".join(lds_lines(table)), lds_markdown([table])):
        assert "6 of 10 subsets; PARTIAL BANK" in shown
    whole = score(of, results(of))
    assert "PARTIAL" not in summary(whole)


@pytest.mark.parametrize("kind", ["same label", "same weights under another label"])
def test_a_duplicated_retraining_is_refused(kind: str) -> None:
    of = bank()
    found = results(of)
    if kind == "same label":
        found.append(found[3])
    else:
        of = Bank(of.kind, of.training, of.settings, (*of.runs, replace(of.runs[3], label="again")))
        found.append(replace(found[3], label="again"))
    with pytest.raises(InputError, match="there twice"):
        score(of, found)


def test_a_foreign_retraining_is_refused() -> None:
    of, other = bank(), random_subsets("training", UNITS, fraction=0.1, subsets=SUBSETS, seed=1)
    with pytest.raises(InputError, match="0.1-000: its weights are not this bank's"):
        score(of, [*results(other)[:1], *results(of)[1:]])
    with pytest.raises(InputError, match="no retraining '0.2-000'"):
        score(of, results(bank(fraction=0.2)))


def test_a_nan_makes_its_query_undefined_and_is_left_out_of_the_mean() -> None:
    of = bank()
    found = results(of)
    whole = score(of, found)
    found[4] = changed(found[4], b_2=float("nan"))
    table = score(of, found)
    assert [row.undefined is None for row in table.queries] == [True, False, True]
    assert table.queries[1].undefined == "1 true changes are not finite or were not measured"
    assert math.isnan(table.queries[1].spearman)
    assert (table.defined, table.undefined) == (2, 1)
    assert table.mean == pytest.approx(np.mean([whole.queries[0].spearman, whole.queries[2].spearman]))
    assert "1 queries undefined, left out of the mean" in summary(table)


def test_constant_columns_are_undefined() -> None:
    of = bank()
    constant = [changed(result, a_1=5.0) for result in results(of)]
    table = score(of, constant)
    assert table.queries[0].undefined == "the true change is the same for all subsets"
    flat = linear_datamodeling_score(of, results(of), base=BASE, scores=np.zeros_like(SCORES), queries=QUERIES)
    assert (flat.defined, flat.undefined) == (0, 3)
    assert math.isnan(flat.mean)
    assert "LDS undefined over 0 queries" in summary(flat)


def test_a_diverged_retraining_is_missing_and_named() -> None:
    of = bank()
    found = results(of)
    found[2] = RunResult(found[2].label, found[2].digest, {}, diverged_at=7)
    table = score(of, found)
    assert (table.coverage, table.diverged, table.undefined) == ("9 of 10 subsets", ("0.1-002",), 0)
    assert "1 diverged (0.1-002)" in summary(table)


def test_a_table_survives_json_with_its_undefined_numbers() -> None:
    import json

    from magic_pipeline.attribution.validation import _without_nan

    of = bank()
    found = results(of)
    found[4] = changed(found[4], b_2=float("inf"))
    table = score(of, found)
    text = json.dumps(_without_nan(table.as_dict()), allow_nan=False)
    assert repr(LinearDatamodelingScore.from_dict(json.loads(text))).replace("inf", "nan") == repr(table).replace(
        "inf", "nan"
    )


def test_the_interval_covers_the_true_correlation_about_as_often_as_it_says() -> None:
    from magic_pipeline.attribution.rank_correlation import bootstrap_interval

    generator, covered, trials = np.random.default_rng(0), 0, 20
    truth = 6 / math.pi * math.asin(0.8 / 2)  # Spearman's rho of a normal pair with Pearson's 0.8
    for trial in range(trials):
        a = generator.normal(size=50)
        b = 0.8 * a + 0.6 * generator.normal(size=50)

        def statistic(at: np.ndarray[tuple[int, ...], np.dtype[np.int64]], a: Floats = a, b: Floats = b) -> Floats:
            return spearman(a[at], b[at])

        low, high = bootstrap_interval(statistic, 50, seed=trial)
        covered += low <= truth <= high
    assert 0.8 <= covered / trials <= 1


def test_ranks_and_correlations_are_scipys_on_ties_and_in_batches() -> None:
    values = np.random.default_rng(3).integers(0, 4, size=(6, 20)).astype(float)
    assert average_ranks(values) == pytest.approx(scipy.stats.rankdata(values, axis=-1))
    for row in range(5):
        expected = scipy.stats.spearmanr(values[row], values[row + 1]).statistic
        assert float(spearman(values[row], values[row + 1])) == pytest.approx(expected, abs=1e-12)
    tiny, shifted = values[0] * 1e-200, values[1] + 1e9
    assert float(pearson(tiny, shifted)) == pytest.approx(
        scipy.stats.pearsonr(values[0], values[1]).statistic, abs=1e-6
    )
    assert math.isnan(float(pearson(np.full(5, 0.1), np.arange(5.0))))


def test_random_subsets_are_drawn_alike_everywhere_and_all_different() -> None:
    first, again = bank(), bank()
    assert first.fingerprint == again.fingerprint
    assert len({run.digest for run in first.runs}) == SUBSETS
    assert all(len(run.rows) == 4 and (run.values == 0).all() for run in first.runs)
    others = [
        bank(fraction=0.2),
        bank(11),
        random_subsets("training", UNITS, fraction=0.1, subsets=SUBSETS, seed=1),
        random_subsets("another", UNITS, fraction=0.1, subsets=SUBSETS, seed=0),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


@pytest.mark.parametrize(
    ("units", "fraction", "subsets", "message"),
    [(4, 0.9, 2, "leaves nothing to train on"), (4, 0.25, 5, "only 4 ways to drop 1 of 4 units")],
)
def test_impossible_subsets_are_refused(units: int, fraction: float, subsets: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        random_subsets("training", units, fraction=fraction, subsets=subsets, seed=0)
