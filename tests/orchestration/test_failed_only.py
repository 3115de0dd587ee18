"""Twenty queries of one run: two fail for good, one stumbles once. What is retried, what is told, and what a rerun walks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.orchestration import failures, operating
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.queries_sensor import decide, view_of
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.small_experiment import materializations, red_partitions
from tests.orchestration.test_queries_sensor import ask, write

QUERIES: list[dict[str, Any]] = [{"id": f"query {n}", "x": [0.1 * n, 1.0 - n], "y": 0.5 * n} for n in range(20)]
BAD, STUMBLING = (4, 11), 7
KEYS = [partition_key(query["id"]) for query in QUERIES]


def test_only_what_failed_is_walked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_WAIT_SECONDS", (1, 1, 1))
    experiment, assets = load_experiment(write(tmp_path / "experiments", QUERIES)), ExperimentAssets("small", 1)
    repository = build_definitions(experiment.folder).get_repository_def()
    with open_instance(experiment.folder) as instance:
        assert repository.get_job("small_train").execute_in_process(instance=instance).success
        # Changed after training, which looks at the queries first.
        ask(experiment.folder, [q | {"y": 1e200} if n in BAD else q for n, q in enumerate(QUERIES)])
        operating._last_opened.clear()
        opened = operating.opened_once(experiment)
        before = [entry for entry in ledger.entries(opened.store, opened.layout) if entry["work"] == "walk"]
        assert before == []
        # Storage that refuses: where the query's folder should be, there is a file.
        in_the_way = Path(opened.store.url) / Path(opened.layout.query(KEYS[STUMBLING], "x")).parent
        in_the_way.parent.mkdir(parents=True, exist_ok=True)
        in_the_way.write_text("in the way")
        threading.Thread(target=unblock_when_it_is_retried, args=(experiment.folder, in_the_way), daemon=True).start()
        ends = {
            ASSET_PARTITION_RANGE_START_TAG: assets.segment_key(KEYS[0], "0"),
            ASSET_PARTITION_RANGE_END_TAG: assets.segment_key(KEYS[-1], "0"),
        }
        job = repository.get_job("small_attribute")
        result = job.execute_in_process(instance=instance, tags=ends, raise_on_error=False)

        # The stumbling one was tried again in the same run; the two that are wrong were not.
        assert not result.success
        kinds = [event.event_type_value for event in result.all_events]
        assert (kinds.count("STEP_UP_FOR_RETRY"), kinds.count("STEP_FAILURE")) == (1, 1)
        [failed] = [event for event in result.all_events if event.is_step_failure]
        told = failed.step_failure_data.user_failure_data
        assert told is not None and told.description is not None
        for number in BAD:
            assert f"query {QUERIES[number]['id']!r}" in told.description
        good = {f"{key}|0" for n, key in enumerate(KEYS) if n not in BAD}
        assert {partition for partition, _, _ in materializations(instance, assets.segments)} == good
        assert red_partitions(instance, assets.segments) == {f"{KEYS[number]}|0" for number in BAD}
        view = view_of(instance, experiment)
        assert view.failed == {KEYS[number] for number in BAD}
        decision = decide(view)
        assert decision.attribute == () and "2 failed and wait for a person" in decision.why

        # The cause is mended: a run makes these two and nothing else.
        walked = len(walks(opened))
        ask(experiment.folder, QUERIES)
        operating._last_opened.clear()
        again = run_experiment(instance, experiment)
        assert [(asset, count) for asset, count, _ in again.runs] == [
            ("segment_checkpoints", 1), ("segment_checkpoints", 1), ("attribution_scores", 20), ("score_matrix", 1),
        ]  # fmt: skip
        assert {key for entry in walks(opened)[walked:] for key in entry["queries"]} == {KEYS[n] for n in BAD}
        made = [partition for partition, _, again in materializations(instance, assets.segments) if not again]
        assert sorted(map(str, made)) == sorted(f"{key}|0" for key in KEYS)
        assert red_partitions(instance, assets.segments) == set()


def walks(opened: Any) -> list[dict[str, Any]]:
    return [entry for entry in ledger.entries(opened.store, opened.layout) if entry["work"] == "walk"]


def unblock_when_it_is_retried(folder: Path, in_the_way: Path) -> None:
    with open_instance(folder) as instance:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for run in instance.get_runs():
                if instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_UP_FOR_RETRY):
                    in_the_way.unlink()
                    return
            time.sleep(0.1)
