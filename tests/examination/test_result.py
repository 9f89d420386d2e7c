"""What a user does with a result: print it, make a table of it, save it, load it, look at it, compare it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import headwise
from headwise.errors import InputError
from headwise.examination import Examination, examine, viewer
from tests.models.tiny_models import ALL, sharpen


@pytest.fixture(scope="module")
def result() -> Examination:
    torch.manual_seed(0)
    batches = [{"input_ids": torch.randint(99, (1, n))} for n in (30, 40)]
    return examine(sharpen(ALL["bert"]()[0]), batches, name="tiny", spectra_every=2)


def test_everything_prints_in_one_short_line(result: Examination) -> None:
    assert repr(result).startswith("Examination(tiny: 8 heads, ")
    assert repr(result).endswith("; 2 texts of 30 to 40 tokens)")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 200
    record = result.records[5]
    assert repr(record).startswith("Record(encoder.layer.1.attention.self, head 1: ")
    assert len(repr(record)) < 120
    assert repr(record.measures["entropy"]).startswith("Statistic(mean=")
    assert len(repr(result.records)) < 1200


def test_inputs_are_called_by_their_names(result: Examination) -> None:
    words = {"item": "image", "items": "images", "unit": "patch", "units": "patches"}
    images = Examination(**{**vars(result), "inputs": {**result.inputs, "words": words, "shortest": 40, "texts": 1}})
    assert images.inputs_in_words() == "1 image of 40 patches"


def test_rows_are_one_dict_a_head_with_plain_values(result: Examination) -> None:
    rows = result.rows()
    assert [(row["layer"][14], row["head"]) for row in rows] == [(str(i), h) for i in range(2) for h in range(4)]
    for row, record in zip(rows, result.records, strict=True):
        assert row["kind"] == record.kind
        assert row["entropy"] == record.measures["entropy"].mean
        assert row["sink_position"] == record.modes["sink_position"].value
        assert row.keys() == rows[0].keys()
        assert "entropy_std" not in row
    json.dumps(rows, allow_nan=False)
    wide = result.rows(spread=True)[3]
    assert wide["entropy_std"] == result.records[3].measures["entropy"].std
    assert (wide["entropy_texts"], wide["effective_rank_texts"]) == (2, 1)
    assert wide["effective_rank_std"] is None  # one text shows no spread
    assert "sink_position_std" not in wide


def test_kinds_by_length_are_columns(result: Examination) -> None:
    kinds = {"16": ["local"] * 8, "32": ["sink"] * 8}
    judged = Examination(**{**vars(result), "by_length": {"lengths": [16, 32], "kinds": kinds}})
    assert [judged.rows()[7][name] for name in ("kind_at_16", "kind_at_32")] == ["local", "sink"]


def test_a_pandas_frame_has_a_row_a_head_and_numbers_as_numbers(result: Examination) -> None:
    pandas = pytest.importorskip("pandas")
    frame = result.to_pandas(spread=True)
    assert frame.shape[0] == 8
    assert frame["entropy"].dtype == frame["effective_rank_std"].dtype == "float64"
    assert frame["entropy"].mean() == pytest.approx(sum(r.measures["entropy"].mean for r in result.records) / 8)
    assert math.isnan(frame["effective_rank_std"][0])
    assert isinstance(frame.groupby("layer")["entropy"].mean(), pandas.Series)


def test_a_polars_frame_has_a_row_a_head_and_numbers_as_numbers(result: Examination) -> None:
    polars = pytest.importorskip("polars")
    frame = result.to_polars(spread=True)
    assert frame.height == 8
    assert frame.schema["entropy"] == frame.schema["effective_rank_std"] == polars.Float64
    assert frame["effective_rank_std"].null_count() == 8


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named(result: Examination, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ModuleNotFoundError
    with pytest.raises(InputError, match=rf"to_{package} needs {package}, which is not installed; pip install"):
        getattr(result, f"to_{package}")()


def test_what_was_saved_is_loaded(result: Examination, tmp_path: Path) -> None:
    file = result.save(tmp_path / "run")
    assert file == tmp_path / "run" / "report.json"
    for place in (tmp_path / "run", str(tmp_path / "run"), file):
        again = Examination.load(place)
        assert again.to_json() == result.to_json()  # every field, to the digits that JSON keeps
        assert repr(again) == repr(result)
    for a, b in zip(result.records, again.records, strict=True):
        for name, statistic in a.measures.items():
            assert b.measures[name].mean == pytest.approx(statistic.mean, rel=1e-6)
            assert math.isnan(b.measures[name].std) == math.isnan(statistic.std)
        assert b.modes == a.modes
        assert (b.kind_counts, b.judged) == (a.kind_counts, a.judged)
    assert again.rows().__len__() == 8
    again.save(tmp_path / "copy")
    assert (tmp_path / "copy/report.json").read_bytes() == file.read_bytes()


def test_an_earlier_result_is_replaced_only_if_asked(result: Examination, tmp_path: Path) -> None:
    from headwise.examination import write_report

    write_report(result, tmp_path)
    with pytest.raises(InputError, match="exists already and holds results of `headwise examine`"):
        result.save(tmp_path)
    result.save(tmp_path, force=True)
    assert not (tmp_path / "report.html").exists()  # it would show another result than report.json
    (tmp_path / "report.json").write_text("mine")
    with pytest.raises(InputError, match=r"report.json has been changed since headwise wrote it"):
        result.save(tmp_path, force=True)


def test_files_that_are_no_result_are_refused(result: Examination, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        Examination.load(tmp_path)
    file = tmp_path / "report.json"
    for change, expected in (
        (lambda facts: facts.update(schema=2), "schema 2 is not 3"),
        (lambda facts: facts["records"][1].update(profile="flat"), 'records/1/profile must be a list, but is "flat"'),
        (lambda facts: facts["records"][1]["measures"]["entropy"].pop("max"), "measures/entropy/max is missing"),
        (lambda facts: facts["records"][2].update(site=7), "records/2/site is 7, but there are 2 sites"),
        (lambda facts: facts["layers"].update(norm=[1, "2"]), 'layers/norm/1 must be a number, but is "2"'),
    ):
        facts = result.to_dict()
        change(facts)
        file.write_text(json.dumps(facts))
        with pytest.raises(InputError, match=expected):
            Examination.load(tmp_path)
    facts = result.to_dict()
    facts["records"][0]["of_a_newer_version"] = facts["of_a_newer_version"] = 1
    file.write_text(json.dumps(facts))
    assert Examination.load(file).to_json() == result.to_json()


def test_show_opens_the_page_in_a_browser(result: Examination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(viewer.webbrowser, "open", opened.append)
    page = result.show(tmp_path / "report")
    assert page == tmp_path / "report/report.html"
    assert opened == [page.as_uri()]
    assert (tmp_path / "report/report.json").exists()
    monkeypatch.setattr(viewer.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    temporary = result.show()
    assert temporary.read_text() == page.read_text()
    assert opened[1] == temporary.as_uri()


def test_show_in_a_notebook_is_a_frame_below_the_cell(result: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr(viewer.webbrowser, "open", lambda url: pytest.fail("opened a browser"))
    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    frame = result.show()
    markup = frame._repr_html_()
    assert markup.startswith('<iframe srcdoc="&lt;!')
    assert "<script" not in markup  # the page is escaped, so that it stays inside the frame
    assert len(repr(frame)) < 40


def test_two_results_are_compared(result: Examination, tmp_path: Path) -> None:
    torch.manual_seed(1)
    batches = [{"input_ids": torch.randint(99, (1, n))} for n in (30, 40)]
    model = sharpen(ALL["bert"]()[0])
    before = examine(model, batches)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.mul_(0.1)
    found = headwise.compare(before, examine(model, batches))
    assert found.paired
    assert repr(found).startswith("ExaminationComparison(BertModel against BertModel: ")
    assert len(repr(found)) < 200
    assert found.heads[0].layer == "encoder.layer.1.attention.self"
    before.save(tmp_path)
    assert headwise.compare(tmp_path, before).heads[0].relative == 0
    with pytest.raises(InputError, match="was given a BertModel; examine the model first"):
        headwise.compare(model, before)
