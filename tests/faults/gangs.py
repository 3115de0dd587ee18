"""Gangs under fire: `magic-pipeline run` with two processes, killed at drawn moments of training and walk, until it is done.

`python -m tests.faults.gangs` prints every try, then a table. What is struck: one process of the gang, all of them, the command
itself, or the command politely. A moment is a number of forward passes made so far by all processes, drawn over the whole run, and
a bit of time. A try survives when the scores are, bit by bit, those of a run in one process, at most one segment was begun twice, no
process is left, store and Dagster's books agree, and all that within a time limit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster._core.storage.sqlite_storage as dagster_storage
import psutil
import torch
import yaml

from magic_pipeline import cli
from magic_pipeline.attribution import gang, ledger
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.status import stored_status
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.orchestration import building, running
from magic_pipeline.orchestration.event_log_view import view_event_log
from magic_pipeline.orchestration.headless import execute_asset
from magic_pipeline.orchestration.instance import dagster_home, open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.reporting import figures
from tests.attribution.gang_tasks import BEATS
from tests.attribution.running import SMALL, STEPS, merged
from tests.faults import inspecting
from tests.faults.forks import Fork, in_a_process, quick_folder

KINDS = ("SIGKILL of one process", "SIGKILL of all processes", "SIGKILL of the command", "SIGTERM of the command")
SEGMENT = 2  # steps
LIMIT = 180.0  # seconds for one command: with four more helpings of a busy machine it takes 40
ORPHANS = 10.0  # seconds after which no process may be left
EXPERIMENT = merged(
    SMALL,
    {
        "task": {"type": "tests.attribution.gang_tasks:Beating"},
        "ranks": 2,
        "training": {"clip_norm": 0.3},
        "attribution": {"segment_steps": SEGMENT, "query_batch": 2},
    },
)


@dataclass(frozen=True)
class Moment:
    """When `beats` forward passes are made, and `seconds` later."""

    beats: int
    seconds: float


@dataclass
class Command:
    """`magic-pipeline run` in a fork that has its folder as working directory, and every process of a gang that it ever had."""

    path: Path
    gang: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fork = Fork(lambda: run_here(self.path), self.path.parent / "log.txt")
        self.process = psutil.Process(self.fork.pid)
        self.deadline = time.monotonic() + LIMIT

    def ranks(self) -> list[psutil.Process]:
        """The gang's processes that live now."""
        try:
            children = [p for p in self.process.children() if "rank_process" in " ".join(p.cmdline())]
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            return []
        self.gang |= {(p.pid, p.create_time()): p for p in children if p.is_running()}
        return children

    def has_ended(self) -> bool:
        self.ranks()
        return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Whether it came to that before the command's end; False, and the command killed, after the time limit."""
        while not self.has_ended():
            if reached():
                return True
            if time.monotonic() > self.deadline:
                os.kill(self.fork.pid, signal.SIGKILL)
                break
            time.sleep(0.02)
        return False

    def end(self) -> str:
        """How it ended: `exit 0`, `signal 9`, `not in time`."""
        self.wait_for(lambda: False)
        late = time.monotonic() > self.deadline
        status, code = self.fork.result()
        return "not in time" if late else f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {code}"

    def orphans(self) -> int:
        """How many of the gang's processes are left a while after its end."""
        _, left = psutil.wait_procs(list(self.gang.values()), timeout=ORPHANS)
        return sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left)


@dataclass(frozen=True)
class Try:
    """`problems` is empty where nothing was lost."""

    kind: str
    moment: Moment
    ended: str
    redone: int
    problems: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Reference:
    """What one process gives undisturbed, and after how many forward passes training and everything was done."""

    scores: Mapping[str, str]
    trained: int
    beats: int


def run_here(path: Path) -> int:
    os.chdir(path.parent)
    return cli.main(["run", str(path)])


