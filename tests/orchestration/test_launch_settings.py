"""The launchpad: it changes how one run works, and refuses what the experiment file would refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.status import trajectory_status
from magic_pipeline.attribution.walk_plan import sealed_plan
from magic_pipeline.errors import InputError
from magic_pipeline.orchestration import operating
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.launch_settings import LaunchSettings, WalkSettings
from magic_pipeline.orchestration.partitions import ExperimentAssets
from tests.orchestration.small_experiment import write_experiment


def config_of(experiment: Experiment, job: str, step: str) -> dict[str, dg.Field]:
    """The fields of a job's step in the launchpad."""
    schema: Any = build_definitions(experiment.folder).get_repository_def().get_job(job).run_config_schema
    return dict(schema.run_config_schema_type.fields["ops"].config_type.fields[step].config_type.fields[
        "config"
    ].config_type.fields)  # fmt: skip


def test_nothing_given_is_as_the_file_says(two_finished: Experiment) -> None:
    assert WalkSettings().applied_to(two_finished) is two_finished


def test_what_is_given_counts_and_nothing_else_changes(two_finished: Experiment) -> None:
    found = WalkSettings(device="cpu", memory_budget="2GiB", query_batch=2).applied_to(two_finished)
    assert (found.device, found.attribution.memory_budget, found.attribution.query_batch) == ("cpu", 2 << 30, 2)
    assert (found.path, found.folder, found.storage_url) == (
        two_finished.path,
        two_finished.folder,
        two_finished.storage_url,
    )
    attribution = found.attribution.model_copy(update={"memory_budget": "auto", "query_batch": "auto"})
    assert attribution == two_finished.attribution
    assert found.model_copy(update={"device": "auto", "attribution": attribution}) == two_finished


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LaunchSettings(device="gpu"), "launch settings: device: should be 'auto', 'cpu' or 'cuda', found 'gpu'"),
        (LaunchSettings(memory_budget="lots"), "launch settings: memory_budget: should be auto, a size such as 8GiB"),
        (WalkSettings(query_batch=0), "launch settings: query_batch: should be auto or a whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_named(two_finished: Experiment, settings: LaunchSettings, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        settings.applied_to(two_finished)


def test_the_launchpad_describes_every_field(two_finished: Experiment) -> None:
    train = config_of(two_finished, "small_train", "small__training_trajectory")
    walk = config_of(two_finished, "small_attribute", "small__segment_checkpoints")
    assert train.keys() == {"device", "memory_budget", "make_freed_states"}
    assert walk.keys() == {"device", "memory_budget", "query_batch"}
    for field in (*train.values(), *walk.values()):
        assert field.description and field.description.endswith(".") and not field.is_required


def test_a_run_walks_as_it_was_launched(tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment(tmp_path / "experiments"))
    assets, repository = ExperimentAssets.of(experiment), build_definitions(experiment.folder).get_repository_def()
    with open_instance(experiment.folder) as instance:
        train = repository.get_job("small_train")
        assert train.execute_in_process(
            instance=instance, run_config=config("training_trajectory", device="cpu")
        ).success
        keys = instance.get_dynamic_partitions(assets.queries_name)
        ends = [assets.segment_key(key, "0") for key in (keys[0], keys[-1])]
        walk = repository.get_job("small_attribute").execute_in_process(
            instance=instance,
            run_config=config("segment_checkpoints", query_batch=1, memory_budget="1GiB"),
            tags={ASSET_PARTITION_RANGE_START_TAG: ends[0], ASSET_PARTITION_RANGE_END_TAG: ends[1]},
        )
        assert walk.success
    opened = operating.opened_once(experiment)
    trajectory = trajectory_status(opened).digest
    assert trajectory is not None
    plans = [sealed_plan(opened.store, opened.layout, one.key, one.digest, trajectory) for one in opened.queries]
    assert [plan and plan.cohort for plan in plans] == [(key,) for key in keys]


def config(asset: str, **settings: Any) -> dict[str, Any]:
    return {"ops": {f"small__{asset}": {"config": settings}}}
