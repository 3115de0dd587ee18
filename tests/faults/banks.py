"""The bank campaign: a leave-out bank, killed before, during and right after each of its durable operations.

`python -m tests.faults.banks [--stride K] [--doubles N] [--seed S]` prints a table. A bank of six retrainings in three blocks of two,
sealed inside a block at every segment; SIGKILL ends a fork at its n-th operation, another fork resumes (in a double fault it is
killed too, and a third one finishes). Afterwards all of this must hold:

* the retrained models and their measurements have the bits of an undisturbed bank;
* a finished block is never begun again, and a block goes on from its newest sealed step;
* training itself is not begun again, and `verify` finds nothing damaged.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magic_pipeline.attribution import ledger, retraining
from magic_pipeline.attribution.bank_plan import plan_bank, seal_bank_plan
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.validation import finished_subsets, retrain_subsets, subset_banks
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.metagradient.numerics import exact_numerics
from tests.attribution.running import open_small
from tests.faults.forks import in_a_process, in_parallel, quick_folder
from tests.faults.struck_sink import Operation, Strike, install
from tests.faults.tables import Try, table

SUBSETS, WIDTH = 6, 2


def open_with_bank(folder: Path) -> OpenExperiment:
    return open_small(folder, validation={"lds": {"subsets": SUBSETS, "drop_fraction": 0.25}})


def prepare(folder: Path) -> None:
    """Training, and the plan of a bank: measured widths would differ from run to run, and with them the last bit."""
    opened = open_with_bank(folder)
    train(opened)
    [bank] = subset_banks(opened)
    with exact_numerics(1):
        plan = plan_bank(opened, bank, threads=1, microbatch_size=None, keep=True)
    plan = type(plan)(**plan.as_dict() | {"width": WIDTH, "batched": True, "why": "as the campaign wants it"})
    seal_bank_plan(opened.store, opened.layout.bank(bank.fingerprint), plan)
    retraining.open_bank(opened, bank)  # describes it


def make_bank(folder: Path, strike: Strike | None) -> dict[str, Any]:
    """The whole bank as far as it is not done; what is stored then."""

    def die(operation: Operation) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    vars(retraining)["SEAL_SECONDS"] = 0.0  # so that a block of a moment is sealed as one of an hour
    operations = install(strike, die)
    opened = open_with_bank(folder)
    retrain_subsets(opened)
    findings = verify_experiment(opened).findings
    return look(folder) | {
        "operations": [asdict(one) for one in operations.made],
        "damaged": [f"{f.object}: {f.problem}" for f in findings if not f.problem.startswith("orphaned")],
    }


def look(folder: Path) -> dict[str, Any]:
    """What is finished, how far each block is sealed, and what was begun."""
    opened = open_with_bank(folder)
    [bank] = subset_banks(opened)
    of = retraining.open_bank(opened, bank)
    runs = finished_subsets(opened)
    return {
        "results": {
            label: [run.digest, *map(float.hex, run.result.measurements.values())] for label, run in runs.items()
        },
        "sealed": {block[0]: max([0, *(n.step for n in of.chain(block).sealed())]) for block in of.blocks},
        "finished": [block[0] for block in of.blocks if block[0] in runs],
        "ledger": list(ledger.entries(opened.store, opened.layout)),
    }


def attempt(folder: Path, trained: Path, strikes: tuple[Strike, ...], reference: dict[str, Any]) -> Try:
    began, problems = time.monotonic(), list[str]()
    shutil.copytree(trained, folder)
    log = folder / "log.txt"
    _, before = in_a_process(functools.partial(look, folder), log)
    for strike in (*strikes, None):
        status, found = in_a_process(functools.partial(make_bank, folder, strike), log)
        if strike is not None and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            problems.append(f"the run to be killed ended with {status}")
        if strike is None and found is None:
            problems.append(f"the rerun ended with {status}: {log.read_text()[-2000:]}")
        _, after = in_a_process(functools.partial(look, folder), log)
        problems += repeated(before, after)
        before = after
    if found is not None:
        problems += found["damaged"]
        if found["results"] != reference["results"]:
            problems.append("the results are not those of an undisturbed bank")
    operation = reference["operations"][strikes[0].n]
    fault = f"SIGKILL {strikes[0].moment} {operation['verb']} {operation['path'].rpartition('/validation/')[2]}"
    kind = "bank: SIGKILL" if len(strikes) == 1 else "bank: SIGKILL, and SIGKILL of the resume"
    return Try(kind, fault, tuple(problems), time.monotonic() - began)


def repeated(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What a run began although it was sealed when the run began."""
    wrong = []
    for entry in after["ledger"][len(before["ledger"]) :]:
        if entry["work"] != "retrain":
            wrong.append(f"{entry['work']} was begun again")
            continue
        first = entry["retrainings"][0]
        if first in before["finished"]:
            wrong.append(f"the finished block of {first} was begun again")
        if entry["start"] != before["sealed"][first]:
            wrong.append(f"{first} went on from step {entry['start']}, not {before['sealed'][first]}")
    return wrong


def campaign(folder: Path, *, stride: int, doubles: int, seed: int, jobs: int) -> list[Try]:
    chosen, trained = random.Random(seed), folder / "trained"
    in_a_process(functools.partial(prepare, trained), folder / "log.txt")
    shutil.copytree(trained, folder / "undisturbed")
    status, reference = in_a_process(functools.partial(make_bank, folder / "undisturbed", None), folder / "log.txt")
    if reference is None:
        raise RuntimeError(f"the undisturbed bank ended with {status}: {(folder / 'log.txt').read_text()}")
    operations = [Operation(**one) for one in reference["operations"]]
    print(f"an undisturbed bank makes {len(operations)} durable operations", flush=True)
    singles = [(Strike(n, moment),) for n in range(0, len(operations), stride) for moment in operations[n].moments]
    pairs = [(Strike(n, "before"), Strike(chosen.randrange(8), "after")) for n in range(2, len(operations) - 16)]
    strikes = [*singles, *chosen.sample(pairs, min(doubles, len(pairs)))]
    tries = [
        functools.partial(_told, folder / f"try{number}", trained, one, reference) for number, one in enumerate(strikes)
    ]
    return [Try(**one | {"problems": tuple(one["problems"])}) for one in in_parallel(jobs, tries)]


def _told(folder: Path, trained: Path, strikes: tuple[Strike, ...], reference: dict[str, Any]) -> dict[str, Any]:
    one = attempt(folder, trained, strikes, reference)
    print(one, flush=True)
    shutil.rmtree(folder)
    return asdict(one)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="only every K-th operation (1)")
    parser.add_argument("--doubles", type=int, default=10, help="double faults (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tries at a time (one a CPU)")
    options = parser.parse_args(arguments)
    with quick_folder() as folder:
        tries = campaign(folder, stride=options.stride, doubles=options.doubles, seed=options.seed, jobs=options.jobs)
    print(table(tries))
    return 1 if any(one.problems for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
