"""The page of two examinations, in real Chromium: the changed head comes first, with its spread."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.errors import InputError
from headwise.examination import Examination, compare_examinations, comparison_page, examine, write_comparison
from tests.examination.report.conftest import serious_faults
from tests.models.tiny_models import ALL, sharpen

HOSTILE = "</script><script>window.ran=1</script>\"'><img src=x onerror=window.ran=1>"


@pytest.fixture(scope="module")
def pair() -> tuple[Examination, Examination]:
    torch.manual_seed(0)
    old = sharpen(ALL["bert"]()[0])
    new = copy.deepcopy(old)
    with torch.no_grad():
        new.encoder.layer[1].attention.self.query.weight[24:].mul_(10)  # head 3
    batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(4)]
    a, b = (examine(model, batches, name=f"tiny {n}", spectra_every=2) for n, model in enumerate((old, new)))
    return a, b


@pytest.fixture(scope="module")
def files(pair: tuple[Examination, Examination], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_comparison(*pair, tmp_path_factory.mktemp("comparison"))


def test_the_files(pair: tuple[Examination, Examination], files: list[Path]) -> None:
    found = json.loads(files[1].read_text())
    facts = [x.to_dict() for x in pair]
    assert found == compare_examinations(*facts).to_dict()
    page = comparison_page(*facts)
    assert page == files[0].read_text()
    assert "8 heads are in both" in page
    assert '<a class="chip" href="#layer.1/head.3">' in page
    with pytest.raises(InputError, match="force"):
        write_comparison(*pair, files[0].parent)


@pytest.mark.browser
def test_the_page(browser, files: list[Path]) -> None:
    browser.get_log("browser")
    browser.get("about:blank")
    browser.get(files[0].as_uri())
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    found = json.loads(files[1].read_text())
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#table tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows[0][:2] == ["layer.1", "3"]
    assert [float(row[-1]) for row in rows] == pytest.approx(
        sorted((head["z"] for head in found["heads"]), reverse=True), abs=6e-3
    )
    assert " ± " in rows[0][4]
    assert rows[0][6] in ("2", "4")
    assert len(browser.find_elements("css selector", "button.head")) == 24  # A, B and the change
    assert "layer.1 · head 3" in browser.find_element("id", "detail").text
    browser.execute_script(
        "const s = document.getElementById('measure'); s.value = 'entropy'; s.dispatchEvent(new Event('change'))"
    )
    changed = browser.find_elements("css selector", "button.head[data-side=change]")
    assert [x.text for x in changed[:7]] == ["="] * 7  # nothing before head 3 of the last layer has changed
    assert changed[7].text in "+−"
    browser.find_elements("css selector", "button.head[data-side=A]")[2].click()
    assert browser.current_url.endswith("#layer.0/head.2")
    browser.find_element("id", "filter").send_keys("z > 3")
    assert [r.get_attribute("data-i") for r in browser.find_elements("css selector", "#table tbody tr")] == ["7"]
    assert browser.execute_script("return window.ran === undefined")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_accessible(browser, files: list[Path], dark: bool) -> None:
    browser.get(files[0].as_uri())
    assert serious_faults(browser, dark=dark) == []


@pytest.mark.browser
def test_other_lengths_one_text_and_hostile_names(
    browser, pair: tuple[Examination, Examination], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = sharpen(ALL["bert"]()[0])
    short = examine(model, [{"input_ids": torch.randint(99, (1, 24))}], name=HOSTILE)
    sites = [{**site, "name": HOSTILE + str(i)} for i, site in enumerate(short.sites)]
    records = [replace(r, layer=sites[r.site]["name"], description=HOSTILE) for r in short.records]
    long = replace(pair[0], sites=sites, records=[replace(r, layer=sites[r.site]["name"]) for r in pair[0].records])
    page, _ = write_comparison(long, replace(short, sites=sites, records=records), tmp_path)
    browser.get_log("browser")
    browser.get(page.as_uri())
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.ran === undefined")
    text = browser.find_element("css selector", "main").text
    assert "length: 40 and 24 tokens" in text
    assert "there is no z" in text
