"""The assets of a validation section in a real instance: made once, reported one by one, and taken up where a run ended."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from magic_pipeline.attribution import bank_plan, ledger, retraining
from magic_pipeline.attribution.directional_derivative import DirectionalDerivative, QueryDerivative
from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.score_matrix import combine
from magic_pipeline.attribution.score_table import ScoreTable
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.checks import derivative_result, matrix_results
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.running import RunFailedError, run_experiment
from magic_pipeline.orchestration.validation_assets import subset_keys
from tests.attribution.test_score_matrix import table
from tests.orchestration.small_experiment import materializations, red_partitions

CHECKS = {
    "score_matrix": ("scores_are_finite", "scores_differ", "all_queries_have_scores"),
    "directional_derivative": ("scores_agree_with_training",),
    "linear_datamodeling_score": ("lds_is_above_its_bound",),
}
SECTION = """
validation:
  lds: {subsets: 4, drop_fraction: [0.25, 0.5]}
  removal: {counts: [1, 2], random: 2, queries: 2}
  smoothness: {}
  derivative: {}
"""


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one, whatever would be the fastest."""
    monkeypatch.setattr(bank_plan, "_choose_width", lambda *arguments: (1, "one by one"))


@pytest.fixture
def validated(two_finished: Experiment) -> Experiment:
    """The small experiment with a validation section."""
    assert two_finished.path is not None
    return with_section(two_finished.path)


def with_section(path: Path) -> Experiment:
    path.write_text(path.read_text() + SECTION)
    return load_experiment(path)


def blocks_begun(opened: OpenExperiment) -> list[str]:
    entries = ledger.entries(opened.store, opened.layout)
    return [entry["retrainings"][0] for entry in entries if entry["work"] == "retrain"]


def test_a_run_makes_everything_that_the_section_asks_for_and_a_second_run_nothing(
    its_instance: dg.DagsterInstance, validated: Experiment
) -> None:
    assets = ExperimentAssets.of(validated)
    ran = [(asset, count) for asset, count, _ in run_experiment(its_instance, validated).runs]
    assert ran[-5:] == [
        ("metasmoothness", 1),
        ("directional_derivative", 1),
        ("retrained_subsets", 8),
        ("linear_datamodeling_score", 1),
        ("removal_curves", 1),
    ]
    made = materializations(its_instance, assets.subsets)
    assert [partition for partition, _, _ in made] == subset_keys(validated) and len({v for _, v, _ in made}) == 8
    [lds] = its_instance.fetch_materializations(assets.lds, limit=10).records
    assert lds.asset_materialization is not None
    metadata = lds.asset_materialization.metadata
    assert metadata["drop_0.25_subsets"].value == metadata["drop_0.5_subsets"].value == "4 of 4"
    # A linear model in float64: what leaving two of twelve examples out does is nearly linear.
    mean = metadata["drop_0.25_mean_lds"].value
    assert isinstance(mean, float) and 0.5 < mean <= 1
    assert checks(its_instance, assets) == {
        "scores_are_finite": (True, "ERROR"),
        "scores_differ": (True, "WARN"),
        "all_queries_have_scores": (True, "WARN"),
        "scores_agree_with_training": (True, "ERROR"),
        "lds_is_above_its_bound": (mean >= 0.9, "WARN"),
    }
    events = its_instance.event_log_storage.get_maximum_record_id()
    assert run_experiment(its_instance, validated).runs == []
    assert its_instance.event_log_storage.get_maximum_record_id() == events


def checks(instance: dg.DagsterInstance, assets: ExperimentAssets) -> dict[str, tuple[bool, str]]:
    """Name -> (passed, severity) of the newest evaluation of every asset check."""
    found = {}
    for key in (assets.matrix, assets.derivative, assets.lds):
        for name in CHECKS[key.path[-1]]:
            [record] = instance.event_log_storage.get_asset_check_execution_history(
                dg.AssetCheckKey(key, name), limit=1
            )
            assert record.event is not None and record.event.dagster_event is not None
            evaluation = record.event.dagster_event.asset_check_evaluation_data
            found[name] = (evaluation.passed, evaluation.severity.name)
    return found


