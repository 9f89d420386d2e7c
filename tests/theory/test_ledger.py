"""Every claim of the sources comes out as the ledger says, by computation; the page and the command say the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from headwise.cli.main import main
from headwise.errors import HeadwiseError
from headwise.nn import MultiHead
from headwise.theory.complexity import fit, growth
from headwise.theory.concentration import Frequency, expected_square, measured_square, sketch_size
from headwise.theory.ledger import LEDGER, Outcome, select
from headwise.theory.ledger.entry import Finding
from headwise.theory.ledger.figures import depth_curves, failure_rates, path_shares
from headwise.theory.own import evaluate, stack_of
from headwise.theory.search import search
from headwise.theory.verdict import Verdict

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.id)
def test_the_computation_gives_the_recorded_outcome(entry) -> None:
    found = entry.check()
    assert found.outcome is entry.expected, f"{found.printed}; {found.without}; {found.corrected}"
    if found.outcome is Outcome.CORRECTED:
        assert entry.truth
    if found.outcome is Outcome.HOLDS_WITH_PREMISE:
        assert entry.premise
    if found.outcome is Outcome.REFUTED:
        assert found.example


def test_ids_are_unique_and_every_source_is_there() -> None:
    assert len({entry.id for entry in LEDGER}) == len(LEDGER)
    assert {entry.source for entry in LEDGER} == {"S0", "S1", "S2", "S3", "S4"}
    assert len(LEDGER) >= 30


def test_the_outcome_follows_from_the_verdicts() -> None:
    good, bad = Verdict("", "", 0, 1, {}), Verdict("", "", 2, 1, {})
    assert Finding(good).outcome is Outcome.HOLDS
    assert Finding(good, without=bad).outcome is Outcome.HOLDS_WITH_PREMISE
    assert Finding(good, without=good).outcome is Outcome.HOLDS  # a premise that is not needed is none
    assert Finding(bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=bad).outcome is Outcome.REFUTED
    assert Finding(bad, corrected=good).outcome is Outcome.CORRECTED


def test_the_page_is_fresh(tmp_path: Path) -> None:
    """docs/claims.md is made by a command; this says when it must be made again."""
    assert main(["verify", "--docs", str(tmp_path / "claims.md"), "-o", str(tmp_path / "claims.json")]) == 0
    made, kept = (tmp_path / "claims.md").read_text(), (ROOT / "docs" / "claims.md").read_text()
    headings = lambda text: [line for line in text.splitlines() if line.startswith(("#", "**Claimed", "**True"))]  # noqa: E731
    assert headings(made) == headings(kept), "stale: run headwise verify --docs docs/claims.md"
    facts = json.loads((tmp_path / "claims.json").read_text())
    assert facts["different"] == []
    assert len(facts["claims"]) == len(LEDGER)


def test_a_different_verdict_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from dataclasses import replace

    from headwise.theory import ledger

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


def test_unknown_names_are_sentences(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--claim", "S0.nothing"]) == 2
    assert "S0.low-rank" in capsys.readouterr().err
    assert main(["verify", "--source", "S9"]) == 2
    assert "S0, S1, S2, S3 and S4" in capsys.readouterr().err


def test_search_finds_a_violation_where_there_is_one() -> None:
    """x <= x^2 fails between 0 and 1; x^2 <= 1 + x^2 nowhere."""
    draw = lambda g: (torch.rand(1, dtype=torch.float64, generator=g) + 0.9,)  # noqa: E731
    found = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert found.gap > 0
    assert 0 < found.at[0].item() < 1
    again = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert again.gap == found.gap
    none = search(lambda x: 2 * x.log().sum(), lambda x: (1 + x**2).log().sum(), draw, starts=2, steps=50)
    assert none.gap < 0


def test_the_second_moment_law() -> None:
    p = torch.softmax(torch.randn(30, 40, dtype=torch.float64), -1)
    w = torch.randn(40, 1, dtype=torch.float64)
    mean, error = measured_square(p, w, 12, 400, generator=torch.Generator().manual_seed(0))
    assert abs(mean - expected_square(p, w, 12)) < 4 * error
    assert abs(mean - 2 * expected_square(p, w, 12)) > 4 * error  # it could tell
    assert sketch_size(512, 0.5) == math.ceil(5 * math.log(512) / 0.125)
    low, high = Frequency(5, 100).interval
    assert low < 0.05 < high


def test_slopes() -> None:
    assert fit((2, 4, 8, 16), (3, 12, 48, 192)).exponent == pytest.approx(2)
    assert growth("softmax", "multiply_adds").exponent == pytest.approx(2)
    assert growth("strided", "multiply_adds").exponent == pytest.approx(1.5, abs=0.1)


def test_the_published_figure_has_its_shape() -> None:
    curves = depth_curves(n=16)
    assert curves["attention"][-1] < 1e-6
    assert curves["+ skip"][-1] > 0.1
    assert curves["+ skip + MLP"][-1] > 1e-2
    assert curves["attention"][-1] <= curves["+ MLP"][-1] * 1e3
    shares = path_shares(depth=6, heads=4, n=12)
    assert shares[0] > shares[-1]
    rates = failure_rates((8, 64), n=64)
    assert rates["zero mean"][1] > rates["nearly constant"][1]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([MultiHead(8, 2), MultiHead(8, 2)])


def test_your_own_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from safetensors.torch import save_file

    assert main(["verify", "--weights", "python:tests.theory.test_ledger:build", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["heads"], facts["width"]) == (2, 2, 8)
    module = nn.ModuleDict({"0": nn.MultiheadAttention(8, 1), "1": nn.MultiheadAttention(8, 1)})
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    stack = stack_of(str(tmp_path / "w.safetensors"))
    x = torch.randn(5, 8, dtype=torch.float64)
    y = x[:, None].float()
    for layer in module.values():
        y = layer(y, y, y)[0]
    torch.testing.assert_close(stack.states(x)[-1].float(), y[:, 0], rtol=1e-4, atol=1e-5)
    assert main(["verify", "--weights", str(tmp_path / "w.safetensors")]) == 0
    assert "beta" in capsys.readouterr().out


def test_weights_the_theory_does_not_cover() -> None:
    with pytest.raises(HeadwiseError, match="Linear has no MultiHead"):
        evaluate(nn.Linear(3, 3))
    broken = MultiHead(8, 2)
    with torch.no_grad():
        broken.key.weight[0, 0] = torch.inf
    with pytest.raises(HeadwiseError, match="wk of layer 0 has non-finite"):
        evaluate(broken)
    with pytest.raises(HeadwiseError, match="does not chain"):
        evaluate(MultiHead(8, 2, out_width=6))
    with pytest.raises(HeadwiseError, match="pickled files are not loaded"):
        stack_of("weights.pt")
