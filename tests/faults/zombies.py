"""The zombie campaign: a complete small experiment, halted at a durable operation, overtaken, and woken while its heir works or after.

`python -m tests.faults.zombies [--storage local|seaweedfs|moto] [--stride K] [--seed S]` prints a table. SIGSTOP halts a run before,
in the middle of or right after its n-th operation. Another run finds its heartbeat standing still,
overtakes it, and finishes. SIGCONT wakes the first at an operation of the second that is drawn under the seed, or once the
second has ended. Afterwards all of this must hold:

* the second run ended well, and what it wrote has the bits of an undisturbed run, before and after the first has ended;
* the first ended well, or because it saw that it had been overtaken (or that the other holds the lease): in one line, and soon;
* `verify` finds nothing damaged, no chain holds anything that `gc` would not name, and after `gc` the storage holds as many
  objects of each name as after an undisturbed run (ledger and epochs aside).
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from magic_pipeline.attribution.collecting import collect
from magic_pipeline.attribution.verifying import verify_experiment
from tests.faults import inspecting
from tests.faults.crashes import Undisturbed, undisturbed
from tests.faults.forks import FAILED, Fork, in_a_process, in_parallel, quick_folder
from tests.faults.struck_sink import Operation, Strike, install
from tests.faults.tables import Try, table
from tests.faults.whole_run import Place, open_at, place, whole_run

OVERTAKEN = ("LeaseLostError: ", "HeldError: ")


def running(
    folder: Path, storage: dict[str, Any], strike: Strike | None, act: Callable[[Operation], None]
) -> Callable[[], dict[str, str]]:
    """A run that acts at an operation; its result are the scores' bits."""

    def work() -> dict[str, str]:
        # Servers refuse an upload of several parts that are as small as half of these objects: whoever wakes could never end it.
        install(strike, act, is_work, sends=open_at(folder, storage).store.sink.reads_back)
        opened = open_at(folder, storage)
        whole_run(opened)
        return inspecting.score_bits(opened)

    return work


def is_work(operation: Operation) -> bool:
    """Not a heartbeat: how many of those there are depends on the time that a run takes."""
    return "/writers/" not in operation.path


def halt(operation: Operation) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def attempt(folder: Path, where: Place, strike: Strike, wake: Strike | None, reference: Undisturbed) -> Try:
    """A run halted at `strike` and woken at its heir's `wake`; None is after the heir has ended."""
    began, storage, problems = time.monotonic(), where.new(), list[str]()
    folder.mkdir(parents=True)
    zombie = Fork(running(folder, storage, strike, halt), folder / "zombie.txt")
    if not zombie.wait_until_stopped():
        return Try(f"{where.name}: SIGSTOP", f"SIGSTOP at operation {strike.n}", ("it ended before",), 0.0)

    def wakes(operation: Operation) -> None:
        os.kill(zombie.pid, signal.SIGCONT)
        time.sleep(0.3)  # what it does now, it does while this run holds the lease

    status, scores = in_a_process(running(folder, storage, wake, wakes), folder / "heir.txt")
    if scores is None:
        problems.append(f"the heir ended with {status}: {_end(folder / 'heir.txt')}")
    elif scores != reference.scores:
        problems.append("the heir's scores are not those of an undisturbed run")
    os.kill(zombie.pid, signal.SIGCONT)
    woken = time.monotonic()
    status, scores = zombie.result()
    if time.monotonic() - woken > 30:
        problems.append(f"the halted run took {time.monotonic() - woken:.0f} s to end")
    last = _end(folder / "zombie.txt").rpartition("\n")[2]
    if scores is None and (os.waitstatus_to_exitcode(status) != FAILED or not last.startswith(OVERTAKEN)):
        problems.append(f"the halted run ended with {status}: {last}")
    if scores is not None and scores != reference.scores:
        problems.append("the halted run's scores are not those of an undisturbed run")
    problems += _remains(folder, storage, reference)
    when = "after its heir had ended" if wake is None else f"at operation {wake.n} of its heir"
    operation = reference.operations[strike.n]
    what = f"{strike.moment} {operation.verb} {inspecting.named(operation.path)} (operation {strike.n})"
    kind = f"{where.name}: SIGSTOP, woken {'at the end' if wake is None else 'while its heir works'}"
    return Try(kind, f"SIGSTOP {what}, woken {when}", tuple(problems), time.monotonic() - began)


def _remains(folder: Path, storage: dict[str, Any], reference: Undisturbed) -> list[str]:
    """What is wrong with the storage when both have ended."""

    def look() -> dict[str, Any]:
        opened = open_at(folder, storage)
        findings = verify_experiment(opened).findings
        scores = inspecting.score_bits(opened)
        collect(opened.experiment, free=True, older_than=0)
        after = verify_experiment(opened).findings
        return {
            "scores": scores,
            "damaged": [f"{f.object}: {f.problem}" for f in findings if not f.problem.startswith("orphaned")],
            "left": [f"after gc, {f.object}: {f.problem}" for f in after],
            "census": without_plans(inspecting.census(opened)),
        }

    status, found = in_a_process(look, folder / "look.txt")
    if found is None:
        return [f"the look afterwards ended with {status}: {_end(folder / 'look.txt')}"]
    wrong = [*found["damaged"], *found["left"]]
    if found["scores"] != reference.scores:
        wrong.append("the scores that stay are not those of an undisturbed run")
    expected = without_plans(reference.census)
    return wrong + [
        f"after gc, {name}: {found['census'].get(name, 0)} in place of {expected.get(name, 0)}"
        for name in sorted(expected.keys() | found["census"].keys())
        if found["census"].get(name, 0) != expected.get(name, 0)
    ]


def without_plans(census: dict[str, int]) -> dict[str, int]:
    """A plan that lands late is one more of its query's: whole, and of no use."""
    return {name: count for name, count in census.items() if "/plans/" not in name}


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8").rstrip()[-2000:] if log.exists() else ""


def campaign(where: Place, folder: Path, *, stride: int, seed: int, jobs: int) -> list[Try]:
    """A try at every moment of every stride-th operation, each told as it ends."""
    chosen = random.Random(f"{seed}/{where.name}")
    reference = undisturbed(folder / "undisturbed", where)
    reference = replace(reference, operations=tuple(filter(is_work, reference.operations)))
    pieces = []
    for number, strike in enumerate(reference.strikes(stride)):
        left = len(reference.operations) - strike.n  # of the heir, about
        wake = Strike(chosen.randrange(left), "after") if chosen.random() < 0.6 else None
        pieces.append(functools.partial(_told, folder / str(number), where, strike, wake, reference))
    return [Try(**one | {"problems": tuple(one["problems"])}) for one in in_parallel(jobs, pieces)]


def _told(folder: Path, where: Place, strike: Strike, wake: Strike | None, reference: Undisturbed) -> dict[str, Any]:
    one = attempt(folder, where, strike, wake, reference)
    print(one, flush=True)
    return asdict(one)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=("local", "seaweedfs", "moto"), default="local")
    parser.add_argument("--stride", type=int, default=1, help="only every K-th operation (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tries at a time (one a CPU)")
    options = parser.parse_args(arguments)
    # A heartbeat that stands still for a second is dead here, so that a try takes seconds and not minutes.
    os.environ |= {"MAGIC_HEARTBEAT_SECONDS": "0.1", "MAGIC_EXPIRY_SECONDS": "1"}
    with quick_folder() as folder, place(options.storage, folder / "server") as where:
        tries = campaign(where, folder / "tries", stride=options.stride, seed=options.seed, jobs=options.jobs)
    print(table(tries))
    return 1 if any(one.problems for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
