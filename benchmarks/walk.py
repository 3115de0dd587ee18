"""What a walk costs per step and query, in units of one training step: CPU seconds and FLOPs, for several numbers of queries.

    python benchmarks/walk.py [--experiment experiments/stdlib_lm.yaml] [--threads 1] [--queries 1 2 4 8 16]

Everything is measured in one process and in alternation, a training step beside a walked step; medians of `--repeats`. A walked
step is what the walk does: rematerialise it, build its double-backward graph, pull all queries back through it, in calls of the width
that the planner's probe chose. Expected with everything held in memory: FLOPs of 2 + 2/Q. Last: forward training beside a plain
torch.optim loop.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.walk_planner import choose_widths, random_cotangent
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.optimizers import AdamW
from magic_pipeline.metagradient.pullback import pull_back
from magic_pipeline.metagradient.step import StepRecord, train_step

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """One number of queries: cost per step and query, in training steps."""

    queries: int
    chunk: int
    cpu: float
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "stdlib_lm.yaml")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    opened = open_experiment(load_experiment(options.experiment))
    with exact_numerics(options.threads):
        state, record = train_step(opened.recipe, opened.initial_state, opened.data(0))
        _, record = train_step(opened.recipe, state, opened.data(1))
        print(
            f"{opened.experiment.name}: {sum(p.numel() for p in state.params.values()):,} parameters, "
            f"{opened.data(1)[0].denominator:g} loss terms a micro-batch, {options.threads} threads, torch {torch.__version__}, "
            f"{platform.machine()}"
        )
        print(f"{'Q':>3} {'chunk':>6} {'CPU, training steps a query':>28} {'FLOPs':>8} {'2 + 2/Q':>8}")
        for queries in options.queries:
            row = measure(opened, record, queries, options.repeats)
            print(
                f"{row.queries:>3} {row.chunk:>6} {row.cpu:>28.2f} {row.flops:>8.3f} {2 + 2 / queries:>8.3f}",
                flush=True,
            )
        print(f"forward training, beside a plain torch.optim loop: {training_ratio(opened, options.repeats):.3f}")


def measure(opened: OpenExperiment, record: StepRecord, queries: int, repeats: int) -> Row:
    """Walks one step for `queries` queries, beside training steps."""
    shards = opened.data(record.state.step)
    chunk = choose_widths(opened, record, shards, queries, longest=1).chunk
    lanes = -(-queries // chunk) * chunk
    cotangent = random_cotangent(record.state, lanes)
    scores = torch.zeros(lanes, len(opened.units), dtype=opened.recipe.model.dtype)

    def train() -> None:
        train_step(opened.recipe, record.state, opened.data(record.state.step))

    def walk() -> None:
        _, again = train_step(opened.recipe, record.state, opened.data(record.state.step))
        pull_back(opened.recipe, again, opened.data(record.state.step), cotangent, scores, chunk=chunk)

    cpu = ratio(walk, train, repeats) / queries
    return Row(queries, chunk, cpu, flops(walk) / flops(train) / queries)


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
