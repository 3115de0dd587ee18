"""A person's way through the real UI: train, backfill, the worker is killed, it heals, a score, its lineage.

`python -m tests.ui.test_browser` goes the same way and keeps the pictures of it in docs/images.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.status import stored_status
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.processes import process_of
from tests.orchestration.small_experiment import materializations, write_experiment

if TYPE_CHECKING:
    from selenium import webdriver

Save = Callable[["webdriver.Chrome", str], None]


@pytest.mark.timeout(400)
def test_a_person_trains_backfills_sees_it_heal_and_follows_the_lineage_of_a_score(
    tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    browsing = pytest.importorskip("tests.ui.browsing")
    if browsing.CHROMIUM is None or browsing.DRIVER is None:
        require_or_skip("chromium and chromedriver are not installed")
    walk_the_main_path(tmp_path, lambda driver, name: None)


def walk_the_main_path(folder: Path, save: Save) -> None:
    """Trains, backfills, kills, waits for the healing, scores, and looks at the lineage; `save` is handed the pages."""
    from tests.ui import browsing

    experiment = load_experiment(write_experiment(folder / "experiments", slow=True))
    assets = ExperimentAssets.of(experiment)
    slow = experiment.folder / "slow"
    with (
        browsing.served(experiment.folder, folder / "ui.log") as address,
        browsing.browser(folder / "profile") as driver,
    ):
        pages = f"{address}/assets/small"
        browsing.materialize(driver, f"{pages}/training_trajectory")
        wait_until_materialized(experiment, assets.trajectory, 1)

        # The walk is slow, so that its worker can be killed in the middle.
        slow.touch()
        segments = f"{pages}/segment_checkpoints?view=partitions"
        browsing.launch_missing(driver, segments, dimensions=2)
        worker = wait_for_the_worker_of_a_begun_walk(experiment)
        os.kill(worker, signal.SIGSTOP)
        driver.get(segments)
        browsing.wait_for_text(driver, "Materialized (0)", "Materializing (3)")
        save(driver, "ui-filling")
        os.kill(worker, signal.SIGKILL)
        slow.unlink()
        wait_until_materialized(experiment, assets.segments, 3)
        driver.get(segments)
        browsing.wait_for_text(driver, "Materialized (3)", "Missing (0)", "Failed (0)")
        driver.get(f"{address}/runs")
        browsing.click(driver, "Show runs within backfills")
        browsing.wait_for_text(driver, "Failure", "Success", "magic_pipeline/resumed")
        save(driver, "ui-healed")

        scores = f"{pages}/attribution_scores?view=partitions"
        browsing.launch_missing(driver, scores, dimensions=1)
        wait_until_materialized(experiment, assets.scores, 3)
        browsing.materialize(driver, f"{pages}/score_matrix")
        wait_until_materialized(experiment, assets.matrix, 1)
        with open_instance(experiment.folder) as instance:
            [(query, *_), *_] = materializations(instance, assets.scores)
        driver.get(f"{scores}&partition={query}")
        browsing.wait_for_text(driver, "top_examples", "walk_digest", "fingerprint", "versions")
        browsing.click(driver, "[Show Markdown]")
        browsing.wait_for_text(driver, "Most helpful", "Most harmful")

        driver.set_window_size(2400, 1000)  # the nodes show no details in a graph that is made small
        driver.get(f"{address}/locations/magic_pipeline.definitions/asset-groups/small/lineage")
        names = ("training_data", "queries", "training_trajectory", "segment_checkpoints", "attribution_scores")
        browsing.wait_for_text(driver, *names, "score_matrix", "3 partitions")
        save(driver, "ui-lineage")


def wait_for_the_worker_of_a_begun_walk(experiment: Experiment) -> int:
    """The id of the process that walks, once one of its segments is sealed."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        stored = stored_status(experiment)
        if stored and any(query.sealed >= 1 for query in stored[0].queries):
            with open_instance(experiment.folder) as instance:
                runs = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
            [holder] = [process_of(run.run_id, run.tags) for run in runs]
            assert holder is not None
            return holder.pid
        time.sleep(0.05)
    raise AssertionError(f"no segment is sealed in time: {stored_status(experiment)}")


def wait_until_materialized(experiment: Experiment, key: dg.AssetKey, partitions: int) -> None:
    """Waits until so many partitions (an asset without them has one) are in the event log."""
    found: set[str | None] = set()
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        with open_instance(experiment.folder) as instance:
            found = {partition for partition, _, _ in materializations(instance, key)}
        if len(found) == partitions:
            return
        time.sleep(0.5)
    raise AssertionError(f"{key.to_user_string()}: only {found} are materialized in time")


if __name__ == "__main__":
    from tests.ui.pictures import save

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        walk_the_main_path(Path(name), save)
