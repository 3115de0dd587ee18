"""What Dagster loads, from good and from bad experiment files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.failures import one_line
from magic_pipeline.orchestration.headless import execute_asset, failure_of
from magic_pipeline.orchestration.instance import open_instance
from tests.orchestration.small_experiment import write_experiment


def repository(folder: Path) -> dg.RepositoryDefinition:
    return build_definitions(folder).get_repository_def()


def test_loading_imports_no_torch_and_reads_the_folder_of_the_environment(tmp_path: Path) -> None:
    write_experiment(tmp_path / "elsewhere", "one")
    code = (
        "import sys; from magic_pipeline.definitions import defs; import magic_pipeline.cli\n"
        "keys = {key.to_user_string() for key in defs().get_repository_def().asset_graph.get_all_asset_keys()}\n"
        "print(sorted(keys), sorted({'torch', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"MAGIC_PIPELINE_EXPERIMENTS": str(tmp_path / "elsewhere")},
        check=True,
        capture_output=True,
        text=True,
    )
    names = [
        "attribution_scores",
        "queries",
        "score_matrix",
        "segment_checkpoints",
        "training_data",
        "training_trajectory",
    ]
    assert shown.stdout == f"{[f'one/{name}' for name in names]} []\n"


def test_lineage_leads_from_the_matrix_back_to_the_trajectory_without_shortcuts(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e", "one")
    graph = repository(tmp_path / "e").asset_graph
    parents = {
        key.path[-1]: {parent.path[-1] for parent in graph.get(key).parent_keys} for key in graph.get_all_asset_keys()
    }
    sources = {"training_data", "queries"}
    assert parents == {
        "training_data": set(),
        "queries": set(),
        "training_trajectory": {"training_data"},
        "segment_checkpoints": {"training_trajectory", *sources},
        "attribution_scores": {"segment_checkpoints", *sources},
        "score_matrix": {"attribution_scores", *sources},
    }
    assert {node.group_name for node in graph.asset_nodes} == {"one"}


def test_each_experiment_has_its_jobs(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e", "one")
    names = {job for job in repository(tmp_path / "e").job_names if not job.startswith("__")}
    assert names == {"one_train", "one_attribute", "one_score", "one_collect", "one_observe"}


def test_what_was_read_before_is_what_runs_and_is_shown(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", "one")
    experiment, key = load_experiment(path), dg.AssetKey(["one", "training_trajectory"])
    before = repository(tmp_path / "e").asset_graph.get(key)
    path.write_text(path.read_text().replace("lr: 0.1", "lr: 0.2"))
    assert repository(tmp_path / "e").asset_graph.get(key).code_version != before.code_version
    now = build_definitions(tmp_path / "e", read=experiment).get_repository_def().asset_graph.get(key)
    assert (now.code_version, now.metadata) == (before.code_version, before.metadata)
    assert "lr: 0.1" in str(now.metadata["experiment"])


def test_a_bad_file_costs_only_its_own_experiment_and_fails_with_its_one_line(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e", "good")
    bad = tmp_path / "e" / "bad.yaml"
    bad.write_text("name: bad\ntask: {type: linear_regression}\nlearning_rate: 3\n")
    loaded = repository(tmp_path / "e")
    key = dg.AssetKey(["invalid_experiments", "bad_yaml"])
    description = loaded.asset_graph.get(key).description
    assert description is not None
    assert "learning_rate: unknown field" in description
    assert dg.AssetKey(["good", "training_trajectory"]) in loaded.asset_graph.get_all_asset_keys()
    with open_instance(tmp_path / "e") as instance:
        run = execute_asset(instance, loaded, key)
        assert not run.is_success
        assert failure_of(instance, run) == ("input", description)


def test_two_files_of_one_name_are_both_shown_as_wrong(tmp_path: Path) -> None:
    first = write_experiment(tmp_path / "e", "same", file="a.yaml")
    second = write_experiment(tmp_path / "e", "same", file="b.yaml")
    graph = repository(tmp_path / "e").asset_graph
    descriptions = {key.path[-1]: graph.get(key).description for key in graph.get_all_asset_keys()}
    assert descriptions.keys() == {"a_yaml", "b_yaml"}
    for description in descriptions.values():
        assert description is not None
        assert first.name in description
        assert second.name in description


def test_a_folder_without_experiments_loads(tmp_path: Path) -> None:
    assert not repository(tmp_path / "nowhere").asset_graph.get_all_asset_keys()


def test_an_error_is_shown_in_one_line() -> None:
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
