"""Trains a bank: block by block, each through the trajectory's own data order and steps, sealed as a whole when it is finished.

A killed bank loses at most the unfinished work of one block: finished blocks are never touched again, and a long block is sealed
at segment boundaries too. A block's completion holds each retrained model's measurements of every query and, by default while they
are small, its parameters: a query that comes later is then measured again without any retraining.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from magic_pipeline.attribution.bank import Bank, blocks_of
from magic_pipeline.attribution.bank_plan import (
    NOT_BATCHABLE,
    BankPlan,
    keeps_models,
    plan_bank,
    seal_bank_plan,
    sealed_bank_plan,
    weights_of,
)
from magic_pipeline.attribution.describing import describe
from magic_pipeline.attribution.free_space import check_free_space
from magic_pipeline.attribution.layout import BankLayout
from magic_pipeline.attribution.ledger import record_retraining
from magic_pipeline.attribution.observing import (
    CheckpointSealed,
    Observe,
    RetrainingProgress,
    RetrainingsComplete,
    ShouldStop,
    never,
    unobserved,
)
from magic_pipeline.attribution.opening import OpenExperiment, OpenQuery, measure
from magic_pipeline.attribution.progress import Pace
from magic_pipeline.attribution.training import chosen_threads
from magic_pipeline.attribution.trajectory import Trajectory, required_trajectory, sealed_trajectory
from magic_pipeline.checkpoints.chain import Chain, Checkpoint
from magic_pipeline.checkpoints.digests import tensors_digest
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import DamagedObjectError, HeldError, InterruptedWalkError, MissingObjectError
from magic_pipeline.metagradient.batched_training import (
    batched_measurement,
    batched_step,
    repeated,
    run_of,
    separate_step,
)
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.segments import segment_boundaries
from magic_pipeline.metagradient.state import TrainState

logger = logging.getLogger("magic_pipeline.attribution")

MODELS, MEASUREMENTS, STATE = "models", "measurements", "state"
# A block is sealed at a segment boundary when so much work would be lost otherwise; a short one only at its end.
SEAL_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class OpenBank:
    """A bank with its place in the store, its plan, and the trajectory that it is measured against (None: it needs none)."""

    opened: OpenExperiment
    bank: Bank
    plan: BankPlan
    trajectory: Trajectory | None

    @property
    def layout(self) -> BankLayout:
        return self.opened.layout.bank(self.bank.fingerprint)

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        return blocks_of(self.bank.labels, self.plan.width)

    def first(self, block: Sequence[str]) -> int:
        return self.bank.labels.index(block[0])

    def chain(self, block: Sequence[str]) -> Chain:
        folder = self.layout.block(self.first(block), self.plan.width)
        return Chain(self.opened.store, folder, writers=self.opened.layout.writers)

    def later(self, block: Sequence[str]) -> Chain:
        """Measurements of queries that came after the block was finished."""
        folder = self.layout.later(self.first(block), self.plan.width)
        return Chain(self.opened.store, folder, writers=self.opened.layout.writers)

    def expect(self, block: Sequence[str]) -> dict[str, Any]:
        """What makes a checkpoint one of this very block."""
        facts = {
            "training": self.opened.fingerprint,
            "bank": self.bank.fingerprint,
            "retrainings": [[label, self.bank.run(label).digest] for label in block],
        }
        return facts if self.trajectory is None else facts | {"trajectory": self.trajectory.digest}


def open_bank(
    opened: OpenExperiment, bank: Bank, *, needs_trajectory: bool = True, keep_models: bool | str = "auto"
) -> OpenBank:
    """The bank with its sealed plan; without one it is probed, planned and described now.

    Raises:
        MagicError: training is not complete, and the bank needs it.
    """
    trajectory = required_trajectory(opened) if needs_trajectory else sealed_trajectory(opened)
    layout = opened.layout.bank(bank.fingerprint)
    plan = sealed_bank_plan(opened.store, layout)
    if plan is None:
        threads = chosen_threads(opened) if trajectory is None else trajectory.threads
        split = opened.experiment.training.microbatch_size if trajectory is None else trajectory.microbatch_size
        keep = keeps_models(opened, bank, keep_models)
        with exact_numerics(threads):
            plan = plan_bank(opened, bank, threads=threads, microbatch_size=split, keep=keep)
        plan = seal_bank_plan(opened.store, layout, plan)
    _describe(opened, bank)
    return OpenBank(opened, bank, plan, trajectory if needs_trajectory else None)


def retrain(
    opened_bank: OpenBank,
    labels: Sequence[str] | None = None,
    *,
    observe: Observe = unobserved,
    should_stop: ShouldStop = never,
) -> None:
    """Makes the retrainings of these labels (default: all) with everything in their blocks; finished blocks are left alone.

    Also measures queries that finished blocks have not measured yet, where the models were kept.

    Raises:
        InputError: the bank has no such retraining.
        HeldError: another live process has one of the blocks; all others are finished first.
        InterruptedWalkError: `should_stop` said so; what was reached is sealed.
    """
    wanted = set(opened_bank.bank.labels if labels is None else labels)
    for label in wanted:
        opened_bank.bank.run(label)
    blocks = [block for block in opened_bank.blocks if wanted.intersection(block)]
    work = _Work(opened_bank, observe, should_stop)
    held: list[HeldError] = []
    with exact_numerics(opened_bank.plan.threads):
        todo = work.unfinished(blocks)
        for block in todo:
            try:
                work.train(block, todo)
            except HeldError as error:
                held.append(error)
        for block in blocks:
            with suppress(HeldError):
                work.measure_later(block)
    if held:
        raise held[0]


@dataclass
class _Work:
    of: OpenBank
    observe: Observe
    should_stop: ShouldStop
    pace: Pace = field(default_factory=Pace)
    finished: int = 0

    def unfinished(self, blocks: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        todo = [block for block in blocks if self.of.chain(block).completed(self.of.expect(block)) is None]
        self.finished = sum(map(len, blocks)) - sum(map(len, todo))
        size = sum(tensor.nbytes for tensor in self.of.opened.initial_state.params.values())
        needed = sum(map(len, todo)) * size * int(self.of.plan.keep_models)
        check_free_space(self.of.opened.store, needed, f"{sum(map(len, todo))} retrained models")
        return todo

    def train(self, block: tuple[str, ...], todo: Sequence[tuple[str, ...]]) -> None:
        """Trains one block from where it was sealed last, and seals it."""
        of, opened, chain, expect = self.of, self.of.opened, self.of.chain(block), self.of.expect(block)
        with chain.take() as lease:
            if chain.completed(expect) is None:  # another process may have finished it before this one held it
                newest = chain.newest(expect, order="highest", read=[STATE])
                run = _Block(of, block, lease, self)
                run.resume(newest)
                record_retraining(opened.store, opened.layout, of.bank.fingerprint, block, run.state.step)
                run.train(sum(len(other) for other in todo[todo.index(block) + 1 :]))
                run.complete()
            if chain.sealed():
                lease.clear(expect)
            lease.sweep()
        self.finished += len(block)
        self.observe(RetrainingsComplete(of.bank.fingerprint, block))

    def measure_later(self, block: tuple[str, ...]) -> None:
        """Measures the queries that this finished block lacks on its kept models, and seals that beside it."""
        of, opened = self.of, self.of.opened
        complete = of.chain(block).completed(of.expect(block), read=[])
        if complete is None or MODELS not in complete.blobs:
            return
        known = set(complete.facts["queries"])
        later = of.later(block)
        for name in later.sealed():
            sealed = later.load(name.step, of.expect(block))
            known |= set() if sealed is None else set(sealed.facts["queries"])
        missing = [query for query in opened.queries if query.measured not in known]
        if not missing:
            return
        models = TrainState.from_flat(opened.steps, complete.tensors(MODELS))
        with later.take() as lease:
            step = 1 + max((name.step for name in later.sealed()), default=-1)
            parts = {MEASUREMENTS: _measurements(opened, of.plan, models, missing)}
            lease.seal(step, parts, of.expect(block) | {"queries": [query.measured for query in missing]})


@dataclass
class _Block:
    """One block's training."""

    of: OpenBank
    labels: tuple[str, ...]
    lease: Lease
    work: _Work
    resumed_from: int = 0
    state: TrainState = field(init=False)
    diverged: dict[str, int] = field(default_factory=dict)

    def resume(self, newest: Checkpoint | None) -> None:
        opened = self.of.opened
        if newest is None:
            self.state = repeated(opened.recipe, opened.initial_state, len(self.labels))
        else:
            device = opened.recipe.model.device
            flat = {name: tensor.to(device) for name, tensor in newest.tensors(STATE).items()}
            self.state, self.diverged = TrainState.from_flat(newest.step, flat), dict(newest.facts["diverged"])
        self.resumed_from = self.state.step
        self.sealed_at, self.sealed_time = self.state.step, time.monotonic()

    def train(self, others: int) -> None:
        opened, plan = self.of.opened, self.of.plan
        weights = weights_of(opened, self.of.bank, self.labels)
        make = batched_step if plan.batched else separate_step
        boundaries = segment_boundaries(opened.steps) if self.of.trajectory is None else self.of.trajectory.boundaries
        for number in range(self.state.step, opened.steps):
            if self.work.should_stop():
                self._seal()
                raise InterruptedWalkError(
                    f"retraining stopped before step {number}, as asked; a rerun goes on from there"
                )
            shards = opened.shards(number, plan.microbatch_size)
            self.state, losses = make(opened.recipe, self.state, shards, weights)
            self._note_diverged(number, torch.isfinite(losses))
            self._tell(number + 1, others)
            if len(self.diverged) == len(self.labels):
                return
            if number + 1 in boundaries[1:-1] and time.monotonic() - self.sealed_time > SEAL_SECONDS:
                self._seal()

    def complete(self) -> None:
        """Seals the measurements, and the models where they are kept."""
        opened, plan = self.of.opened, self.of.plan
        models = self.state.flat()
        models = {name: tensor for name, tensor in models.items() if name.startswith(("params/", "buffers/"))}
        finite = torch.stack([torch.isfinite(tensor.flatten(1)).all(1) for tensor in models.values()]).all(0)
        self._note_diverged(opened.steps, finite)
        if self.diverged:
            logger.warning(
                "%d retrainings did not stay finite (%s): they have no result",
                len(self.diverged),
                ", ".join(self.diverged),
            )
        parts: dict[str, Mapping[str, Tensor]] = {MEASUREMENTS: _measurements(opened, plan, self.state, opened.queries)}
        if plan.keep_models:
            parts[MODELS] = models
        facts = self._facts() | {
            "queries": [query.measured for query in opened.queries],
            "models": [tensors_digest({n: t[row] for n, t in models.items()}) for row in range(len(self.labels))],
        }
        self.lease.complete(parts, facts)

    def _facts(self) -> dict[str, Any]:
        return self.of.expect(self.labels) | {"diverged": self.diverged, "plan": self.of.plan.as_dict()}

    def _seal(self) -> None:
        if self.state.step > self.sealed_at:
            self.lease.seal(self.state.step, {STATE: self.state.flat()}, self._facts())
            self.lease.retire(order="highest", keep=2)
            size = sum(tensor.nbytes for tensor in self.state.flat().values())
            self.work.observe(CheckpointSealed(f"{self.of.bank.kind} {self.labels[0]}", self.state.step, size))
        self.sealed_at, self.sealed_time = self.state.step, time.monotonic()

    def _note_diverged(self, step: int, finite: Tensor) -> None:
        for label, whole in zip(self.labels, finite.tolist(), strict=True):
            if not whole:
                self.diverged.setdefault(label, step)

    def _tell(self, step: int, others: int) -> None:
        opened, width = self.of.opened, len(self.labels)
        rate, eta = self.work.pace.step(opened.steps - step + -(-others // max(1, width)) * opened.steps)
        self.work.observe(
            RetrainingProgress(
                step=step,
                steps=opened.steps,
                labels=self.labels,
                finished=self.work.finished,
                retrainings=len(self.of.bank.runs),
                steps_per_second=rate * width,
                eta_seconds=eta,
                resumed_from=self.resumed_from,
            )
        )


def _measurements(
    opened: OpenExperiment, plan: BankPlan, state: TrainState, queries: Sequence[OpenQuery]
) -> dict[str, Tensor]:
    """Query digest -> phi of every run `[runs]`, float64."""
    return {query.measured: _phi(opened, plan, state, query).to(torch.float64).cpu() for query in queries}


def _phi(opened: OpenExperiment, plan: BankPlan, state: TrainState, query: OpenQuery) -> Tensor:
    model = opened.recipe.model
    state = TrainState.from_flat(state.step, {name: t.to(model.device) for name, t in state.flat().items()})

    def phi(module: nn.Module) -> Tensor:
        return measure(opened.task, module, query.query, model.place)

    if plan.batched:
        try:
            return batched_measurement(model, state, phi)
        except NOT_BATCHABLE as error:
            why = str(error).strip().partition("\n")[0]
            logger.info("query %r is measured on one model after the other: %s", query.id, why)
    runs = (run_of(state, index) for index in range(len(next(iter(state.params.values())))))
    with torch.no_grad():
        return torch.stack([opened.phi(query, run.params, run.buffers) for run in runs])


def _describe(opened: OpenExperiment, bank: Bank) -> None:
    """bank.json beside the experiment's own descriptions; a damaged one is written again."""
    if opened.board.leads:
        describe(opened)
    layout = opened.layout.bank(bank.fingerprint)
    try:
        opened.store.read_json(layout.description)
    except (MissingObjectError, DamagedObjectError) as error:
        if isinstance(error, DamagedObjectError):
            logger.warning("%s/%s is written again: %s", opened.store.url, layout.description, error)
        content = {
            "kind": bank.kind,
            "training": bank.training,
            "validation": bank.fingerprint,
            "settings": dict(bank.settings),
            "retrainings": [[run.label, run.digest] for run in bank.runs],
        }
        opened.store.replace_json(layout.description, content)
