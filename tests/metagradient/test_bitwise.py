"""What must not change by a single bit: a resumed walk, the other lanes, the ambient random generator."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Recipe, train_step
from magic_pipeline.metagradient.walk import Lanes, walk_segment
from tests.metagradient import cases, running
from tests.reference.problem import Problem

FAMILIES = ("mlp-dropout", "conv-batchnorm", "gpt2-dropout")
Saved = dict[str, Tensor]


@functools.cache
def trained(family: str) -> tuple[Problem, Recipe, list[TrainState]]:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5, micro=2)
    run = running.recipe(problem)
    return problem, run, running.train(problem, run)


def copied(lanes: Lanes, lane: int) -> tuple[Saved, Tensor]:
    """What a checkpoint of one lane would hold."""
    return {n: v.clone() for n, v in lanes.cotangent.lane(lane).items()}, lanes.scores[lane].clone()


def walked(family: str, lanes: Lanes, start: int, stop: int, hold: int | None = None) -> None:
    problem, run, states = trained(family)
    for _ in walk_segment(run, running.data(problem), states[start], stop, lanes, chunk=2, hold=hold):
        pass


def end(family: str, columns: Sequence[int | None]) -> Lanes:
    problem, run, states = trained(family)
    return running.joined(problem, run, states[-1], columns)


def identical(one: tuple[Saved, Tensor], other: tuple[Saved, Tensor]) -> bool:
    return torch.equal(one[1], other[1]) and all(torch.equal(v, other[0][n]) for n, v in one[0].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_walk_resumed_by_lanes_at_different_positions_has_the_same_bits(family: str) -> None:
    steps = len(trained(family)[2]) - 1
    whole = end(family, (0, 1))
    walked(family, whole, 2, steps)
    middle = [copied(whole, lane) for lane in (0, 1)]
    walked(family, whole, 1, 2)
    later = copied(whole, 1)
    walked(family, whole, 0, 1)
    resumed = end(family, (None, None))
    resumed.join(0, *middle[0])  # query 0 was interrupted at step 2, query 1 at step 1
    walked(family, resumed, 1, 2)
    resumed.join(1, *later)
    walked(family, resumed, 0, 1)
    assert all(identical(copied(whole, lane), copied(resumed, lane)) for lane in (0, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_may_join_between_the_steps_of_a_segment(family: str) -> None:
    problem, run, states = trained(family)
    steps = len(states) - 1
    whole = end(family, (0, 1))
    resumed = end(family, (None, 1))
    saved = None
    for lanes in (whole, resumed):
        for step in walk_segment(run, running.data(problem), states[0], steps, lanes, chunk=2):
            if step == 2 and lanes is whole:
                saved = copied(whole, 0)
            elif step == 2 and saved is not None:
                resumed.join(0, *saved)
    assert all(identical(copied(whole, lane), copied(resumed, lane)) for lane in (0, 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("others", [(None, 1, None, None), (0, 1, 1, 0), (None, 1, 0, 1)], ids=str)
def test_the_other_lanes_do_not_change_a_lanes_bits(family: str, others: tuple[int | None, ...]) -> None:
    steps = len(trained(family)[2]) - 1
    alone, among = end(family, (None, 1)), end(family, others)
    walked(family, alone, 0, steps)
    walked(family, among, 0, steps)
    assert identical(copied(alone, 1), copied(among, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lanes_position_changes_no_more_than_rounding(family: str) -> None:
    # Not bitwise: a vectorised kernel rounds the odd elements at its end differently. The walk plan fixes each query's lane.
    steps = len(trained(family)[2]) - 1
    lanes = end(family, (1, 0, 0, 1))
    walked(family, lanes, 0, steps)
    for one, other in ((0, 3), (1, 2)):
        largest = float(lanes.scores[one].abs().max())
        assert float((lanes.scores[one] - lanes.scores[other]).abs().max()) <= 1e-12 * largest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lane_that_left_is_zero_and_the_others_keep_their_bits(family: str) -> None:
    steps = len(trained(family)[2]) - 1
    whole, left = end(family, (0, 1)), end(family, (0, 1))
    walked(family, whole, 0, steps)
    walked(family, left, 2, steps)
    left.leave(0)
    walked(family, left, 0, 2)
    assert identical(copied(whole, 1), copied(left, 1))
    assert not left.scores[0].any() and not any(v.any() for v in left.cotangent.lane(0).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_held_do_not_change_a_bit(family: str) -> None:
    steps = len(trained(family)[2]) - 1
    held, recomputed = end(family, (0, 1)), end(family, (0, 1))
    walked(family, held, 0, steps)
    walked(family, recomputed, 0, steps, hold=1)
    assert all(identical(copied(held, lane), copied(recomputed, lane)) for lane in (0, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_cotangents_are_never_changed_in_place(family: str) -> None:
    _, _, states = trained(family)
    lanes = end(family, (0, 1))
    before, start = [{n: v.clone() for n, v in state.flat().items()} for state in states], lanes.cotangent
    held = {n: v.clone() for n, v in start.lane(0).items()}
    walked(family, lanes, 0, len(states) - 1)
    assert all(
        torch.equal(v, state.flat()[n]) for flat, state in zip(before, states, strict=True) for n, v in flat.items()
    )
    assert all(torch.equal(v, start.lane(0)[n]) for n, v in held.items())


def test_a_step_gives_the_same_bits_each_time_and_with_weights_of_one() -> None:
    problem, run, states = trained("mlp-dropout")
    for weights in (None, problem.weights):
        again, _ = train_step(run, states[2], running.data(problem)(2), weights)
        assert all(torch.equal(v, again.flat()[n]) for n, v in states[3].flat().items())


def test_another_seed_drops_other_units() -> None:
    """The guard on the replay: if dropout were off, the seed would not matter."""
    problem, run, states = trained("mlp-dropout")
    shards = [running.shard(part) for part in problem.steps[2]]
    moved = [type(s)(s.batch, s.units, s.denominator, s.seed + 1) for s in shards]
    other, _ = train_step(run, states[2], moved)
    assert not torch.equal(other.params["0.weight"], states[3].params["0.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_walking_leave_the_ambient_generator_as_it_was(family: str) -> None:
    problem = trained(family)[0]
    torch.manual_seed(123)
    before = torch.get_rng_state()
    running.walk(problem)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_ambient_generator_drew_before_does_not_matter() -> None:
    problem = trained("mlp-dropout")[0]
    torch.manual_seed(1)
    first = running.walk(problem)
    torch.manual_seed(2)
    torch.randn(5)
    assert torch.equal(first, running.walk(problem))
