"""Queries that arrive in waves while the sensor is on and Dagster's daemon runs, and SIGKILL to the worker at random.

`python -m tests.faults.waves [--queries 200] [--waves 3] [--kills 5] [--seed 0]` serves the UI as people do, trains, turns the sensor
on, and does nothing more than append to the queries file and kill. It prints the table of runs. At the end all of this must hold:

* every query was walked and scored exactly once, and the matrix holds all of them; no run is unfinished, no partition is red;
* no run was launched for a query that was finished when it was made;
* `verify` finds nothing damaged, and the scores have the bits of a run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.attribution.scores import write_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.processes import process_of
from magic_pipeline.orchestration.runs_of_experiment import queries_of_run
from tests.faults import inspecting
from tests.faults.books import books
from tests.orchestration.small_experiment import materializations, red_partitions
from tests.ui.serving import ask, served

TASK = """
import time
from pathlib import Path

class Slow(Asked):
    def example_losses(self, model, batch):
        if (Path(__file__).parent / "slow").exists():
            time.sleep(0.15)
        return super().example_losses(model, batch)
"""
FILE = """
name: waves
task: {{type: "{module}:Slow", examples: 12, features: 2}}
queries: {{file: queries.jsonl}}
training:
  {{epochs: 2, batch_size: 4, dtype: float64, optimizer: {{name: sgd, lr: 0.1}}, schedule: {{name: constant}}}}
attribution: {{segment_steps: 2, threads: 1, chunk: 1}}
"""
TURN_ON = """
mutation ($sensor: SensorSelector!) {
  startSensor(sensorSelector: $sensor) { __typename ... on PythonError { message } }
}
"""
LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
}
"""
WHERE = {"repositoryLocationName": "magic_pipeline.definitions", "repositoryName": "__repository__"}
ASSETS = ExperimentAssets("waves", 1)
_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)
Tell = Callable[[str], None]


def prepare(folder: Path) -> Path:
    """The experiment, with no query yet, slow while there is a file of that name."""
    folder.mkdir()
    asked = (Path(__file__).parents[1] / "orchestration" / "asked_task.py").read_text()
    module = f"{folder.name}_task"  # one process imports them from several folders
    (folder / f"{module}.py").write_text(asked + TASK)
    (folder / "queries.jsonl").touch()
    path = folder / "waves.yaml"
    path.write_text(FILE.format(module=module))
    return path


def some_queries(start: int, stop: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    drawn = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(stop)]
    return [{"id": f"query {n}", "x": drawn[n][:2], "y": drawn[n][2]} for n in range(start, stop)]


def ask_for(folder: Path, queries: list[dict[str, Any]]) -> None:
    """Appends to the queries file, as whoever writes it does."""
    with (folder / "queries.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(query)}\n" for query in queries)


def undisturbed_bits(folder: Path, queries: int) -> dict[str, str]:
    """The scores of all queries together, without Dagster."""
    path = prepare(folder)
    ask_for(folder, some_queries(0, queries))
    opened = open_experiment(load_experiment(path))
    train(opened)
    walk(opened, [query.key for query in opened.queries])
    for query in opened.queries:
        write_scores(opened, query.key)
    return inspecting.score_bits(opened)


