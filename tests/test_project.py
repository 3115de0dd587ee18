"""Claims about the project as a whole: light imports, a complete lock, no trace of one machine, documented commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
LIGHT_MODULES = (
    "magic_pipeline.definitions",
    "magic_pipeline.cli",
    "magic_pipeline.attribution.experiment",
    "magic_pipeline.attribution.queries",
    "magic_pipeline.attribution.status",
    "magic_pipeline.attribution.score_table",
)
HEAVY = {"torch", "transformers", "datasets", "peft", "sklearn", "matplotlib"}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_imports_nothing_heavy(module: str, require_or_skip: Callable[[str], NoReturn]) -> None:
    if importlib.util.find_spec(module) is None:
        require_or_skip(f"{module} does not exist")
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert module in done.stdout.split()
    assert not HEAVY & set(done.stdout.split())


def test_no_tracked_file_holds_a_path_of_one_machine(require_or_skip: Callable[[str], NoReturn]) -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        require_or_skip("this is not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    assert len(files) > 10
    own = re.escape(str(ROOT).encode()) + rb"\b"
    personal = re.compile(own + rb"|/(?:home|Users)/[a-z][\w.-]*/|/(?:work|root)/[a-z.]")
    found = {file: personal.findall(file.read_bytes()) for file in files if file.is_file()}
    assert {file: paths for file, paths in found.items() if paths} == {}


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_pins_everything_that_is_asked_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    # A local version such as +cpu exists on one index only.
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin)] == []
    assert "torch==2.13.0" in pins
    locked = {normal(pin.partition("==")[0]) for pin in pins}
    project = pyproject()["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {normal(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]) for requirement in asked}
    assert names - locked == {"magic-pipeline"}


def test_the_import_contract_is_the_table_of_rooms() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE)
    contract = pyproject()["tool"]["importlinter"]["contracts"][0]
    layers = [room for layer in contract["layers"] for room in layer.split(" | ")]
    assert contract["exhaustive"] is True
    assert layers == table


def test_every_package_is_a_room_or_inside_one() -> None:
    contract = pyproject()["tool"]["importlinter"]["contracts"][0]
    layers = {room for layer in contract["layers"] for room in layer.split(" | ")}
    modules = {path.stem for path in (ROOT / "magic_pipeline").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules - {"__init__", "__pycache__", "py"} <= layers
