"""deploy/server as people use it: its scripts, and its UI's requests over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.ui.serving import ask

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "deploy" / "server"
NAMES = ("code-server", "daemon", "webserver")
JOBS = "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name } } } } }"
RUN = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status tags { key value } } } }"
RUNS = """{ runsOrError { ... on Runs { results { runId jobName status parentRunId tags { key value } } } } }"""
POOLS = "{ instance { concurrencyLimits { concurrencyKey claimedSlots { runId } } } }"
LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""
RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def script(name: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SERVER / name)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


@dataclass
class Deployment:
    """A home and a folder of experiments, served by deploy/server.

    Attributes:
        extra: of the environment: Postgres, S3.
    """

    home: Path
    experiments: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    port: str = field(default_factory=free_port)
    code_port: str = field(default_factory=free_port)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DAGSTER_HOME": str(self.home),
            "MAGIC_PIPELINE_EXPERIMENTS": str(self.experiments),
            "MAGIC_PORT": self.port,
            "MAGIC_CODE_PORT": self.code_port,
            "MAGIC_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            **self.extra,
        }

    def start(self) -> None:
        """start.sh; it starts what does not run."""
        started = script("start.sh", self.environment)
        assert started.returncode == 0, started.stderr + started.stdout

    def stop(self) -> None:
        stopped = script("stop.sh", self.environment)
        assert stopped.returncode == 0, stopped.stderr

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.home / f"{name}.pid").read_text()))

    def kill_group(self, name: str) -> None:
        """SIGKILL to a process and to all that it has started."""
        process = self.process(name)
        family = [process, *process.children(recursive=True)]
        os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(family, timeout=10)

    def wait_until_it_answers(self, seconds: float = 120) -> list[str]:
        """The names of the jobs, once webserver and code server answer."""
        found: list[str] = []

        def answers() -> bool:
            with contextlib.suppress(OSError, AssertionError):
                nodes = ask(self.address, JOBS)["repositoriesOrError"].get("nodes", [])
                found.extend(job["name"] for node in nodes for job in node["jobs"])
            return bool(found)

        wait_for(answers, seconds, lambda: (self.home / "webserver.log").read_text()[-2000:])
        return found

    def launch(self, job: str, first: str | None = None, last: str | None = None) -> str:
        """Launches a job, over a range of partitions, as the launchpad does; gives the run's id."""
        tags = [] if first is None else [{"key": k, "value": str(v)} for k, v in zip(RANGE, (first, last), strict=True)]
        selector = {
            "repositoryLocationName": "magic_pipeline.definitions",
            "repositoryName": "__repository__",
            "jobName": job,
        }
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}, "mode": "default"}
        answer = ask(self.address, LAUNCH, {"params": params})["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def status(self, run: str) -> str:
        return str(ask(self.address, RUN, {"id": run})["runOrError"]["status"])

    def runs(self) -> list[dict[str, Any]]:
        return list(ask(self.address, RUNS)["runsOrError"]["results"])

    def wait_until_succeeded(self, run: str, seconds: float = 120) -> None:
        """Until the run, or one that tries it again, has ended well."""
        wait_for(lambda: self._succeeded(run), seconds, lambda: str(self.runs()))

    def _succeeded(self, run: str) -> bool:
        family, grown = {run}, True
        runs = self.runs()
        while grown:
            more = {one["runId"] for one in runs if one["parentRunId"] in family}
            grown, family = not more <= family, family | more
        mine = [one["status"] for one in runs if one["runId"] in family]
        return "SUCCESS" in mine

    def claimed_slots(self) -> list[str]:
        limits = ask(self.address, POOLS)["instance"]["concurrencyLimits"]
        return [slot["runId"] for limit in limits for slot in limit["claimedSlots"]]


def wait_for(reached: Callable[[], bool], seconds: float, explain: Callable[[], str], every: float = 0.25) -> float:
    """Waits until it is so; gives the seconds that it took."""
    began = time.monotonic()
    while not _reached(reached):
        assert time.monotonic() < began + seconds, f"not within {seconds:.0f} s: {explain()}"
        time.sleep(every)
    return time.monotonic() - began


def _reached(reached: Callable[[], bool]) -> bool:
    # After a restart of Postgres the webserver answers 500 once for each connection that it had kept: no answer yet.
    with contextlib.suppress(urllib.error.URLError):
        return reached()
    return False


@contextlib.contextmanager
def deployed(deployment: Deployment) -> Iterator[Deployment]:
    """Started, and stopped at the end, whatever was killed meanwhile; runs that are left are killed."""
    try:
        deployment.start()
        deployment.wait_until_it_answers()
        yield deployment
    finally:
        groups = []
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
                groups.append(deployment.process(name).pid)
        deployment.stop()
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
