"""What a walk costs per step and query, in units of one training step: CPU seconds and FLOPs, for several numbers of queries.

    python benchmarks/walk.py [--experiment experiments/stdlib_lm.yaml] [--sizes 64x1024 256x1024] [--engines eager compiled]
                              [--threads 1] [--queries 1 2 4 8 16]

Everything is measured in one process and in alternation, a training step beside a walked step; medians of `--repeats`. A walked
step is what the walk does: rematerialise it, build its double-backward graph, pull all queries back through it, in calls of the width
that the planner's probe chose. Expected with everything held in memory: FLOPs of 2 + 2/Q. `--sizes WIDTHxTOKENS` makes the
experiment's language model that wide and its steps that long. Last: forward training beside a plain torch.optim loop.
"""

from __future__ import annotations

import argparse
import copy
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from magic_pipeline.attribution.experiment import Experiment, load_experiment, parse_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.walk_planner import choose_widths, random_cotangent
from magic_pipeline.metagradient.compiled import CannotCompileError, CompiledEngine, form_of
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.optimizers import AdamW
from magic_pipeline.metagradient.pullback import EAGER, Engine, pull_back
from magic_pipeline.metagradient.step import StepRecord, train_step

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """One number of queries: cost per step and query, in training steps."""

    queries: int
    chunk: int
    cpu: float
    flops: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "stdlib_lm.yaml")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", metavar="WIDTHxTOKENS", default=[None])
    parser.add_argument("--engines", nargs="+", choices=["eager", "compiled"], default=["eager"])
    options = parser.parse_args()
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            opened = open_experiment(experiment_of(options.experiment, size, Path(folder)))
            with exact_numerics(options.threads):
                report(opened, options)


def experiment_of(file: Path, size: str | None, folder: Path) -> Experiment:
    """The experiment, or the same with its language model's width and its steps' tokens as `size` says."""
    if size is None:
        return load_experiment(file)
    width, tokens = map(int, size.split("x"))
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["task"] |= {"d_model": width, "heads": max(1, width // 32)}
    content["training"]["batch_size"] = max(1, tokens // content["task"]["context"])
    return parse_experiment(content | {"name": f"walk_{size}"}, folder=folder)


def report(opened: OpenExperiment, options: argparse.Namespace) -> None:
    """Prints the table of one experiment."""
    state, _ = train_step(opened.recipe, opened.initial_state, opened.data(0))
    _, record = train_step(opened.recipe, state, opened.data(1))
    print(
        f"{opened.experiment.name}: {sum(p.numel() for p in state.params.values()):,} parameters, "
        f"{opened.data(1)[0].denominator:g} loss terms a micro-batch, {options.threads} threads, torch {torch.__version__}, "
        f"{platform.machine()}"
    )
    print(f"{'engine':>9} {'Q':>3} {'chunk':>6} {'CPU, training steps a query':>28} {'FLOPs':>8} {'2 + 2/Q':>8}")
    for name in options.engines:
        engine = EAGER if name == "eager" else compiled_engine(opened, record)
        for queries in options.queries:
            row = measure(opened, record, queries, options.repeats, engine)
            flops = "" if row.flops is None else f"{row.flops:.3f}"
            print(
                f"{name:>9} {row.queries:>3} {row.chunk:>6} {row.cpu:>28.2f} {flops:>8} {2 + 2 / queries:>8.3f}",
                flush=True,
            )
    print(
        f"forward training, beside a plain torch.optim loop: {training_ratio(opened, options.repeats):.3f}", flush=True
    )


def compiled_engine(opened: OpenExperiment, record: StepRecord) -> Engine:
    """The compiled engine for the form of a step's first shard, compiled here and now."""
    shard, began = opened.data(record.state.step)[0], time.perf_counter()

    def unavailable(error: CannotCompileError) -> None:
        raise SystemExit(f"the compiled engine cannot be had: {error}")

    engine = CompiledEngine(frozenset({form_of(shard)}), unavailable)
    engine.shard_graph(opened.recipe.model, record, shard, 0, shard.denominator)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return engine


def measure(opened: OpenExperiment, record: StepRecord, queries: int, repeats: int, engine: Engine = EAGER) -> Row:
    """Walks one step for `queries` queries, beside training steps."""
    shards = opened.data(record.state.step)
    eager = engine is EAGER
    chunk = choose_widths(opened, record, shards, queries, longest=1).chunk if eager else 1
    lanes = -(-queries // chunk) * chunk
    cotangent = random_cotangent(record.state, lanes)
    scores = torch.zeros(lanes, len(opened.units), dtype=opened.recipe.model.dtype)

    def train() -> None:
        train_step(opened.recipe, record.state, opened.data(record.state.step))

    def walk() -> None:
        _, again = train_step(opened.recipe, record.state, opened.data(record.state.step))
        pull_back(opened.recipe, again, opened.data(record.state.step), cotangent, scores, chunk=chunk, engine=engine)

    cpu = ratio(walk, train, repeats) / queries
    # Compiled code calls kernels that the counter does not see.
    return Row(queries, chunk, cpu, flops(walk) / flops(train) / queries if eager else None)


def training_ratio(opened: OpenExperiment, repeats: int) -> float:
    """CPU seconds of the project's training steps over those of an ordinary loop on the same batches."""
    model, optimizer = copy.deepcopy(opened.module), opened.recipe.optimizer
    if not isinstance(optimizer, AdamW):
        raise SystemExit("the plain loop is written for AdamW")
    reference = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    batches: Sequence[int] = range(min(5, opened.steps))

    def plain() -> None:
        for step in batches:
            for shard in opened.data(step):
                loss = (
                    opened.task.example_losses(model, opened.recipe.model.place(shard.batch)).sum() / shard.denominator
                )
                reference.zero_grad()
                torch.autograd.backward(loss)
                if opened.recipe.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), opened.recipe.clip_norm)
                reference.step()

    def ours() -> None:
        state = opened.initial_state
        for step in batches:
            state, _ = train_step(opened.recipe, state, opened.data(step))

    return ratio(ours, plain, repeats)


def ratio(work: Callable[[], None], unit: Callable[[], None], repeats: int) -> float:
    """Median CPU time of `work` over that of `unit`, run in alternation after a warm-up."""
    work()
    unit()
    times = [(cpu_seconds(work), cpu_seconds(unit)) for _ in range(repeats)]
    return median(a for a, _ in times) / median(b for _, b in times)


def cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def flops(work: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
