"""The walk over one segment: rematerialise its steps, then pull the queries' cotangents back through them, last step first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from magic_pipeline.metagradient.pullback import EAGER, Engine, pull_back
from magic_pipeline.metagradient.segments import split
from magic_pipeline.metagradient.state import Cotangent, Tensors, TrainState
from magic_pipeline.metagradient.step import Data, Recipe, StepRecord, train_step


@dataclass
class Lanes:
    """The queries that are walked together, one a lane. The tensors are replaced, never changed in place, but for `scores`.

    Attributes:
        cotangent: of the state that the walk has reached.
        scores: `[lanes, units]`, accumulated so far.
        active: which lanes take part; the others hold zeros.
    """

    cotangent: Cotangent
    scores: Tensor
    active: list[bool]

    @classmethod
    def empty(cls, state: TrainState, lanes: int, units: int) -> Lanes:
        """Lanes of zeros that nobody has joined yet."""
        dtype, device = _float_kind(state)
        return cls(
            Cotangent.zeros(state, lanes), torch.zeros(lanes, units, dtype=dtype, device=device), [False] * lanes
        )

    def join(self, lane: int, cotangent: Tensors, scores: Tensor) -> None:
        """A query takes `lane` at the step that the walk has reached."""
        self.cotangent = self.cotangent.with_lane(lane, cotangent)
        self.scores[lane] = scores
        self.active[lane] = True

    def leave(self, lane: int) -> None:
        """The query of `lane` is given up; zeros stay behind, so that the other lanes' bits do not change."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.cotangent.lane(lane).items()}
        self.cotangent = self.cotangent.with_lane(lane, zeros)
        self.scores[lane] = 0
        self.active[lane] = False


def walk_segment(
    recipe: Recipe,
    data: Data,
    start: TrainState,
    stop: int,
    lanes: Lanes,
    *,
    chunk: int,
    hold: int | None = None,
    check_end: Callable[[TrainState], None] | None = None,
    engine: Engine = EAGER,
) -> Iterator[int]:
    """Walks `lanes` from step `stop` back to `start.step`.

    Yields every step whose cotangent is now in `lanes`: `stop` first (nothing is pulled back yet: queries may join), then one less
    each time, `start.step` last. The caller may let queries join or leave between steps.

    Args:
        chunk: lanes per batched pullback.
        hold: how many states fit in memory (None: all of the segment); with fewer, the segment is split recursively.
        check_end: called once with the rematerialised state `stop`, before anything is pulled back.
    """
    yield stop
    for record in _records(recipe, data, start, stop, hold or stop - start.step, check_end):
        step = record.state.step
        lanes.cotangent = pull_back(
            recipe, record, data(step), lanes.cotangent, lanes.scores, chunk=chunk, active=lanes.active, engine=engine
        )
        yield step


def _records(
    recipe: Recipe, data: Data, start: TrainState, stop: int, hold: int, check_end: Callable[[TrainState], None] | None
) -> Iterator[StepRecord]:
    """The records of steps `stop - 1` down to `start.step`, at most about `hold` of them in memory at once."""
    length, state = stop - start.step, start
    if length <= max(1, hold):
        records: list[StepRecord] = []
        for step in range(start.step, stop):
            state, record = train_step(recipe, state, data(step))
            records.append(record)
        if check_end is not None:
            check_end(state)
        while records:
            yield records.pop()
        return
    middle = start.step + split(length, max(1, hold))
    for step in range(start.step, middle):
        state, _ = train_step(recipe, state, data(step))
    yield from _records(recipe, data, state, stop, hold - 1, check_end)
    yield from _records(recipe, data, start, middle, hold, None)


def _float_kind(state: TrainState) -> tuple[torch.dtype, torch.device]:
    first = next(iter(state.params.values()))
    return first.dtype, first.device
