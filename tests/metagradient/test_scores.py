"""Scores of whole walks equal the unrolled autograd reference and central differences of ordinary training."""

from __future__ import annotations

import pytest
import torch

from tests.metagradient import cases, running
from tests.reference.ordinary import central_differences
from tests.reference.unrolled import unroll, unrolled_scores

WALKS = [(family, *setting) for family in cases.FAMILIES for setting in cases.parameters(family)]


@pytest.mark.parametrize(("family", "optimizer", "clip_norm", "micro"), WALKS)
def test_scores_equal_the_unrolled_reference(family: str, optimizer: str, clip_norm: float | None, micro: int) -> None:
    setting = cases.OPTIMIZERS[optimizer]
    problem = cases.FAMILIES[family].problem(setting, clip_norm=clip_norm, micro=micro)
    assert running.relative_error(running.walk(problem, chunk=2), unrolled_scores(problem)) < 1e-9


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("optimizer", ["sgd-nesterov-decay", "adamw"])
def test_the_trained_state_and_the_losses_equal_the_unrolled_reference(family: str, optimizer: str) -> None:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS[optimizer], clip_norm=0.5, micro=2)
    expected = unroll(problem, problem.weights).trained
    trained = running.train(problem, running.recipe(problem))[-1]
    assert trained.params.keys() == expected.params.keys()
    for found, reference in ((trained.params, expected.params), (trained.buffers, expected.buffers)):
        for name, value in found.items():
            torch.testing.assert_close(value, reference[name].detach(), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("optimizer", ["sgd-nesterov-decay", "adamw"])
def test_scores_equal_central_differences_of_ordinary_training(family: str, optimizer: str) -> None:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS[optimizer], clip_norm=0.5, micro=2)
    scores = running.walk(problem)
    units = [0, 9]
    reference = central_differences(problem, units)
    assert reference.uncertainty < 1e-6 * scores.abs().max()
    assert (scores[units] - reference.scores).abs().max() < 1e-6 * scores.abs().max()


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_the_clip_norm_of_these_cases_clips_some_steps(family: str) -> None:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5)
    assert min(unroll(problem, problem.weights).coefficients) < 0.7
