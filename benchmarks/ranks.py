"""What ranks cost and save: memory of slots and cotangents a process, bytes exchanged a step, and time beside one process.

    python benchmarks/ranks.py [--experiment experiments/stdlib_lm.yaml] [--ranks 4] [--queries 4] [--steps 3] [--processes 1 2 4]

Each number of processes is a gang of its own, started here, that makes some training steps and walks them back for some queries, one
thread a process. Bytes are counted at the exchanges themselves; times are medians of the leading process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.rank_parts import owned
from magic_pipeline.attribution.walk_planner import random_cotangent
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.processes import ProcessGang
from magic_pipeline.metagradient.pullback import pull_back
from magic_pipeline.metagradient.step import train_step

ROOT = Path(__file__).parent.parent
MIB = 2**20


class CountingGang(ProcessGang):
    """Counts the bytes that this process sends to others."""

    sent = 0

    def exchange(self, rows: Tensor) -> Tensor:
        self.sent += rows.nbytes * (self.processes - 1) // self.processes
        return super().exchange(rows)

    def gather(self, tensor: Tensor) -> Tensor:
        self.sent += tensor.nbytes * (self.processes - 1)
        return super().gather(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "stdlib_lm.yaml")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(options, *options.member)
        return
    rows = {count: gang(options, count) for count in options.processes}
    params, one = rows[options.processes[0]]["params"], rows[options.processes[0]]
    print(
        f"{options.ranks} ranks, {options.queries} queries, parameters of {params / MIB:.2f} MiB, {os.cpu_count()} CPUs"
    )
    print(
        f"{'W':>2} {'slots + cotangents':>20} {'share':>6} {'sent, training step':>20} {'walked step':>20} {'train':>9} {'walk':>9}"
    )
    for count, row in rows.items():
        share = row["held"] / one["held"]
        print(
            f"{count:>2} {row['held'] / MIB:>16.2f} MiB {share:>6.3f} {row['sent_train'] / params:>9.2f} parameters "
            f"{row['sent_walk'] / params:>9.2f} parameters {row['train']:>7.3f} s {row['walk']:>7.3f} s"
        )


def gang(options: argparse.Namespace, processes: int) -> dict[str, Any]:
    """The leading process's figures, of a gang of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--experiment", str(options.experiment), "--ranks", str(options.ranks)]
        command += ["--queries", str(options.queries), "--steps", str(options.steps), "--member"]
        started = [
            subprocess.Popen([*command, str(process), str(processes), f"{folder}/store"], stdout=subprocess.PIPE)
            for process in range(processes)
        ]
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("a process of the gang failed")
        found: list[dict[str, Any]] = [json.loads(output) for output in outputs]
        return found[0] | {"held": max(one["held"] for one in found)}


def member(options: argparse.Namespace, process: str, processes: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(process), world_size=int(processes))
    counting = CountingGang()
    experiment = load_experiment(options.experiment).model_copy(update={"ranks": options.ranks})
    opened = open_experiment(experiment, gang=counting)
    with exact_numerics(1):
        print(json.dumps(measured(opened, counting, options.queries, options.steps)))
    dist.destroy_process_group()


def measured(opened: OpenExperiment, counting: CountingGang, queries: int, steps: int) -> dict[str, Any]:
    state, records = opened.initial_state, []

    def train() -> None:
        nonlocal state
        state, record = train_step(opened.recipe, state, opened.data(state.step))
        records.append(record)

    train_seconds, sent_train = timed(train, counting, steps)
    mine = owned(opened.ranks, state)
    cotangent = random_cotangent(mine, queries)
    scores = torch.zeros(queries, opened.score_rows, dtype=opened.recipe.model.dtype)

    def walk() -> None:
        nonlocal cotangent
        record = records.pop()
        cotangent = pull_back(opened.recipe, record, opened.data(record.state.step), cotangent, scores, chunk=1)

    walk_seconds, sent_walk = timed(walk, counting, steps)
    held = sum(t.nbytes for slot in state.slots.values() for t in slot.values())
    held += sum(t.nbytes for t in cotangent.params.values())
    held += sum(t.nbytes for slot in cotangent.slots.values() for t in slot.values())
    params = sum(t.nbytes for t in state.params.values())
    return {
        "params": params, "held": held, "sent_train": sent_train, "sent_walk": sent_walk, "train": train_seconds, "walk": walk_seconds,
    }  # fmt: skip


def timed(work: Callable[[], None], counting: CountingGang, times: int) -> tuple[float, float]:
    """Median seconds, and bytes sent, of one call."""
    seconds, before = [], counting.sent
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds), (counting.sent - before) / times


if __name__ == "__main__":
    main()
