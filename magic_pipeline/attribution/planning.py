"""What a run will do and cost, from a few measured steps on this machine, before anything is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from magic_pipeline.attribution.fragility import fragile_settings
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.status import query_statuses, trajectory_status
from magic_pipeline.attribution.training import chosen_threads, step_flops
from magic_pipeline.attribution.walk_planner import (
    choose_widths,
    longest_segment,
    memory_budget,
    seconds_of_graph,
    seconds_per_lane,
)
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.segments import save_steps, segment_boundaries
from magic_pipeline.metagradient.step import StepRecord, train_step

_PROBE_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """A forecast. Times are seconds, sizes bytes; what is finished already is not counted again.

    Attributes:
        places: scores of a query: units, or with unit: token the tokens of all of them. A query holds that many numbers in
            memory, and in each of its checkpoints.
        checkpoint_bytes: one query's sealed checkpoint; two generations are kept while it is walked.
        at_risk_seconds: the work that a kill costs at most: one segment.
        chunk: queries per batched call, as measured now; a walk measures again when it seals its plan.
        fragile: settings that are known to make exact scores predict retraining poorly.
    """

    experiment: str
    fingerprint: str
    storage: str
    device: str
    threads: int
    parameters: int
    examples: int
    unit: str
    units: int
    places: int
    steps: int
    segments: int
    training_complete: bool
    queries: int
    queries_finished: int
    cohorts: int
    lanes: int
    chunk: int
    hold: int | None
    training_flops: int
    walk_flops: int
    training_seconds: float
    walk_seconds: float
    peak_memory_bytes: int
    memory_budget_bytes: int
    trajectory_bytes: int
    checkpoint_bytes: int
    stored_bytes: int
    at_risk_seconds: float
    fragile: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The plan for people, one fact a line."""
        left = self.queries - self.queries_finished
        held = "all of a segment's states" if self.hold is None else f"{self.hold} states at once (segments are split)"
        training = (
            "finished"
            if self.training_complete
            else f"{_duration(self.training_seconds)}, {_flops(self.training_flops)}"
        )
        lines = [
            f"experiment   {self.experiment} ({self.fingerprint[:12]}) in {self.storage}",
            f"model        {self.parameters:,} trainable parameters on {self.device}, {self.threads} threads",
            f"training     {self.steps:,} steps in {self.segments:,} segments over {self.examples:,} examples: {training}",
            f"walk         {left:,} of {self.queries:,} queries to do, {self.lanes} at a time, {self.chunk} per batched call:",
            f"             {_duration(self.walk_seconds)}, {_flops(self.walk_flops)}",
            f"scores       {self.places:,} a query: one for each {self.unit}",
            f"memory       about {_bytes(self.peak_memory_bytes)} of a budget of {_bytes(self.memory_budget_bytes)}, holding {held}",
            f"storage      {_bytes(self.stored_bytes)} at most: the trajectory {_bytes(self.trajectory_bytes)}, a query's checkpoint",
            f"             {_bytes(self.checkpoint_bytes)} (two are kept while it is walked)",
            f"at risk      {_duration(self.at_risk_seconds)} of work if the run is killed",
        ]
        lines += [f"fragile      {line}" for line in self.fragile]
        if self.fragile:
            lines.append(
                "             look at metasmoothness first: validation: {smoothness: {}}, then magic-pipeline validate"
            )
        return lines if left else [line for line in lines if not line.startswith("at risk")]


def plan_experiment(opened: OpenExperiment) -> Plan:
    """Measures a few steps and forecasts the rest. Writes nothing.

    Raises:
        NonFiniteError: a probed step's loss is NaN or infinite.
    """
    threads = chosen_threads(opened)
    with exact_numerics(threads):
        return _plan(opened, threads)


