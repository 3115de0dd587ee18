"""Dagster's records follow what is removed from the storage."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from magic_pipeline.attribution.collecting import collect
from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.restoring import missing_states
from magic_pipeline.attribution.trajectory import sealed_trajectory
from magic_pipeline.cli import main
from magic_pipeline.orchestration import operating, running
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import execute_asset
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.records import Records, forget, records_of, tell_of_collection
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.small_experiment import materializations, write_experiment


def test_freed_states_show_on_the_trajectory_and_materializing_it_makes_them_again(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assert two_finished.path is not None
    run_experiment(its_instance, two_finished)
    trajectory = ExperimentAssets.of(two_finished).trajectory
    [(_, version, _)] = materializations(its_instance, trajectory)
    assert main(["gc", str(two_finished.path), "--trajectory", "--yes"]) == 0
    [record] = its_instance.fetch_observations(trajectory, limit=1).records
    observation = record.asset_observation
    assert observation is not None and observation.description is not None
    assert "makes them again" in observation.description
    objects, size = (observation.metadata[name].value for name in ("freed_objects", "freed_bytes"))
    assert isinstance(objects, int) and objects > 0 and isinstance(size, int) and size > 0
    opened = operating.opened_once(two_finished)
    sealed = sealed_trajectory(opened)
    assert sealed is not None and len(missing_states(opened, sealed)) == 4
    # A second call frees nothing and says nothing.
    assert main(["gc", str(two_finished.path), "--trajectory", "--yes"]) == 0
    assert its_instance.fetch_observations(trajectory, limit=1).records == [record]

    # `run` reports to another instance what is finished, and makes none of it again.
    with open_instance(two_finished.folder / "other home") as other:
        assert running._Running(other, two_finished, None)._train()
        assert materializations(other, trajectory) == [(None, version, True)]
    assert len(missing_states(opened, sealed)) == 4

    repository = build_definitions(two_finished.folder).get_repository_def()
    assert execute_asset(its_instance, repository, trajectory).is_success
    assert missing_states(opened, sealed) == []
    assert [found for _, found, _ in materializations(its_instance, trajectory)] == [version, version]
    [record] = its_instance.fetch_materializations(trajectory, limit=1).records
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert (metadata["states_made_again"].value, metadata["reported_again"].value) == (4, True)


def test_an_experiment_is_forgotten_and_its_neighbour_is_not(
    its_instance: dg.DagsterInstance, two_finished: Experiment, tmp_path: Path
) -> None:
    # The neighbour's name begins with this one's, and so do the names of its jobs.
    path = write_experiment(two_finished.folder, "small_train")
    operating._last_opened.clear()
    run_experiment(its_instance, load_experiment(path))
    job = build_definitions(two_finished.folder).get_repository_def().get_job("small_train_observe")
    assert job.execute_in_process(instance=its_instance).success
    neighbour = records_of(its_instance, "small_train")
    assert neighbour == Records(assets=6, partitions=3, runs=5)
    found = records_of(its_instance, "small")
    assert forget(its_instance, "small") == found == Records(assets=6, partitions=3, runs=4)
    assert records_of(its_instance, "small") == Records(0, 0, 0)
    assert records_of(its_instance, "small_train") == neighbour
    # Killed in between or called again: nothing is left to do.
    assert forget(its_instance, "small") == Records(0, 0, 0)
    operating._last_opened.clear()
    assert [asset for asset, _, _ in run_experiment(its_instance, two_finished).runs] == [
        "training_trajectory", "segment_checkpoints", "attribution_scores", "score_matrix",
    ]  # fmt: skip


def test_what_was_only_looked_at_is_not_told(its_instance: dg.DagsterInstance, two_finished: Experiment) -> None:
    run_experiment(its_instance, two_finished)
    assert not tell_of_collection(its_instance, "small", collect(two_finished, trajectories=True))
    assert not tell_of_collection(its_instance, "nobody", collect(two_finished, trajectories=True, free=True))


def test_assets_whose_runs_are_gone_are_forgotten_too(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    # By a person, in the UI: the events go with the runs, and Dagster's index still shows what they had made.
    scores = ExperimentAssets.of(two_finished).scores
    for run in its_instance.get_runs():
        its_instance.delete_run(run.run_id)
    assert its_instance.get_latest_materialization_event(scores) is not None
    assert forget(its_instance, "small") == Records(assets=6, partitions=3, runs=0)
    assert its_instance.get_latest_materialization_event(scores) is None
    assert records_of(its_instance, "small") == Records(0, 0, 0)
