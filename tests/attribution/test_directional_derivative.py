"""Along a random direction the scores are what two trainings show, and one wrong score is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from magic_pipeline.attribution.directional_derivative import LESS, MORE, derivative_bank, directional_derivative
from magic_pipeline.attribution.experiment_settings import DerivativeSettings
from magic_pipeline.attribution.linear_datamodeling import RunResult
from magic_pipeline.attribution.validation import derivative_digest, read_validation, write_directional_derivative
from magic_pipeline.attribution.validation_tables import validation_lines
from magic_pipeline.errors import InputError
from tests.attribution.running import open_small, run


def test_the_scores_agree_with_two_trainings_to_the_square_of_h(tmp_path: Path) -> None:
    for h, tolerance in ((0.02, 1e-2), (0.002, 1e-4)):
        opened = open_small(tmp_path, validation={"derivative": {"h": h, "tolerance": tolerance}})
        assert derivative_digest(opened) is None
        run(opened)
        report = write_directional_derivative(opened)
        assert report.content["holds"], report.content
        assert min(abs(row["predicted"]) for row in report.content["queries"]) > 1e-3
        assert write_directional_derivative(opened).found and derivative_digest(opened) == report.digest
        lines = validation_lines(read_validation(opened))
        assert "agrees, worst relative error" in lines[0] and len(lines) == 5


def test_one_wrong_score_and_a_training_that_diverged_are_found() -> None:
    settings = DerivativeSettings(h=0.01, seed=2)
    bank = derivative_bank("f" * 64, 3, settings)
    signs = (bank.run(MORE).values - 1) / 0.01
    assert set(signs.round(9)) == {-1.0, 1.0}
    scores = np.array([[1.0, 1.0], [2.0, 2.0], [-0.5, -0.5]])
    slope = float(signs @ scores[:, 0])
    measured = {"a": 10 + 0.01 * slope, "b": 10 + 0.01 * slope}, {"a": 10 - 0.01 * slope, "b": 10 - 0.01 * slope}
    results = [
        RunResult(label, bank.run(label).digest, values) for label, values in zip((MORE, LESS), measured, strict=True)
    ]
    queries = {"a": "A", "b": "B"}
    assert directional_derivative(bank, results, scores=scores, queries=queries, settings=settings).holds
    wrong = scores.copy()
    wrong[1, 1] *= 1.1
    found = directional_derivative(bank, results, scores=wrong, queries=queries, settings=settings)
    assert not found.holds and found.queries[0].error == pytest.approx(0, abs=1e-9)
    largest = max(abs(float(signs @ wrong[:, 1])), abs(slope), 2.2)
    assert found.worst == found.queries[1].error == pytest.approx(0.2 / largest)
    diverged = [results[0], RunResult(LESS, results[1].digest, {}, diverged_at=3)]
    found = directional_derivative(bank, diverged, scores=scores, queries=queries, settings=settings)
    assert found.worst is None and not found.holds
    with pytest.raises(InputError, match="is there twice"):
        directional_derivative(bank, [*results, results[0]], scores=scores, queries=queries, settings=settings)
