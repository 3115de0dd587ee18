"""What is in the state besides weights: running statistics, counters, tied, frozen and constant tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from tests.metagradient import cases, running
from tests.reference import families, models
from tests.reference.ordinary import central_differences
from tests.reference.problem import SGD, Problem
from tests.reference.unrolled import unroll, unrolled_scores

BATCH_NORMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "cumulative": {"momentum": None},
    "no-affine": {"affine": False},
    "untracked": {"tracked": False},
}


@pytest.mark.parametrize("kind", BATCH_NORMS)
@pytest.mark.parametrize("micro", [1, 3])
def test_scores_through_batch_norm_equal_the_unrolled_reference(kind: str, micro: int) -> None:
    problem = families.conv_net(**BATCH_NORMS[kind]).problem(SGD(0.9), micro=micro)
    assert running.relative_error(running.walk(problem, chunk=2), unrolled_scores(problem)) < 1e-9


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_scores_through_batch_norm_equal_central_differences_of_the_stock_layer(kind: str) -> None:
    problem = families.conv_net(**BATCH_NORMS[kind]).problem(SGD(0.9), micro=2)
    scores, reference = running.walk(problem), central_differences(problem, [0, 9])
    assert reference.uncertainty < 1e-6 * scores.abs().max()
    assert (scores[[0, 9]] - reference.scores).abs().max() < 1e-6 * scores.abs().max()


def test_batch_norm_in_eval_mode_during_training_is_a_constant() -> None:
    problem = cases.FAMILIES["conv-batchnorm"].problem(SGD(0.9), micro=2, train_mode=False)
    assert not running.initial_state(problem, running.recipe(problem)).buffers
    assert running.relative_error(running.walk(problem), unrolled_scores(problem)) < 1e-9


def test_running_statistics_matter_for_the_scores() -> None:
    """The guard on the guards above: with the statistics' cotangent cut off, scores are visibly wrong."""
    problem = cases.FAMILIES["conv-batchnorm"].problem(SGD(0.9))
    run = running.recipe(problem)
    state = running.train(problem, run)[-1]
    cotangent = running.query_cotangent(run, state, problem.measurements[0])
    assert max(float(v.abs().max()) for n, v in cotangent.items() if n.startswith("buffers/")) > 1e-3


def test_counters_are_carried_and_not_differentiated() -> None:
    problem = cases.FAMILIES["conv-batchnorm"].problem(SGD(0.9), micro=2)
    run = running.recipe(problem)
    states = running.train(problem, run)
    assert set(states[0].counters) == {"over_pixels.num_batches_tracked", "over_features.num_batches_tracked"}
    shards = sum(len(parts) for parts in problem.steps[:2])
    assert [int(count) for count in states[2].counters.values()] == [shards, shards]
    assert [int(count) for count in states[0].counters.values()] == [0, 0]
    assert not any("num_batches" in name for name in running.query_cotangent(run, states[-1], problem.measurements[0]))


def test_tied_weights_are_one_leaf() -> None:
    problem = families.gpt2(tied=True).problem(SGD(0.9))
    names = running.initial_state(problem, running.recipe(problem)).params.keys()
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names


def test_the_tie_matters_for_the_scores() -> None:
    tied, untied = (families.gpt2(tied=tied).problem(cases.OPTIMIZERS["adamw"]) for tied in (True, False))
    assert running.relative_error(running.walk(untied), running.walk(tied)) > 0.05


def partly_frozen() -> nn.Module:
    module = models.mlp()
    module.get_submodule("0").requires_grad_(False)
    return module


def test_frozen_parameters_are_not_in_the_state_and_scores_equal_the_unrolled_reference() -> None:
    problem = Problem(**{**vars(cases.FAMILIES["mlp"].problem(cases.OPTIMIZERS["adamw"])), "build": partly_frozen})
    state = running.train(problem, running.recipe(problem))[-1]
    assert list(state.params) == ["2.weight", "2.bias"]
    assert all(list(values) == ["2.weight", "2.bias"] for values in state.slots.values())
    assert running.relative_error(running.walk(problem), unrolled_scores(problem)) < 1e-9


class Unused(nn.Module):
    """A layer that some rows use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = torch.tanh(self.always(inputs))
        return scores + self.sometimes(inputs) ** 2 if inputs[0, 0] > 0 else scores


def test_parameters_without_a_gradient_are_decayed_and_scores_equal_the_unrolled_reference() -> None:
    problem = cases.FAMILIES["mlp"].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5, micro=2)
    problem = Problem(**{**vars(problem), "build": lambda: models.seeded(4, Unused)})
    assert running.relative_error(running.walk(problem), unrolled_scores(problem)) < 1e-9
    states = running.train(problem, running.recipe(problem))
    assert (states[-1].params["never.weight"].abs() < states[0].params["never.weight"].abs()).all()


class Centred(nn.Module):
    """Keeps a running mean of its inputs' projection, by formula, in a buffer that is not saved; a table in another."""

    centre: Tensor
    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4), persistent=False)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        centred = torch.tanh(hidden * self.table - self.centre)
        if self.training:
            self.calls += 1
            self.centre = 0.7 * self.centre + 0.3 * hidden.mean(0)
        scores: Tensor = self.last(centred)
        return scores


def test_buffers_that_are_not_saved_are_captured_and_differentiated() -> None:
    problem = cases.FAMILIES["mlp"].problem(cases.OPTIMIZERS["sgd-nesterov-decay"], micro=2)
    problem = Problem(**{**vars(problem), "build": lambda: models.seeded(4, Centred)})
    states = running.train(problem, running.recipe(problem))
    assert list(states[0].buffers) == ["centre"]
    assert list(states[0].counters) == ["calls"]
    assert [int(state.counters["calls"]) for state in states[:3]] == [0, 2, 4]
    expected = unroll(problem, problem.weights).trained.buffers["centre"].detach()
    torch.testing.assert_close(states[-1].buffers["centre"], expected, rtol=1e-12, atol=1e-14)


def test_scores_through_such_a_buffer_equal_the_unrolled_reference() -> None:
    problem = cases.FAMILIES["mlp"].problem(cases.OPTIMIZERS["sgd-nesterov-decay"], micro=2)
    problem = Problem(**{**vars(problem), "build": lambda: models.seeded(4, Centred)})
    assert running.relative_error(running.walk(problem, chunk=2), unrolled_scores(problem)) < 1e-9


def normalised() -> nn.Module:
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
    return module.double()


def instance_normalised() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(5, 3)
    ).double()


class ScalesByDetachedMean(nn.Module):
    """Moves a float buffer in place, by values that were cut off the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("seen").mul_(0.9).add_(inputs.mean().detach(), alpha=0.1)
        scores: Tensor = self.linear(inputs)
        return scores


@pytest.mark.parametrize(
    ("build", "buffer"),
    [
        (normalised, "_u"),
        (instance_normalised, "running_mean"),
        (lambda: models.seeded(0, ScalesByDetachedMean), "seen"),
    ],
)
def test_a_float_buffer_that_changes_without_a_gradient_path_is_refused_by_name(build: Any, buffer: str) -> None:
    problem = Problem(**{**vars(cases.FAMILIES["mlp"].problem(SGD())), "build": build})
    with pytest.raises(InputError, match=f"{buffer}.* without a gradient path"):
        running.initial_state(problem, running.recipe(problem))
