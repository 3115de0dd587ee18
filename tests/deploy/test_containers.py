"""The image and the compose file of deploy/server, read by the tools that read them in earnest; each also refuses a typo."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from tests.deploy.deployment import SERVER

COMPOSE, DOCKERFILE = SERVER / "docker-compose.yml", SERVER / "Dockerfile"


@pytest.fixture
def tool(require_or_skip: Callable[[str], NoReturn]) -> Callable[[str], str]:
    """The path of a program beside this Python or on the PATH."""

    def find(name: str) -> str:
        return (
            shutil.which(name, path=str(Path(sys.executable).parent))
            or shutil.which(name)
            or require_or_skip(f"{name} is not installed")
        )

    return find


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def environment_file(folder: Path) -> Path:
    """environment.example, filled in."""
    text = (SERVER / "environment.example").read_text()
    file = folder / "environment"
    file.write_text(text.replace("MAGIC_POSTGRES_PASSWORD=", "MAGIC_POSTGRES_PASSWORD=secret"))
    return file


def test_docker_compose_takes_the_file_with_the_example_environment_and_refuses_a_typo(
    tmp_path: Path, tool: Callable[[str], str]
) -> None:
    compose, environment = tool("docker-compose"), environment_file(tmp_path)

    def config(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return run([compose, "--env-file", str(environment), "-f", str(file), "config", *options])

    seen = config(COMPOSE)
    assert seen.returncode == 0, seen.stderr
    services = yaml.safe_load(seen.stdout)["services"]
    assert services["daemon"]["environment"]["MAGIC_POSTGRES_PASSWORD"] == "secret"
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("restart: unless-stopped", "restrat: unless-stopped"))
    assert config(wrong, "-q").returncode != 0
    environment.write_text((SERVER / "environment.example").read_text())
    assert "see environment.example" in config(COMPOSE, "-q").stderr


def test_the_schema_of_compose_files_holds(tmp_path: Path, tool: Callable[[str], str]) -> None:
    check = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    assert run([*check, str(COMPOSE)]).returncode == 0
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_grace_perod"))
    assert run([*check, str(wrong)]).returncode != 0


def test_the_dockerfile_is_without_fault(tmp_path: Path, tool: Callable[[str], str]) -> None:
    lint = [tool("hadolint"), "--failure-threshold", "warning"]
    found = run([*lint, str(DOCKERFILE)])
    assert found.returncode == 0, found.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace("WORKDIR /opt/magic", "WORKDIRR /opt/magic"))
    assert run([*lint, str(wrong)]).returncode != 0


def test_only_the_webserver_is_reached_from_outside_and_only_on_loopback_and_no_secret_is_in_a_file() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(ports) == ["webserver"]
    assert all(port.startswith("127.0.0.1:") for port in ports["webserver"])
    for service in services.values():
        for name, value in service["environment"].items():
            if "PASSWORD" in name or "SECRET" in name:
                assert value.startswith("${"), name
    for line in (SERVER / "environment.example").read_text().splitlines():
        assert not ("PASSWORD" in line or "SECRET" in line) or line.endswith("="), line
