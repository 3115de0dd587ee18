"""One cohort's walk: for each segment from last to first, load, rematerialise, pull back, seal, retire; all its queries together.

A query that is sealed further along joins when the loop reaches its step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.attribution.engines import engine_of
from magic_pipeline.attribution.free_space import check_free_space, walk_bytes
from magic_pipeline.attribution.ledger import most_redone, record_walk
from magic_pipeline.attribution.library_versions import versions
from magic_pipeline.attribution.observing import (
    CheckpointSealed,
    Event,
    Observe,
    QueryComplete,
    ShouldStop,
    WalkProgress,
)
from magic_pipeline.attribution.opening import OpenExperiment, OpenQuery
from magic_pipeline.attribution.progress import Pace
from magic_pipeline.attribution.rank_parts import by_rank, digest_together, owned, part_of, seal_together
from magic_pipeline.attribution.trajectory import Trajectory, check_state, state_at
from magic_pipeline.attribution.walk_plan import WalkPlan
from magic_pipeline.checkpoints.background import Background, is_worth_a_thread
from magic_pipeline.checkpoints.chain import COMPLETE_STEP, Checkpoint
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import InterruptedWalkError, NonFiniteError
from magic_pipeline.metagradient.state import Cotangent, Tensors, TrainState
from magic_pipeline.metagradient.step import leaves
from magic_pipeline.metagradient.walk import Lanes, walk_segment

logger = logging.getLogger("magic_pipeline.attribution")


@dataclass
class Member:
    """A query in a cohort: where it goes on, and the right to write, which the leading process has."""

    query: OpenQuery
    lease: Lease | None
    expect: Mapping[str, Any]
    sealed: Checkpoint | None
    plan: WalkPlan | None
    lane: int = -1
    saved_at: int | None = None


@dataclass(frozen=True)
class _Sealed:
    """A query's checkpoint that has become durable, of so many bytes."""

    member: Member
    step: int
    size: int


