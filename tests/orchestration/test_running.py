"""`run`, and runs as the UI launches them, over a real instance and a real store."""

from __future__ import annotations

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import execute_asset, failure_of
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys
from magic_pipeline.orchestration.running import Outcome, run_experiment
from tests.orchestration.small_experiment import materializations, planned_partitions, red_partitions


def ids(experiment: Experiment) -> list[str]:
    return [query.id for query in opened_once(experiment).queries]


def ran(outcome: Outcome) -> list[tuple[str, int]]:
    return [(asset, count) for asset, count, _ in outcome.runs]


def execute_segments(instance: dg.DagsterInstance, experiment: Experiment, first: str, last: str) -> dg.DagsterRun:
    """One run over a range of segment partitions, as the UI makes it, whatever is finished."""
    assets = ExperimentAssets.of(experiment)
    repository = build_definitions(experiment.folder).get_repository_def()
    bounds = (assets.segment_key(first, "0"), assets.segment_key(last, "0"))
    return execute_asset(instance, repository, assets.segments, bounds)


def test_only_the_unfinished_query_is_planned_and_executed(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assets, queries = ExperimentAssets.of(two_finished), opened_once(two_finished).queries
    outcome = run_experiment(its_instance, two_finished)
    assert ran(outcome) == [("segment_checkpoints", 1), ("attribution_scores", 1), ("score_matrix", 1)]
    key = queries[2].key
    assert planned_partitions(its_instance, assets.segments, outcome.runs[0][2]) == {f"{key}|0"}
    assert planned_partitions(its_instance, assets.scores, outcome.runs[1][2]) == {key}
    assert all(run.is_success for run in its_instance.get_runs())
    reports = [partition for partition, _, _ in materializations(its_instance, assets.segments)]
    assert sorted(reports, key=str) == [f"{query.key}|0" for query in queries]
    # With everything finished there is nothing to run, and no event is written.
    events = its_instance.event_log_storage.get_maximum_record_id()
    assert ran(run_experiment(its_instance, two_finished)) == []
    assert its_instance.event_log_storage.get_maximum_record_id() == events


def test_a_ui_run_over_all_queries_reports_two_again_computes_one_and_leaves_nothing_red(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assets = ExperimentAssets.of(two_finished)
    before = {partition: version for partition, version, _ in materializations(its_instance, assets.segments)}
    queries = opened_once(two_finished).queries
    run = execute_segments(its_instance, two_finished, queries[0].key, queries[2].key)
    assert run.is_success
    after = materializations(its_instance, assets.segments)[len(before) :]
    assert {partition: again for partition, _, again in after} == {
        f"{queries[0].key}|0": True,
        f"{queries[1].key}|0": True,
        f"{queries[2].key}|0": False,
    }
    assert {partition: version for partition, version, again in after if again} == before
    assert red_partitions(its_instance, assets.segments) == set()


def test_what_is_sealed_but_missing_from_the_event_log_is_reported_and_not_computed(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    run_experiment(its_instance, two_finished)
    assets = ExperimentAssets.of(two_finished)
    for key in (assets.trajectory, assets.segments, assets.scores, assets.matrix):
        its_instance.wipe_assets([key])
    assert len(run_experiment(its_instance, two_finished).runs) == 4
    for key in (assets.trajectory, assets.segments, assets.scores, assets.matrix):
        assert {again for _, _, again in materializations(its_instance, key)} == {True}, key


def test_finished_partitions_stay_when_another_of_the_same_run_fails(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assets = ExperimentAssets.of(two_finished)
    add_query_keys(its_instance, assets, ["removed-00000000"])
    first = opened_once(two_finished).queries[0].key
    run = execute_segments(its_instance, two_finished, first, "removed-00000000")
    assert not run.is_success
    kind, message = failure_of(its_instance, run)
    assert kind == "input"
    assert "removed-00000000" in message
    assert all(status.complete for status in query_statuses(opened_once(two_finished)))
    assert red_partitions(its_instance, assets.segments) == {"removed-00000000|0"}


def test_a_run_over_a_reversed_range_fails(its_instance: dg.DagsterInstance, two_finished: Experiment) -> None:
    queries = opened_once(two_finished).queries
    run = execute_segments(its_instance, two_finished, queries[2].key, queries[0].key)
    assert not run.is_success
    assert "covers no partition" in failure_of(its_instance, run)[1]


def test_a_run_that_dagster_would_leave_half_done_fails_and_says_what_it_would_skip(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assets = ExperimentAssets.of(two_finished)
    both = dg.define_asset_job("both", selection=dg.AssetSelection.assets(assets.scores, assets.matrix))
    loaded = dg.Definitions.merge(build_definitions(two_finished.folder, executor=None), dg.Definitions(jobs=[both]))
    made = (
        loaded.get_repository_def()
        .get_job("both")
        .execute_in_process(
            instance=its_instance, partition_key=opened_once(two_finished).queries[0].key, raise_on_error=False
        )
    )
    assert not made.success
    kind, message = failure_of(its_instance, made.dagster_run)
    assert (kind, message.startswith("Dagster would skip small/score_matrix in this run")) == ("input", True)


def test_scores_of_an_unfinished_walk_fail_and_say_what_to_do(
    its_instance: dg.DagsterInstance, two_finished: Experiment
) -> None:
    assets = ExperimentAssets.of(two_finished)
    repository = build_definitions(two_finished.folder).get_repository_def()
    keys = [query.key for query in opened_once(two_finished).queries]
    run = execute_asset(its_instance, repository, assets.scores, (keys[1], keys[2]))
    assert not run.is_success
    kind, message = failure_of(its_instance, run)
    assert (kind, f"materialize its partition {keys[2]}" in message) == ("other", True)
    assert red_partitions(its_instance, assets.scores) == {keys[2]}


def test_a_query_that_is_not_there_is_named(its_instance: dg.DagsterInstance, two_finished: Experiment) -> None:
    from magic_pipeline.errors import InputError

    with pytest.raises(InputError, match="no query 'nobody'"):
        run_experiment(its_instance, two_finished, ["nobody"])
