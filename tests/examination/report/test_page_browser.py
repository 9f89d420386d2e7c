"""The report in real Chromium: no error, no request, clicks and keys work, and it is accessible in both themes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.examination import Examination, examine, report_page, with_depth, write_report
from tests.models.tiny_models import ALL, sharpen

webdriver = pytest.importorskip("selenium.webdriver")
axe_core = pytest.importorskip("axe_core_python")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def examination() -> Examination:
    """Of two texts, with names and tokens that try to break out of the page."""
    torch.manual_seed(0)
    model, batch = ALL["llama"]()
    words = ["</script><script>alert(1)</script>", "&amp;", '"quoted"', *(f"word{i}" for i in range(37))]
    found = examine(sharpen(model), [batch, batch], name="tiny <b>llama</b>", token_names=lambda x: [words])
    return with_depth(found, model, batch)


@pytest.fixture(scope="module")
def page(examination: Examination, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(examination, tmp_path_factory.mktemp("report"))[0]


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


HOSTILE = "</script><script>window.ran=1</script>\"'><img src=x onerror=window.ran=1><svg onload=window.ran=1>"


def hostile(x: Any) -> Any:
    """The same with every string replaced, except the names that the page looks up."""
    known = ("kind", "kind_counts", "name", "maps", "dtype", "measures", "modes", "evidence")
    if isinstance(x, dict):
        return {key: value if key in known else hostile(value) for key, value in x.items()}
    if isinstance(x, list):
        return [hostile(value) for value in x]
    return HOSTILE if isinstance(x, str) else x


def opened(browser, file: Path, html: str) -> list[str]:
    """Open the page; the errors that the browser reports."""
    browser.get_log("browser")
    file.write_text(html, encoding="utf-8")
    browser.get(file.as_uri())
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_hostile_names_and_texts_do_not_run(browser, page: Path, examination: Examination, tmp_path: Path) -> None:
    sites = [{**site, "name": HOSTILE} for site in examination.sites]
    records = [replace(record, layer=HOSTILE, description=HOSTILE) for record in examination.records]
    definitions = [{**x, "label": HOSTILE, "formula": HOSTILE, "meaning": HOSTILE} for x in examination.measures]
    bad = replace(
        examination,
        model={**examination.model, "name": HOSTILE, "class": HOSTILE},
        sites=sites,
        records=records,
        measures=definitions,
        headline=[HOSTILE] * 3,
        inputs=hostile(examination.inputs),
        provenance=hostile(examination.provenance),
        excerpt=hostile(examination.excerpt),
        ablations=hostile(examination.ablations),
        paths={**examination.paths, "frozen": [HOSTILE]},
    )
    assert opened(browser, tmp_path / "hostile.html", report_page(bad)) == []
    assert browser.execute_script("return window.ran === undefined")
    assert HOSTILE in browser.find_element("id", "detail").text
    browser.get(page.as_uri())


def test_markup_that_gets_into_the_page_does_not_run(
    browser, page: Path, examination: Examination, tmp_path: Path
) -> None:
    """The policy holds where escaping fails: no script, handler, style, form, frame or request of somebody else."""
    injected = (
        "<script>window.ran=1</script><img src=x onerror=window.ran=1><svg onload=window.ran=1></svg>"
        "<p id=styled style='color:red'>x</p><base href='https://example.org/'><script src=other.js></script>"
        "<iframe srcdoc='<script>parent.ran=1</script>'></iframe><a id=link href='javascript:window.ran=1'>x</a>"
    )
    whole = report_page(examination)
    broken = whole.replace("<main>", f"<main>{injected}")
    assert broken != whole
    violations = opened(browser, tmp_path / "injected.html", broken)
    assert len([x for x in violations if "Content Security Policy" in x]) >= 6
    browser.execute_script("document.getElementById('link').click()")
    late = "const s = document.createElement('script'); s.textContent = 'window.ran=1'; document.body.append(s)"
    browser.execute_script(late)
    assert browser.execute_script("return window.ran === undefined")
    assert (
        browser.execute_script("return getComputedStyle(document.getElementById('styled')).color") != "rgb(255, 0, 0)"
    )
    assert browser.execute_script("return document.baseURI") == (tmp_path / "injected.html").as_uri()
    assert len(browser.find_elements("css selector", "button.head")) == 8  # the page itself works
    browser.get_log("browser")
    browser.get(page.as_uri())


def test_the_page_says_how_many_texts_a_number_comes_from(browser) -> None:
    """Two texts, one of them with a spectrum."""
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    detail = browser.find_element("id", "detail").text
    assert "of 2 texts of 40 tokens: " in detail
    assert "Singular values of P, exact, of one text" in detail
    assert "Mean weight by offset, mean of 2 texts" in detail
    cells = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#detail table.numbers tbody tr')]"
        ".map(r => [r.cells[0].textContent, [...r.cells].slice(1).map(c => c.textContent)]))"
    )
    texts, mean, std, low, high = cells["effective rank (directions)"]
    assert (texts, std, low, high) == ("1", "–", "–", "–")
    assert float(mean) > 1
    texts, mean, std, low, high = cells["entropy (nats)"]
    assert (texts, std) == ("2", "–")
    assert float(low) <= float(mean) <= float(high)
    assert cells["sink position (position)"][1].endswith(" on 2 of 2 texts")


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
        "provenance": {"texts": [4, 3, 5]},
    }
    path = add_plan(tmp_path, plan)
    browser.get(path.as_uri())
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    policies = [
        text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
        for text in (path.read_text(), page.read_text())
    ]
    assert policies[0] == policies[1] != ""
    chosen = browser.find_elements("css selector", "#plan-map td.chosen")[1]
    assert (
        chosen.value_of_css_property("background-color") == "rgba(0, 114, 178, 1)"
    )  # set by the script, as the policy allows
    assert len(browser.find_elements("css selector", "#plan-map td.chosen")) == 8
    assert len(browser.find_elements("css selector", "#plan-curve circle")) == 3
    assert "drift of at most 0.2" in browser.find_element("id", "plan-note").text
    assert "measured on 5 held-out texts" in browser.find_element("id", "plan-curve-note").text
    browser.get(page.as_uri())
