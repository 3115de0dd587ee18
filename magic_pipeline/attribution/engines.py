"""Which engine pulls a walk's steps back, chosen when its plan is made: compiling costs half a minute and more, and has to pay.

torch.compile's caches lie in `.magic/compiled` beside the experiment unless TORCHINDUCTOR_CACHE_DIR says otherwise, so that a second
process compiles in seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import Counter

import torch

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.trajectory import Trajectory
from magic_pipeline.attribution.walk_plan import WalkPlan
from magic_pipeline.metagradient.compiled import (
    CannotCompileError,
    CompiledEngine,
    CompiledShard,
    compile_shard,
    form_of,
)
from magic_pipeline.metagradient.pullback import EAGER, Engine
from magic_pipeline.metagradient.step import Shard, StepRecord

logger = logging.getLogger("magic_pipeline.attribution")

# What compiling is expected to take and to save, before it is tried: seconds, and a share of a lane's eager time (docs/speed.md).
_COMPILE_SECONDS, _EXPECTED_SAVING = 60.0, 0.3
# Steps looked at for the form of batch that is most frequent.
_SAMPLED_STEPS = 16


def engine_of(opened: OpenExperiment, plan: WalkPlan) -> Engine:
    """The plan's engine; where it cannot be had any more, the walk says so and goes on eagerly."""
    if plan.engine != "compiled":
        return EAGER
    _prepare_cache(opened)

    def unavailable(error: CannotCompileError) -> None:
        logger.warning(
            "the walk was planned with the compiled engine, which cannot be had now (%s): it goes on eagerly, exact to rounding but "
            "not to the last bit",
            error,
        )

    return CompiledEngine(frozenset(plan.forms), unavailable)


def forms_to_compile(
    opened: OpenExperiment,
    trajectory: Trajectory,
    record: StepRecord,
    eager_seconds: float,
    queries: int,
    most_kept: int,
) -> tuple[str, ...]:
    """The forms of shards that are compiled: the most frequent one if it pays, else none, with a message where it was asked for.

    Args:
        record: of any step.
        eager_seconds: that one query adds to a walked step.
        most_kept: bytes that the shared half's results may take: as many as the eager graph.
    """
    setting = opened.experiment.attribution.engine
    if setting == "eager":
        return ()
    if opened.ranks.count > 1:
        if setting == "compiled":
            logger.warning(
                "the walk is pulled back eagerly: the compiled engine works on one rank, not on %d", opened.ranks.count
            )
        return ()
    share, shard = _most_frequent(opened, trajectory)
    expected = _EXPECTED_SAVING * eager_seconds * share * trajectory.steps * queries
    if setting == "auto" and expected <= _COMPILE_SECONDS:
        return ()
    try:
        compiled, seconds = _compile(opened, record, shard)
        lane_seconds = _check_it_pays(compiled, record, shard, most_kept)
    except CannotCompileError as error:
        logger.warning("the walk is pulled back eagerly, since the compiled engine cannot be had: %s", error)
        return ()
    logger.info(
        "the compiled engine took %.0f s to make; a query adds %.3f s to a step in place of %.3f s, in %.0f %% of the steps",
        seconds,
        lane_seconds,
        eager_seconds,
        100 * share,
    )
    # A query's own part of a step holds the optimizer's pullback too, which is the same for both engines and in one of these only.
    return (form_of(shard),) if setting == "compiled" or lane_seconds < 0.9 * eager_seconds else ()


def _most_frequent(opened: OpenExperiment, trajectory: Trajectory) -> tuple[float, Shard]:
    """(share of the sampled shards, one of them) of the most frequent form."""
    steps = sorted({trajectory.steps * i // _SAMPLED_STEPS for i in range(_SAMPLED_STEPS)})
    shards = [shard for step in steps for shard in opened.shards(step, trajectory.microbatch_size)]
    counts = Counter(form_of(shard) for shard in shards)
    form, count = counts.most_common(1)[0]
    return count / len(shards), next(shard for shard in shards if form_of(shard) == form)


def _compile(opened: OpenExperiment, record: StepRecord, shard: Shard) -> tuple[CompiledShard, float]:
    if opened.recipe.model.device.type == "cpu" and not any(
        map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))
    ):
        raise CannotCompileError("there is no C++ compiler on the PATH; install g++, or set attribution.engine: eager")
    _prepare_cache(opened)
    model, began = opened.recipe.model, time.perf_counter()
    compiled = compile_shard(model, record, shard, 0, shard.denominator)
    model.compiled[form_of(shard)] = compiled
    return compiled, time.perf_counter() - began


def _check_it_pays(compiled: CompiledShard, record: StepRecord, shard: Shard, most_kept: int) -> float:
    """Seconds of one lane; CannotCompileError where the shared half would hold more than the budget was made for."""
    graph = compiled.graph(record, shard, 0, shard.denominator)
    kept = sum(part.nbytes for part in graph.kept if isinstance(part, torch.Tensor))
    if kept > max(most_kept, 1 << 20):
        raise CannotCompileError(f"it keeps {kept} bytes of a step, more than the eager engine's {most_kept}")
    cotangents = graph.zero_cotangents(record)
    graph.pull(cotangents, keep_graph=True)
    began = time.perf_counter()
    for _ in range(3):
        graph.pull(cotangents, keep_graph=True)
        if shard.units.device.type == "cuda":
            torch.cuda.synchronize(shard.units.device)
    return (time.perf_counter() - began) / 3


def _prepare_cache(opened: OpenExperiment) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(opened.experiment.folder / ".magic" / "compiled"))
