"""Scores do not depend on how the walk is carried out, and equal references that share no code with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walk_plan import WalkPlan, sealed_plan
from magic_pipeline.attribution.walk_planner import MOST_LANES
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError, InterruptedWalkError
from magic_pipeline.metagradient import optimizers
from magic_pipeline.tasks import protocol
from tests.attribution.running import TASKS, keys, open_small, relative_error, run, same_bits, stop_after
from tests.reference.problem import SGD, AdamW, MicroBatch, Problem
from tests.reference.unrolled import unrolled_scores

Undisturbed = Callable[..., Tensor]


def problem_of(opened: OpenExperiment) -> Problem:
    """The run as plain data for the references of tests/reference."""
    optimizer, found, place = opened.recipe.optimizer, None, opened.recipe.model.place
    if isinstance(optimizer, optimizers.AdamW):
        found = AdamW(optimizer.betas, optimizer.eps, optimizer.eps_root, optimizer.weight_decay)
    elif isinstance(optimizer, optimizers.SGD):
        found = SGD(optimizer.momentum, optimizer.nesterov, optimizer.weight_decay)  # type: ignore[assignment]
    assert found is not None

    def measurement(query: protocol.Query) -> Callable[[torch.nn.Module], Tensor]:
        return lambda module: protocol.query_measurement(opened.task, module, query, place)

    return Problem(
        lambda: copy.deepcopy(opened.module).double(),
        opened.task.example_losses,
        [
            [MicroBatch(place(shard.batch), shard.units, shard.denominator, shard.seed) for shard in opened.data(step)]
            for step in range(opened.steps)
        ],
        found,
        opened.recipe.learning_rates,
        [measurement(query.query) for query in opened.queries],
        units=len(opened.units),
        clip_norm=opened.recipe.clip_norm,
        train_mode=opened.recipe.model.train_mode,
    )


def plan_of(opened: OpenExperiment) -> WalkPlan:
    query = opened.queries[0]
    plan = sealed_plan(opened.store, opened.layout, query.key, query.digest, train(opened).digest)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "attribution",
    [
        {"segment_steps": 1},
        {"segment_steps": 100},
        {"query_batch": 1},
        {"query_batch": 2},
        {"chunk": 1},
        {"chunk": 3},
        {"chunk": "auto"},
        {"save_every": 1},
        {"save_every": 4},
        {"threads": 2},
    ],
    ids=str,
)
def test_scores_do_not_depend_on_how_the_walk_is_carried_out(
    tmp_path: Path, undisturbed: Undisturbed, attribution: dict[str, Any]
) -> None:
    found = run(open_small(tmp_path, attribution=attribution))
    assert relative_error(found, undisturbed()) < 1e-10


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_scores_do_not_depend_on_micro_batches(tmp_path: Path, undisturbed: Undisturbed, micro: int) -> None:
    found = run(open_small(tmp_path, training={"microbatch_size": micro}))
    assert relative_error(found, undisturbed()) < 1e-10


def test_scores_do_not_depend_on_a_memory_budget_that_splits_segments(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"training": {"batch_size": 1}, "attribution": {"segment_steps": 24}}
    free = open_small(tmp_path / "free", **changes)
    expected = run(free)
    assert plan_of(free).hold is None
    with pytest.raises(
        InputError, match=r"attribution\.memory_budget: 100 bytes are too few .* about (\d+) bytes"
    ) as few:
        run(open_small(tmp_path / "tight", **changes | {"attribution": {"segment_steps": 24, "memory_budget": 100}}))
    # What one query needs with two states held, and room for two more.
    needed = int(str(few.value).split("about ")[1].split(" ")[0])
    budget = {"segment_steps": 24, "memory_budget": int(1.5 * needed), "query_batch": 1, "chunk": 1}
    tight = open_small(tmp_path / "tight", **changes | {"attribution": budget})
    found = run(tight)
    hold = plan_of(tight).hold
    assert hold is not None
    assert 2 <= hold <= 8
    assert relative_error(found, expected) < 1e-10


def test_many_queries_are_walked_in_cohorts(tmp_path: Path) -> None:
    ids = [f"q{number}" for number in range(MOST_LANES + 2)]
    opened = open_small(
        tmp_path, task={"type": f"{TASKS}:SmallTask", "query_ids": ids}, attribution={"chunk": 8, "save_every": 6}
    )
    found = run(opened)
    assert plan_of(opened).cohort == tuple(keys(opened)[:MOST_LANES])
    assert relative_error(found, unrolled_scores(problem_of(opened))) < 1e-9


@pytest.mark.parametrize("middle", ["tanh", "dropout", "batch_norm"])
@pytest.mark.parametrize(
    "training",
    [{}, {"clip_norm": 0.3}, {"microbatch_size": 2}, {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}}],
)
def test_scores_equal_the_unrolled_run(tmp_path: Path, middle: str, training: dict[str, Any]) -> None:
    opened = open_small(tmp_path, task={"type": f"{TASKS}:SmallTask", "middle": middle}, training=training)
    assert relative_error(run(opened), unrolled_scores(problem_of(opened))) < 1e-9


@pytest.mark.parametrize(
    ("tied", "dropout", "training"),
    [
        (True, 0.0, {}),
        (False, 0.0, {"clip_norm": 0.3}),
        (True, 0.2, {"microbatch_size": 2}),
        (True, 0.0, {"clip_norm": 0.3, "microbatch_size": 1, "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}}),
    ],
)
def test_a_causal_language_model_equals_the_unrolled_run(
    tmp_path: Path, tied: bool, dropout: float, training: dict[str, Any]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"text{number}.txt").write_text(f"the {number}th text says {'ab' * (3 + number)}.\n" * 2)
    task = {
        "type": "causal_lm_text",
        "text_folder": "texts",
        "documents": 6,
        "layers": 1,
        "d_model": 8,
        "heads": 2,
        "context": 16,
        "tied": tied,
        "dropout": dropout,
    }
    # Batches of 4 leave one of 2 at the end of an epoch; the texts differ in length.
    opened = open_small(tmp_path, task=task, queries={"split": "held_out", "count": 1}, training=training)
    # transformers' softmax and its like round in float32 nowhere in GPT-2's eager attention.
    assert relative_error(run(opened), unrolled_scores(problem_of(opened))) < 1e-9


@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"clip_norm": 0.3, "microbatch_size": 2},
        {"microbatch_size": 1, "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}},
        {"clip_norm": 0.1, "microbatch_size": 4, "optimizer": {"name": "sgd", "lr": 0.5}},
    ],
)
def test_the_digits_equal_the_unrolled_run(tmp_path: Path, model: str, training: dict[str, Any]) -> None:
    task = {"type": "digits_classifier", "model": model, "hidden": 5, "train_size": 18}
    # Batches of 5 leave one of 3 at the end of an epoch.
    settings = {"batch_size": 5} | training
    opened = open_small(tmp_path, task=task, queries={"split": "test", "count": 2}, training=settings)
    found = run(opened)
    assert float(found.abs().max()) > 1e-4
    # The losses are written out: the reference's module has plain tensors in place of parameters, and the task asks for one.
    reference = replace(
        problem_of(opened),
        example_losses=cross_entropy_of_digits,
        measurements=[measurement_of_digits(opened, query.query) for query in opened.queries],
    )
    assert relative_error(found, unrolled_scores(reference)) < 1e-9


def cross_entropy_of_digits(module: torch.nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["pixels"]), batch["labels"], reduction="none")


def measurement_of_digits(opened: OpenExperiment, query: protocol.Query) -> Callable[[torch.nn.Module], Tensor]:
    batch = opened.recipe.model.place(opened.task.collate(query.examples))
    return lambda module: cross_entropy_of_digits(module, batch).mean()


def test_float32_scores_are_close_to_float64_ones(tmp_path: Path, undisturbed: Undisturbed) -> None:
    found = run(open_small(tmp_path, training={"dtype": "float32"}))
    assert found.dtype == torch.float32
    assert relative_error(found.double(), undisturbed()) < 1e-3


def test_the_sealed_plan_is_kept_whatever_settings_say_later(trained_folder: Path, undisturbed: Undisturbed) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=stop_after(2))
    plan = plan_of(opened)
    changed = open_small(
        trained_folder,
        training={"microbatch_size": 3},
        attribution={"chunk": 1, "save_every": 1, "segment_steps": 3, "query_batch": 1, "threads": 2},
    )
    assert same_bits(run(changed), undisturbed())
    assert plan_of(changed) == plan


def test_training_goes_on_with_the_micro_batches_that_it_was_begun_with(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    opened = open_small(tmp_path)
    with pytest.raises(InterruptedWalkError):
        train(opened, should_stop=stop_after(3))
    assert same_bits(run(open_small(tmp_path, training={"microbatch_size": 1})), undisturbed())


def test_two_undisturbed_runs_agree_to_the_last_bit(tmp_path: Path, undisturbed: Undisturbed) -> None:
    assert same_bits(run(open_small(tmp_path)), undisturbed())
