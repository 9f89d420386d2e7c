"""Chromium for the pages, and a look at what a page does in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver")
    if not shutil.which("chromedriver"):
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--force-prefers-reduced-motion",
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def serious_faults(browser, *, dark: bool, within: str = "html") -> list:
    """What axe finds on the page that is open, in one theme."""
    axe_core = pytest.importorskip("axe_core_python")
    browser.execute_script(f"theme({json.dumps(dark)})")
    browser.execute_script((Path(axe_core.__file__).parent / "axe.min.js").read_text())
    found = browser.execute_async_script("const done = arguments[1]; axe.run(arguments[0]).then(done)", within)
    return [
        (fault["id"], [node["html"][:160] for node in fault["nodes"][:3]])
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
