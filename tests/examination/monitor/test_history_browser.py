"""The page of a history in real Chromium: slider, clicks, keys, hostile names, accessibility, a narrow screen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.examination.monitor import Alarm, Head, History
from headwise.examination.monitor.history import NAMES
from headwise.examination.monitor.history_page import write_history
from tests.examination.monitor.test_history_page import written

webdriver = pytest.importorskip("selenium.webdriver")
axe_core = pytest.importorskip("axe_core_python")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_history(written(), tmp_path_factory.mktemp("history"))[0]


def text(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def slide(browser, place: int) -> None:
    browser.execute_script(
        "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", place
    )


HOSTILE = "</script><script>window.ran=1</script>\"'><img src=x onerror=window.ran=1>"


def test_no_error_and_no_request(browser, page: Path) -> None:
    browser.get(page.as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    urls = {url for url in requested if url.startswith(("http", "file")) and "chrome" not in url}
    assert urls == {page.as_uri()}


def test_it_opens_at_the_first_alarm(browser, page: Path) -> None:
    browser.get(page.as_uri())
    assert text(browser, "#step-name").startswith("70, loss 2.3")
    assert text(browser, "#detail").count("logit growth") >= 1
    assert text(browser, "button.head[aria-pressed=true]") == "!"


def test_the_slider_moves_everything(browser, page: Path) -> None:
    browser.get(page.as_uri())
    slide(browser, 11)
    assert text(browser, "#step-name").startswith("110")
    label = "return document.querySelector('button.head').getAttribute('aria-label')"
    assert browser.execute_script(label) == "layers.0 · head 0: max logit 17.9"
    slide(browser, 0)
    assert browser.execute_script(label) == "layers.0 · head 0: max logit 1"


def test_measures_keys_and_the_picture_choose(browser, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(page.as_uri())
    browser.execute_script(
        "const m = document.getElementById('measure'); m.value = 'effective_rank';m.dispatchEvent(new Event('change'))"
    )
    slide(browser, 6)  # measured at step 40 last
    assert "(of step 40)" in browser.execute_script(
        "return document.querySelector('button.head').getAttribute('aria-label')"
    )
    browser.execute_script("document.querySelector('button.head[aria-pressed=true]').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert "layers.2 · head 2" in text(browser, "#detail")
    area = browser.find_element("css selector", "#overview .area")
    webdriver.ActionChains(browser).move_to_element_with_offset(area, 0, 0).click().perform()
    assert text(browser, "#step-name").startswith(("50", "60"))


def test_hostile_names_stay_text(browser, tmp_path: Path) -> None:
    history = History(HOSTILE)
    history.add(0, {Head(HOSTILE, 0): [1.0] * len(NAMES), Head("b", 0): [1.0] * len(NAMES)})
    history.alarms.append(Alarm(0, HOSTILE, HOSTILE, 0, HOSTILE))
    path = write_history(history, tmp_path / "hostile")[0]
    browser.get_log("browser")
    browser.get(path.as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.ran") is None
    assert HOSTILE in text(browser, "h1")


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_accessible_and_fits_a_phone(browser, page: Path, dark: bool) -> None:
    browser.get(page.as_uri())
    browser.execute_script("theme(arguments[0])", dark)
    browser.execute_script((Path(axe_core.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
