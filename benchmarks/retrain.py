"""Batched against one-by-one retraining: seconds per retraining, and whether the results are the same.

    python benchmarks/retrain.py [--experiment experiments/digits.yaml] [--threads 1] [--widths 8 16 32 50 100] [--steps 20]

Everything is measured in one process and in alternation; medians of `--repeats`. With one thread the times are CPU times of this
process. Also says what the bank's probe would choose, and compares final parameters in float32 and in float64.
"""

from __future__ import annotations

import argparse
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from magic_pipeline.attribution.bank import Bank, random_subsets
from magic_pipeline.attribution.bank_plan import NOT_BATCHABLE, plan_bank, weights_of
from magic_pipeline.attribution.experiment import load_experiment, parse_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.metagradient.batched_training import batched_step, repeated, run_of, separate_step
from magic_pipeline.metagradient.numerics import exact_numerics

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "digits.yaml")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 50, 100])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    opened = open_experiment(load_experiment(options.experiment))
    steps, threads = min(options.steps, opened.steps), options.threads
    bank = random_subsets(opened.fingerprint, len(opened.units), fraction=0.05, subsets=max(options.widths), seed=0)
    print(
        f"{opened.experiment.name}: {sum(p.numel() for p in opened.initial_state.params.values()):,} parameters, {steps} steps, "
        f"{threads} threads, torch {torch.__version__}, {platform.machine()}"
    )
    with exact_numerics(threads):
        print(f"{'width':>6} {'ms alone':>9} {'ms batched':>11} {'times as fast':>14}   a step of one retraining")
        for width in options.widths:
            compare(opened, bank, width, steps, threads, options.repeats)
        print("the probe:", plan_bank(opened, bank, threads=threads, microbatch_size=None, keep=True).why)
        for dtype in ("float32", "float64"):
            print(f"{dtype}: the largest difference of a parameter, relative: {difference(opened, dtype):.1e}")


def compare(opened: OpenExperiment, bank: Bank, width: int, steps: int, threads: int, repeats: int) -> None:
    """One row of the table."""
    clock = time.process_time if threads == 1 and opened.recipe.model.device.type == "cpu" else time.perf_counter

    def work(runs: int, step: Callable[..., tuple[object, object]]) -> Callable[[], float]:
        weights = weights_of(opened, bank, bank.labels[:runs])

        def timed() -> float:
            state = repeated(opened.recipe, opened.initial_state, runs)
            began = clock()
            for number in range(steps):
                state, _ = step(opened.recipe, state, opened.data(number), weights)  # type: ignore[assignment]
            return (clock() - began) / runs / steps

        return timed

    alone, batched = work(1, separate_step), work(width, batched_step)
    try:
        alone(), batched()
    except NOT_BATCHABLE as error:
        print(f"{width:>6}  cannot be batched: {error}")
        return
    pairs = [(alone(), batched()) for _ in range(repeats)]
    ratio = median(a / b for a, b in pairs)
    print(
        f"{width:>6} {1e3 * median(a for a, _ in pairs):>9.3f} {1e3 * median(b for _, b in pairs):>11.3f} {ratio:>14.1f}",
        flush=True,
    )


def difference(opened: OpenExperiment, dtype: str, runs: int = 4) -> float:
    """Of the final parameters after all steps, the worst of four retrainings."""
    content = opened.experiment.model_dump(mode="json")
    content["training"]["dtype"] = dtype
    again = open_experiment(parse_experiment(content, folder=opened.experiment.folder))
    bank = random_subsets(again.fingerprint, len(again.units), fraction=0.05, subsets=runs, seed=0)
    weights = weights_of(again, bank, bank.labels)
    together = alone = repeated(again.recipe, again.initial_state, runs)
    for number in range(again.steps):
        together, _ = batched_step(again.recipe, together, again.data(number), weights)
        alone, _ = separate_step(again.recipe, alone, again.data(number), weights)
    worst = 0.0
    for run in range(runs):
        expected = run_of(alone, run).params
        for name, found in run_of(together, run).params.items():
            worst = max(worst, float((found - expected[name]).abs().max() / expected[name].abs().max()))
    return worst


if __name__ == "__main__":
    main()