def _plan(opened: OpenExperiment, threads: int) -> Plan:
    status, queries = trajectory_status(opened), query_statuses(opened)
    setting = opened.experiment.attribution.segment_steps
    boundaries = status.boundaries or segment_boundaries(opened.steps, None if setting == "auto" else setting)
    longest = longest_segment(boundaries)
    step_seconds, record = _time_training(opened)
    shards, flops = opened.data(record.state.step), step_flops(opened)
    left = [query for query in queries if not query.complete]
    widths = choose_widths(opened, record, shards, max(1, len(left)), longest)
    groups = [len(left[at : at + widths.lanes]) for at in range(0, len(left), widths.lanes)]
    graph_seconds = seconds_of_graph(opened, record, shards) if left else 0.0
    lane_seconds = seconds_per_lane(opened, record, shards, widths.chunk, graph_seconds) if left else 0.0
    per_step = [step_seconds + graph_seconds + lanes * lane_seconds for lanes in groups]
    state_bytes = sum(tensor.nbytes for tensor in opened.initial_state.flat().values())
    checkpoint = widths.sizes.state + opened.scored.places * state_item_bytes(opened)
    saves = save_steps(boundaries, opened.experiment.attribution.save_every)
    at_risk = max(longest, max((a - b for a, b in zip((opened.steps, *saves), saves, strict=False)), default=1))
    trajectory_bytes = len(boundaries) * state_bytes
    held = longest if widths.hold is None else widths.hold
    return Plan(
        experiment=opened.experiment.name,
        fingerprint=opened.fingerprint,
        storage=opened.store.url,
        device=opened.recipe.model.device.type,
        threads=threads,
        parameters=sum(tensor.numel() for tensor in opened.initial_state.params.values()),
        examples=len(opened.dataset),
        unit=opened.scored.kind,
        units=len(opened.units),
        places=opened.scored.places,
        steps=opened.steps,
        segments=len(boundaries) - 1,
        training_complete=status.complete,
        queries=len(queries),
        queries_finished=len(queries) - len(left),
        cohorts=len(groups),
        lanes=widths.lanes,
        chunk=widths.chunk,
        hold=widths.hold,
        training_flops=0 if status.complete else flops * opened.steps,
        walk_flops=sum(flops * opened.steps * (2 + 2 * lanes) for lanes in groups),
        training_seconds=0.0 if status.complete else step_seconds * opened.steps,
        walk_seconds=opened.steps * sum(per_step),
        peak_memory_bytes=widths.sizes.lane(widths.chunk, widths.lanes) + held * widths.sizes.record,
        memory_budget_bytes=memory_budget(opened),
        trajectory_bytes=trajectory_bytes,
        checkpoint_bytes=checkpoint,
        stored_bytes=trajectory_bytes + 2 * checkpoint * max(groups, default=0) + _scores_bytes(opened, len(queries)),
        at_risk_seconds=at_risk * max(per_step, default=step_seconds),
        fragile=fragile_settings(opened),
    )


def _time_training(opened: OpenExperiment) -> tuple[float, StepRecord]:
    """Seconds of the fastest of the first steps, and the record of the last of them."""
    state, seconds = opened.initial_state, list[float]()
    records: list[StepRecord] = []
    for step in range(min(_PROBE_STEPS, opened.steps)):
        began = time.perf_counter()
        state, record = train_step(opened.recipe, state, opened.data(step))
        seconds.append(time.perf_counter() - began)
        records = [record]
    return min(seconds), records[-1]


def state_item_bytes(opened: OpenExperiment) -> int:
    """Bytes of one number of the run."""
    return torch.finfo(opened.recipe.model.dtype).bits // 8


def _scores_bytes(opened: OpenExperiment, queries: int) -> int:
    return queries * opened.scored.places * state_item_bytes(opened)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _flops(count: int) -> str:
    return f"{count / 1e9:.3g} GFLOP" if count < 1e13 else f"{count / 1e12:.3g} TFLOP"


def _bytes(count: float) -> str:
    units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {units[power]}" if power == 0 else f"{count:.1f} {units[power]}"