@dataclass
class Cohort:
    """The loop over segments for queries that share a plan."""

    opened: OpenExperiment
    trajectory: Trajectory
    plan: WalkPlan
    members: list[Member]
    observe: Observe
    should_stop: ShouldStop
    failures: list[NonFiniteError] = field(default_factory=list)
    steps_redone: int = 0

    def walk(self) -> None:
        self.saves = self.opened.board.channel(f"saves of {self.plan.digest}")
        with Background[list[_Sealed]]() as self.background:
            self._walk()

    def _walk(self) -> None:
        opened, leads = self.opened, self.opened.board.leads
        if leads:
            self._warn_where_bits_may_differ()
        final = state_at(opened, self.trajectory, self.trajectory.steps)
        mine = owned(opened.ranks, final)
        if leads:
            self._check_free_space(mine)
        self.lanes = Lanes.empty(mine, self.plan.lanes, opened.score_rows)
        self.waiting: dict[str, tuple[int, Callable[[], tuple[Tensors, Tensor]]]] = {}
        for member in self.members:
            member.lane = self.plan.lane(member.query.key)
            self._wait(member, final)
        self.pace = Pace()
        self.engine = engine_of(self.opened, self.plan)
        if leads:
            self.steps_redone = most_redone(opened.store, opened.layout, {k: s for k, (s, _) in self.waiting.items()})
        position = max(step for step, _ in self.waiting.values())
        while position > 0 and (self.waiting or self._active()):
            start = max(boundary for boundary in self.plan.boundaries if boundary < position)
            self._segment(start, position)
            position = start
        self._note(self.background.wait())
        for member in self._active():
            self._complete(member)

    def _check_free_space(self, mine: TrainState) -> None:
        count = len(self.members)
        needed = count * walk_bytes(mine, self.opened.score_rows) * self.opened.ranks.gang.processes
        check_free_space(self.opened.store, needed, f"the walk of {count} queries")

    def _wait(self, member: Member, final: TrainState) -> None:
        """The query joins at the step it is sealed at, or at the end of the run with its gradient."""
        sealed = member.sealed
        if sealed is None:
            self.waiting[member.query.key] = (self.trajectory.steps, lambda: self._fresh(member, final))
        else:
            member.saved_at = sealed.step
            self.waiting[member.query.key] = (sealed.step, lambda: self._resumed(member, sealed))

    def _fresh(self, member: Member, final: TrainState) -> tuple[Tensors, Tensor]:
        return _query_gradient(self.opened, member.query, final), torch.zeros_like(self.lanes.scores[0])

    def _resumed(self, member: Member, sealed: Checkpoint) -> tuple[Tensors, Tensor]:
        cotangent: dict[str, Tensor] = {}
        scores: list[Tensor] = []
        for rank in self.opened.ranks.hosted:
            tensors = {n: t.to(self.lanes.scores.device) for n, t in sealed.tensors(part_of(rank)).items()}
            scores.append(tensors.pop("scores"))
            cotangent |= tensors
        return cotangent, torch.cat(scores)

    def _segment(self, start: int, stop: int) -> None:
        queries = {m.query.key: stop for m in self._active()} | {
            key: step for key, (step, _) in self.waiting.items() if start < step <= stop
        }
        if self.opened.board.leads:
            record_walk(self.opened.store, self.opened.layout, start, queries)
        state = state_at(self.opened, self.trajectory, start)
        steps = walk_segment(
            self.opened.recipe,
            self.opened.data_split_by(self.plan.microbatch_size),
            state,
            stop,
            self.lanes,
            chunk=self.plan.chunk,
            hold=self.plan.hold,
            check_end=lambda end: check_state(self.opened, self.trajectory, end),
            engine=self.engine,
        )
        for step in steps:
            if step < stop:
                self._walked(step)
            if self._join(step):
                self.opened.board.collect(None)  # no collective waits for another process's disk
            if step > 0 and self.opened.ranks.agree(self.should_stop(), self.lanes.scores.device):
                self._interrupt(step)

    def _walked(self, step: int) -> None:
        """What follows a backward step: the non-finite leave, the others are sealed where the plan says so."""
        self._give_up_non_finite(step)
        rate, left = self.pace.step(step)
        self._observe(self._progress(step, rate, left))
        self._note(self.background.finished())
        if step > 0 and step in self.plan.save_steps:
            self._save(self._active(), step)

    def _join(self, step: int) -> bool:
        """Lets the queries join that go on from here; whether there were any."""
        joined = False
        for member in self.members:
            at, load = self.waiting.get(member.query.key, (-1, None))
            if at == step and load is not None:
                try:
                    self.lanes.join(member.lane, *load())
                except NonFiniteError as error:
                    self.failures.append(error)
                del self.waiting[member.query.key]
                joined = True
        return joined

    def _give_up_non_finite(self, step: int) -> None:
        mine = self.lanes.cotangent.is_finite() & torch.isfinite(self.lanes.scores.sum(1))
        finite = self.opened.ranks.gang.gather(mine.to(self.lanes.scores.dtype)).bool().all(0)
        for member in self._active():
            if not bool(finite[member.lane]):
                self.failures.append(
                    NonFiniteError(
                        f"query {member.query.id!r}: its cotangent or scores are not finite at step {step}; sealed down to "
                        f"{'nothing' if member.saved_at is None else f'step {member.saved_at}'}"
                    )
                )
                self.lanes.leave(member.lane)

    def _save(self, members: Sequence[Member], step: int) -> None:
        """Seals these queries at this step: large ones while the walk goes on, but never two steps at a time."""
        # By reference: the cotangents are replaced and never changed in place; the scores are added to.
        parts = [self._parts(member) for member in members]
        self._note(self.background.wait())
        seals = self._seals(members, step, parts)
        size = sum(t.nbytes for part in parts for named in part.values() for t in named.values())
        # The same answer in every process, so of what is the same in all of them.
        if is_worth_a_thread(self.opened.store, max(self.opened.board.collect(size))):
            self.background.start(lambda: list(seals))
        else:
            self._note([seals])
            self.opened.board.collect(None)  # no collective waits for another process's disk

    def _parts(self, member: Member) -> dict[str, dict[str, Tensor]]:
        """This process's blobs of a query: each rank's pieces of the cotangent and the scores of its own examples."""
        pieces, scores = by_rank(self.opened.ranks, self.lanes.cotangent.lane(member.lane)), self._scores(member)
        return {part_of(rank): pieces[rank] | {"scores": scores[rank]} for rank in self.opened.ranks.hosted}

    def _scores(self, member: Member) -> dict[int, Tensor]:
        rows = torch.split(self.lanes.scores[member.lane].clone(), self.opened.scored.places)
        return dict(zip(self.opened.ranks.hosted, rows, strict=True))

    def _seals(
        self, members: Sequence[Member], step: int, parts: list[dict[str, dict[str, Tensor]]]
    ) -> Iterator[_Sealed]:
        for member in members:
            facts = {**member.expect, "plan": self.plan.as_dict()}
            chain = self.opened.query_chain(member.query)
            size = seal_together(self.saves, chain, member.lease, step, parts.pop(0), facts)
            if member.lease is not None:
                # Two generations stay until the newer one is verified, which `retire` does first.
                member.lease.retire(order="lowest", keep=2)
            yield _Sealed(member, step, size)

    def _note(self, batches: Sequence[Iterable[_Sealed]]) -> None:
        for sealed in (one for batch in batches for one in batch):
            sealed.member.saved_at = sealed.step
            self._observe(CheckpointSealed(sealed.member.query.key, sealed.step, sealed.size))

    def _observe(self, event: Event) -> None:
        if self.opened.board.leads:
            self.observe(event)

    def _complete(self, member: Member) -> None:
        scores = {rank: {"scores": rows} for rank, rows in self._scores(member).items()}
        content = digest_together(self.opened, scores)
        digest = _walk_digest(member.expect, content)
        facts = {**member.expect, "plan": self.plan.as_dict(), "walk": digest}
        parts = {part_of(rank): tensors for rank, tensors in scores.items()}
        chain = self.opened.query_chain(member.query)
        seal_together(self.opened.board, chain, member.lease, COMPLETE_STEP, parts, facts)
        if member.lease is not None:
            member.lease.clear(member.expect)
        self._observe(QueryComplete(member.query.key, digest))

    def _interrupt(self, step: int) -> None:
        self._note(self.background.wait())
        if step < self.trajectory.steps:
            self._save([member for member in self._active() if member.saved_at != step], step)
            self._note(self.background.wait())
        raise InterruptedWalkError(f"the walk stopped at step {step}, as asked; a rerun goes on from there")

    def _active(self) -> list[Member]:
        return [member for member in self.members if self.lanes.active[member.lane]]

    def _progress(self, step: int, rate: float, left: float) -> WalkProgress:
        boundaries = self.plan.boundaries
        return WalkProgress(
            step=step,
            steps=self.trajectory.steps,
            segments_done=sum(boundary >= step for boundary in boundaries[:-1]),
            segments=len(boundaries) - 1,
            keys=tuple(member.query.key for member in self._active()),
            steps_per_second=rate,
            eta_seconds=left,
            resumed_from={m.query.key: m.sealed.step if m.sealed else None for m in self.members},
            steps_redone=self.steps_redone,
        )

    def _warn_where_bits_may_differ(self) -> None:
        now = {"device": self.opened.recipe.model.device.type, **versions()}
        planned = {"device": self.plan.device, **self.plan.versions}
        differing = [
            f"{name} {planned.get(name)} -> {now.get(name)}"
            for name in sorted(now | planned)
            if planned.get(name) != now.get(name)
        ]
        if differing:
            logger.warning(
                "the walk was planned elsewhere (%s): it goes on, exact to rounding but not to the last bit",
                ", ".join(differing),
            )


