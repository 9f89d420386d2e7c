"""Whatever stands in plan.json, report.json or config.json: it is read, or refused with a sentence that names the file.

Valid files are changed at random: fields dropped, renamed, added, given values of other types or absurd sizes, nested
deeply; and their bytes cut, repeated and replaced.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.cli.main import main
from headwise.errors import HeadwiseError
from headwise.examination import add_plan, examine, write_report
from headwise.models.fingerprint import weights_hash
from headwise.replacement import Choice, Plan, PlanPoint, load, rewrite
from tests.hostile.counting import count, hostile
from tests.models.tiny_models import ALL
from tests.replacement.plans import describe

pytest.importorskip("transformers")

DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 4, 0.5, -0.5, 2.5, 1e-300, 1e300, -1e300, 2**31, 2**53, 10**12, 10**17, 10**400),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "x", "softmax", "window", "cosine", "loss", "BertModel", "../..", "[/x]", "$\\frac$", "a\nb", "\0", "\ud800"),
    *([], {}, [None], [[]], [1, 2, 3, 4], {"kind": "window"}, {"kind": "projected", "rank": 10**6}, DEEP),
]
KINDS = [
    "softmax",
    "uniform",
    "offset",
    "toeplitz",
    "window",
    "near_far",
    "efficient",
    "hashed",
    "nystrom",
    "projected",
]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, x in items for place in ((*path, name), *places(x, (*path, name)))]


@st.composite
def changed(draw: st.DrawFn, facts: dict[str, Any]) -> dict[str, Any]:
    """`facts` with one to three changes."""
    facts = copy.deepcopy(facts)
    for _ in range(draw(st.integers(1, 3))):
        found = places(facts)
        if not found:
            break
        depth = draw(st.integers(1, max(map(len, found))))  # as many changes near the top as far below
        *path, last = draw(st.sampled_from([place for place in found if len(place) <= depth]))
        parent: Any = facts
        for name in path:
            parent = parent[name]
        change = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename", "add", "swap", "kind"]))
        if change == "replace":
            parent[last] = copy.deepcopy(
                draw(st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=5))
            )
        elif change == "drop":
            del parent[last]
        elif change == "kind":
            number = copy.deepcopy(draw(st.sampled_from(VALUES)))
            parent[last] = {"kind": draw(st.sampled_from(KINDS)), "width": number, "rank": number}
        elif change == "swap":
            parent[last] = copy.deepcopy(_at(facts, draw(st.sampled_from(found))))
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = (
                parent.pop(last) if change == "rename" else copy.deepcopy(draw(st.sampled_from(VALUES)))
            )
        else:
            parent.append(copy.deepcopy(parent[last]))
    return facts


def _at(value: Any, path: tuple) -> Any:
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):  # moved by an earlier change
            return None
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` cut off, with a piece repeated, or with other bytes somewhere."""
    start = draw(st.integers(0, len(content)))
    stop = draw(st.integers(start, min(len(content), start + 40)))
    piece = draw(
        st.sampled_from([b"", b"\0", b"\xff", b"{", b"]", b'"', b"NaN", b"1e999", b",", b"\\ud800", b"[" * 2000])
    )
    return draw(st.sampled_from([content[:start], content[:start] + piece + content[stop:], content[:stop] * 2]))


def text_of(facts: Any) -> bytes:
    return json.dumps(facts).encode()  # with NaN and Infinity, as Python writes them


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return ALL["bert"]()[0].eval()


@pytest.fixture(scope="module")
def plan(model: torch.nn.Module) -> Plan:
    sites = describe(model, {"input_ids": torch.randint(99, (1, 40))})
    about = {"class": "BertModel", "name": "tiny", "fingerprint": weights_hash(model), "sites": sites}
    window, uniform = Choice("window", {"width": 9}), Choice("uniform")
    rows = {name: [window, uniform, Choice("softmax"), Choice("offset", {"by": -1})] for name in sites}
    same = {name: [uniform] * 4 for name in sites}
    curve = [PlanPoint(rows, 0.5, 0.01, {"prose": {20: 0.01, 40: 0.012}}, 0.02), PlanPoint(same, 0.1, 0.2)]
    below = dict.fromkeys(sites, 16)
    return Plan(about, 40, rows, {}, 0.05, "cosine", curve, lengths=(20, 40), exact_below=below)


def test_plans(plan: Plan, model: torch.nn.Module, tmp_path: Path) -> None:
    facts, file = plan.to_dict(), tmp_path / "plan.json"
    file.write_bytes(text_of(facts))
    assert Plan.load(file).sites == plan.sites
    outcomes = {True: 0, False: 0}

    @hostile(60)
    @given(changed(facts).map(text_of) | damaged(text_of(facts)))
    def check(content: bytes) -> None:
        count("plan.json")
        file.write_bytes(content)
        try:
            read = Plan.load(file)
        except HeadwiseError as error:
            outcomes[False] += 1
            if "plan.json" not in str(error):
                pytest.fail(f"the file is not named: {error}")
            return
        outcomes[True] += 1
        assert Plan.load(file).to_dict() == json.loads(json.dumps(read.to_dict()))
        try:
            read.at(read.tolerance)
            if read.length <= 4096:
                read.cost()
                rewrite(model, read)
        except HeadwiseError:
            pass

    check()
    assert all(outcomes.values())  # neither everything nor nothing is refused


def test_reports(model: torch.nn.Module, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [{"input_ids": torch.randint(99, (1, 12))} for _ in range(2)]
    good, bad = tmp_path / "good", tmp_path / "bad"
    for directory in (good, bad):
        directory.mkdir()
    write_report(examine(model, batches, spectra_every=1), good)
    facts = json.loads((good / "report.json").read_bytes())
    facts |= {
        "records": facts["records"][:3],
        "redundancy": [[1, None]],
        "excerpt": {},
        "measures": facts["measures"][:5],
    }
    for record in facts["records"]:
        record |= {"profile": [0.5], "spectrum": [1.0], "measures": dict(list(record["measures"].items())[:5])}
    outcomes = {0: 0, 2: 0}

    @hostile(60)
    @given(changed(facts).map(text_of) | damaged(text_of(facts)), st.booleans())
    def check(content: bytes, as_json: bool) -> None:
        count("report.json")
        (bad / "report.json").write_bytes(content)
        code = main(["compare", str(good), str(bad), *(["--json"] if as_json else [])])
        printed = capsys.readouterr()
        outcomes[code] += 1  # any other code is a KeyError
        assert printed.err.count("\n") == (code == 2)
        if as_json and code == 0:
            json.loads(printed.out, parse_constant=pytest.fail)
        try:
            add_plan(bad, plan.to_dict())
        except HeadwiseError:
            pass
        else:
            assert code == 0 or "share no head" in printed.err or "no measure in common" in printed.err

    check()
    assert all(outcomes.values())


def test_configs_of_rewritten_models(plan: Plan, model: torch.nn.Module, tmp_path: Path) -> None:
    rewrite(model, plan)[0].save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    facts = json.loads(file.read_bytes())
    outcomes = {True: 0, False: 0}

    @hostile(40)
    @given(changed({"headwise": facts["headwise"]}).map(lambda part: text_of({**facts, **part})))
    def check(content: bytes) -> None:
        count("config.json")
        file.write_bytes(content)
        try:
            load(tmp_path)
            outcomes[True] += 1
        except HeadwiseError:
            outcomes[False] += 1

    check()
    assert all(outcomes.values())
