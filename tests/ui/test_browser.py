"""A person looks at the UI: the graph, the grid of partitions, a score's table and plot; and launches a run there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.small_experiment import materializations, write_experiment


@pytest.mark.timeout(280)
def test_the_ui_shows_lineage_partitions_and_scores_and_launches_what_is_missing(
    tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    browsing = pytest.importorskip("tests.ui.browsing")
    if browsing.CHROMIUM is None or browsing.DRIVER is None:
        require_or_skip("chromium and chromedriver are not installed")
    experiment = load_experiment(write_experiment(tmp_path / "experiments"))
    queries = opened_once(experiment).queries
    with open_instance(experiment.folder) as instance:
        run_experiment(instance, experiment, [query.id for query in queries[:2]])

    with (
        browsing.served(experiment.folder, tmp_path / "ui.log") as address,
        browsing.browser(tmp_path / "profile") as driver,
    ):
        driver.get(f"{address}/locations/magic_pipeline.definitions/asset-groups/small/lineage")
        browsing.wait_for_text(
            driver, "training_trajectory", "segment_checkpoints", "attribution_scores", "score_matrix", "Materialized"
        )
        driver.get(f"{address}/assets/small/segment_checkpoints?view=partitions")
        browsing.wait_for_text(driver, "Materialized (2)", "Missing (1)", "Failed (0)", queries[0].key)

        driver.get(f"{address}/assets/small/attribution_scores?view=partitions&partition={queries[0].key}")
        browsing.wait_for_text(driver, "top_examples", "walk_digest", "fingerprint", queries[0].id)
        browsing.click(driver, "[Show Markdown]")
        browsing.wait_for_text(driver, "Most helpful", "Most harmful")

        browsing.launch_missing(driver, f"{address}/assets/small/segment_checkpoints?view=partitions")
        wait_until_walked(experiment.folder, seconds=120)
        driver.get(f"{address}/assets/small/segment_checkpoints?view=partitions")
        browsing.wait_for_text(driver, "Materialized (3)", "Missing (0)", "Failed (0)")


def wait_until_walked(folder: Path, *, seconds: float) -> None:
    """Waits until the third query's partition is in the event log: the daemon's run in the pool `gpu` has ended well."""
    (path,) = folder.glob("*.yaml")
    assets = ExperimentAssets.of(load_experiment(path))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with open_instance(folder) as instance:
            partitions = {partition for partition, _, _ in materializations(instance, assets.segments)}
        if len(partitions) == 3:
            return
        time.sleep(1)
    raise AssertionError(f"after {seconds:.0f} s only {partitions} are materialized")
