"""A person looks at the UI after a killed run: launches what is missing there, and looks at lineage, partitions and a score."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from magic_pipeline import cli
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets
from tests.orchestration.small_experiment import materializations, write_experiment

ROOT = Path(__file__).parents[2]
KILLED_RUN = """
import sys
from magic_pipeline import cli
from tests.faults.faults import Fault, arm
arm(Fault("walk step", "SIGKILL", 3))
cli.main(["run", sys.argv[1]])
"""


@pytest.mark.timeout(290)
def test_after_a_killed_run_the_ui_launches_what_is_missing_and_shows_lineage_partitions_and_scores(
    tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    browsing = pytest.importorskip("tests.ui.browsing")
    if browsing.CHROMIUM is None or browsing.DRIVER is None:
        require_or_skip("chromium and chromedriver are not installed")
    path = write_experiment(tmp_path / "experiments")
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, str(path)], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    experiment = load_experiment(path)
    key = opened_once(experiment).queries[0].key

    with browsing.served(path.parent, tmp_path / "ui.log") as address, browsing.browser(tmp_path / "profile") as driver:
        partitions = f"{address}/assets/small/segment_checkpoints?view=partitions"
        driver.get(partitions)
        browsing.wait_for_text(driver, "Materialized (0)", "Failed (3)")
        browsing.launch_missing(driver, partitions)
        wait_until_walked(path, seconds=120)
        driver.get(partitions)
        browsing.wait_for_text(driver, "Materialized (3)", "Missing (0)", "Failed (0)", key)

        assert cli.main(["run", str(path)]) == 0
        driver.set_window_size(2400, 1000)  # the nodes show no details in a graph that is made small
        driver.get(f"{address}/locations/magic_pipeline.definitions/asset-groups/small/lineage")
        browsing.wait_for_text(
            driver, "training_trajectory", "segment_checkpoints", "attribution_scores", "score_matrix", "3 partitions"
        )
        driver.get(f"{address}/assets/small/attribution_scores?view=partitions&partition={key}")
        browsing.wait_for_text(driver, "top_examples", "walk_digest", "fingerprint")
        browsing.click(driver, "[Show Markdown]")
        browsing.wait_for_text(driver, "Most helpful", "Most harmful")


def wait_until_walked(path: Path, *, seconds: float) -> None:
    """Waits until all partitions are in the event log: the daemon's run in the pool `gpu` has ended well."""
    assets = ExperimentAssets.of(load_experiment(path))
    partitions: set[str | None] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with open_instance(path.parent) as instance:
            partitions = {partition for partition, _, _ in materializations(instance, assets.segments)}
        if len(partitions) == 3:
            return
        time.sleep(1)
    raise AssertionError(f"after {seconds:.0f} s only {partitions} are materialized")
