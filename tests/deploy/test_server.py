"""The server's three processes, started, asked, killed and stopped; its configuration held against Dagster's own schema."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import yaml
from dagster._core.instance.config import dagster_instance_config

from magic_pipeline.orchestration.instance import prepare_home
from tests.deploy.deployment import NAMES, SERVER, Deployment, script
from tests.orchestration.small_experiment import write_experiment


@pytest.mark.timeout(200)
def test_three_processes_start_answer_on_loopback_alone_and_stop_and_a_second_start_mends_what_is_gone(
    tmp_path: Path,
) -> None:
    served = Deployment(tmp_path / "home", write_experiment(tmp_path / "experiments").parent)
    other = Deployment(tmp_path / "other", served.experiments, port=served.port, code_port=served.code_port)
    served.start()
    processes = [served.process(name) for name in NAMES]
    try:
        assert "small_attribute" in served.wait_until_it_answers()
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in processes
            for one in (process, *process.children(recursive=True))
            for connection in one.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        refused = script("start.sh", other.environment)
        assert refused.returncode == 1 and "is taken" in refused.stderr
        assert "everything runs" in script("start.sh", served.environment).stdout
        assert [served.process(name) for name in NAMES] == processes
        processes[2].kill()
        psutil.wait_procs(processes[2:], timeout=10)
        assert script("start.sh", served.environment).stdout.startswith("started: webserver.")
        processes[2] = served.process("webserver")
        served.wait_until_it_answers()
        assert all(process.is_running() for process in processes)
    finally:
        served.stop()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == [] and not list(served.home.glob("*.pid"))


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
