"""The server's three processes, started, asked and stopped; its configuration held against Dagster's own schema."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from dagster._core.instance.config import dagster_instance_config

from magic_pipeline.orchestration.instance import prepare_home
from tests.orchestration.small_experiment import write_experiment
from tests.ui.serving import ask

SERVER = Path(__file__).parents[2] / "deploy" / "server"
NAMES = ("code-server", "daemon", "webserver")
JOBS = "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name } } } } }"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def script(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SERVER / name)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.timeout(200)
def test_three_processes_start_answer_refuse_a_second_start_and_stop(tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = {
        "DAGSTER_HOME": str(home),
        "MAGIC_PIPELINE_EXPERIMENTS": str(write_experiment(tmp_path / "experiments").parent),
        "MAGIC_PORT": free_port(),
        "MAGIC_CODE_PORT": free_port(),
        "MAGIC_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    started = script("start.sh", environment)
    assert started.returncode == 0, started.stderr
    processes = [psutil.Process(int((home / f"{name}.pid").read_text())) for name in NAMES]
    try:
        address, until = f"http://127.0.0.1:{environment['MAGIC_PORT']}", time.monotonic() + 120
        while True:
            try:
                nodes = ask(address, JOBS, {})["repositoriesOrError"]["nodes"]
                if nodes:
                    break
            except OSError:
                pass
            assert time.monotonic() < until, (home / "webserver.log").read_text()[-2000:]
            time.sleep(0.5)
        assert "small_attribute" in {job["name"] for job in nodes[0]["jobs"]}
        again = script("start.sh", environment)
        assert again.returncode == 1 and "is taken" in again.stderr
        assert all(process.is_running() for process in processes)
    finally:
        stopped = script("stop.sh", environment)
    assert stopped.returncode == 0, stopped.stderr
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == [] and not list(home.glob("*.pid"))


def test_what_is_missing_in_the_environment_is_named(tmp_path: Path) -> None:
    for name in ("start.sh", "stop.sh"):
        found = script(name, {"DAGSTER_HOME": ""})
        assert found.returncode != 0 and "set DAGSTER_HOME" in found.stderr


def test_the_configuration_for_postgres_is_valid_and_otherwise_that_of_a_home_of_our_own(tmp_path: Path) -> None:
    shutil.copy(SERVER / "dagster.yaml", tmp_path / "dagster.yaml")
    content, _ = dagster_instance_config(str(tmp_path))
    assert content["storage"]["postgres"]["postgres_db"]["password"] == {"env": "MAGIC_POSTGRES_PASSWORD"}
    prepare_home(tmp_path / "own")
    own = yaml.safe_load((tmp_path / "own" / "dagster.yaml").read_text())
    ours = yaml.safe_load((SERVER / "dagster.yaml").read_text())
    assert {name: value for name, value in ours.items() if name != "storage"} == {
        n: v for n, v in own.items() if n != "nux"
    }
    (tmp_path / "dagster.yaml").write_text(
        (SERVER / "dagster.yaml").read_text().replace("run_monitoring:", "run_monitorin:")
    )
    with pytest.raises(Exception, match="run_monitorin"):
        dagster_instance_config(str(tmp_path))
