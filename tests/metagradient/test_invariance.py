"""What scores must not depend on: how the run is cut, held, batched and split."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from magic_pipeline.metagradient.walk import walk_segment
from tests.metagradient import cases, running
from tests.reference.problem import Problem


@functools.cache
def problem() -> Problem:
    return cases.FAMILIES["mlp"].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5, micro=2)


@functools.cache
def plain_scores() -> Tensor:
    """One segment, everything held, one lane at a time."""
    return running.walk(problem(), segment_steps=len(problem().steps))


@pytest.mark.parametrize(
    "plan",
    [
        *({"segment_steps": length} for length in (1, 2, 4, 5)),
        *({"segment_steps": 6, "hold": hold} for hold in (1, 2, 3, 5)),
        {"chunk": 2},
        {"segment_steps": 4, "hold": 2, "chunk": 2},
    ],
    ids=str,
)
def test_scores_do_not_depend_on_segments_states_held_or_chunk(plan: dict[str, Any]) -> None:
    assert running.relative_error(running.walk(problem(), **plan), plain_scores()) < 1e-10


@pytest.mark.parametrize("columns", [(0,), (1,), (None, 1, 0, None), (0, 1, 1, 0, 1, None)], ids=str)
def test_scores_do_not_depend_on_which_lanes_there_are(columns: tuple[int | None, ...]) -> None:
    scores = running.walk(problem(), columns=columns, chunk=1 if len(columns) == 1 else 2)
    for lane, column in enumerate(columns):
        if column is None:
            assert not scores[:, lane].any()
        else:
            assert running.relative_error(scores[:, [lane]], plain_scores()[:, [column]]) < 1e-10


@pytest.mark.parametrize("family", ["mlp", "gpt2-tied"])
@pytest.mark.parametrize("micro", cases.MICRO_BATCHES[1:])
def test_scores_do_not_depend_on_micro_batches(family: str, micro: int) -> None:
    whole, split = (
        cases.FAMILIES[family].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5, micro=m) for m in (1, micro)
    )
    assert running.relative_error(running.walk(split, chunk=2), running.walk(whole, chunk=2)) < 1e-10


def test_micro_batches_of_batch_statistics_are_another_run() -> None:
    """So that nobody claims the invariance where it does not hold: a guard on the guard above."""
    whole, split = (cases.FAMILIES["conv-batchnorm"].problem(cases.OPTIMIZERS["adamw"], micro=m) for m in (1, 2))
    assert running.relative_error(running.walk(split), running.walk(whole)) > 1e-3


def test_the_queries_columns_add_up_to_the_aggregate_query() -> None:
    first, second = problem().measurements
    together = Problem(**{**vars(problem()), "measurements": [lambda module: first(module) + second(module)]})
    assert running.relative_error(plain_scores().sum(1, keepdim=True), running.walk(together)) < 1e-12


def order(steps: int, hold: int | None) -> list[str]:
    """What a walk over the first `steps` steps does: `n` makes step n, `<n` pulls back through it."""
    run, whole = running.recipe(problem()), running.data(problem())
    states = running.train(problem(), run)
    lanes = running.joined(problem(), run, states[steps], (None,))
    done: list[str] = []

    def noted(step: int) -> Any:
        done.append(str(step))
        return whole(step)

    yielded = []
    for step in walk_segment(run, noted, states[0], steps, lanes, chunk=1, hold=hold):
        if step < steps:
            assert done.pop() == str(step)  # the pullback asks for its step's data too
            done.append(f"<{step}")
        yielded.append(step)
    assert yielded == list(range(steps, -1, -1))
    return done


@pytest.mark.parametrize(
    ("steps", "hold", "expected"),
    [
        (4, None, "0 1 2 3 <3 <2 <1 <0"),
        (4, 4, "0 1 2 3 <3 <2 <1 <0"),
        (4, 1, "0 1 2 3 <3 0 1 2 <2 0 1 <1 0 <0"),
        (6, 2, "0 1 2 3 4 5 <5 3 4 <4 3 <3 0 1 2 <2 1 <1 0 <0"),
    ],
)
def test_steps_are_recomputed_in_this_order(steps: int, hold: int | None, expected: str) -> None:
    assert " ".join(order(steps, hold)) == expected


@pytest.mark.parametrize("hold", [1, 2, 3, 4, 5, 6])
def test_no_more_steps_are_recomputed_than_binomial_checkpointing_needs(hold: int) -> None:
    """Griewank & Walther 2000: with c snapshots, `r l - C(c + r, r - 1)` steps besides the l that are differentiated."""
    length = 6
    repetitions = next(r for r in range(1, length + 1) if math.comb(hold + r, hold) >= length)
    optimum = repetitions * length - math.comb(hold + repetitions, repetitions - 1) + length
    made = [step for step in order(length, hold) if not step.startswith("<")]
    assert len(made) <= optimum


def test_the_rematerialised_end_is_handed_out_once_before_anything_is_pulled_back() -> None:
    run = running.recipe(problem())
    states = running.train(problem(), run)
    lanes = running.joined(problem(), run, states[6], (0, 1))
    ends: list[bool] = []

    def check(state: Any) -> None:
        ends.append(
            all(torch.equal(v, states[6].flat()[n]) for n, v in state.flat().items()) and not lanes.scores.any()
        )

    for _ in walk_segment(run, running.data(problem()), states[2], 6, lanes, chunk=1, hold=2, check_end=check):
        pass
    assert ends == [True]
