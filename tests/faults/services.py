"""deploy/server on a real Postgres and an S3 server, and SIGKILL to everything in it, one after the other, while queries are walked.

`python -m tests.faults.services [--storage local|seaweedfs|moto]` prints a table: what was killed, after how many seconds Dagster had
found it (where it can), and after how many all was as it should be. `start.sh` is called after each kill, as cron or a service manager
would. Every run is launched over HTTP, as the UI does. At the end all of this must hold:

* every query was walked by a run that ended well, no partition is red or missing, no run is unfinished, no slot of a pool is claimed;
* `verify` finds nothing damaged, and the scores have the bits of a run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.scores import write_scores
from magic_pipeline.attribution.status import QueryStatus, stored_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.processes import process_of
from tests.deploy.deployment import SERVER, Deployment, deployed, wait_for
from tests.faults import inspecting
from tests.faults.books import books
from tests.faults.whole_run import place
from tests.orchestration.small_experiment import red_partitions, write_experiment
from tests.servers.postgres import PostgresServer, running_postgres

VICTIMS = ("run worker", "code server and its runs", "daemon", "webserver", "Postgres")
FOUND_SECONDS = 60
_HEALED_SECONDS = 120


@dataclass(frozen=True)
class Healed:
    """A row of the table; `found` is None where nothing has to be found: the run went on."""

    victim: str
    found: float | None
    healed: float
    runs: tuple[str, ...]

    def __str__(self) -> str:
        found = "-" if self.found is None else f"{self.found:.1f}"
        return f"{self.victim:26}  {found:>7}  {self.healed:8.1f}  {', '.join(self.runs)}"


HEAD = f"{'killed':26}  {'found s':>7}  {'healed s':>8}  runs"


def prepare(folder: Path, storage: Mapping[str, object], queries: int, *, slow: bool = True) -> Experiment:
    """An experiment of five steps a query, whose walk takes seconds while a file of that name lies beside it.

    Queries are pulled one by one: a batched call rounds otherwise for another number of them, and who walks together
    is not the same with kills as without.
    """
    path = write_experiment(folder, slow=slow)
    text = (
        path.read_text()
        .replace("epochs: 2", "epochs: 5")
        .replace("examples: 12", f"examples: 20, query_count: {queries}")
    )
    text = text.replace("count: 3", f"count: {queries}").replace("chunk: 3", "chunk: 1")
    path.write_text(text + "".join(f"{name}: {json.dumps(value)}\n" for name, value in storage.items()))
    return load_experiment(path)


def home_on_postgres(folder: Path, configured: Path = SERVER) -> Path:
    """A Dagster home with the dagster.yaml of a folder of deploy/."""
    folder.mkdir()
    shutil.copy(configured / "dagster.yaml", folder / "dagster.yaml")
    return folder


def undisturbed_bits(folder: Path, queries: int = len(VICTIMS)) -> dict[str, str]:
    """The scores of the same experiment, without Dagster and without the file that slows it, in a folder of its own."""
    opened = open_experiment(prepare(folder, {}, queries, slow=False))
    train(opened)
    walk(opened, [query.key for query in opened.queries])
    for query in opened.queries:
        write_scores(opened, query.key)
    return inspecting.score_bits(opened)


@dataclass
class Struck:
    """A deployment under way, and what is killed in it."""

    deployment: Deployment
    experiment: Experiment
    postgres: PostgresServer

    def walk_and_kill(self, victim: str, query: int, *, outlived: bool = False) -> Healed:
        """Launches a walk of one query, kills the victim in the middle of it, starts what is gone, waits for the walk.

        Args:
            outlived: by the walk itself, which is to be under way still when Dagster, which took it for dead, has begun another.
        """
        slow, key = self.experiment.folder / "slow", self.query(query).key
        slow.write_text("3" if outlived else "")
        run = self.deployment.launch("small_attribute", f"{key}|0", f"{key}|{self.experiment.ranks - 1}")
        wait_for(lambda: self.query(query).sealed > 0, _HEALED_SECONDS, lambda: f"{victim}: {self.deployment.runs()}")
        began = time.monotonic()
        found = self.kill(victim, run)
        if not outlived:
            slow.unlink()
        if victim != "run worker":
            self.deployment.start()
        self.deployment.wait_until_it_answers()
        if found:
            wait_for(lambda: self.deployment.status(run) == "FAILURE", FOUND_SECONDS, lambda: f"{victim} is not found")
        seconds = time.monotonic() - began
        if outlived:
            wait_for(lambda: self.has_begun_again(run), FOUND_SECONDS, lambda: f"{victim}: {self.deployment.runs()}")
            slow.unlink()
        self.deployment.wait_until_succeeded(run, _HEALED_SECONDS)
        healed = time.monotonic() - began
        wait_for(lambda: not self.deployment.claimed_slots(), _HEALED_SECONDS, lambda: "a slot of the pool is not free")
        own = [one for one in self.deployment.runs() if run in (one["runId"], one["parentRunId"])]
        return Healed(victim, seconds if found else None, healed, tuple(one["status"] for one in reversed(own)))

    def has_begun_again(self, run: str) -> bool:
        """Whether another run tries this one again, and has named its process."""
        again = [one["runId"] for one in self.deployment.runs() if one["parentRunId"] == run]
        with open_instance(self.experiment.folder) as instance:
            tags = {name: record.tags for name in again if (record := instance.get_run_by_id(name)) is not None}
        return any(process_of(name, own) is not None for name, own in tags.items())

    def kill(self, victim: str, run: str) -> bool:
        """Whether the run has gone with it, so that Dagster has to find that out."""
        if victim == "run worker":
            self.kill_worker(run)
            return True
        if victim == "Postgres":
            self.postgres.kill()
            time.sleep(2)  # everybody notices
            self.postgres.start()
            return False
        name = "code-server" if victim.startswith("code server") else victim
        worker = self.worker(run)
        self.deployment.kill_group(name)
        if name == "code-server":
            with contextlib.suppress(ProcessLookupError):  # a run has a session of its own
                os.kill(worker, 9)
        return name == "code-server"

    def kill_worker(self, run: str) -> None:
        os.kill(self.worker(run), 9)

    def worker(self, run: str) -> int:
        with open_instance(self.experiment.folder) as instance:
            record = instance.get_run_by_id(run)
        assert record is not None
        process = process_of(run, record.tags)
        assert process is not None
        return process.pid

    def query(self, number: int) -> QueryStatus:
        return stored_status(self.experiment)[0].queries[number]

    def train(self) -> None:
        self.deployment.wait_until_succeeded(self.deployment.launch("small_train"))

    def finish(self) -> None:
        """Scores and matrix, as runs over all queries."""
        keys = [query.key for query in stored_status(self.experiment)[0].queries]
        self.deployment.wait_until_succeeded(self.deployment.launch("small_score", keys[0], keys[-1]))
        self.deployment.wait_until_succeeded(self.deployment.launch("small_collect"))

    def wrong(self, bits: Mapping[str, str]) -> list[str]:
        """What does not hold at the end."""
        problems = books(self.experiment.folder / "small.yaml")
        if inspecting.score_bits(open_experiment(self.experiment)) != bits:
            problems.append("the scores differ from those of an undisturbed run")
        with open_instance(self.experiment.folder) as instance:
            segments = ExperimentAssets.of(self.experiment).segments
            problems += [f"partition {name} is red" for name in red_partitions(instance, segments)]
            done = instance.get_materialized_partitions(segments)
            expected = len(bits) * self.experiment.ranks
            if len(done) != expected:
                problems.append(f"{len(done)} of {expected} partitions are materialized")
            unfinished = [run.run_id for run in instance.get_runs() if run.status not in _ENDED]
        return problems + [f"run {run} has not ended" for run in unfinished]


_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)


@contextlib.contextmanager
def environment_of(deployment: Deployment) -> Iterator[None]:
    """This process reads the books of the deployment."""
    before = dict(os.environ)
    os.environ.update(deployment.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def struck(folder: Path, storage: Mapping[str, object], queries: int = len(VICTIMS)) -> Iterator[Struck]:
    """Postgres, and deploy/server on it, running."""
    experiment = prepare(folder / "experiments", storage, queries)
    with running_postgres() as postgres:
        deployment = Deployment(home_on_postgres(folder / "home"), experiment.folder, postgres.environment)
        with environment_of(deployment), deployed(deployment):
            yield Struck(deployment, experiment, postgres)


def campaign(folder: Path, storage: Mapping[str, object], tell: Callable[[str], None]) -> list[str]:
    """Kills everything once; gives what was wrong in the end."""
    bits = undisturbed_bits(folder / "undisturbed")
    with struck(folder, storage) as running:
        running.train()
        tell(HEAD)
        for number, victim in enumerate(VICTIMS):
            tell(str(running.walk_and_kill(victim, number)))
        running.finish()
        return running.wrong(bits)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=("local", "seaweedfs", "moto"), default="moto")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    # ignore_cleanup_errors: a killed server may still write its last line.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with place(options.storage, folder / "server") as where:
            problems = campaign(folder, where.new(), functools.partial(print, flush=True))
    end = f"{len(problems)} things are wrong" if problems else "nothing lost"
    print(*problems, f"{end} ({time.monotonic() - began:.0f} s)", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
