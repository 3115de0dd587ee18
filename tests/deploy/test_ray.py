"""deploy/ray: its configuration as Dagster and the launcher read it, and what node.sh refuses.

What becomes of lost nodes is `python -m tests.faults.ray_nodes`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import dagster as dg
import pytest
import yaml
from dagster._config import process_config

from magic_pipeline.orchestration.instance import prepare_home
from tests.deploy.deployment import ROOT

RAY = ROOT / "deploy" / "ray"


@pytest.fixture
def launcher(require_or_skip: Callable[[str], NoReturn]) -> Any:
    if importlib.util.find_spec("dagster_ray") is None:
        require_or_skip("dagster-ray is not installed: the extra `ray`")
    import dagster_ray

    return dagster_ray.RayRunLauncher


def configured() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((RAY / "dagster.yaml").read_text())
    return content


def test_the_launchers_configuration_is_valid_and_a_misspelt_field_is_not(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGIC_RAY_ADDRESS", "http://127.0.0.1:8265")
    schema = dg.Field(launcher.config_type()).config_type
    given = configured()["run_launcher"]["config"]
    right = process_config(schema, given)
    assert right.success, right.errors
    made = launcher.from_config_value(None, right.value)
    assert (made.address, made.num_gpus, made.num_cpus) == ("http://127.0.0.1:8265", 1, 1)
    given["ray"]["num_gpu"] = given["ray"].pop("num_gpus")
    wrong = process_config(schema, given)
    assert wrong.errors and "num_gpu" in wrong.errors[0].message


def test_runs_are_monitored_and_tried_again_as_everywhere(tmp_path: Path) -> None:
    prepare_home(tmp_path / "home")
    ours, server = yaml.safe_load((tmp_path / "home" / "dagster.yaml").read_text()), configured()
    assert server["run_retries"] == ours["run_retries"] and server["run_queue"] == ours["run_queue"]
    # Only that a run may wait for a node of the cluster is otherwise.
    assert server["run_monitoring"] == ours["run_monitoring"] | {"start_timeout_seconds": 900}
    assert server["concurrency"]["pools"]["granularity"] == ours["concurrency"]["pools"]["granularity"]
    assert server["telemetry"] == {"enabled": False}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["head"], {"MAGIC_PIPELINE_EXPERIMENTS": ""}, "set MAGIC_PIPELINE_EXPERIMENTS"),
        ([], {}, "node.sh head | node.sh worker"),
        (["worker"], {}, "node.sh worker HEAD_ADDRESS:PORT"),
        (["head"], {"MAGIC_PYTHON": "no-such-python"}, "no-such-python"),
    ],
)
def test_what_a_node_lacks_is_named(arguments: list[str], environment: dict[str, str], said: str) -> None:
    given = {"MAGIC_PIPELINE_EXPERIMENTS": "/srv/experiments", "PATH": os.environ["PATH"], **environment}
    refused = subprocess.run(
        ["bash", str(RAY / "node.sh"), *arguments], env=given, capture_output=True, text=True, check=False, timeout=30
    )
    assert refused.returncode != 0 and said in refused.stderr
