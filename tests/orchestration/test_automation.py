"""What the automation sensor would ask for, tick by tick, over a real instance and a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import execute_asset
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from tests.orchestration.small_experiment import write_experiment

ASSETS = ExperimentAssets("small", 2)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    path = write_experiment(tmp_path / "experiments")
    path.write_text(path.read_text() + "ranks: 2\nprocesses: 1\n")
    return load_experiment(path)


@pytest.fixture
def instance(experiment: Experiment) -> Iterator[dg.DagsterInstance]:
    with open_instance(experiment.folder) as opened:
        yield opened


class Ticks:
    def __init__(self, instance: dg.DagsterInstance, folder: Path) -> None:
        self.instance, self.definitions = instance, build_definitions(folder)
        self.repository = self.definitions.get_repository_def()
        self.cursor: dg.AutomationConditionSensorDefinition | None = None
        self.result: dg.EvaluateAutomationConditionsResult | None = None

    def tick(self) -> set[str]:
        """The assets and partitions that would be launched."""
        cursor = None if self.result is None else self.result.cursor
        chosen = dg.AssetSelection.assets(ASSETS.scores, ASSETS.matrix)
        self.result = dg.evaluate_automation_conditions(
            self.definitions, self.instance, cursor=cursor, asset_selection=chosen
        )
        found = set()
        for key in (ASSETS.scores, ASSETS.matrix):
            found |= {f"{key.path[-1]} {one or ''}".strip() for one in self.result.get_requested_partitions(key)}
        return found

    def make(self, key: dg.AssetKey, *ends: str) -> None:
        partitions = (ends[0], ends[-1]) if ends else None
        assert execute_asset(self.instance, self.repository, key, partitions).is_success

    def walk(self, query: str, *ranks: str) -> None:
        self.make(ASSETS.segments, *(ASSETS.segment_key(query, rank) for rank in ranks))


def test_scores_follow_complete_walks_and_the_matrix_all_scores(
    instance: dg.DagsterInstance, experiment: Experiment
) -> None:
    ticks = Ticks(instance, experiment.folder)
    assert ticks.tick() == set()
    ticks.make(ASSETS.trajectory)
    first, second, third = instance.get_dynamic_partitions(ASSETS.queries_name)
    assert ticks.tick() == set()
    # A walk is complete on all its ranks or not at all.
    ticks.walk(first, "0")
    assert ticks.tick() == set()
    ticks.walk(first, "0", "1")
    assert ticks.tick() == {f"attribution_scores {first}"}
    assert ticks.tick() == set()
    ticks.make(ASSETS.scores, first)
    assert ticks.tick() == set()
    # What is only reported again is not written again.
    ticks.walk(first, "0", "1")
    assert ticks.tick() == set()
    ticks.walk(second, "0", "1")
    ticks.walk(third, "0", "1")
    assert ticks.tick() == {f"attribution_scores {second}", f"attribution_scores {third}"}
    ticks.make(ASSETS.scores, second)
    assert ticks.tick() == set()
    ticks.make(ASSETS.scores, third)
    assert ticks.tick() == {"score_matrix"}
    ticks.make(ASSETS.matrix)
    assert ticks.tick() == set()
    # Another training: its walks, once they are there, make new scores, and these a new matrix.
    assert experiment.path is not None
    experiment.path.write_text(experiment.path.read_text().replace("lr: 0.1", "lr: 0.2"))
    ticks.definitions = build_definitions(experiment.folder)
    ticks.repository = ticks.definitions.get_repository_def()
    ticks.make(ASSETS.trajectory)
    assert ticks.tick() == set()
    ticks.walk(second, "0", "1")
    assert ticks.tick() == {f"attribution_scores {second}"}
    ticks.make(ASSETS.scores, second)
    assert ticks.tick() == {"score_matrix"}


def test_nothing_happens_before_a_person_turns_it_on(experiment: Experiment) -> None:
    repository = build_definitions(experiment.folder).get_repository_def()
    statuses = {sensor.name: sensor.default_status for sensor in repository.sensor_defs}
    assert statuses.keys() == {"small_queries", "small_inputs", "default_automation_condition_sensor"}
    assert set(statuses.values()) == {dg.DefaultSensorStatus.STOPPED}
    assert {schedule.default_status for schedule in repository.schedule_defs} == {dg.DefaultScheduleStatus.STOPPED}
