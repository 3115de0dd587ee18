"""The component in somebody else's Dagster project: found, loaded, materialized, and killed in that project's own executor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import dagster as dg
import psutil
import pytest

import magic_pipeline
from magic_pipeline.errors import InputError
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.processes import process_of
from tests.orchestration.small_experiment import materializations, write_experiment

DEFS_YAML = """
type: magic_pipeline.MagicExperiment
attributes:
  experiment: small.yaml
"""
DEFINITIONS = """
from pathlib import Path
import dagster as dg

@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
OWN = """
import dagster as dg

@dg.asset(deps=[dg.AssetKey(["small", "score_matrix"])])
def filtered_data() -> int:
    return 1
"""
PROJECT = """
[project]
name = "foreign"
version = "0.1"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "foreign"
"""
# One run as a project without an executor of its own makes it: Dagster's multiprocess executor.
EXECUTE = """
import sys
import dagster as dg
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

if __name__ == "__main__":
    home, key, *ends = sys.argv[1:]
    tags = dict(zip([ASSET_PARTITION_RANGE_START_TAG, ASSET_PARTITION_RANGE_END_TAG], ends))
    job = ReconstructableRepository.for_module("foreign.definitions", "defs").get_reconstructable_job("__ASSET_JOB")
    with dg.DagsterInstance.from_config(home) as instance:
        result = dg.execute_job(job, instance, tags=tags, asset_selection=[dg.AssetKey(key.split("/"))])
        sys.exit(not result.success)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A Dagster project with an asset of its own downstream of ours, and an experiment in its `defs` folder."""
    defs = tmp_path / "src" / "foreign" / "defs"
    (defs / "influence").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (defs.parent / "__init__.py").touch()
    (defs.parent / "definitions.py").write_text(DEFINITIONS)
    (defs / "own.py").write_text(OWN)
    (defs / "influence" / "defs.yaml").write_text(DEFS_YAML)
    (tmp_path / "execute.py").write_text(EXECUTE)
    write_experiment(defs / "influence", slow=True)
    return tmp_path


def environment(project: Path) -> dict[str, str]:
    paths = [str(project / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DAGSTER_HOME": str(project / "home")}


def start(project: Path, key: str, *ends: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "execute.py", str(project / "home"), key, *ends],
        cwd=project,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def execute(project: Path, key: str, *ends: str) -> None:
    run = start(project, key, *ends)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output


def test_a_foreign_project_embeds_an_experiment_and_materializes_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(project / "home"))
    shown = subprocess.run(
        [sys.executable, "-m", "dagster", "asset", "list", "-m", "foreign.definitions"],
        env=environment(project),
        cwd=project,
        check=True,
        capture_output=True,
        text=True,
    )
    names = ("training_trajectory", "segment_checkpoints", "attribution_scores", "score_matrix")
    assert {"filtered_data", *(f"small/{name}" for name in names)} <= set(shown.stdout.split())
    slow = project / "src" / "foreign" / "defs" / "influence" / "slow"
    with open_instance(project) as instance:
        assets = ExperimentAssets("small", 1)
        slow.touch()
        killed = start(project, "small/training_trajectory")
        try:
            named, children = wait_for_the_step(instance, killed.pid)
            killed.kill()
        finally:
            killed.communicate()
        assert named == killed.pid
        # Nobody is left who goes on computing: the step's process was killed with the run's.
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert gone and not alive
        slow.unlink()
        execute(project, "small/training_trajectory")
        keys = instance.get_dynamic_partitions(assets.queries_name)
        assert len(keys) == 3
        execute(project, "small/segment_checkpoints", f"{keys[0]}|0", f"{keys[-1]}|0")
        execute(project, "small/attribution_scores", keys[0], keys[-1])
        execute(project, "small/score_matrix")
        assert len(materializations(instance, assets.scores)) == 3
        [(_, _, again)] = materializations(instance, assets.matrix)
        assert again is False


def wait_for_the_step(instance: dg.DagsterInstance, run_pid: int) -> tuple[int, list[psutil.Process]]:
    """The process that the run's tag names, and all below the run's process, once the step is at work."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for run in instance.get_runs():
            process = process_of(run.run_id, run.tags)
            if process is not None:
                return process.pid, psutil.Process(run_pid).children(recursive=True)
        time.sleep(0.1)
    raise TimeoutError("no run began its step")


def test_dg_finds_the_component() -> None:
    [found] = entry_points(group="dagster_dg_cli.registry_modules", name="magic_pipeline")
    assert found.load() is magic_pipeline
    assert "MagicExperiment" in dir(magic_pipeline)
    assert issubclass(magic_pipeline.MagicExperiment, dg.Component)


def test_a_file_that_is_not_there_is_named(project: Path) -> None:
    from dagster.components.core.component_tree import ComponentTree

    context = ComponentTree.for_test().load_context
    component = magic_pipeline.MagicExperiment(experiment="nowhere.yaml")
    with pytest.raises(InputError, match=r"nowhere\.yaml.*experiment.*no such file"):
        component.build_defs(context)
