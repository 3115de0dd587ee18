"""Scores equal those that an independent implementation computed: tests/oracle/README.md."""

from __future__ import annotations

import pytest
import torch

from tests.metagradient import running
from tests.reference import oracle
from tests.reference.unrolled import unrolled_scores


@pytest.mark.parametrize("name", oracle.NAMES)
def test_scores_equal_an_independent_implementation(name: str) -> None:
    stored = oracle.load(name)
    scores = running.walk(stored.problem, chunk=2)
    # Of the run's largest score: the stored rounding (float32 bias corrections) does not shrink with a query's own scores.
    assert (scores - stored.scores).abs().max() < 1e-6 * stored.scores.abs().max()
    assert running.relative_error(scores, stored.scores) < 1e-5


@pytest.mark.parametrize("name", oracle.NAMES[:2])
def test_the_trained_weights_equal_an_independent_implementation(name: str) -> None:
    stored = oracle.load(name)
    trained = running.train(stored.problem, running.recipe(stored.problem))[-1]
    for parameter, value in trained.params.items():
        torch.testing.assert_close(value, stored.final[parameter], rtol=0, atol=2e-8, msg=parameter)


def test_scores_equal_the_unrolled_reference_more_closely_than_the_stored_ones() -> None:
    stored = oracle.load("tiny_f64")
    assert running.relative_error(running.walk(stored.problem), unrolled_scores(stored.problem)) < 1e-9