class Waves:
    """The campaign over a served folder."""

    def __init__(self, path: Path, instance: dg.DagsterInstance, address: str, tell: Tell, seed: int) -> None:
        self.experiment: Experiment = load_experiment(path)
        self.instance, self.address, self.tell = instance, address, tell
        self.draw, self.kills, self.killed = random.Random(seed), 0, list[str]()
        self.began = time.monotonic()

    def run(self, queries: int, waves: int, kills: int, seconds: float) -> None:
        folder = self.experiment.folder
        bounds = [queries * n // waves for n in range(waves + 1)]
        ask_for(folder, some_queries(0, bounds[1]))
        self._train(seconds)
        (folder / "slow").touch()
        self._turn_on()
        for number in range(waves):
            if number:
                ask_for(folder, some_queries(bounds[number], bounds[number + 1]))
                self.tell(f"{self._now():6.0f} s  wave {number + 1}: {bounds[number + 1]} queries asked")
            share = kills * (number + 1) // waves
            # The next wave comes while the one before is still walked.
            enough = bounds[number + 1] if number == waves - 1 else bounds[number] + 1
            self._until(functools.partial(self._reached, enough, share), share, seconds)
        self._until(self._is_quiet, 0, seconds)

    def _train(self, seconds: float) -> None:
        params = {"selector": {**WHERE, "jobName": "waves_train"}, "runConfigData": {}, "mode": "default"}
        answer = ask(self.address, LAUNCH, {"params": params})["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        self._until(lambda: bool(materializations(self.instance, ASSETS.trajectory)), 0, seconds)

    def _turn_on(self) -> None:
        answer = ask(self.address, TURN_ON, {"sensor": {**WHERE, "sensorName": "waves_queries"}})["startSensor"]
        assert answer["__typename"] == "Sensor", answer
        self.tell(f"{self._now():6.0f} s  wave 1: the sensor is on")

    def _until(self, reached: Callable[[], bool], kills: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {self._scored()} scored, {self.kills} kills"
            if self.kills < kills:
                self._kill_one()
            time.sleep(0.5)

    def _kill_one(self) -> None:
        """SIGKILL to the worker of a walk that has just begun, was walking for a while, or is about to end: by the draw."""
        for run in self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            process = process_of(run.run_id, run.tags)
            if process is None or run.job_name != "waves_attribute" or run.run_id in self.killed:
                continue
            time.sleep(self.draw.uniform(0, 4))
            try:
                os.kill(process.pid, 9)
            except ProcessLookupError:
                return
            self.kills += 1
            self.killed.append(run.run_id)
            self.tell(f"{self._now():6.0f} s  SIGKILL {self.kills}: the worker of run {run.run_id[:8]}")
            return

    def _reached(self, scored: int, kills: int) -> bool:
        return self._scored() >= scored and self.kills >= kills

    def _scored(self) -> int:
        return len(self.instance.get_materialized_partitions(ASSETS.scores))

    def _is_quiet(self) -> bool:
        """The matrix is that of all queries, and no run is under way."""
        newest = self.instance.fetch_materializations(ASSETS.matrix, limit=1).records
        event = newest[0].event_log_entry.asset_materialization if newest else None
        return (
            event is not None
            and event.metadata["queries"].value == self._scored()
            and all(run.status in _ENDED for run in self.instance.get_runs())
        )

    def _now(self) -> float:
        return time.monotonic() - self.began

    def table(self) -> Iterator[str]:
        """Every run, oldest first: what it was for, how it ended, and what became of it."""
        order = self.instance.get_dynamic_partitions(ASSETS.queries_name)
        counts: Counter[tuple[str, str]] = Counter()
        yield f"{'run':8}  {'job':16}  {'queries':>7}  {'ended':8}  {'s':>5}  what it resumed, or why it was made"
        for record in reversed(self.instance.get_run_records()):
            run = record.dagster_run
            counts[run.job_name, run.status.value] += 1
            seconds = (record.end_time or 0) - (record.start_time or 0)
            why = f"retry of {run.parent_run_id[:8]}; " if run.parent_run_id else ""
            told = {name: run.tags.get(f"magic_pipeline/{name}", "nothing") for name in ("resumed", "lost")}
            why += ", ".join(f"{name} {value}" for name, value in told.items() if value != "nothing")
            why += " SIGKILL" if run.run_id in self.killed else ""
            covered = len(queries_of_run(run.tags, order)) or ""
            yield f"{run.run_id[:8]}  {run.job_name:16}  {covered!s:>7}  {run.status.value:8}  {seconds:5.1f}  {why}".rstrip()
        yield "; ".join(f"{count} {job} {status}" for (job, status), count in sorted(counts.items()))

    def wrong(self, queries: int, bits: dict[str, str]) -> list[str]:
        """What does not hold at the end."""
        problems = books(self.experiment.path or Path())
        if inspecting.score_bits(open_experiment(self.experiment)) != bits:
            problems.append("the scores differ from those of an undisturbed run")
        keys = [partition_key(query["id"]) for query in some_queries(0, queries)]
        walked = self._made(ASSETS.segments)
        for what, made in (("walked", Counter({k.rpartition("|")[0]: n for k, n in walked.items()})),
                           ("scored", self._made(ASSETS.scores))):  # fmt: skip
            problems += [f"{key} was {what} {made[key]} times" for key in keys if made[key] != 1]
            problems += [f"{key}, which nobody asked for, was {what}" for key in made.keys() - set(keys)]
        problems += [f"partition {name} is red" for name in red_partitions(self.instance, ASSETS.segments)]
        problems += [f"run {run.run_id} has not ended" for run in self.instance.get_runs() if run.status not in _ENDED]
        return problems + list(self._launched_in_vain())

    def _made(self, key: dg.AssetKey) -> Counter[str]:
        """How often each partition was made, not counting what was only reported again."""
        return Counter(str(partition) for partition, _, again in materializations(self.instance, key) if not again)

    def _launched_in_vain(self) -> Iterator[str]:
        finished: dict[str, float] = {}
        for record in self.instance.fetch_materializations(ASSETS.segments, limit=5000, ascending=True).records:
            event = record.event_log_entry.asset_materialization
            assert event is not None and event.partition is not None
            finished.setdefault(event.partition.rpartition("|")[0], record.timestamp)
        order = self.instance.get_dynamic_partitions(ASSETS.queries_name)
        for made_run in self.instance.get_run_records():
            run = made_run.dagster_run
            # A retry is made of its parent's partitions, finished or not.
            if run.job_name != "waves_attribute" or run.parent_run_id is not None:
                continue
            made = made_run.create_timestamp.timestamp()
            for key in queries_of_run(run.tags, order):
                if finished[key] < made:
                    yield f"run {run.run_id} was launched for {key}, which was finished"


def campaign(folder: Path, tell: Tell, *, queries: int, waves: int, kills: int, seed: int) -> list[str]:
    """The whole of it; gives what was wrong in the end."""
    bits = undisturbed_bits(folder / "undisturbed", queries)
    path = prepare(folder / "experiments")
    with served(path.parent, folder / "ui.log") as address, open_instance(path.parent) as instance:
        running = Waves(path, instance, address, tell, seed)
        try:
            running.run(queries, waves, kills, seconds=600)
        finally:
            for line in running.table():
                tell(line)
        return running.wrong(queries, bits)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("queries", 200), ("waves", 3), ("kills", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        problems = campaign(Path(name), lambda line: print(line, flush=True), **vars(options))
    end = f"{len(problems)} things are wrong" if problems else "every query scored once, nothing lost"
    print(*problems, f"{end} ({time.monotonic() - began:.0f} s)", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
