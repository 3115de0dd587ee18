"""The walk of queries: who is finished, who may write, where each goes on, and who is walked together.

A query whose walk is complete is never touched again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from magic_pipeline.attribution.board import decided
from magic_pipeline.attribution.cohort import Cohort, Member
from magic_pipeline.attribution.describing import describe
from magic_pipeline.attribution.expectations import of_walk
from magic_pipeline.attribution.observing import (
    Observe,
    ShouldStop,
    never,
    unobserved,
)
from magic_pipeline.attribution.opening import OpenExperiment, OpenQuery
from magic_pipeline.attribution.progress import Pace
from magic_pipeline.attribution.rank_parts import agreed
from magic_pipeline.attribution.restoring import restore_states
from magic_pipeline.attribution.trajectory import Trajectory, required_trajectory
from magic_pipeline.attribution.walk_plan import WalkPlan, cohorts, seal_plan, sealed_plan
from magic_pipeline.attribution.walk_planner import plan_cohorts
from magic_pipeline.checkpoints.chain import by_age
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import HeldError, NonFiniteError
from magic_pipeline.metagradient.numerics import exact_numerics

_SHOWN = 5


@dataclass(frozen=True)
class WalkReport:
    """What a call of `walk` did.

    Attributes:
        resumed_from: per query that was not complete yet, the step it went on from; None where it started at the end.
        steps_redone: at most so many steps are made again, since an earlier process began their segment and did not seal it.
        seconds: of the walk.
    """

    resumed_from: Mapping[str, int | None]
    steps_redone: int
    seconds: float


def walk(
    opened: OpenExperiment, keys: Sequence[str], *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> WalkReport:
    """Walks the queries of these partition keys to step 0; returns at once what is finished.

    Raises:
        InputError: there is no such query.
        MagicError: training is not complete.
        HeldError: another live process walks one of them, or makes states of the trajectory again; nothing was begun.
        NonFiniteError: a query's cotangent or scores are NaN or infinite; all other queries are finished first.
        TrajectoryMismatchError: a replayed state is not the sealed one.
        InterruptedWalkError: `should_stop` said so; what was reached is sealed.
    """
    trajectory, board = required_trajectory(opened), opened.board
    if board.leads:
        describe(opened)
    pace = Pace()
    queries = {key: opened.query(key) for key in keys}
    unfinished = [k for k, q in queries.items() if not _is_complete(opened, trajectory, q)] if board.leads else []
    resumed: dict[str, int | None] = {}
    failures: list[NonFiniteError] = []
    redone = 0
    with ExitStack() as held:
        leases = {key: held.enter_context(opened.query_chain(queries[key]).take()) for key in unfinished}
        # Looked at again now that nobody else can be at them: whoever was may have finished before the lease was free.
        left = [key for key, lease in leases.items() if not _was_finished(opened, trajectory, queries[key], lease)]
        todo = [queries[key] for key in decided(board, left)]
        if todo:
            restore_states(opened, trajectory, observe, should_stop)
        members = {query.key: _member(opened, trajectory, query, leases.get(query.key)) for query in todo}
        with exact_numerics(trajectory.threads):
            _plan_the_unplanned(opened, trajectory, members)
        for plan, in_cohort in cohorts({key: m.plan for key, m in members.items() if m.plan is not None}):
            cohort = Cohort(opened, trajectory, plan, [members[key] for key in in_cohort], observe, should_stop)
            resumed |= {m.query.key: m.sealed.step if m.sealed else None for m in cohort.members}
            with exact_numerics(plan.threads):
                cohort.walk()
            redone += cohort.steps_redone
            failures += cohort.failures
    if failures:
        shown = "; ".join(map(str, failures[:_SHOWN]))
        more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
        raise failures[0] if len(failures) == 1 else NonFiniteError(f"{len(failures)} queries failed: {shown}{more}")
    return WalkReport(resumed, redone, pace.seconds)


def _is_complete(opened: OpenExperiment, trajectory: Trajectory, query: OpenQuery) -> bool:
    chain, expect = opened.query_chain(query), of_walk(opened.fingerprint, query.digest, trajectory.digest)
    if chain.completed(expect) is None:
        return False
    if chain.sealed():
        # Killed between completing and clearing: what is left over is of no use to anybody. Whoever is at it clears it too.
        with suppress(HeldError), chain.take() as lease:
            lease.clear(expect)
    return True


def _was_finished(opened: OpenExperiment, trajectory: Trajectory, query: OpenQuery, lease: Lease) -> bool:
    """Whether another process finished the query before this lease was taken; then nothing but the result is left."""
    expect = of_walk(opened.fingerprint, query.digest, trajectory.digest)
    if opened.query_chain(query).completed(expect) is None:
        return False
    lease.clear(expect)
    lease.release()
    return True


def _member(opened: OpenExperiment, trajectory: Trajectory, query: OpenQuery, lease: Lease | None) -> Member:
    chain, expect = opened.query_chain(query), of_walk(opened.fingerprint, query.digest, trajectory.digest)
    sealed = agreed(opened, chain, by_age(chain.sealed(), "lowest") if lease else [], expect)
    if sealed is not None:
        return Member(query, lease, expect, sealed, WalkPlan.from_dict(sealed.facts["plan"]))
    found = sealed_plan(opened.store, opened.layout, query.key, query.digest, trajectory.digest) if lease else None
    plan = decided(opened.board, None if found is None else found.as_dict())
    return Member(query, lease, expect, None, None if plan is None else WalkPlan.from_dict(plan))


def _plan_the_unplanned(opened: OpenExperiment, trajectory: Trajectory, members: Mapping[str, Member]) -> None:
    """Seals a plan for every query that has none: a new one, or that of its cohort.

    A process killed between two plans of a cohort, or a damaged plan, must not change the width of the batched calls.
    """
    sealed = [member.plan for member in members.values() if member.plan is not None]
    adopted = {key: plan for plan in sealed for key in plan.cohort if key in members and members[key].plan is None}
    unplanned = [key for key, member in members.items() if member.plan is None and key not in adopted]
    made = {key: plan for plan in plan_cohorts(opened, trajectory, unplanned) for key in plan.cohort}
    for key, plan in (adopted | made).items():
        lease = members[key].lease
        if lease is not None:
            lease.check()  # who was overtaken while it measured must not have the last word
            seal_plan(opened.store, opened.layout, key, members[key].query.digest, trajectory.digest, plan)
        members[key].plan = plan
