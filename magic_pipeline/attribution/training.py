"""Training: the steps of the run, sealed at every segment boundary, resumed from the newest sealed one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from magic_pipeline.attribution.board import decided
from magic_pipeline.attribution.checking import check_before_training
from magic_pipeline.attribution.describing import describe
from magic_pipeline.attribution.expectations import of_training
from magic_pipeline.attribution.free_space import check_free_space, state_bytes, walk_bytes
from magic_pipeline.attribution.ledger import most_retrained, record_training
from magic_pipeline.attribution.library_versions import versions
from magic_pipeline.attribution.observing import (
    CheckpointSealed,
    Event,
    Observe,
    ShouldStop,
    TrainingProgress,
    never,
    unobserved,
)
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.progress import Pace
from magic_pipeline.attribution.rank_parts import (
    agreed,
    owned,
    part_of,
    parts_of_state,
    seal_together,
    state_digest,
    state_of_parts,
)
from magic_pipeline.attribution.restoring import restore_states
from magic_pipeline.attribution.trajectory import (
    LOSSES,
    Trajectory,
    required_trajectory,
    sealed_trajectory,
    trajectory_digest,
)
from magic_pipeline.checkpoints.background import Background, is_worth_a_thread
from magic_pipeline.checkpoints.chain import COMPLETE_STEP, Checkpoint, by_age
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import InterruptedWalkError, NonFiniteError
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.segments import segment_boundaries
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import train_step

# Below this a step's threads spend their time waiting: 60 steps of a 5,000-parameter model took 0.2 s with one thread and
# 1.7 s with two on a busy machine.
_FLOPS_WORTH_THREADS = 10**8


def train(opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never) -> Trajectory:
    """Trains to the end, going on from the newest sealed boundary. Of a finished training only states that were freed are made again.

    Raises:
        InputError: the model, its data or a query is wrong; found before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; names the step.
        HeldError: another live process trains this.
        TrajectoryMismatchError: freed states cannot be made again bit by bit.
        InterruptedWalkError: `should_stop` said so; the boundary reached last is sealed.
    """
    finished = sealed_trajectory(opened)
    if decided(opened.board, finished is not None):
        trajectory = finished or required_trajectory(opened)
        restore_states(opened, trajectory, observe, should_stop)
        return trajectory
    with ExitStack() as held:
        lease = None
        if opened.board.leads:
            lease = held.enter_context(opened.trajectory_chain.take())
            describe(opened)
        return _Training(opened, lease, observe, should_stop).run()


class _Training:
    def __init__(self, opened: OpenExperiment, lease: Lease | None, observe: Observe, should_stop: ShouldStop) -> None:
        self.opened, self.lease, self.observe, self.should_stop = opened, lease, observe, should_stop
        self.losses: list[float] = []
        self.state_digests: list[str] = []
        self.pace = Pace()
        self.sealed_at: int | None = None
        self.steps_redone = 0
        self.chain, self.saves = opened.trajectory_chain, opened.board.channel("saves of training")

    def run(self) -> Trajectory:
        newest = self._resumable()
        if newest is None:
            setting = self.opened.experiment.attribution.segment_steps
            self.boundaries = segment_boundaries(self.opened.steps, None if setting == "auto" else setting)
            self.threads = decided(self.opened.board, chosen_threads(self.opened))
            self.microbatch_size = self.opened.experiment.training.microbatch_size
            with exact_numerics(self.threads):
                check_before_training(self.opened)
            state = self.opened.initial_state
        else:
            # The plan is the sealed one: settings may have changed since.
            self.boundaries, self.threads = tuple(newest.facts["boundaries"]), newest.facts["threads"]
            self.microbatch_size = newest.facts["microbatch_size"]
            self.losses = newest.tensors(LOSSES)["losses"].tolist()
            self.state_digests = list(newest.facts["state_digests"])
            state = state_of_parts(self.opened, newest)
            self.sealed_at = newest.step
        self.resumed_from = state.step
        if self.opened.board.leads:
            self.steps_redone = most_retrained(self.opened.store, self.opened.layout, state.step)
        self._check_free_space(state)
        with exact_numerics(self.threads), Background[CheckpointSealed]() as self.background:
            if newest is None:
                self._seal(state)
            for stop in (boundary for boundary in self.boundaries if boundary > state.step):
                if self.opened.board.leads:
                    record_training(self.opened.store, self.opened.layout, state.step, stop)
                self._meet()
                state = self._segment(state, stop)
                self._seal(state)
            self._note(self.background.wait())
        lead, losses, facts = self.opened.board.leads, self._losses(), self._facts()
        seal_together(self.opened.board, self.chain, self.lease, COMPLETE_STEP, {LOSSES: losses} if lead else {}, facts)
        if self.lease is not None:
            self.lease.sweep()  # what killed writers left
        return Trajectory(
            facts["trajectory"],
            losses["losses"].tolist(),
            len(self.losses),
            self.resumed_from,
            tuple(facts["boundaries"]),
            tuple(facts["state_digests"]),
            facts["threads"],
            facts["microbatch_size"],
            facts["versions"],
        )

    def _check_free_space(self, state: TrainState) -> None:
        left = sum(boundary >= state.step for boundary in self.boundaries) - (self.sealed_at == state.step)
        mine = owned(self.opened.ranks, state)
        needed = left * state_bytes(mine) + walk_bytes(mine, self.opened.score_rows)
        what = f"training ({left} states, and then one query's walk)"
        check_free_space(self.opened.store, needed * self.opened.ranks.gang.processes, what)

    def _resumable(self) -> Checkpoint | None:
        names = by_age(self.chain.sealed(), "highest") if self.opened.board.leads else []
        read = [*map(part_of, self.opened.ranks.hosted), LOSSES]
        return agreed(self.opened, self.chain, names, of_training(self.opened.fingerprint), read)

    def _segment(self, state: TrainState, stop: int) -> TrainState:
        for step in range(state.step, stop):
            if self.opened.ranks.agree(self.should_stop(), self.opened.recipe.model.device):
                self._note(self.background.wait())
                if self.sealed_at != state.step:
                    self._seal(state)
                    self._note(self.background.wait())
                raise InterruptedWalkError(f"training stopped before step {step}, as asked; a rerun goes on from there")
            state, record = train_step(self.opened.recipe, state, self.opened.shards(step, self.microbatch_size))
            self.losses.append(record.loss)
            self._note(self.background.finished())
            rate, left = self.pace.step(self.opened.steps - step - 1)
            done = (step + 1, self.opened.steps, record.loss, rate, left)
            self._observe(TrainingProgress(*done, self.resumed_from, self.steps_redone))
        return state

    def _seal(self, state: TrainState) -> None:
        """Seals a boundary, or where training was asked to stop, the state in between; a large one while training goes on."""
        flat = owned(self.opened.ranks, state).flat()
        bad = [name for name, tensor in flat.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise NonFiniteError(f"the state of step {state.step} is not finite in {bad[0]} (and {len(bad) - 1} more)")
        digest = state_digest(self.opened, state)
        if state.step in self.boundaries[len(self.state_digests) :]:
            self.state_digests.append(digest)
        parts: dict[str, Mapping[str, torch.Tensor]] = dict(parts_of_state(self.opened.ranks, state))
        if self.opened.board.leads:
            parts[LOSSES] = self._losses()
        facts = self._facts() | {"state": digest}

        def work() -> CheckpointSealed:
            size = seal_together(self.saves, self.chain, self.lease, state.step, parts, facts)
            return CheckpointSealed(None, state.step, size)

        self._note(self.background.wait())
        if is_worth_a_thread(self.opened.store, state_bytes(state)):
            self.background.start(work)
        else:
            self._note([work()])
        self._meet()

    def _meet(self) -> None:
        """Here all processes are done with their disks: no collective waits for that."""
        if self.opened.ranks.gang.processes > 1:
            self.opened.board.collect(None)

    def _note(self, sealed: Sequence[CheckpointSealed]) -> None:
        for event in sealed:
            self.sealed_at = event.step
            self._observe(event)

    def _observe(self, event: Event) -> None:
        if self.opened.board.leads:
            self.observe(event)

    def _losses(self) -> Mapping[str, torch.Tensor]:
        return {"losses": torch.tensor(self.losses, dtype=torch.float64)}

    def _facts(self) -> dict[str, Any]:
        reached: Sequence[int] = self.boundaries[: len(self.state_digests)]
        return of_training(self.opened.fingerprint) | {
            "boundaries": self.boundaries,
            "state_digests": tuple(self.state_digests),
            "trajectory": trajectory_digest(reached, self.state_digests),
            "threads": self.threads,
            "microbatch_size": self.microbatch_size,
            "device": self.opened.recipe.model.device.type,
            "versions": versions(),
        }


def chosen_threads(opened: OpenExperiment) -> int:
    """`attribution.threads`. auto takes one thread where a step is so small that threads would only wait for each other, else all CPUs.

    The rule counts FLOPs and measures no time, so that two runs on one machine choose alike and give the same bits.
    """
    setting = opened.experiment.attribution.threads
    if setting != "auto":
        return int(setting)
    if step_flops(opened) < _FLOPS_WORTH_THREADS:
        return 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // opened.ranks.gang.processes)


def step_flops(opened: OpenExperiment) -> int:
    """FLOPs of the matrix products and convolutions of the first training step."""
    with FlopCounterMode(display=False) as counter:
        train_step(opened.recipe, opened.initial_state, opened.data(0))
    return int(counter.get_total_flops())
