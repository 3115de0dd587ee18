"""Chooses a new cohort's plan: how many queries are walked together, how wide a batched call is, how many states are held.

Widths are measured on this machine, not assumed: a wide call pays for large layers, one lane at a time for narrow models with many
tokens. What is chosen is sealed in the walk plan, so that a resumed walk cannot choose differently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil
import torch
from torch import Tensor

from magic_pipeline.attribution.engines import forms_to_compile
from magic_pipeline.attribution.library_versions import versions
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.rank_parts import owned
from magic_pipeline.attribution.trajectory import Trajectory, state_at
from magic_pipeline.attribution.walk_plan import WalkPlan
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.pullback import pull_back, shard_graph
from magic_pipeline.metagradient.segments import save_steps
from magic_pipeline.metagradient.state import Cotangent, TrainState
from magic_pipeline.metagradient.step import Shard, StepRecord, total_denominator, train_step

logger = logging.getLogger("magic_pipeline.attribution")

# Beyond this the shared graph is under 4 % of a query's cost; Dagster runs are kept to tens of queries.
MOST_LANES = 32
# What `memory_budget: auto` takes of the memory that is free.
_AUTO_SHARE = 0.6
# Widths are tried from narrow to wide, until one takes this much longer per lane than the best.
_HOPELESS = 1.15
# A chunk's transients per lane, as measured on GPT-2-like models: passes over the parameters, and a share of the graph.
_PARAM_PASSES_PER_LANE, _GRAPH_SHARE_PER_LANE = 2.7, 0.9


@dataclass(frozen=True)
class StepSizes:
    """Bytes of what a walk holds.

    Attributes:
        state: this process's pieces of params, slots and buffers.
        params: the trainable parameters.
        record: a rematerialised step: its state and gradient.
        graph: the double-backward graph of the largest micro-batch.
    """

    state: int
    params: int
    record: int
    graph: int

    def lane(self, chunked: int, lanes: int) -> int:
        """All of a walk's bytes but the held steps, for `lanes` lanes pulled `chunked` at a time."""
        transients = chunked * int(_PARAM_PASSES_PER_LANE * self.params + _GRAPH_SHARE_PER_LANE * self.graph)
        # The cotangents, their successors, and those that are being sealed meanwhile.
        return self.graph + 3 * lanes * self.state + transients


@dataclass(frozen=True)
class Widths:
    """What is chosen for cohorts of up to `lanes` queries: lanes per batched call, states held (None: all of a segment's)."""

    lanes: int
    chunk: int
    hold: int | None
    sizes: StepSizes


def plan_cohorts(opened: OpenExperiment, trajectory: Trajectory, keys: Sequence[str]) -> list[WalkPlan]:
    """Plans for queries that have none, in cohorts of their order."""
    if not keys:
        return []
    state = state_at(opened, trajectory, trajectory.boundaries[-2])
    shards = opened.shards(state.step, trajectory.microbatch_size)
    _, record = train_step(opened.recipe, state, shards)
    widths = choose_widths(opened, record, shards, len(keys), longest_segment(trajectory.boundaries))
    eager_seconds = seconds_of_lane(opened, record, shards, widths.chunk)
    forms = forms_to_compile(opened, trajectory, record, eager_seconds, len(keys), widths.sizes.graph)
    if forms:
        widths = replace(widths, chunk=1)  # compiled lanes go one after the other
    groups = [tuple(keys[at : at + widths.lanes]) for at in range(0, len(keys), widths.lanes)]
    return [_plan(opened, trajectory, group, widths, forms) for group in groups]


def seconds_of_lane(opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard], chunk: int) -> float:
    """Seconds that one query adds to a walked step."""
    return seconds_per_lane(opened, record, shards, chunk, seconds_of_graph(opened, record, shards))


def longest_segment(boundaries: Sequence[int]) -> int:
    """Steps of the longest segment: so many states are held where memory allows."""
    return max(stop - start for start, stop in pairwise(boundaries))


