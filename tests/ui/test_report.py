"""The report in a real browser: readable on a phone, complete without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from magic_pipeline.attribution.validation import retrain_subsets
from magic_pipeline.reporting.html_report import html_report
from tests.attribution.running import open_small, run
from tests.ui.browsing import CHROMIUM, DRIVER, browser, show_at_width

WIDTHS = (390, 1200)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    task = {"type": "causal_lm_text", "documents": 24, "layers": 1, "d_model": 8, "heads": 2, "context": 24}
    opened = open_small(
        tmp_path,
        task=task,
        training={"dtype": "float32", "batch_size": 8, "epochs": 1},
        queries={"split": "held_out", "count": 2},
        validation={"lds": {"subsets": 3, "drop_fraction": 0.25}},
    )
    run(opened)
    retrain_subsets(opened)
    file = tmp_path / "report.html"
    file.write_text(html_report(opened), encoding="utf-8")
    return file


def test_nothing_is_cut_off_at_any_width_and_nothing_is_asked_of_a_network(
    page: Path, tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    if CHROMIUM is None or DRIVER is None:
        require_or_skip("chromium and chromedriver are not installed")
    with browser(tmp_path / "profile") as driver:
        for width in WIDTHS:
            show_at_width(driver, page, width)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            assert driver.execute_script("return [...document.images].every(image => image.naturalWidth > 0)")
            assert "most helpful" in driver.find_element("tag name", "body").text
            asked = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert [name for name in asked if not name.startswith("data:")] == []
        assert driver.get_log("browser") == []  # type: ignore[no-untyped-call]
