"""States of a finished trajectory that are not there any more (freed by gc, or lost) are made again before a walk, and sealed.

Training is repeated from the state before each gap, exactly as it was sealed: its boundaries, micro-batches and threads, whatever
settings say now. A state with other contents is refused, for the finished walks would be of another training run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from magic_pipeline.attribution.board import decided
from magic_pipeline.attribution.expectations import of_training
from magic_pipeline.attribution.free_space import check_free_space, state_bytes
from magic_pipeline.attribution.ledger import record_training
from magic_pipeline.attribution.library_versions import versions
from magic_pipeline.attribution.observing import CheckpointSealed, Observe, ShouldStop, TrainingProgress
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.progress import Pace
from magic_pipeline.attribution.rank_parts import owned, parts_of_state, seal_together, state_digest
from magic_pipeline.attribution.trajectory import LOSSES, Trajectory, state_at, trajectory_digest
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import InterruptedWalkError, TrajectoryMismatchError
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import train_step

logger = logging.getLogger("magic_pipeline.attribution")


def restore_states(opened: OpenExperiment, trajectory: Trajectory, observe: Observe, should_stop: ShouldStop) -> None:
    """Makes and seals the boundary states that no manifest names; nothing where all are there, which one listing tells.

    Raises:
        HeldError: another live process holds the trajectory, most likely to do the same.
        TrajectoryMismatchError: training does not give the sealed states again.
        InterruptedWalkError: `should_stop` said so; the states made so far are sealed.
    """
    if not missing_states(opened, trajectory):
        return
    with ExitStack() as held:
        lease = held.enter_context(opened.trajectory_chain.take()) if opened.board.leads else None
        missing = missing_states(opened, trajectory)  # another process may just have made them
        logger.warning("%d of %d states of the trajectory are made again", len(missing), len(trajectory.boundaries))
        with exact_numerics(trajectory.threads):
            _Restoring(opened, trajectory, lease, observe, should_stop).run(missing)


def missing_states(opened: OpenExperiment, trajectory: Trajectory) -> list[int]:
    """The boundaries whose states no manifest names."""
    there = {name.step for name in opened.trajectory_chain.sealed()} if opened.board.leads else set()
    missing: list[int] = decided(opened.board, [step for step in trajectory.boundaries if step not in there])
    return missing


class _Restoring:
    def __init__(
        self,
        opened: OpenExperiment,
        trajectory: Trajectory,
        lease: Lease | None,
        observe: Observe,
        should_stop: ShouldStop,
    ) -> None:
        self.opened, self.trajectory, self.lease = opened, trajectory, lease
        self.observe, self.should_stop = observe, should_stop
        self.pace = Pace()

    def run(self, missing: list[int]) -> None:
        state: TrainState | None = None
        for number, step in enumerate(missing):
            position = self.trajectory.boundaries.index(step)
            if position == 0:
                state = self.opened.initial_state
            else:
                before = self.trajectory.boundaries[position - 1]
                if state is None or state.step != before:
                    state = state_at(self.opened, self.trajectory, before)
                state = self._train(state, step)
            if number == 0:
                needed = len(missing) * state_bytes(owned(self.opened.ranks, state))
                check_free_space(self.opened.store, needed, f"{len(missing)} states of the trajectory")
            self._seal(state, position)

    def _train(self, state: TrainState, stop: int) -> TrainState:
        opened, start = self.opened, state.step
        if opened.board.leads:
            record_training(opened.store, opened.layout, start, stop)
        opened.board.collect(None)  # no collective waits for another process's disk
        for step in range(start, stop):
            if opened.ranks.agree(self.should_stop(), opened.recipe.model.device):
                raise InterruptedWalkError(
                    f"the trajectory was being made again, and stopped before step {step}, as asked"
                )
            state, record = train_step(opened.recipe, state, opened.shards(step, self.trajectory.microbatch_size))
            rate, left = self.pace.step(self.trajectory.steps - step - 1)
            if opened.board.leads:
                self.observe(TrainingProgress(step + 1, opened.steps, record.loss, rate, left, start))
        return state

    def _seal(self, state: TrainState, position: int) -> None:
        """As training sealed it, so that training could go on from it too."""
        opened, trajectory = self.opened, self.trajectory
        digest = state_digest(opened, state)
        if digest != trajectory.state_digests[position]:
            raise TrajectoryMismatchError(
                f"step {state.step}: the trajectory's states are not stored any more, and training does not give the same bits "
                f"again (made with {_listed(trajectory.versions)}; here are {_listed(versions())}). Run it where it was made; or "
                f"export the scores, remove this training "
                f"(magic-pipeline delete EXPERIMENT.yaml --fingerprint {opened.fingerprint[:12]}) and run everything anew"
            )
        reached = trajectory.state_digests[: position + 1]
        facts = of_training(opened.fingerprint) | {
            "boundaries": trajectory.boundaries,
            "state_digests": reached,
            "trajectory": trajectory_digest(trajectory.boundaries[: position + 1], reached),
            "threads": trajectory.threads,
            "microbatch_size": trajectory.microbatch_size,
            "device": opened.recipe.model.device.type,
            "versions": dict(trajectory.versions),
            "state": digest,
        }
        parts: dict[str, Mapping[str, torch.Tensor]] = dict(parts_of_state(opened.ranks, state))
        if opened.board.leads:
            parts[LOSSES] = {"losses": torch.tensor(trajectory.losses[: state.step], dtype=torch.float64)}
        size = seal_together(opened.board, opened.trajectory_chain, self.lease, state.step, parts, facts)
        if opened.ranks.gang.processes > 1:
            opened.board.collect(None)  # no collective waits for another process's disk
        if opened.board.leads:
            self.observe(CheckpointSealed(None, state.step, size))


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