def write_experiment(folder: Path, processes: int) -> Path:
    """The experiment in a folder that has an instance already."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"processes": processes}), encoding="utf-8")
    return path


def prepare(folder: Path) -> Reference:
    """An `empty` folder with an instance, one that is `trained`, and one that is finished: all by one process."""
    empty, trained, finished = folder / "empty", folder / "trained", folder / "finished"
    _done(lambda: _make_instance(empty), folder)
    shutil.copytree(empty, trained)
    path = write_experiment(trained, 1)
    _done(lambda: _train(path), folder)
    beats = _beats(trained)
    shutil.copytree(trained, finished)
    path = write_experiment(finished, 1)
    if _done(lambda: run_here(path), folder) != 0:
        raise RuntimeError((folder / "log.txt").read_text())
    passes = _beats(finished)
    scores, _, _ = _done(lambda: _inspect(path), folder)
    return Reference(scores, beats, passes)


def _make_instance(folder: Path) -> None:
    with open_instance(folder):
        assert dagster_home(folder).exists()


def _train(path: Path) -> None:
    os.chdir(path.parent)
    experiment = load_experiment(path)
    with open_instance(path.parent) as instance:
        repository = building.build_definitions(path.parent).get_repository_def()
        if not execute_asset(instance, repository, ExperimentAssets.of(experiment).trajectory).is_success:
            raise RuntimeError("training failed")


def _done(work: Callable[[], Any], folder: Path) -> Any:
    status, result = in_a_process(work, folder / "log.txt")
    if status != 0:
        raise RuntimeError((folder / "log.txt").read_text())
    return result


def _beats(folder: Path) -> int:
    beats = folder / BEATS
    return beats.stat().st_size if beats.exists() else 0


def attempt(folder: Path, kind: str, moment: Moment, reference: Reference, chosen: random.Random) -> Try:
    """Two processes, struck at the moment and run again until it is done: by itself where a process was struck, else by hand.

    A moment after training is struck in a copy of the folder where training is done, which has made the same passes.
    """
    began = time.monotonic()
    shutil.copytree(folder.parent / ("empty" if moment.beats < reference.trained else "trained"), folder)
    command = Command(write_experiment(folder, 2))
    problems = [] if command.wait_for(lambda: strikes_now(command, folder, moment)) else ["the moment never came"]
    time.sleep(moment.seconds)
    strike(command, kind, chosen)
    ended = command.end()
    expected = {KINDS[2]: "signal 9", KINDS[3]: "exit 1"}.get(kind, "exit 0")
    if ended != expected:
        problems.append(f"ended with {ended}, not {expected}")
    orphans = command.orphans()
    if ended != "exit 0":
        again = Command(command.path)
        if (end := again.end()) != "exit 0":
            problems.append(f"the rerun ended with {end}")
        orphans += again.orphans()
    if orphans:
        problems.append(f"{orphans} processes are left")
    redone, found = inspected(command.path, reference)
    return Try(kind, moment, ended, redone, (*problems, *found), time.monotonic() - began)


def strikes_now(command: Command, folder: Path, moment: Moment) -> bool:
    return _beats(folder) >= moment.beats and len(command.ranks()) == 2


def strike(command: Command, kind: str, chosen: random.Random) -> None:
    struck = [command.process]
    if kind in KINDS[:2]:
        ranks = command.ranks()
        struck = [chosen.choice(ranks)] if ranks and kind == KINDS[0] else ranks
    for process in struck:
        try:
            process.send_signal(signal.SIGTERM if kind == KINDS[3] else signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue  # it was done


def inspected(path: Path, reference: Reference) -> tuple[int, list[str]]:
    """(steps begun twice, what is wrong) in a finished folder."""
    status, found = in_a_process(lambda: _inspect(path), path.parent / "log.txt")
    if status != 0:
        return 0, ["what is stored cannot be read"]
    scores, redone, wrong = found
    if scores != reference.scores:
        wrong.append("the scores are not those of an undisturbed run in one process")
    if redone > SEGMENT:
        wrong.append(f"{redone} steps were begun twice")
    return redone, wrong


def _inspect(path: Path) -> tuple[dict[str, str], int, list[str]]:
    os.chdir(path.parent)
    opened = open_experiment(load_experiment(path))
    begun = Counter[str]()
    for entry in ledger.entries(opened.store, opened.layout):
        begun.update({"training": entry["stop"] - entry["start"]} if entry["work"] == "train" else {})
        begun.update({key: stop - entry["start"] for key, stop in entry.get("queries", {}).items()})
    return inspecting.score_bits(opened), max(begun.values()) - STEPS, _books(opened)


def _books(opened: OpenExperiment) -> list[str]:
    """Where Dagster's books differ from the store, what is not materialized, and what `verify` finds."""
    [stored] = stored_status(opened.experiment)
    with open_instance(opened.experiment.folder) as instance:
        view = view_event_log(instance, opened.experiment, stored)
    queries = len(opened.queries)
    segments = queries * opened.ranks.count
    expected = {"training_trajectory": 1, "segment_checkpoints": segments, "attribution_scores": queries}
    wrong = [*view.differences, *(f"run {run} is not finished" for run in view.unfinished_runs)]
    if view.materialized != {**expected, "score_matrix": 1}:
        wrong.append(f"materialized: {view.materialized}")
    # A killed writer may leave what nothing names; that takes space and is no fault.
    findings = [f for f in verify_experiment(opened).findings if not f.problem.startswith("orphaned")]
    return [*wrong, *(f"{finding.object}: {finding.problem}" for finding in findings)]


def draw(seed: int, tries: int, reference: Reference) -> Iterator[tuple[str, Moment]]:
    """The kinds in turn, each at moments drawn over the whole run."""
    chosen = random.Random(seed)
    for number in range(tries):
        yield KINDS[number % len(KINDS)], Moment(chosen.randrange(reference.beats), chosen.uniform(0, 0.15))


def table(tries: list[Try]) -> str:
    made, survived = Counter(one.kind for one in tries), Counter(one.kind for one in tries if not one.problems)
    most = {kind: max(one.redone for one in tries if one.kind == kind) for kind in made}
    lines = [f"{'fault':26}  tries  survived  most steps begun twice"]
    lines += [f"{kind:26}  {count:5}  {survived[kind]:8}  {most[kind]:22}" for kind, count in made.items()]
    return "\n".join([*lines, f"{'all':26}  {made.total():5}  {survived.total():8}  {max(most.values()):22}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=30)
    options = parser.parse_args(arguments)
    os.environ.pop("DAGSTER_HOME", None)  # every try has an instance of its own
    torch.set_num_threads(1)
    with exact_numerics(1):
        pass
    assert all((building, running, dagster_storage, figures, gang))  # imported, so that forks need not
    tries: list[Try] = []
    with quick_folder() as folder:
        reference = prepare(folder)
        print(
            f"seed {options.seed}; training makes {reference.trained} of {reference.beats} forward passes", flush=True
        )
        for number, (kind, moment) in enumerate(draw(options.seed, options.tries, reference)):
            place = folder / f"try{number}"
            one = attempt(place, kind, moment, reference, random.Random(f"{options.seed}/{number}"))
            tries.append(one)
            result = "; ".join(one.problems) or "nothing lost"
            when = f"after {moment.beats} passes and {moment.seconds:.2f} s"
            print(f"{kind} {when}: {one.ended}, {one.redone} redone, {one.seconds:.0f} s: {result}", flush=True)
            if one.problems:
                print((place / "log.txt").read_text()[-4000:], flush=True)
            shutil.rmtree(place)
    print(table(tries))
    return 1 if any(one.problems for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