def _walk_digest(expect: Mapping[str, Any], scores_digest: str) -> str:
    """One digest of a finished walk: its scores, query and trajectory. Equal for equal results, whoever made them."""
    return fingerprint({"scores": scores_digest, "query": expect["query"], "trajectory": expect["trajectory"]})


def _query_gradient(opened: OpenExperiment, query: OpenQuery, state: TrainState) -> dict[str, Tensor]:
    """d phi / d state, where the walk begins, in this process's pieces: zero in the optimizer's slots.

    Raises:
        NonFiniteError: the measurement or its gradient is NaN or infinite.
    """
    flat = Cotangent.zeros(owned(opened.ranks, state), 1).lane(0)
    params, buffers = leaves(state.params), leaves(state.buffers)
    phi, gradient = torch.zeros((), device=opened.recipe.model.device), list[Tensor | None]()
    for measure_part in opened.phi_parts(query, params, buffers):
        with torch.enable_grad():
            value = measure_part()
            found = torch.autograd.grad(value, [*params.values(), *buffers.values()], allow_unused=True)
        phi = phi + value.detach()
        gradient = [_sum(a, b) for a, b in zip(gradient, found, strict=True)] if gradient else list(found)
    of_params = {
        name: torch.zeros_like(params[name]) if part is None else part.detach()
        for name, part in zip(params, gradient, strict=False)
    }
    flat |= {f"params/{name}": piece for name, piece in opened.ranks.cut(of_params).items()}
    for name, part in zip(buffers, gradient[len(params) :], strict=True):
        if part is not None:
            flat[f"buffers/{name}"] = part.detach()
    if not all(bool(torch.isfinite(part).all()) for part in [phi, *of_params.values(), *flat.values()]):
        raise NonFiniteError(f"query {query.id!r}: its measurement ({float(phi.detach())}) or gradient is not finite")
    return flat


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """None is zero."""
    return b if a is None else a if b is None else a + b
