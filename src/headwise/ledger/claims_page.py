"""docs/claims.md from the ledger: what was claimed, what is true, and what it means for someone who builds a model."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.ledger.entry import Outcome, Result
from headwise.theory.verdict import Verdict

TITLES = {
    "S0": "S0: the loss of rank",
    "S1": "S1: growing attention",
    "S2": "S2: linear attention",
    "S3": "S3: a mathematical view",
    "S4": "S4: attention and convolution",
}
HEAD = """# Claims

Five texts on the mathematics of attention, claim by claim, and what came of each when it was computed. This page is
made by `headwise verify --docs docs/claims.md`; every verdict is the outcome of a computation that anyone can repeat.

* **HOLDS**: as printed.
* **HOLDS WITH PREMISE**: true under a premise that the text leaves out, and shown to fail without it.
* **CORRECTED**: false as printed; the corrected statement was tested too.
* **REFUTED**: false, with a counter-example.

| | text |
|---|---|
| S0 | Xie Zejian, *Attention* (2021): notes on Dong, Cordonnier & Loukas 2021 and on Wang et al. 2020 |
| S1 | Léo Burgund, *Attention growing networks*, internship report |
| S2 | Madhusudan Verma, *Revisiting Linformer with a modified self-attention with linear complexity* |
| S3 | Shuiwang Ji & Yaochen Xie, *A Mathematical View of Attention Models in Deep Learning* |
| S4 | a solved exercise (2023) on Cordonnier, Loukas & Jaggi 2020, *Self-Attention and Convolutional Layers* |

Tokens are rows, P = softmax(QK'/sqrt d) is the attention matrix, a prime transposes, res X is X less its mean row,
||X||_1 the largest column sum, ||X||_inf the largest row sum, ||X||_(1,inf) the root of their product. "At most" is the
bound that the measured number is compared with; where an identity is tested, "rounding" means equal to 1e-9.
"""
TIMED = "* Timed here, and different on every machine: "


def page(results: Sequence[Result]) -> str:
    """The whole page; the same results give the same text."""
    parts = [HEAD, _overview(results), _wrong(results)]
    for source, title in TITLES.items():
        mine = [result for result in results if result.entry.source == source]
        if mine:
            parts.append(f"## {title}\n")
            parts += [_entry(result) for result in mine]
    return "\n".join(parts)


def _overview(results: Sequence[Result]) -> str:
    rows = ["| | " + " | ".join(outcome.value for outcome in Outcome) + " |", "|---|" + "---:|" * len(Outcome)]
    for source in TITLES:
        mine = [result.finding.outcome for result in results if result.entry.source == source]
        rows.append(f"| {source} | " + " | ".join(str(mine.count(outcome)) for outcome in Outcome) + " |")
    return "\n".join(rows) + "\n"


def _wrong(results: Sequence[Result]) -> str:
    """What a reader in a hurry wants."""
    rows = ["## In short: what is not so\n", "| | claimed | true instead |", "|---|---|---|"]
    for result in results:
        if result.finding.outcome in (Outcome.CORRECTED, Outcome.REFUTED):
            instead = result.entry.truth or result.entry.meaning
            cells = (cell.replace("|", "\\|") for cell in (result.entry.statement, instead))
            rows.append(f"| {result.entry.id} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _entry(result: Result) -> str:
    entry, finding = result.entry, result.finding
    lines = [
        f"### {entry.id}: {finding.outcome.value}\n",
        f"**Claimed** ({entry.place}): {entry.statement}.\n",
        f"    {entry.latex}\n",
    ]
    if entry.premise:
        lines.append(f"**Premise**: {entry.premise}.\n")
    if entry.truth:
        lines.append(f"**True instead**: {entry.truth}.\n")
    if finding.example:
        named = "Counter-example" if finding.outcome in (Outcome.CORRECTED, Outcome.REFUTED) else "Example"
        lines.append(f"**{named}**: {finding.example}.\n")
    lines.append(f"**What it means**: {entry.meaning}\n")
    lines.append(f"* Measured: {_number(finding.printed)}.")
    if finding.without is not None:
        lines.append(f"* Without the premise: {_number(finding.without)}.")
    if finding.corrected is not None:
        lines.append(f"* Corrected: {_number(finding.corrected)}.")
    if result.timed:
        lines.append(f"{TIMED}{result.timed}.")
    return "\n".join(lines) + "\n"


def _number(verdict: Verdict) -> str:
    said = "at most" if verdict.holds else "not at most"
    # rounding errors differ from machine to machine
    measured = "rounding" if 0 < abs(verdict.measured) < 1e-9 else f"{verdict.measured:.3g}"
    return f"{verdict.claim}: {measured}, {said} {verdict.bound:.3g}"
