"""The report in real Chromium: no error, no request, clicks, keys and links work, accessible in both themes."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.examination import (
    Examination,
    Statistic,
    add_plan,
    examine,
    report_page,
    with_depth,
    write_report,
)
from tests.examination.report.conftest import serious_faults
from tests.examination.report.test_excerpt import attention
from tests.models.tiny_models import ALL, sharpen

pytestmark = pytest.mark.browser

LENGTH = 150
HOSTILE = "</script><script>window.ran=1</script>\"'><img src=x onerror=window.ran=1><svg onload=window.ran=1>"


def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, _ = ALL["llama"]()
    return sharpen(model, 30), {"input_ids": torch.randint(99, (1, LENGTH))}


@pytest.fixture(scope="module")
def examination() -> Examination:
    """Of two texts, with all that a page can show, and with names and tokens that try to break out of it."""
    model, batch = tiny()
    words = ["</script><script>alert(1)</script>", "&amp;", '"quoted"', *(f"word{i}" for i in range(LENGTH - 3))]
    found = examine(model, [batch, batch], name="tiny <b>llama</b>", token_names=lambda x: [words])
    found = with_depth(found, model, batch)
    importance = {
        "name": "importance",
        "label": "importance",
        "formula": "drift",
        "meaning": "change of the answer.",
        "unit": "share",
        **dict.fromkeys(("shown", "compared"), True),
        **dict.fromkeys(("unusual", "discrete"), False),
    }
    records = [
        replace(
            record,
            traits=["induction", "broad"] if i == 5 else [],
            measures={**record.measures, "importance": Statistic(10.0**-i, 0.0, 10.0**-i, 10.0**-i, 2)},
        )
        for i, record in enumerate(found.records)
    ]
    return replace(
        found,
        records=records,
        measures=[importance, *found.measures],
        advice=[
            {
                "topic": "Idle heads",
                "text": "Two heads do `<nothing>`.",
                "heads": [[1, 2], [0, 3]],
                "command": "headwise plan x",
            },
            {"topic": "Collapse", "text": "Tokens become equal.", "heads": [], "command": None},
        ],
        unseen=[{"name": "trunk.mixer", "class": "Mixer", "why": "it is written by hand"}],
        by_length={"lengths": [64, LENGTH], "kinds": {"64": ["sink"] * 8, str(LENGTH): [r.kind for r in records]}},
    )


@pytest.fixture(scope="module")
def page(examination: Examination, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(examination, tmp_path_factory.mktemp("report"))[0]


@pytest.fixture
def opened(browser, page: Path) -> Iterator:
    """The page, as it is at first; afterwards the browser has nothing to complain about."""
    browser.get_log("browser")
    browser.get("about:blank")
    browser.get(page.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def pressed(browser) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('button.head[aria-pressed=true]')].map(b => b.getAttribute('aria-label'))"
    )


def one(browser, selector: str):
    return browser.find_element("css selector", selector)


def every(browser, selector: str) -> list:
    return browser.find_elements("css selector", selector)


def errors(browser, file: Path, html: str) -> list[str]:
    """Open the page; the errors that the browser reports."""
    browser.get_log("browser")
    file.write_text(html, encoding="utf-8")
    browser.get(file.as_uri())
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


# ---- safe ----


def test_no_request(opened, page: Path) -> None:
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in requested if url.startswith("http") or "report" in url} == {page.as_uri()}


def test_untrusted_names_stay_text(opened) -> None:
    assert one(opened, "h1").text == "tiny <b>llama</b>"


def hostile(x: Any) -> Any:
    """The same with every string replaced, except the names that the page looks up."""
    known = ("kind", "kind_counts", "name", "maps", "links", "dtype", "measures", "modes", "evidence")
    if isinstance(x, dict):
        return {key: value if key in known else hostile(value) for key, value in x.items()}
    if isinstance(x, list):
        return [hostile(value) for value in x]
    return HOSTILE if isinstance(x, str) else x


def test_hostile_names_and_texts_do_not_run(browser, examination: Examination, tmp_path: Path) -> None:
    sites = [{**site, "name": HOSTILE} for site in examination.sites]
    records = [replace(r, layer=HOSTILE, description=HOSTILE, traits=[HOSTILE]) for r in examination.records]
    definitions = [{**x, "label": HOSTILE, "formula": HOSTILE, "meaning": HOSTILE} for x in examination.measures]
    bad = replace(
        examination,
        model={**examination.model, "name": HOSTILE, "class": HOSTILE},
        sites=sites,
        records=records,
        measures=definitions,
        headline=[HOSTILE] * 3,
        inputs={**hostile(examination.inputs), "words": dict.fromkeys(("item", "items", "unit", "units"), HOSTILE)},
        provenance=hostile(examination.provenance),
        excerpt=hostile(examination.excerpt),
        ablations=hostile(examination.ablations),
        paths={**examination.paths, "frozen": [HOSTILE]},
        advice=[{"topic": HOSTILE, "text": HOSTILE, "heads": [[0, 0]], "command": HOSTILE}],
        unseen=[{"name": HOSTILE, "class": HOSTILE, "why": HOSTILE}],
    )
    assert errors(browser, tmp_path / "hostile.html", report_page(bad)) == []
    browser.execute_script("document.querySelector('a.chip').click(); window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return window.ran === undefined")
    assert HOSTILE in one(browser, "#detail").text


def test_markup_that_gets_into_the_page_does_not_run(browser, examination: Examination, tmp_path: Path) -> None:
    """The policy holds where escaping fails: no script, handler, style, form, frame or request of somebody else."""
    injected = (
        "<script>window.ran=1</script><img src=x onerror=window.ran=1><svg onload=window.ran=1></svg>"
        "<p id=styled style='color:red'>x</p><base href='https://example.org/'><script src=other.js></script>"
        "<iframe srcdoc='<script>parent.ran=1</script>'></iframe><a id=link href='javascript:window.ran=1'>x</a>"
    )
    whole = report_page(examination)
    broken = whole.replace("<main>", f"<main>{injected}")
    assert broken != whole
    violations = errors(browser, tmp_path / "injected.html", broken)
    assert len([x for x in violations if "Content Security Policy" in x]) >= 6
    browser.execute_script("document.getElementById('link').click()")
    late = "const s = document.createElement('script'); s.textContent = 'window.ran=1'; document.body.append(s)"
    browser.execute_script(late)
    assert browser.execute_script("return window.ran === undefined")
    assert (
        browser.execute_script("return getComputedStyle(document.getElementById('styled')).color") != "rgb(255, 0, 0)"
    )
    assert browser.execute_script("return document.baseURI") == (tmp_path / "injected.html").as_uri()
    assert len(every(browser, "button.head")) == 8  # the page itself works


# ---- what to do ----


def test_advice_comes_first_and_its_heads_can_be_clicked(opened) -> None:
    sections = [x.text for x in every(opened, "main h2") if x.text]
    assert sections[:3] == [
        "What to do",
        "Not seen: 1 module looks like attention but was not measured",
        "Heads",
    ]
    assert "From 2 texts of 150 tokens, 1 of them with spectra." in one(opened, ".advice").text
    assert one(opened, ".advice code").text == "<nothing>"
    assert "trunk.mixer (Mixer): it is written by hand" in one(opened, ".warning").text
    assert "layers.1.self_attn, head 2" in pressed(opened)[0]  # the first head of the advice is shown
    chip = every(opened, "a.chip")[1]
    assert chip.text == "layers.0 · 3"
    chip.click()
    assert "layers.0.self_attn, head 3" in pressed(opened)[0]
    copy = one(opened, ".advice button.copy")
    copy.click()
    for _ in range(20):
        if copy.text == "Copied":
            break
        time.sleep(0.05)
    assert copy.text == "Copied"


# ---- map and table ----


def test_a_click_shows_the_head_and_moves_the_table(opened) -> None:
    assert len(every(opened, "button.head")) == 8
    every(opened, "button.head")[6].click()
    (label,) = pressed(opened)
    assert "layers.1.self_attn, head 2" in label
    detail = one(opened, "#detail").text
    assert "layers.1 · head 2" in detail
    assert one(opened, "#said").get_attribute("textContent").startswith("layers.1 · head 2: ")
    assert "2 key heads for 4 query heads" in detail
    assert "Singular values of P" in detail
    assert "64 tokens" in detail  # kinds by length
    assert one(opened, "#table tr.chosen").get_attribute("data-i") == "6"


def test_a_row_of_the_table_moves_the_map(opened) -> None:
    every(opened, "#table tbody tr")[1].click()
    assert "layers.0.self_attn, head 1" in pressed(opened)[0]
    one(opened, "#table tr.chosen button.row").send_keys("\ue015")  # arrow down
    assert "layers.0.self_attn, head 2" in pressed(opened)[0]
    assert opened.switch_to.active_element.find_element("xpath", "../..").get_attribute("data-i") == "2"


def column(browser, name: str) -> list[str]:
    return browser.execute_script(
        "const k = [...document.querySelectorAll('#table thead th')].findIndex(h => h.dataset.name === arguments[0]);"
        "return [...document.querySelectorAll('#table tbody tr')].map(r => r.cells[k].textContent)",
        name,
    )


def test_the_table_sorts_filters_and_takes_columns(opened, page: Path) -> None:
    facts = json.loads((page.parent / "report.json").read_text())
    true = [record["measures"]["entropy"]["mean"] for record in facts["records"]]
    heading = one(opened, "#table th[data-name=entropy]")
    heading.find_element("css selector", "button").click()
    shown = [float(x) for x in column(opened, "entropy")]
    assert shown == pytest.approx(sorted(true, reverse=True), abs=6e-3)
    assert one(opened, "#table th[data-name=entropy]").get_attribute("aria-sort") == "descending"
    one(opened, "#table th[data-name=entropy] button").click()
    assert [float(x) for x in column(opened, "entropy")] == pytest.approx(sorted(true), abs=6e-3)

    box, limit = one(opened, "#filter"), sum(sorted(true)[3:5]) / 2
    box.send_keys(f"layers.1, entropy >= {limit:.9f}")
    expected = [i for i in range(4, 8) if true[i] >= limit]
    found = [int(row.get_attribute("data-i")) for row in every(opened, "#table tbody tr")]
    assert sorted(found) == expected
    assert one(opened, "#count").text == f"{len(expected)} of 8 heads"
    faint = [int(b.get_attribute("data-i")) for b in every(opened, "button.head.faint")]
    assert sorted(faint) == [i for i in range(8) if i not in expected]
    box.clear()
    box.send_keys("induction")
    assert [row.get_attribute("data-i") for row in every(opened, "#table tbody tr")] == ["5"]
    box.send_keys(webdriver_keys().BACKSPACE * 9)
    assert one(opened, "#count").text == "8 heads"

    one(opened, ".chooser summary").click()
    labels = [x for x in every(opened, "#columns label") if x.text.startswith("stable rank")]
    assert "‖P‖²_F / σ_1²" in labels[0].text  # every measure is defined there
    labels[0].click()
    assert len(column(opened, "stable_rank")) == 8
    one(opened, ".chooser summary").click()


def test_the_csv_has_the_numbers_of_the_table(opened, page: Path) -> None:
    facts = json.loads((page.parent / "report.json").read_text())
    text = opened.execute_script("return csv(table.cells())")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["layer"], row["head"]) for row in rows] == [(f"layers.{s}", str(h)) for s in (0, 1) for h in range(4)]
    for row, record in zip(rows, facts["records"], strict=True):
        assert float(row["effective rank (directions)"]) == pytest.approx(
            record["measures"]["effective_rank"]["mean"], rel=1e-3
        )
    risky = opened.execute_script("return csv([['=1+1', 'a,\"b\"', -2, null]])")
    assert next(csv.reader(io.StringIO(risky))) == ["'=1+1", 'a,"b"', "-2", ""]


def webdriver_keys():
    from selenium import webdriver

    return webdriver.Keys


def test_arrow_keys_move(opened) -> None:
    keys = webdriver_keys()
    buttons = every(opened, "button.head")
    buttons[0].click()
    for key, expected in ((keys.ARROW_RIGHT, 1), (keys.ARROW_DOWN, 5), (keys.HOME, 4), (keys.ARROW_UP, 0)):
        opened.switch_to.active_element.send_keys(key)
        assert pressed(opened) == [buttons[expected].get_attribute("aria-label")]
        assert opened.switch_to.active_element == buttons[expected]


def colour_by(browser, name: str) -> None:
    browser.execute_script(
        "const s = document.getElementById('measure'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        name,
    )


def test_another_measure_repaints_the_map_and_is_explained(opened) -> None:
    before = every(opened, "button.head")[3].get_attribute("aria-label")
    colour_by(opened, "effective_rank")
    after = every(opened, "button.head")[3].get_attribute("aria-label")
    assert before != after
    assert "effective rank" in after
    assert "how many directions P uses" in one(opened, "#legend").text
    groups = [x.get_attribute("label") for x in every(opened, "#measure optgroup")]
    assert groups[:6] == ["Kind", "Effect", "Spread", "Rank", "Position", "Single tokens"]
    assert "Other" not in groups


def test_colours_tell_heads_apart_where_a_measure_is_skewed(opened) -> None:
    """Eight powers of ten: on a linear scale seven of them would have one colour."""
    colour_by(opened, "importance")
    colours = [b.value_of_css_property("background-color") for b in every(opened, "button.head")]
    assert len(set(colours)) == 8
    assert "by rank" in one(opened, "#legend").text
    even = opened.execute_script("return valueScale([0, 1, 2, 3, 4, 5, 6, 7])")
    assert even["byRank"] is False


def test_the_page_says_how_many_texts_a_number_comes_from(opened) -> None:
    """Two texts, one of them with a spectrum."""
    opened.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    detail = one(opened, "#detail").text
    assert "of 2 texts of 150 tokens: " in detail
    assert "Singular values of P, exact, of one text" in detail
    assert "Mean weight by offset, mean of 2 texts" in detail
    cells = opened.execute_script(
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


# ---- addresses ----


def test_permalinks_and_the_back_button(opened, page: Path) -> None:
    buttons = every(opened, "button.head")
    buttons[1].click()
    buttons[7].click()
    assert opened.current_url.endswith("#layers.1/head.3")
    opened.back()
    assert "layers.0.self_attn, head 1" in pressed(opened)[0]
    opened.forward()
    assert "layers.1.self_attn, head 3" in pressed(opened)[0]
    for address in ("#layers.0/head.2", "#layers.0.self_attn/head.2", "#layers.0/head.2/token.7"):
        opened.get("about:blank")
        opened.get(page.as_uri() + address)
        assert "layers.0.self_attn, head 2" in pressed(opened)[0]
    assert "(7) attends" in one(opened, "#reading h3").text
    opened.get("about:blank")
    opened.get(page.as_uri() + "#layers.9/head.99")
    assert len(pressed(opened)) == 1


# ---- hover ----


def test_hover_text_appears_and_goes_away(opened) -> None:
    from selenium import webdriver

    area = one(opened, "#detail svg.heat .area")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", area)
    time.sleep(0.1)
    chain = webdriver.ActionChains(opened)
    chain.move_to_element(area).perform()
    assert re.search(r"tokens 7\d–7\d → tokens 7\d–7\d: .* % on average", one(opened, "#hover").text)
    chain.move_to_element(one(opened, "#detail-title")).perform()
    assert not one(opened, "#hover").is_displayed()
    heading = one(opened, "#table th[data-name=sink_mass] button")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", heading)
    time.sleep(0.1)
    chain.move_to_element(heading).perform()
    assert "max_j c_j: share of all attention that goes to the most attended key" in one(opened, "#hover").text
    heading.send_keys(webdriver_keys().ESCAPE)
    assert not one(opened, "#hover").is_displayed()


# ---- tokens ----


def test_the_page_decodes_the_weights_of_the_model(opened, page: Path) -> None:
    """Against P in float64: exact for what is stored, mass kept for what is not."""
    model, batch = tiny()
    true = attention(model, batch)
    facts = json.loads((page.parent / "report.json").read_text())["excerpt"]
    assert facts["linked"] == LENGTH
    assert facts["sites"][0]["rows"] == 64
    for s, h, query in ((0, 0, 0), (0, 3, 149), (1, 2, 77), (1, 1, 31)):
        shown = np.array(opened.execute_script(f"return [...ATTENTION.weights({s}, {h}, {query})]"))
        p = true[s][h, query]
        stored = p > facts["threshold"] + 1e-5
        assert stored.any()
        assert np.abs(np.sqrt(shown[stored]) - np.sqrt(p[stored])).max() < 0.5 / 255 + 1e-3
        assert shown[~stored].max(initial=0) <= facts["threshold"] * 1.01
        part = opened.execute_script(f"return [...ATTENTION.weights({s}, {h}, {query}, 20, 30)]")
        assert part == pytest.approx(shown[20:30].tolist())


def test_choosing_a_token_shows_where_it_attends(opened) -> None:
    model, batch = tiny()
    true = attention(model, batch)
    every(opened, "button.head")[6].click()
    every(opened, ".reading .token")[20].click()
    assert "“word17” (20) attends" in one(opened, "#reading h3").text
    assert opened.current_url.endswith("#layers.1/head.2/token.20")
    first = one(opened, ".strongest li")
    best = int(true[1][2, 20].argmax())
    assert f"({best})" in first.text
    shown = float(first.text.splitlines()[-1].removesuffix(" %"))
    assert shown == pytest.approx(100 * true[1][2, 20, best], rel=0.05)
    assert "in every head" in one(opened, "#every h3").text
    area = one(opened, "#every .area")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", area)
    opened.execute_script(
        "const b = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent("
        "new MouseEvent('click', {clientX: b.left + 5, clientY: b.top + 3.5 * b.height / 8}))",
        area,
    )
    assert "layers.0.self_attn, head 3" in pressed(opened)[0]


def test_what_attends_to_a_token(opened) -> None:
    model, batch = tiny()
    column = attention(model, batch)[1][2][:, 20]
    every(opened, "button.head")[6].click()
    opened.execute_script(
        "const s = document.getElementById('direction'); s.value = 'in'; s.dispatchEvent(new Event('change'))"
    )
    every(opened, ".reading .token")[20].click()
    assert one(opened, "#reading h3").text == "What attends to “word17” (20)"
    assert f"({int(column.argmax())})" in one(opened, ".strongest li").text
    shown = np.array(opened.execute_script("return [...ATTENTION.received(1, 2, 20)]"))
    stored = column > opened.execute_script("return EXCERPT.threshold") + 1e-5
    assert np.abs(np.sqrt(shown[stored]) - np.sqrt(column[stored])).max() < 0.5 / 255 + 1e-3


def test_another_kind_that_fits_colours_a_corner(opened) -> None:
    cells = every(opened, "button.head")
    assert "gradient" in cells[5].value_of_css_property("background-image")
    assert "gradient" not in cells[4].value_of_css_property("background-image")
    assert cells[5].get_attribute("aria-label").endswith(", also induction, broad")
    assert "that kind fits the head too" in one(opened, "#legend").text


def test_kinds_at_other_lengths(opened) -> None:
    assert "Kinds depend on the length: at 64 tokens" in one(opened, "#legend").text
    colour_by(opened, "kind 0")
    assert {b.text for b in every(opened, "button.head")} == {"S"}
    assert "layers.0.self_attn, head 0: sink" in every(opened, "button.head")[0].get_attribute("aria-label")


def test_the_window_moves(opened) -> None:
    opened.execute_script(
        "const f = document.getElementById('from'); f.value = 100; f.dispatchEvent(new Event('input'))"
    )
    assert one(opened, "#where").text == "queries 100–131, keys 100–131 of 150"
    assert every(opened, ".reading .token")[0].text == "word97"
    opened.execute_script("document.querySelectorAll('#detail .area')[0].dispatchEvent(new MouseEvent('click'))")
    assert one(opened, "#where").text == "queries 0–31, keys 0–31 of 150"


def test_small_multiples_choose_a_head(opened) -> None:
    thumbs = every(opened, "#multiples button")
    assert len(thumbs) == 4
    thumbs[1].click()
    assert "layers.1.self_attn, head 1" in pressed(opened)[0]
    opened.execute_script(
        "const s = document.getElementById('layer-choice'); s.value = '0'; s.dispatchEvent(new Event('change'))"
    )
    assert "layers.0.self_attn, head 0" in pressed(opened)[0]


def test_cross_attention_has_two_texts(browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = ALL["t5"]()
    found = examine(
        sharpen(model), [batch], token_names=lambda x: [[f"t{i}" for i in row.tolist()] for row in x["input_ids"]]
    )
    assert errors(browser, tmp_path / "t5.html", report_page(found)) == []
    place = next(i for i, r in enumerate(found.records) if "EncDec" in r.layer)
    every(browser, "button.head")[place].click()
    words = [x.text for x in every(browser, ".reading h4")]
    assert words == ["Queries", "Keys"]
    lines = every(browser, ".reading .text")
    assert [len(line.find_elements("css selector", "button")) for line in lines] == [24, 32]
    assert serious_faults(browser, dark=False, within="#tokens-section") == []


def test_patches_of_an_image_lie_on_a_grid(browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = ALL["vit"]()
    names = ["[CLS]", *(f"{r},{c}" for r in range(6) for c in range(6))]
    words = {"item": "image", "items": "images", "unit": "patch", "units": "patches"}
    found = examine(sharpen(model), [batch], token_names=lambda x: [names], inputs={"kind": "images", "words": words})
    assert errors(browser, tmp_path / "vit.html", report_page(found)) == []
    assert len(every(browser, ".patches .token")) == 36
    text = one(browser, "#tokens-section").text + one(browser, "header").text
    assert "Patches" in text
    assert "1 image of 37 patches" in one(browser, "header").text
    assert not re.search(r"\b(texts?|tokens?)\b", text)
    every(browser, ".patches .token")[8].click()
    assert "“1,2” (9) attends" in one(browser, "#reading h3").text
    assert serious_faults(browser, dark=True, within="#tokens-section") == []


def test_a_model_without_names_or_excerpt(browser, examination: Examination, tmp_path: Path) -> None:
    bare = replace(examination, excerpt={}, advice=[], unseen=[], by_length={}, ablations={}, paths={})
    assert errors(browser, tmp_path / "bare.html", report_page(bare)) == []
    assert not one(browser, "#tokens-section").is_displayed()
    assert one(browser, "main h2").text == "In words"
    nameless = replace(examination, excerpt={**examination.excerpt, "tokens": []})
    assert errors(browser, tmp_path / "nameless.html", report_page(nameless)) == []
    assert every(browser, ".reading .token")[3].text == "3"


# ---- similar heads, downloads, print, phone ----


def test_similar_heads_are_named_and_can_be_chosen(opened, page: Path) -> None:
    matrix = json.loads((page.parent / "report.json").read_text())["redundancy"]
    every(opened, "button.head")[2].click()
    row = one(opened, "#alike-chosen tbody tr")
    named = re.fullmatch(r"layers.0 · 2 layers.(\d) · (\d) ([\d.]+)", row.text)
    assert named
    best = 4 * int(named[1]) + int(named[2])
    assert matrix[2][best] == pytest.approx(max(x for j, x in enumerate(matrix[2]) if j != 2), abs=1e-3)
    assert float(named[3]) == pytest.approx(matrix[2][best], abs=6e-3)
    row.find_elements("css selector", "button")[1].click()
    assert f"layers.{best // 4}.self_attn, head {best % 4}" in pressed(opened)[0]
    labels = [x.text for x in every(opened, "#redundancy svg text")]
    assert {"layers.0", "layers.1", "cosine", "0.5"} <= set(labels)


def test_pictures_and_the_table_can_be_downloaded(opened, tmp_path: Path) -> None:
    opened.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    opened.execute_script("document.getElementById('csv').click()")
    for button in one(opened, "#detail figure.picture").find_elements("css selector", ".keep"):
        opened.execute_script("arguments[0].click()", button)
    wanted = {".csv", ".svg", ".png"}
    for _ in range(60):
        found = {file.suffix: file for file in tmp_path.iterdir()}
        if wanted <= set(found):
            break
        time.sleep(0.1)
    assert wanted <= set(found)
    svg = found[".svg"].read_text()
    assert svg.startswith("<svg")
    assert "data:image/png;base64," in svg
    assert "class=" not in svg
    assert found[".png"].read_bytes().startswith(b"\x89PNG")
    assert found[".csv"].read_text().startswith("layer,head,kind,importance (share)")


def test_every_picture_has_titles_of_its_axes(opened) -> None:
    for svg in every(opened, "main svg.heat, main svg.chart"):
        if svg.is_displayed():
            assert len(svg.find_elements("css selector", "text.label")) >= 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_fault(opened, theme: str) -> None:
    opened.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert serious_faults(opened, dark=theme == "dark") == []
    colour_by(opened, "entropy")
    assert serious_faults(opened, dark=theme == "dark", within="#map") == []


def test_print_has_all_heads_and_a_few_pictures(opened) -> None:
    printed = base64.b64decode(opened.print_page())
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 4
    assert 2 <= len(every(opened, "#print-heads svg")) <= 6  # made when printing began
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert one(opened, "#print-heads").is_displayed()
        assert all(row.is_displayed() for row in every(opened, "#table tbody tr"))
        assert not one(opened, "#tokens-section").is_displayed()
    finally:
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_on_a_phone_nothing_is_cut_off_and_a_tap_shows_the_head(opened) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        opened.refresh()
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 390
        box = "const b = arguments[0].getBoundingClientRect(); return [b.left, b.right, b.top]"
        for button in every(opened, "button.head"):
            left, right, _ = opened.execute_script(box, button)
            assert 0 <= left < right <= 390
        target = every(opened, "button.head")[5]
        opened.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", target)
        target.click()
        for _ in range(40):  # the page scrolls smoothly
            top = opened.execute_script(box, one(opened, "#detail"))[2]
            if top < 400:
                break
            time.sleep(0.05)
        assert top < 400
        assert "layers.1 · head 1" in one(opened, "#detail-title").text
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# ---- plan ----


def test_the_view_of_a_plan(browser, page: Path, tmp_path: Path) -> None:
    """Hidden without a plan; with one, a cell a head and a curve, in colours that no kind of head has."""
    browser.get(page.as_uri())
    assert not one(browser, "#plan").is_displayed()
    facts = json.loads((page.parent / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(facts))
    names = [site["name"] for site in facts["sites"]]
    softmax, window = {"kind": "softmax"}, {"kind": "window", "width": 9, "leading": 1}
    drift = {kind: {"40": 0.12} for kind in ("prose", "code", "tables")}
    point = {"predicted": 0.1, "drift": drift, "bound": 0.15}
    plan = {
        "model": {"class": facts["model"]["class"]},
        "length": 40,
        "tolerance": 0.2,
        "measure": "loss",
        "choices": [softmax, window],
        "sites": {name: [softmax, window, window, softmax] for name in names},
        "curve": [{**point, "cost": cost, "sites": {name: [0, 1, 1, 0] for name in names}} for cost in (0.9, 0.5, 0.1)],
        "provenance": {},
    }
    path = add_plan(tmp_path, plan)
    browser.get(path.as_uri())
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    policies = [
        text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
        for text in (path.read_text(), page.read_text())
    ]
    assert policies[0] == policies[1] != ""
    chosen = every(browser, "#plan-map .operator")
    assert [x.text for x in chosen] == ["·", "wi", "wi", "·"] * 2
    colour = chosen[1].value_of_css_property("background-color")
    kinds = {x.value_of_css_property("background-color") for x in every(browser, "button.head, #legend .swatch")}
    assert colour.startswith("rgb")
    assert colour not in kinds
    assert len(every(browser, "#plan-curve circle")) == 3
    assert "drift of at most 0.2" in one(browser, "#plan-note").text
    assert "measured on 3 kinds of held-out texts" in one(browser, "#plan-curve-note").text
    assert serious_faults(browser, dark=True, within="#plan") == []
