"""A process of a gang, for tests.

`python -m tests.metagradient.gang_of_tests STORE PROCESS PROCESSES RANKS FAMILY OPTIMIZER CLIP MICRO OUT`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.processes import ProcessGang
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.segments import segment_boundaries
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Data, Recipe, train_step
from magic_pipeline.metagradient.walk import Lanes, walk_segment
from tests.metagradient import cases, running
from tests.reference.problem import Problem


def problem_of(family: str, optimizer: str, clip: str, micro: int) -> Problem:
    setting = cases.OPTIMIZERS[optimizer]
    return cases.FAMILIES[family].problem(setting, clip_norm=None if clip == "None" else float(clip), micro=micro)


def data_of(problem: Problem, ranks: Ranks) -> Data:
    """Each step's micro-batches dealt to the ranks in order; ranks may get none. Score rows are one block a hosted rank."""

    def shards(step: int) -> list[object]:
        parts = problem.steps[step]
        return [
            replace(running.shard(part), rank=rank, units=part.units + position * problem.units)
            for position, rank in enumerate(ranks.hosted)
            for number, part in enumerate(parts)
            if number * ranks.count // len(parts) == rank
        ]

    return shards  # type: ignore[return-value]


def walk(problem: Problem, ranks: Ranks, *, chunk: int) -> tuple[TrainState, Tensor, int]:
    """The trained state, the hosted ranks' scores `[hosted, units, queries]`, and the bytes of this process's slots."""
    run = replace(running.recipe(problem), ranks=ranks)
    state = run.model.initial_state(run.optimizer, problem.steps[0][0].batch)
    states = [replace(state, slots=run.optimizer.init(ranks.cut(state.params)))]
    data = data_of(problem, ranks)
    for step in range(len(problem.steps)):
        states.append(train_step(run, states[-1], data(step))[0])
    lanes = _joined(problem, run, states[-1])
    for start, stop in reversed(list(pairwise(segment_boundaries(len(problem.steps), None)))):
        for _ in walk_segment(run, data, states[start], stop, lanes, chunk=chunk):
            pass
    scores = lanes.scores.reshape(len(lanes.scores), len(ranks.hosted), problem.units).permute(1, 2, 0)
    return states[-1], scores, sum(t.nbytes for slot in states[-1].slots.values() for t in slot.values())


def _joined(problem: Problem, run: Recipe, trained: TrainState) -> Lanes:
    ranks = run.ranks
    owned = replace(trained, params=ranks.cut(trained.params))
    lanes = Lanes.empty(owned, len(problem.measurements), len(ranks.hosted) * problem.units)
    for lane, measurement in enumerate(problem.measurements):
        whole = running.query_cotangent(run, replace(trained, slots={}), measurement)
        params = ranks.cut({name.removeprefix("params/"): value for name, value in whole.items()})
        start = {n: torch.zeros_like(t) for n, t in lanes.cotangent.lane(lane).items()}
        start |= {f"params/{name}": piece for name, piece in params.items()}
        lanes.join(lane, start, torch.zeros_like(lanes.scores[lane]))
    return lanes


def main(arguments: Sequence[str]) -> None:
    store, process, processes, ranks, family, optimizer, clip, micro, out = arguments
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(process), world_size=int(processes))
    with exact_numerics(1):
        state, scores, slots = walk(
            problem_of(family, optimizer, clip, int(micro)), Ranks(int(ranks), ProcessGang()), chunk=2
        )
    torch.save({"params": dict(state.params), "scores": scores, "slots": slots}, Path(out) / f"{process}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
