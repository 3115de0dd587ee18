"""The pictures of the UI and of the report in docs/images, made from the finished digits demo: python -m tests.ui.pictures"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

from magic_pipeline import cli
from tests.ui.browsing import browser, click, served, show_at_width, wait_for_text

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    """Needs `make demo` before."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with served(ROOT / "experiments", folder / "log") as address, browser(folder / "profile") as driver:
            driver.get(f"{address}/locations/magic_pipeline.definitions/asset-groups/digits/lineage")
            wait_for_text(driver, "training_trajectory", "score_matrix", "12 partitions")
            save(driver, "ui-assets")
            driver.get(f"{address}/assets/digits/segment_checkpoints?view=partitions")
            wait_for_text(driver, "Materialized (12)")
            click(driver, "test-0000-digit-1-7dc8cb71")
            click(driver, "0")
            # No further down: the path where the checkpoints lie is this machine's own.
            driver.set_window_size(1400, 640)
            save(driver, "ui-partitions")
            driver.set_window_size(1400, 1100)
            driver.get(
                f"{address}/assets/digits/attribution_scores?view=partitions&partition=test-0000-digit-1-7dc8cb71"
            )
            for number, picture in enumerate(("ui-table", "ui-plot")):
                wait_for_text(driver, "walk_digest")
                click(driver, "[Show Markdown]", number=number)
                time.sleep(3)
                driver.find_element(By.CSS_SELECTOR, "[role=dialog]").screenshot(str(IMAGES / f"{picture}.png"))
                driver.refresh()
    report(ROOT / "experiments" / "digits.yaml")


def report(experiment: Path) -> None:
    """What stands below the first heading of the report: above it is a path of this machine."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, browser(Path(name) / "profile") as driver:
        page = Path(name) / "report.html"
        cli.main(["report", str(experiment), "--output", str(page)])
        for picture, width, heading in (("report-desktop", 1000, 1), ("report-phone", 390, -1)):
            show_at_width(driver, page, width)
            driver.execute_script(f"[...document.querySelectorAll('h2')].at({heading}).scrollIntoView()")
            save(driver, picture)


def save(driver: webdriver.Chrome, name: str) -> None:
    """Keeps what the window shows as docs/images/{name}.png."""
    time.sleep(3)  # the page's animations
    driver.save_screenshot(str(IMAGES / f"{name}.png"))


if __name__ == "__main__":
    main()
