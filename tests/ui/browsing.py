"""The real UI in a real browser: headless Chromium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.ui.serving import served as served

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """Headless Chromium with an empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def show_at_width(driver: webdriver.Chrome, page: Path, width: int) -> None:
    """A local page in a window as wide as this, which is a phone's below 600."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(page.absolute().as_uri())


def wait_for_text(driver: webdriver.Chrome, *texts: str, seconds: float = 60) -> None:
    """Waits until the page shows all of `texts`.

    Raises:
        AssertionError: it does not within `seconds`; says what is shown.
    """

    def missing() -> list[str]:
        shown = driver.find_element(By.TAG_NAME, "body").text
        return [text for text in texts if text not in shown]

    deadline = time.monotonic() + seconds
    while missing():
        if time.monotonic() > deadline:
            shown = driver.find_element(By.TAG_NAME, "body").text
            raise AssertionError(f"{driver.current_url} does not show {missing()}; it shows: {shown[:1500]}")
        time.sleep(0.3)


def click(driver: webdriver.Chrome, text: str, *, number: int = 0) -> None:
    """Clicks the element whose own text is `text`, by script: nothing that lies above it is in the way."""
    path = f"//*[normalize-space(text())={text!r}]"
    found = WebDriverWait(driver, 30).until(
        lambda d: d.find_elements(By.XPATH, path)[number:], f"nothing to click reads {text!r} ({number})"
    )[0]
    driver.execute_script("arguments[0].click()", found)


def materialize(driver: webdriver.Chrome, page: str) -> None:
    """Materializes an asset without partitions that nothing has made yet, by its page's button."""
    driver.get(page)
    wait_for_text(driver, "Never materialized")
    click(driver, "Materialize")
    wait_for_text(driver, "Launched run")


def launch_missing(driver: webdriver.Chrome, page: str, *, dimensions: int) -> None:
    """Materializes an asset's missing partitions as a person does it: button, all of each dimension, only missing, launch."""
    driver.get(page)
    wait_for_text(driver, "Partitions Selected")
    click(driver, "Materialize…")
    wait_for_text(driver, "Backfill only failed and missing partitions within selection")
    for number in range(dimensions):
        click(driver, "All", number=number)
    click(driver, "Backfill only failed and missing partitions within selection")
    # It reads "Launch backfill" or "Launch 1 run", as many as are missing, and can be pressed once they are counted.
    button = WebDriverWait(driver, 30).until(
        lambda d: d.find_elements(By.XPATH, "//button[starts-with(normalize-space(.), 'Launch') and not(@disabled)]"),
        "the dialog's button to launch",
    )[0]
    driver.execute_script("arguments[0].click()", button)
