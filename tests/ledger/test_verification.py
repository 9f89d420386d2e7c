"""Every claim has the recorded outcome; the page docs/claims.md, the command and the Python function agree."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import headwise
from headwise.cli.main import main
from headwise.cli.verify_command import SOURCES as SOURCES_IN_HELP
from headwise.ledger import CLAIMS, SOURCES, Finding, Ledger, Outcome, check_claim, select, verification
from headwise.ledger.claims_page import TIMED, page
from headwise.outputs import json_text
from headwise.theory.verdict import Verdict

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
SPREAD = re.compile(r"± [\d.]+")
"""Of a fit to what one machine measured: another may differ by several times."""


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return headwise.verify()


@pytest.mark.parametrize("index", range(len(CLAIMS)), ids=[entry.id for entry in CLAIMS])
def test_the_computation_gives_the_recorded_outcome(index: int, ledger: Ledger) -> None:
    entry, finding = ledger.results[index].entry, ledger.results[index].finding
    assert entry is CLAIMS[index]
    assert finding.outcome is entry.expected, f"{finding.printed}; {finding.without}; {finding.corrected}"
    assert bool(entry.truth) == (finding.outcome is Outcome.CORRECTED)
    if finding.outcome is Outcome.HOLDS_WITH_PREMISE:
        assert entry.premise
    if finding.outcome in (Outcome.REFUTED, Outcome.CORRECTED):
        assert re.search(r"\d", finding.example), "a counter-example in numbers"


def test_the_ledger_is_a_value_with_a_text_and_json(ledger: Ledger) -> None:
    assert ledger.different == ()
    lines = str(ledger).splitlines()
    assert len(lines) == len(CLAIMS) + 1
    assert re.fullmatch(r"S0\.shift +HOLDS               softmax\(A \+ x1'\) = softmax\(A\)", lines[0])
    assert lines[-1] == ledger.summary == "50 HOLDS, 26 CORRECTED, 12 HOLDS WITH PREMISE, 4 REFUTED"
    assert repr(ledger) == f"Ledger(92 claims: {ledger.summary}; 0 different from the record)"
    facts = json.loads(json_text(ledger.to_json()))
    assert [claim["id"] for claim in facts["claims"]] == [entry.id for entry in CLAIMS]
    assert facts["sources"]["S2"].startswith("Madhusudan Verma, Revisiting Linformer")


def test_progress_is_the_number_of_claims_done() -> None:
    done: list[tuple[str, int, int | None]] = []
    (result,) = headwise.verify(claim="S1.bias", progress=lambda *step: done.append(step)).results
    assert done == [("checking claims", 1, 1)]
    assert result == check_claim(select(claim="S1.bias")[0])


def test_ids_are_unique_and_begin_with_their_source() -> None:
    assert len({entry.id for entry in CLAIMS}) == len(CLAIMS) == 92
    assert [source.id for source in SOURCES] == ["S0", "S1", "S2", "S3", "S4"]
    assert all(entry.source == source.id for source in SOURCES for entry in source.entries)
    assert all(source.id in SOURCES_IN_HELP and source.authors.split()[-1] in SOURCES_IN_HELP for source in SOURCES[1:])
    rows = ("recurrent", "softmax", "strided", "hashed", "projected")  # of both tables; S2 has what S0 has not
    tables = {f"S0.{column}-{row}" for column in ("table", "steps") for row in rows}
    tables |= {"S2.table-projected", "S2.table-efficient", "S2.steps-efficient"}
    assert tables == {entry.id for entry in CLAIMS if ".table-" in entry.id or ".steps-" in entry.id}
    assert {f"S0.question-{i}" for i in range(1, 5)} <= {entry.id for entry in CLAIMS}


def test_the_outcome_follows_from_the_verdicts() -> None:
    good, bad = Verdict("", "", 0, 1, {}), Verdict("", "", 2, 1, {})
    assert Finding(good).outcome is Outcome.HOLDS
    assert Finding(good, without=bad).outcome is Outcome.HOLDS_WITH_PREMISE
    assert Finding(good, without=good).outcome is Outcome.HOLDS  # a premise that is not needed is none
    assert Finding(bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=good).outcome is Outcome.CORRECTED


def assert_same_page(made: str, kept: str) -> None:
    """The same text except for times and spreads, and the same numbers up to differences between processors."""
    made, kept = ("\n".join(line for line in text.splitlines() if not line.startswith(TIMED)) for text in (made, kept))
    made, kept = (SPREAD.sub("±", text) for text in (made, kept))
    assert NUMBER.sub("#", made) == NUMBER.sub("#", kept)
    for one, other in zip(NUMBER.findall(made), NUMBER.findall(kept), strict=True):
        a, b = (float(x.replace(",", "")) for x in (one, other))
        # the last digit shown, or a few per cent for results of a search or a draw; below 1e-9 all is rounding
        assert math.isclose(a, b, rel_tol=0.05, abs_tol=0.02 if "." in one else 1e-9), (one, other)


def test_the_page_is_up_to_date(ledger: Ledger) -> None:
    """docs/claims.md is written by a command; this fails when it must be written again."""
    kept = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    try:
        assert_same_page(page(ledger.results), kept)
    except AssertionError as error:
        raise AssertionError("stale: run headwise verify --docs docs/claims.md --force") from error


def test_a_stale_page_is_detected(ledger: Ledger) -> None:
    made = page(ledger.results)
    assert_same_page(made, made + f"{TIMED}time n^1.23.\n")
    for old, new in (
        ("CORRECTED", "HOLDS"),
        ("eta > 0", "eta < 0"),  # a corrected statement
        ("Averaging makes tokens equal", "Averaging makes tokens differ"),  # an example
        ("[0.9, 0.1]", "[0.9, 0.3]"),  # a number of a counter-example
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
    assert "Léo Burgund, Attention growing networks" in printed
    assert "diag(10, 1)" in printed  # the counter-example
    assert "### S1.sign: CORRECTED" in page_file.read_text(encoding="utf-8")
    facts = json.loads(facts_file.read_text(encoding="utf-8"))
    assert facts["different"] == []
    assert [claim["id"] for claim in facts["claims"]] == [entry.id for entry in select(source="S1")]
    assert facts["claims"][0]["latex"] == "2d_ed_k+2d_ed_v"


def test_times_are_printed_beside_the_verdicts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (entry,) = select(claim="S1.bias")
    monkeypatch.setattr(verification, "CLAIMS", (replace(entry, timing=lambda: "time n^9.99"),))
    assert main(["verify"]) == 0
    assert "time n^9.99" in capsys.readouterr().out


def test_a_different_verdict_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (entry,) = select(claim="S1.bias")
    monkeypatch.setattr(verification, "CLAIMS", (replace(entry, expected=Outcome.REFUTED),))
    assert headwise.verify().different == ("S1.bias",)
    assert str(headwise.verify()).endswith("; different from the record: S1.bias")
    assert main(["verify"]) == 1
    assert "Different from the record: S1.bias" in capsys.readouterr().out


def test_one_claim_as_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--claim", "S0.question-2", "--json"]) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["outcome"] == "CORRECTED"
    assert claim["printed"]["measured"] == pytest.approx(3)
    assert claim["printed"]["bound"] == pytest.approx(2 * math.sqrt(2))


def test_unknown_names_and_unwritable_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--claim", "S0.nothing"]) == 2
    assert "S0.low-rank" in capsys.readouterr().err
    assert main(["verify", "--source", "S9"]) == 2
    assert "S4 (Dordevic)" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["verify", "--claim", "S1.bias", "-o", str(tmp_path / "file" / "where.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
