"""Every claim of the sources comes out as the ledger says, by computation; the page and the command say the same."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headwise import ledger
from headwise.cli.main import main
from headwise.ledger import LEDGER, Outcome, Result, examine, select
from headwise.ledger.claims_page import TIMED, page
from headwise.ledger.entry import Finding
from headwise.theory.verdict import Verdict

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {entry.id: examine(entry, clock=False) for entry in LEDGER}


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.id)
def test_the_computation_gives_the_recorded_outcome(entry, results: dict[str, Result]) -> None:
    found = results[entry.id].finding
    assert found.outcome is entry.expected, f"{found.printed}; {found.without}; {found.corrected}"
    assert bool(entry.truth) == (found.outcome is Outcome.CORRECTED)
    if found.outcome is Outcome.HOLDS_WITH_PREMISE:
        assert entry.premise
    if found.outcome in (Outcome.REFUTED, Outcome.CORRECTED):
        assert re.search(r"\d", found.example), "a counter-example in numbers"


def test_ids_are_unique_and_every_source_is_there() -> None:
    assert len({entry.id for entry in LEDGER}) == len(LEDGER)
    assert {entry.source for entry in LEDGER} == {"S0", "S1", "S2", "S3", "S4"}
    for source in ("S0", "S2"):  # both tables, all rows, both columns
        rows = ("recurrent", "softmax", "strided", "hashed", "projected", *(("efficient",) if source == "S2" else ()))
        assert {f"{source}.{column}-{row}" for column in ("table", "steps") for row in rows} <= {e.id for e in LEDGER}
    assert {f"S0.question-{i}" for i in range(1, 5)} <= {entry.id for entry in LEDGER}


def test_the_outcome_follows_from_the_verdicts() -> None:
    good, bad = Verdict("", "", 0, 1, {}), Verdict("", "", 2, 1, {})
    assert Finding(good).outcome is Outcome.HOLDS
    assert Finding(good, without=bad).outcome is Outcome.HOLDS_WITH_PREMISE
    assert Finding(good, without=good).outcome is Outcome.HOLDS  # a premise that is not needed is none
    assert Finding(bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=good).outcome is Outcome.CORRECTED


def assert_same_page(made: str, kept: str) -> None:
    """The same text word for word but for what is timed, and the same numbers up to what a processor may change."""
    made, kept = ("\n".join(line for line in text.splitlines() if not line.startswith(TIMED)) for text in (made, kept))
    assert NUMBER.sub("#", made) == NUMBER.sub("#", kept)
    for one, other in zip(NUMBER.findall(made), NUMBER.findall(kept), strict=True):
        a, b = (float(x.replace(",", "")) for x in (one, other))
        # the last digit shown, or a few per cent for what a search or a draw found; below 1e-9 all is rounding
        assert math.isclose(a, b, rel_tol=0.05, abs_tol=0.02 if "." in one else 1e-9), (one, other)


def test_the_page_is_fresh(results: dict[str, Result]) -> None:
    """docs/claims.md is made by a command; this says when it must be made again."""
    kept = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    try:
        assert_same_page(page([*results.values()]), kept)
    except AssertionError as error:
        raise AssertionError("stale: run headwise verify --docs docs/claims.md") from error


def test_a_stale_page_is_noticed(results: dict[str, Result]) -> None:
    made = page([*results.values()])
    assert_same_page(made, made + f"{TIMED}time n^1.23.\n")
    for old, new in (
        ("CORRECTED", "HOLDS"),
        ("eta > 0", "eta < 0"),  # a corrected statement
        ("Averaging makes tokens equal", "Averaging makes tokens differ"),  # an example
        ("[[0.9, 0.1]", "[[0.9, 0.3]"),  # a number of a counter-example
        ("determinant 0", "determinant 1"),
    ):
        assert old in made
        with pytest.raises(AssertionError):
            assert_same_page(made, made.replace(old, new, 1))


def test_the_command_writes_the_page_and_the_facts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page_file, facts_file = tmp_path / "claims.md", tmp_path / "claims.json"
    assert main(["verify", "--source", "S1", "--docs", str(page_file), "-o", str(facts_file)]) == 0
    printed = capsys.readouterr().out
    assert "S1.truncation" in printed
    assert "diag(10, 1)" in printed  # the counter-example
    assert "### S1.sign: CORRECTED" in page_file.read_text(encoding="utf-8")
    facts = json.loads(facts_file.read_text(encoding="utf-8"))
    assert facts["different"] == []
    assert [claim["id"] for claim in facts["claims"]] == [entry.id for entry in select(source="S1")]
    assert facts["claims"][0]["latex"] == "2d_ed_k+2d_ed_v"


def test_what_is_timed_is_said_and_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (entry,) = select(claim="S1.bias")
    monkeypatch.setattr(ledger, "LEDGER", (replace(entry, timed=lambda: "time n^9.99"),))
    assert main(["verify"]) == 0
    assert "time n^9.99" in capsys.readouterr().out


def test_a_different_verdict_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (entry,) = select(claim="S1.bias")
    monkeypatch.setattr(ledger, "LEDGER", (replace(entry, expected=Outcome.REFUTED),))
    assert main(["verify"]) == 1
    assert "Different from the ledger: S1.bias" in capsys.readouterr().out


def test_one_claim_as_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--claim", "S0.question-2", "--json"]) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["outcome"] == "CORRECTED"
    assert claim["printed"]["measured"] == pytest.approx(3)
    assert claim["printed"]["bound"] == pytest.approx(2 * math.sqrt(2))


def test_unknown_names_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--claim", "S0.nothing"]) == 2
    assert "S0.low-rank" in capsys.readouterr().err
    assert main(["verify", "--source", "S9"]) == 2
    assert "S0, S1, S2, S3 and S4" in capsys.readouterr().err
    assert main(["verify", "--claim", "S1.bias", "-o", str(tmp_path / "no" / "where.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