def choose_widths(
    opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard], queries: int, longest: int
) -> Widths:
    """How many of `queries` are walked together, and how, where the longest segment has `longest` steps; measured on one step.

    Raises:
        InputError: the memory budget is too small for a single query.
    """
    sizes, budget = measure_sizes(opened, record, shards), memory_budget(opened)
    wanted = opened.experiment.attribution.query_batch
    lanes = min(queries, MOST_LANES if wanted == "auto" else int(wanted))
    while lanes > 1 and sizes.lane(1, lanes) + 2 * sizes.record > budget:
        lanes = (lanes + 1) // 2
    chunk = _chunk(opened, record, shards, lanes, sizes, budget)
    hold = max(2, (budget - sizes.lane(chunk, lanes)) // max(1, sizes.record))
    return Widths(lanes, chunk, None if hold >= longest else int(hold), sizes)


def _plan(
    opened: OpenExperiment, trajectory: Trajectory, cohort: tuple[str, ...], widths: Widths, forms: tuple[str, ...]
) -> WalkPlan:
    chunk = min(widths.chunk, len(cohort))
    return WalkPlan(
        cohort=cohort,
        lanes=-(-len(cohort) // chunk) * chunk,
        chunk=chunk,
        boundaries=trajectory.boundaries,
        save_steps=save_steps(trajectory.boundaries, opened.experiment.attribution.save_every),
        hold=widths.hold,
        microbatch_size=trajectory.microbatch_size,
        threads=trajectory.threads,
        device=opened.recipe.model.device.type,
        versions=versions(),
        engine="compiled" if forms else "eager",
        forms=forms,
    )


def memory_budget(opened: OpenExperiment) -> int:
    """Bytes that each process of a walk may take: `attribution.memory_budget`, by default a share of what is free now."""
    setting = opened.experiment.attribution.memory_budget
    if setting != "auto":
        return int(setting)
    device = opened.recipe.model.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // opened.ranks.gang.processes
    return int(_AUTO_SHARE * min(opened.board.collect(free)))


def measure_sizes(opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard]) -> StepSizes:
    """Sizes of one step, the graph's by counting what autograd saves for it."""
    state = record.state
    params = _bytes(state.params.values())
    slots = sum(_bytes(t.values()) for t in state.slots.values())
    pieces = _bytes(opened.ranks.cut(state.params).values())
    size = pieces + slots + _bytes(state.buffers.values())
    saved: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in state.flat().values()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    denominator = total_denominator(shards, state.step, opened.ranks)  # asked for by all processes
    if shards:  # a process without rows of the batch has none
        widest = max(range(len(shards)), key=lambda index: len(shards[index].units))
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            graph = shard_graph(opened.recipe.model, record, shards[widest], widest, denominator)
        del graph
    record_size = params + slots + _bytes(state.buffers.values()) + pieces
    return StepSizes(*(max(opened.board.collect(n)) for n in (size, params, record_size, sum(saved.values()))))


def _chunk(
    opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard], lanes: int, sizes: StepSizes, budget: int
) -> int:
    """The width with the least time per lane among those that fit; a width that cannot be batched is passed over with a message."""
    setting = opened.experiment.attribution.chunk
    widths = _widths(lanes) if setting == "auto" else sorted({1, min(int(setting), lanes)})
    fitting = [width for width in widths if sizes.lane(width, lanes) + 2 * sizes.record <= budget]
    if not fitting and opened.experiment.attribution.memory_budget != "auto":
        raise InputError(
            f"{budget} bytes are too few for one query: about {sizes.lane(1, 1) + 2 * sizes.record} bytes are needed (graph of a "
            f"micro-batch {sizes.graph}, state {sizes.state}); raise it or lower training.microbatch_size",
            field="attribution.memory_budget",
        )
    timed: dict[int, float] = {}
    graph_seconds = seconds_of_graph(opened, record, shards) if fitting else 0.0
    for width in fitting:
        if timed and list(timed.values())[-1] > _HOPELESS * min(timed.values()):
            break
        try:
            timed[width] = seconds_per_lane(opened, record, shards, width, graph_seconds)
        except RuntimeError as error:
            if width == 1:
                raise
            logger.warning(
                "queries are pulled back one at a time, since an operation cannot be batched: %s", _first_line(error)
            )
            break
    if setting != "auto":
        return max(timed, default=1)
    return min(timed, key=lambda width: timed[width], default=1)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _widths(lanes: int) -> list[int]:
    """1, 2, 4, ... and the cohort itself, each as even as the cohort allows, so that few lanes are empty."""
    halves = [lanes]
    while halves[-1] > 1:
        halves.append((halves[-1] + 1) // 2)
    return sorted(set(halves))


def seconds_per_lane(
    opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard], width: int, graph_seconds: float
) -> float:
    """Seconds of one step's pullback per lane without the graph that the lanes share, pulled `width` at a time; the better of two."""
    # Two chunks, so that the graph is shared as in the walk and its cost counts the same for every width.
    lanes = max(2, width)
    cotangent = random_cotangent(owned(opened.ranks, record.state), lanes)
    scores = torch.zeros(lanes, opened.score_rows, dtype=opened.recipe.model.dtype, device=opened.recipe.model.device)
    seconds = []
    for _ in range(2):
        began = _clock(opened.recipe.model.device)
        pull_back(opened.recipe, record, shards, cotangent, scores, chunk=width)
        seconds.append(_clock(opened.recipe.model.device) - began)
    # All processes have to choose alike, so they take the slowest one's time.
    slowest: float = max(opened.board.collect(max(min(seconds) - graph_seconds, 1e-9) / lanes))
    return slowest


def seconds_of_graph(opened: OpenExperiment, record: StepRecord, shards: Sequence[Shard]) -> float:
    """Seconds of building a step's double-backward graphs."""
    denominator = total_denominator(shards, record.state.step, opened.ranks)
    seconds = []
    for _ in range(2):
        began = _clock(opened.recipe.model.device)
        for index, shard in enumerate(shards):
            shard_graph(opened.recipe.model, record, shard, index, denominator)
        seconds.append(_clock(opened.recipe.model.device) - began)
    slowest: float = max(opened.board.collect(min(seconds)))
    return slowest


def random_cotangent(state: TrainState, lanes: int) -> Cotangent:
    """A cotangent to measure with: what a pullback costs does not depend on its values."""
    generator = torch.Generator(device=next(iter(state.params.values())).device).manual_seed(0)

    def noise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: torch.randn(lanes, *t.shape, generator=generator, dtype=t.dtype, device=t.device)
            for n, t in tensors.items()
        }

    return Cotangent(
        noise(dict(state.params)), {slot: noise(dict(t)) for slot, t in state.slots.items()}, noise(dict(state.buffers))
    )


def _clock(device: torch.device) -> float:
    """Seconds. With one thread, of this process's own work: what else the machine does then changes no choice."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