def test_a_wrong_score_and_a_query_without_gradient_fail_the_checks_that_are_there_for_them() -> None:
    good = QueryDerivative("good", 1.0, 1.001, 0.001)
    wrong = QueryDerivative("wrong", 1.0, 1.2, 0.17)
    lost = QueryDerivative("lost", 1.0, None, None)
    for rows, failing in (((good,), ""), ((good, wrong), "wrong"), ((lost, good), "lost")):
        found = derivative_result(DirectionalDerivative(0.01, 0.02, rows).as_dict())
        assert found.passed is (failing == "") and found.severity is dg.AssetCheckSeverity.ERROR
        assert failing == "" or found.metadata["which"].value == failing
    matrix = combine([replace_scores(table("flat"), 0.5), table("other")])
    results = {result.check_name: result for result in matrix_results(matrix, ["flat", "other", "late"])}
    assert results["scores_are_finite"].passed
    assert results["scores_differ"].metadata["which"].value == "flat" and not results["scores_differ"].passed
    assert results["all_queries_have_scores"].metadata["which"].value == "late"


def replace_scores(one: ScoreTable, value: float) -> ScoreTable:
    return ScoreTable(one.facts, one.ids, np.full_like(one.scores, value))


@pytest.mark.usefixtures("one_by_one")
def test_jobs_over_some_subsets_make_their_blocks_and_a_table_that_says_how_many(
    its_instance: dg.DagsterInstance, validated: Experiment
) -> None:
    run_experiment_without_validation(its_instance, validated)
    opened, assets = opened_once(validated), ExperimentAssets.of(validated)
    repository = build_definitions(validated.folder).get_repository_def()
    retrain, validate = repository.get_job("small_retrain"), repository.get_job("small_validate")
    tags = {ASSET_PARTITION_RANGE_START_TAG: "0.25-000", ASSET_PARTITION_RANGE_END_TAG: "0.25-002"}
    for again in (False, True):
        assert retrain.execute_in_process(instance=its_instance, tags=tags).success
        assert blocks_begun(opened) == ["0.25-000", "0.25-001", "0.25-002"]
        made = materializations(its_instance, assets.subsets)[-3:]
        assert [(partition, reported) for partition, _, reported in made] == [
            (f"0.25-00{number}", again) for number in range(3)
        ]
    assert validate.execute_in_process(instance=its_instance).success
    [lds] = its_instance.fetch_materializations(assets.lds, limit=1).records
    assert lds.asset_materialization is not None
    assert lds.asset_materialization.metadata["drop_0.25_subsets"].value == "3 of 4"
    assert lds.asset_materialization.metadata["drop_0.5_subsets"].value == "0 of 4"
    assert "PARTIAL BANK" in str(lds.asset_materialization.metadata["summary"].value)
    assert red_partitions(its_instance, assets.subsets) == set()


def run_experiment_without_validation(instance: dg.DagsterInstance, experiment: Experiment) -> None:
    assert experiment.path is not None
    content = experiment.path.read_text()
    experiment.path.write_text(content.replace(SECTION, ""))
    run_experiment(instance, load_experiment(experiment.path))
    experiment.path.write_text(content)


@pytest.mark.usefixtures("one_by_one")
def test_subsets_that_finished_before_a_failure_stay_and_a_rerun_makes_the_others_alone(
    its_instance: dg.DagsterInstance, validated: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, made = retraining._Block.complete, []

    def fail_at_the_third(block: retraining._Block) -> None:
        if block.of.bank.kind == "subsets":
            made.append(block)
        if len(made) == 3:
            raise ArithmeticError("the third one is too much")
        complete(block)

    assets = ExperimentAssets.of(validated)
    with monkeypatch.context() as failing:
        failing.setattr(retraining._Block, "complete", fail_at_the_third)
        with pytest.raises(RunFailedError, match="the third one is too much"):
            run_experiment(its_instance, validated)
    assert [p for p, _, _ in materializations(its_instance, assets.subsets)] == ["0.25-000", "0.25-001"]
    run_experiment(its_instance, validated)
    begun = [label for label in blocks_begun(opened_once(validated)) if label in subset_keys(validated)]
    assert sorted(begun) == sorted([*subset_keys(validated), "0.25-002"])
    assert red_partitions(its_instance, assets.subsets) == set()
    assert {p for p, _, _ in materializations(its_instance, assets.subsets)} == set(subset_keys(validated))
