"""What a page is made of, without a browser: labels, groups, advice, sizes, and the view for notebooks."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from headwise.examination import Examination, examine, notebook_html, report_page
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.report.excerpt import LINK_BYTES, MAP_BYTES, make_excerpt
from headwise.examination.report.kind_styles import kind_style
from headwise.examination.report.measure_groups import COLUMNS, GROUPS, first_columns, group_of
from headwise.examination.report.page import page_data, telling_heads, with_code
from headwise.examination.report.site_labels import head_address, site_labels
from tests.models.tiny_models import ALL, sharpen

HOSTILE = "</script><img src=x onerror=alert(1)>\"'"


@pytest.fixture(scope="module")
def examination() -> Examination:
    torch.manual_seed(0)
    model, batch = ALL["bert"]()
    return examine(sharpen(model), [batch, batch], name="tiny")


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ([f"encoder.layer.{i}.attention.self" for i in range(3)], ["layer.0", "layer.1", "layer.2"]),
        (["model.layers.0.self_attn", "model.layers.10.self_attn"], ["layers.0", "layers.10"]),
        (["decoder.0.self", "decoder.0.cross"], ["decoder.0.self", "decoder.0.cross"]),
        (["h.0.attn", "trunk.attn"], ["h.0", "trunk"]),
        (["attention"], ["attention"]),
        (["attention.self"], ["attention.self"]),
        (["a.b", "a.b"], ["a.b(1)", "a.b(2)"]),
        (["a", "a.b"], ["a", "a.b"]),
    ],
)
def test_labels_are_short_and_differ(names: list[str], labels: list[str]) -> None:
    assert site_labels(names) == labels
    assert len(set(labels)) == len(names)


def test_addresses_hold_any_name() -> None:
    assert head_address("layer.4", 5) == "layer.4/head.5"
    assert head_address('a/b "x"#', 0) == "a%2Fb%20%22x%22%23/head.0"


def test_every_measure_has_a_group() -> None:
    assert [name for name in MEASURES if group_of(name) == "Other"] == []
    assert set(GROUPS) >= {group_of(name) for name in MEASURES}
    assert group_of("of_my_own") == "Other"
    assert first_columns(["entropy", "output_error_8", "output_error_16"]) == ["entropy", "output_error_16"]
    assert first_columns(list(MEASURES)) == [name for name in COLUMNS if name in MEASURES]


def test_telling_heads_begin_with_the_advice(examination: Examination) -> None:
    facts = examination.to_dict()
    facts["advice"] = [
        {"topic": "", "text": "", "heads": [[1, 3], [0, 0]]},
        {"topic": "", "text": "", "heads": [[9, 9]]},
    ]
    found = telling_heads(facts)
    assert found[0] == 7
    assert {facts["records"][i]["kind"] for i in found} == {record["kind"] for record in facts["records"]}
    assert len(set(found)) == len(found) <= 8


def test_a_page_reads_reports_without_the_newer_fields(examination: Examination) -> None:
    facts = examination.to_dict()
    for name in ("advice", "unseen", "by_length", "excerpt", "paths", "ablations"):
        del facts[name]
    data = page_data(facts)
    assert data["excerpt"] == {}
    assert [site["label"] for site in data["sites"]] == ["layer.0", "layer.1"]


def test_similarity_is_kept_to_half_a_percent(examination: Examination) -> None:
    facts = examination.to_dict()
    facts["redundancy"][3][1] = None
    stored = base64.b64decode(page_data(facts)["similarity"])
    below = [(i, j) for i in range(8) for j in range(i)]
    assert len(stored) == len(below)
    for byte, (i, j) in zip(stored, below, strict=True):
        true = facts["redundancy"][i][j]
        assert byte == 255 if true is None else abs(byte / 250 - true) <= 0.0021


def test_advice_names_a_dozen_heads_and_counts_the_others(examination: Examination) -> None:
    heads = [[s, h] for s in (0, 1) for h in range(4)] * 2
    page = report_page(replace(examination, advice=[{"topic": "t", "text": "x", "heads": heads, "command": None}]))
    assert page.count('class="chip"') == 12
    assert "and 4 more" in page
    assert 'href="#layer.0/head.1"' in page


def test_backticks_are_code_and_nothing_is_markup() -> None:
    assert with_code("run `a < b` & go") == "run <code>a &lt; b</code> &amp; go"
    assert with_code("one ` <b>") == "one ` &lt;b&gt;"
    assert "<img" not in with_code("`<img src=x>`<img src=x>")


@pytest.mark.parametrize("kind", [*KINDS, "a kind of your own"])
def test_every_kind_has_a_letter_and_a_readable_ink(kind: str) -> None:
    def luminance(colour: str) -> float:
        x = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = ((v / 12.92) if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in x)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    style = kind_style(kind)
    low, high = sorted((luminance(style["colour"]), luminance({"#000": "#000000", "#fff": "#ffffff"}[style["ink"]])))
    assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG AA
    assert len(style["letter"]) == 1
    letters = [kind_style(other)["letter"] for other in KINDS]
    assert len(set(letters)) == len(letters)


def test_the_excerpt_of_72_heads_at_512_tokens_fits() -> None:
    """A page of MiniLM is less than 2 MB; its excerpt is most of it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=48, num_hidden_layers=6, num_attention_heads=12, intermediate_size=48
    )
    model = sharpen(BertModel(config), 40)
    names = [f"token{i}" for i in range(512)]
    found = make_excerpt(model, {"input_ids": torch.randint(99, (1, 512))}, lambda x: [names])
    size = len(json.dumps(found))
    assert 0.8 * (MAP_BYTES + LINK_BYTES) < 3 * size / 4 < MAP_BYTES + LINK_BYTES + 20_000
    assert size < 1_400_000


class Elements(HTMLParser):
    """Names of all elements and of all attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_map_and_table_without_script(examination: Examination) -> None:
    html = notebook_html(replace(examination, advice=[]))
    seen = Elements(html)
    assert len(html) < 40_000
    assert not seen.tags & {"script", "style", "link", "img", "iframe", "a", "form"}
    assert not [name for name in seen.attributes if name.startswith("on") or name in ("href", "src", "class", "id")]
    assert "tiny" in seen.text
    assert "2 texts of 40 tokens" in seen.text
    assert len(re.findall("<rect ", html)) == 8
    assert 'fill="currentColor"' in html  # readable on light and on dark
    assert examination.headline[0] in seen.text


def test_a_notebook_begins_with_advice_and_escapes_names(examination: Examination) -> None:
    bad = replace(
        examination,
        model={**examination.model, "name": HOSTILE, "class": HOSTILE},
        sites=[{**site, "name": HOSTILE + str(i)} for i, site in enumerate(examination.sites)],
        records=[replace(record, description=HOSTILE, traits=[HOSTILE]) for record in examination.records],
        measures=[{**x, "label": HOSTILE, "unit": HOSTILE} for x in examination.measures],
        advice=[{"topic": HOSTILE, "text": "do this", "heads": [[0, 1]], "command": HOSTILE}],
        unseen=[{"name": HOSTILE, "class": "", "why": ""}],
    )
    seen = Elements(notebook_html(bad))
    assert not seen.tags & {"script", "img"}
    assert "do this" in seen.text
    assert HOSTILE in seen.text
    assert examination.headline[0] not in seen.text
