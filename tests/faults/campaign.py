"""The fault campaign: `magic-pipeline run` killed, interrupted or failed at a drawn place, then run again, many times.

`python -m tests.faults.campaign` prints every try, then a table. Each run is a process of its own, forked from this one, which
has torch and Dagster imported and has computed nothing; what it executes is the command line itself.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster._core.storage.sqlite_storage as dagster_storage
import torch
import yaml

from magic_pipeline import cli
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.orchestration import building, running
from magic_pipeline.orchestration.instance import dagster_home, open_instance
from tests.attribution.running import SMALL, merged
from tests.faults import inspecting
from tests.faults.books import books
from tests.faults.faults import PLACES, Fault, Strike, arm, count_calls
from tests.faults.forks import in_a_process

# (place, strike, whether it may also come right after the call)
KINDS: tuple[tuple[str, Strike, bool], ...] = (
    ("training step", "SIGKILL", False),
    ("walk step", "SIGKILL", False),
    ("blob", "SIGKILL", True),
    ("manifest", "SIGKILL", True),
    ("report", "SIGKILL", True),
    ("training step", "SIGTERM", False),
    ("walk step", "SIGTERM", False),
    ("blob", "SIGTERM", True),
    ("blob", "exception", False),
)
# What the default tests have time for: a kill in the walk, at a seal and at a report.
QUICK = (1, 3, 4)
# The query ids are awkward on purpose; 5 queries in calls of 2 make one lane empty.
EXPERIMENT = merged(
    SMALL,
    {"task": {"type": SMALL["task"]["type"], "query_ids": ["a|b", "../x", "é", "Q", "q"]}},
)


@dataclass(frozen=True)
class Try:
    """One fault and the run after it: `problems` is empty where nothing was lost."""

    fault: Fault
    ended: str
    problems: tuple[str, ...]
    seconds: float


def run(path: Path, fault: Fault | None = None) -> tuple[int, int | None]:
    """(wait status, exit code) of `magic-pipeline run` with a fault."""

    def command() -> int:
        if fault is not None:
            arm(fault)
        return cli.main(["run", str(path)])

    return in_a_process(command, path.parent / "log.txt")


def write_experiment(folder: Path) -> Path:
    """The experiment in a folder of its own, with an empty Dagster instance: a copy, since making one takes seconds."""
    home = folder.parent / "empty_instance"
    if not home.exists():
        in_a_process(lambda: _make_instance(home))
    shutil.copytree(dagster_home(home), dagster_home(folder))
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    return path


def _make_instance(folder: Path) -> None:
    with open_instance(folder):
        pass


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run gives, and how often each place is passed in it."""

    scores: dict[str, str]
    calls: dict[str, int]


def undisturbed(folder: Path) -> Reference:
    path = write_experiment(folder)

    def command() -> dict[str, int]:
        counters = {name: count_calls(name) for name in PLACES}
        if cli.main(["run", str(path)]) != 0:
            raise RuntimeError("the undisturbed run failed")
        return {name: counter() for name, counter in counters.items()}

    _, calls = in_a_process(command, folder / "log.txt")
    _, scores = in_a_process(lambda: inspecting.score_bits(_opened(path)))
    if calls is None or scores is None:
        raise RuntimeError((folder / "log.txt").read_text())
    return Reference(scores, calls)


def attempt(folder: Path, fault: Fault, reference: Reference) -> Try:
    """A run with the fault, then a run without."""
    began, path = time.monotonic(), write_experiment(folder)
    status, code = run(path, fault)
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {code}"
    problems = [] if _ended_as_it_should(fault, ended) else [f"the run with the fault ended with {ended}"]
    _, before = in_a_process(lambda: vars(inspecting.look(_opened(path))))
    _, again = run(path)
    if again != 0:
        problems.append(f"the rerun ended with {again}")
    _, found = in_a_process(
        lambda: (vars(inspecting.look(_opened(path))), inspecting.score_bits(_opened(path)), books(path)),
        folder / "log.txt",
    )
    if before is None or found is None:
        problems.append("what is stored cannot be read")
    else:
        after, scores, wrong = found
        problems += inspecting.repeated_work(inspecting.Found(**before), inspecting.Found(**after))
        problems += wrong
        if scores != reference.scores:
            problems.append("the scores are not those of an undisturbed run")
    return Try(fault, ended, tuple(problems), time.monotonic() - began)


def _opened(path: Path) -> OpenExperiment:
    return open_experiment(load_experiment(path))


def _ended_as_it_should(fault: Fault, ended: str) -> bool:
    return ended == {"SIGKILL": "signal 9", "SIGTERM": "exit 1", "exception": "exit 1"}[fault.strike]


def draw(seed: int, tries: int, calls: dict[str, int], quick: bool) -> Iterator[Fault]:
    """`tries` faults of each kind, at places drawn under the seed, none twice; all of them where there are not so many."""
    for number, (place, strike, also_after) in enumerate(KINDS):
        if quick and number not in QUICK:
            continue
        chosen = random.Random(f"{seed}/{number}")
        moments = [(n, after) for n in range(calls[place]) for after in ((False, True) if also_after else (False,))]
        for n, after in chosen.sample(moments, min(tries, len(moments))):
            yield Fault(place, strike, n, after)


def prepare() -> None:
    """Imports all that a run needs, so that forks need not, and computes nothing."""
    os.environ.pop("DAGSTER_HOME", None)  # every try has an instance of its own
    torch.set_num_threads(1)
    with exact_numerics(1):
        pass
    assert all((building, running, dagster_storage))


def table(tries: list[Try]) -> str:
    made = Counter(one.fault.kind for one in tries)
    survived = Counter(one.fault.kind for one in tries if not one.problems)
    width = max(map(len, made))
    lines = [f"{'fault':{width}}  tries  survived"]
    lines += [f"{kind:{width}}  {count:5}  {survived[kind]:8}" for kind, count in made.items()]
    return "\n".join([*lines, f"{'all':{width}}  {made.total():5}  {survived.total():8}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=5, help="of each kind of fault (5)")
    parser.add_argument("--quick", action="store_true", help="three of the kinds")
    options = parser.parse_args(arguments)
    prepare()
    tries: list[Try] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = undisturbed(folder / "undisturbed")
        passed = ", ".join(f"{count} {place}s" for place, count in reference.calls.items())
        print(f"seed {options.seed}; an undisturbed run passes {passed}", flush=True)
        for number, fault in enumerate(draw(options.seed, options.tries, reference.calls, options.quick)):
            tries.append(attempt(folder / str(number), fault, reference))
            one = tries[-1]
            result = "; ".join(one.problems) or "nothing lost"
            print(f"{fault}: {one.ended}, run again in {one.seconds:.1f} s: {result}", flush=True)
            if one.problems:
                print((folder / str(number) / "log.txt").read_text()[-3000:], flush=True)
    print(table(tries))
    return 1 if any(one.problems for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
