"""A measure is registered once and found everywhere: in the JSON, on the page, in comparisons and in the docs.

`python -m tests.examination.measure.test_head_measures` writes the table into docs/reference/report-json.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination import (
    HeadSpectrum,
    HeadSums,
    compare_examinations,
    examine,
    register_measure,
    report_page,
    unusual_heads,
)
from headwise.examination.measure.head_measures import MEASURES, measures_table
from tests.models.tiny_models import ALL, sharpen

SCHEMA_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "report-json.md"
START, END = "<!-- measures: start -->", "<!-- measures: end -->"


@pytest.fixture
def toy_measures() -> Iterator[None]:
    """The weight of the last key, and the third singular value."""

    @register_measure(
        of=HeadSums,
        label="weight of the last key",
        unit="share",
        shown=True,
        compared=True,
        unusual=True,
    )
    def last_key(x: HeadSums) -> Tensor:
        """mean_i P_in: how much goes to the last key."""
        return x.received[:, -1]

    @register_measure(of=HeadSpectrum)
    def sigma_3(x: HeadSpectrum) -> float:
        """σ_3: the third singular value."""
        return x.values[2].item()

    yield
    del MEASURES["last_key"], MEASURES["sigma_3"]


@pytest.mark.usefixtures("toy_measures")
def test_a_registered_measure_is_in_json_page_comparison_and_table() -> None:
    model = sharpen(ALL["bert"]()[0])
    batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(2)]
    found = examine(model, batches)
    facts = found.to_dict()
    record = facts["records"][3]["measures"]
    assert record["last_key"]["texts"] == 2
    assert 0 < record["last_key"]["mean"] < 1
    assert record["sigma_3"]["mean"] <= record["sigma_1"]["mean"]
    definition = next(x for x in facts["measures"] if x["name"] == "last_key")
    assert definition["label"] == "weight of the last key"
    assert definition["formula"] == "mean_i P_in"

    data = json.loads(report_page(found).partition('id="data">')[2].partition("</script>")[0])
    assert [x["name"] for x in data["measures"] if x["shown"]].count("last_key") == 1

    other = found.to_dict()
    other["records"][5]["measures"]["last_key"]["mean"] += 100
    other["records"][5]["by_text"]["last_key"] = [100.0, 100.1]
    change = compare_examinations(facts, other).heads[0]
    assert (change.measure, change.head) == ("last_key", facts["records"][5]["head"])

    assert "`last_key` | mean_i P_in | share | how much goes to the last key." in measures_table()


@pytest.mark.usefixtures("toy_measures")
def test_a_registered_measure_counts_for_unusual_heads() -> None:
    model = sharpen(ALL["bert"]()[0])
    found = examine(model, [{"input_ids": torch.randint(99, (1, 40))}])
    plain = [record for record in found.records if record not in unusual_heads(found.records, 3)]
    from dataclasses import replace

    odd = plain[0]
    far = replace(odd.measures["last_key"], mean=1e9)
    changed = replace(odd, measures={**odd.measures, "last_key": far})
    records = [changed if record is odd else record for record in found.records]
    assert changed in unusual_heads(records, 3)


def test_a_name_is_registered_once_and_with_a_definition() -> None:
    with pytest.raises(InputError, match="there is a measure 'entropy' already"):
        register_measure(of=HeadSums)(MEASURES["entropy"].compute)
    with pytest.raises(InputError, match="'undocumented' needs a docstring 'formula: meaning'"):
        register_measure(of=HeadSums, name="undocumented", definition="no meaning")(MEASURES["entropy"].compute)


def test_the_documentation_lists_every_measure() -> None:
    page = SCHEMA_PAGE.read_text(encoding="utf-8")
    assert page.partition(START)[2].partition(END)[0].strip() == measures_table()


if __name__ == "__main__":
    text = SCHEMA_PAGE.read_text(encoding="utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    SCHEMA_PAGE.write_text(f"{before}{START}\n{measures_table()}\n{END}{after}", encoding="utf-8")
