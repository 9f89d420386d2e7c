"""The report in real Chromium: no error, no request, clicks and keys work, and it is accessible in both themes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headwise.examination import examine, with_depth, write_report
from tests.models.tiny_models import ALL, sharpen

webdriver = pytest.importorskip("selenium.webdriver")
axe_core = pytest.importorskip("axe_core_python")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose tokens try to break out of the page."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("report")
    model, batch = ALL["llama"]()
    words = ["</script><script>alert(1)</script>", "&amp;", '"quoted"', *(f"word{i}" for i in range(37))]
    found = examine(sharpen(model), [batch, batch], name="tiny <b>llama</b>", token_names=lambda x: [words])
    return write_report(with_depth(found, model, batch), out)[0]


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator:
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
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def pressed(browser) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('button.head[aria-pressed=true]')].map(b => b.getAttribute('aria-label'))"
    )


def test_no_console_error_and_no_request(browser, page: Path) -> None:
    messages = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert messages == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in requested if not url.startswith("data:")} == {page.as_uri()}


def test_untrusted_names_stay_text(browser) -> None:
    assert browser.find_element("css selector", "h1").text == "tiny <b>llama</b>"


def test_every_head_is_on_the_map(browser) -> None:
    assert len(browser.find_elements("css selector", "button.head")) == 8
    assert len(pressed(browser)) == 1


def test_a_click_shows_the_head(browser) -> None:
    browser.find_elements("css selector", "button.head")[6].click()
    (label,) = pressed(browser)
    assert "layers.1.self_attn, head 2" in label
    detail = browser.find_element("id", "detail").text
    assert "layers.1.self_attn · head 2" in detail
    assert "2 key heads for 4 query heads" in detail
    assert "Singular values of P" in detail


def test_arrow_keys_move(browser) -> None:
    keys = webdriver.Keys
    buttons = browser.find_elements("css selector", "button.head")
    buttons[0].click()
    for key, expected in ((keys.ARROW_RIGHT, 1), (keys.ARROW_DOWN, 5), (keys.HOME, 4), (keys.ARROW_UP, 0)):
        browser.switch_to.active_element.send_keys(key)
        assert pressed(browser) == [buttons[expected].get_attribute("aria-label")]
        assert browser.switch_to.active_element == buttons[expected]


def test_another_measure_repaints_the_map(browser) -> None:
    before = browser.find_elements("css selector", "button.head")[3].get_attribute("aria-label")
    browser.execute_script(
        "const s = document.getElementById('measure'); s.value = 'effective_rank'; s.dispatchEvent(new Event('change'))"
    )
    after = browser.find_elements("css selector", "button.head")[3].get_attribute("aria-label")
    assert before != after
    assert "effective rank" in after


def test_pointing_at_a_cell_names_its_tokens(browser) -> None:
    canvas = browser.find_element("css selector", "#detail canvas")
    webdriver.ActionChains(browser).move_to_element(canvas).perform()
    tip = browser.find_element("css selector", ".tip").text
    assert "attends to" in tip
    assert "word" in tip


def test_the_map_of_a_head_holds_its_weights(browser, page: Path) -> None:
    """The excerpt's bytes decode to the cell means of P that the JSON promises."""
    facts = json.loads((page.parent / "report.json").read_text())
    site = facts["excerpt"]["sites"][0]
    drawn = browser.execute_script(
        "const c = document.createElement('canvas'); return data.excerpt.sites[0].maps[0].length"
    )
    assert drawn == len(site["maps"][0])
    assert site["rows"] == site["columns"] == 40


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_fault(browser, theme: str) -> None:
    browser.execute_script(f"theme({json.dumps(theme == 'dark')})")
    source = (Path(axe_core.__file__).parent / "axe.min.js").read_text()
    browser.execute_script(source)
    found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
    serious = [
        (v["id"], [node["html"][:120] for node in v["nodes"][:3]])
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_the_page_prints_every_section(browser) -> None:
    printed = browser.print_page()
    assert len(printed) > 10_000  # a PDF with content, base64


def test_the_view_of_a_plan(browser, page: Path, tmp_path: Path) -> None:
    """Hidden without a plan; with one, a cell a head and a curve, and still no error."""
    from headwise.examination import add_plan

    assert not browser.find_element("id", "plan").is_displayed()
    facts = json.loads((page.parent / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(facts))
    names = [site["name"] for site in facts["sites"]]
    softmax, window = {"kind": "softmax"}, {"kind": "window", "width": 9, "leading": 1}
    point = {"name": "", "selection": 0.1, "error": 0.0, "test": 0.12}
    plan = {
        "model": {"class": facts["model"]["class"]},
        "length": 40,
        "tolerance": 0.2,
        "measure": "loss",
        "choices": [softmax, window],
        "sites": {name: [softmax, window, window, softmax] for name in names},
        "curve": [{**point, "cost": cost, "sites": {name: [0, 1, 1, 0] for name in names}} for cost in (0.9, 0.5, 0.1)],
        "baselines": [],
    }
    browser.get(add_plan(tmp_path, plan).as_uri())
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    assert len(browser.find_elements("css selector", "#plan-map td.chosen")) == 8
    assert len(browser.find_elements("css selector", "#plan-curve circle")) == 3
    assert "drift of at most 0.2" in browser.find_element("id", "plan-note").text
    browser.get(page.as_uri())
