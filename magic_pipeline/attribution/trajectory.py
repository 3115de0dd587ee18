"""The sealed trajectory: the states at segment boundaries, read back so that a damaged one is replaced by replaying to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from magic_pipeline.attribution.expectations import of_training
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.rank_parts import agreed, owned, part_of, state_digest, state_of_parts
from magic_pipeline.checkpoints.chain import Checkpoint
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.errors import MagicError, TrajectoryMismatchError
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import train_step

logger = logging.getLogger("magic_pipeline.attribution")

LOSSES = "losses"
# A state that was computed again may differ from the sealed one by rounding (other threads, hardware or versions) and no more.
# Relative to the largest value of each tensor.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Trajectory:
    """A finished training run.

    Attributes:
        digest: over the contents of all boundary states.
        losses: of every step.
        resumed_from: the step that this process started at; `steps` where all was there already.
        boundaries: the steps whose states are sealed.
        state_digests: of the state at each boundary, whatever file holds it.
        threads: CPU threads that it was made with, and that a replay takes.
        microbatch_size: likewise; None took a batch whole.
    """

    digest: str
    losses: Sequence[float]
    steps: int
    resumed_from: int
    boundaries: tuple[int, ...]
    state_digests: tuple[str, ...]
    threads: int
    microbatch_size: int | None
    versions: Mapping[str, str]


def trajectory_digest(boundaries: Sequence[int], state_digests: Sequence[str]) -> str:
    """One digest over the contents of the boundary states."""
    return fingerprint({"states": [[step, digest] for step, digest in zip(boundaries, state_digests, strict=True)]})


def sealed_trajectory(opened: OpenExperiment) -> Trajectory | None:
    """The finished trajectory; None where training is not complete."""
    complete = opened.trajectory_chain.completed(of_training(opened.fingerprint), read=[LOSSES])
    return None if complete is None else from_completion(complete, resumed_from=opened.steps)


def required_trajectory(opened: OpenExperiment) -> Trajectory:
    """The finished trajectory.

    Raises:
        MagicError: training is not complete; says what to do.
    """
    trajectory = sealed_trajectory(opened)
    if trajectory is None:
        raise MagicError(
            f"experiment {opened.experiment.name}: there is no finished training trajectory in {opened.store.url}/{opened.folder}; "
            "materialize training_trajectory (or call train) first"
        )
    return trajectory


def from_completion(complete: Checkpoint, *, resumed_from: int) -> Trajectory:
    facts = complete.facts
    losses = complete.tensors(LOSSES)["losses"].tolist()
    return Trajectory(
        facts["trajectory"],
        losses,
        len(losses),
        resumed_from,
        tuple(facts["boundaries"]),
        tuple(facts["state_digests"]),
        facts["threads"],
        facts["microbatch_size"],
        facts["versions"],
    )


def state_at(opened: OpenExperiment, trajectory: Trajectory, step: int) -> TrainState:
    """The state at a boundary: sealed, or where that is damaged, replayed from the boundary before and compared with its digest."""
    position = trajectory.boundaries.index(step)
    checkpoint = _sealed_state(opened, step, trajectory.state_digests[position])
    if checkpoint is not None:
        return state_of_parts(opened, checkpoint)
    if position == 0:
        state = opened.initial_state
    else:
        before = trajectory.boundaries[position - 1]
        logger.warning("the state of step %d cannot be read; it is computed again from step %d", step, before)
        state = state_at(opened, trajectory, before)
        for replayed in range(before, step):
            state, _ = train_step(opened.recipe, state, opened.shards(replayed, trajectory.microbatch_size))
    check_state(opened, trajectory, state)
    return state


def _sealed_state(opened: OpenExperiment, step: int, digest: str) -> Checkpoint | None:
    chain = opened.trajectory_chain
    names = [name for name in reversed(chain.sealed()) if name.step == step] if opened.board.leads else []
    read = [part_of(rank) for rank in opened.ranks.hosted]
    return agreed(opened, chain, names, of_training(opened.fingerprint) | {"state": digest}, read)


def check_state(opened: OpenExperiment, trajectory: Trajectory, state: TrainState) -> None:
    """Compares a state that was computed again with the sealed boundary.

    Any difference is warned about with its size.

    Raises:
        TrajectoryMismatchError: it is beyond rounding, or cannot be measured since the sealed state is damaged.
    """
    if state.step not in trajectory.boundaries:
        return
    expected = trajectory.state_digests[trajectory.boundaries.index(state.step)]
    if state_digest(opened, state) == expected:
        return
    sealed = _sealed_state(opened, state.step, expected)
    if sealed is None:
        raise TrajectoryMismatchError(
            f"step {state.step}: the state computed again differs from the one that was sealed, which cannot be read any more"
        )
    mine = _difference(owned(opened.ranks, state), owned(opened.ranks, state_of_parts(opened, sealed)))
    size = max(opened.board.collect(mine))
    tolerance = TOLERANCE[opened.recipe.model.dtype]
    if not size <= tolerance:
        raise TrajectoryMismatchError(
            f"step {state.step}: the state computed again is {size:.2g} off the sealed one (relative; tolerance {tolerance:.0e}): the "
            "walk would be of another training run. Was it made on other hardware, with other versions or non-deterministic kernels?"
        )
    logger.warning(
        "step %d: the state computed again is %.2g off the sealed one (relative): scores are exact to rounding, not to the last bit",
        state.step,
        size,
    )


def _difference(state: TrainState, sealed: TrainState) -> float:
    worst = 0.0
    mine, theirs = state.flat(), sealed.flat()
    if mine.keys() != theirs.keys():
        return float("inf")
    for name, tensor in mine.items():
        other = theirs[name].to(tensor)
        scale = float(other.abs().max()) if other.numel() else 0.0
        off = float((tensor - other).abs().max()) if other.numel() else 0.0
        worst = max(worst, off / scale if scale > 0 else off) if off == off else float("inf")
    return worst
