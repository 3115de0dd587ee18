"""A folder with one small experiment, and its real, persistent Dagster instance."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.small_experiment import write_experiment


@pytest.fixture(scope="session")
def _two_finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `run` has finished the first two of the three queries."""
    experiment = load_experiment(write_experiment(tmp_path_factory.mktemp("two finished") / "experiments"))
    with open_instance(experiment.folder) as opened:
        ids = [query.id for query in opened_once(experiment).queries]
        run_experiment(opened, experiment, ids[:2])
    return experiment.folder


@pytest.fixture
def two_finished(_two_finished: Path, tmp_path: Path) -> Experiment:
    """The experiment in a copy of that folder, store and instance included."""
    return load_experiment(shutil.copytree(_two_finished, tmp_path / "experiments") / "small.yaml")


@pytest.fixture
def its_instance(two_finished: Experiment) -> Iterator[dg.DagsterInstance]:
    with open_instance(two_finished.folder) as opened:
        yield opened
