"""The page docs/claims.md: what was claimed, what is true, and what it means for someone who builds a model."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.ledger.entry import ClaimResult, Outcome
from headwise.ledger.verification import SOURCES
from headwise.theory.verdict import Verdict

HEAD = """# Claims

Claims that five texts on the mathematics of attention make, each tested by computation. `headwise verify --force --docs
docs/claims.md` writes this page; `headwise verify --claim ID` repeats one test.

* **HOLDS**: true as printed.
* **HOLDS WITH PREMISE**: true under a premise that the text leaves out, and false without it.
* **CORRECTED**: false as printed; the corrected statement was tested too.
* **REFUTED**: false, with a counter-example.
"""
NOTATION = r"""Tokens are rows, $P = \mathrm{softmax}(Q K^\top / \sqrt d)$ is the attention matrix, in text a prime
transposes, res X is X minus its mean row, $\|X\|_1$ is the largest column sum, $\|X\|_\infty$ the largest row sum,
$\|X\|_{1,\infty}$ the root of their product. "At most" is followed by the bound with which the measured number is
compared; for identities, "rounding" means equal within 1e-9.
"""
TIMED = "* Time on one machine: "


def page(results: Sequence[ClaimResult]) -> str:
    """The whole page; the same results give the same text."""
    parts = [HEAD, _overview(results), NOTATION, _false_claims(results)]
    for source in SOURCES:
        claims = [_entry(result) for result in results if result.entry.source == source.id]
        if claims:
            parts += [f"## {source.id}: {source.topic}\n", f"{source.authors}, {source.title}.\n", *claims]
    return "\n".join(parts)


def _overview(results: Sequence[ClaimResult]) -> str:
    """The sources, and how many of their claims have each outcome."""
    names = " | ".join(outcome.value for outcome in Outcome)
    rows = [f"| | authors | text | {names} |", "|---|---|---|" + "---:|" * len(Outcome)]
    for source in SOURCES:
        outcomes = [result.finding.outcome for result in results if result.entry.source == source.id]
        counts = " | ".join(str(outcomes.count(outcome)) for outcome in Outcome)
        rows.append(f"| {source.id} | {source.authors} | {source.title} | {counts} |")
    return "\n".join(rows) + "\n"


def _false_claims(results: Sequence[ClaimResult]) -> str:
    rows = ["## Summary: claims that are false as printed\n", "| | claimed | true instead |", "|---|---|---|"]
    for result in results:
        if result.finding.outcome in (Outcome.CORRECTED, Outcome.REFUTED):
            instead = result.entry.truth or result.entry.meaning
            cells = (_escaped(cell).replace("|", "\\|") for cell in (result.entry.statement, instead))
            rows.append(f"| {result.entry.id} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _entry(result: ClaimResult) -> str:
    entry, finding = result.entry, result.finding
    lines = [
        f"### {entry.id}: {finding.outcome.value}\n",
        f"**Claimed** ({entry.place}): {entry.statement}.\n",
        f"$$\n{entry.latex}\n$$\n",
    ]
    label = "Counter-example" if finding.outcome in (Outcome.CORRECTED, Outcome.REFUTED) else "Example"
    texts = {"Premise": entry.premise, "True instead": entry.truth, label: finding.example}
    lines += [f"**{name}**: {text}.\n" for name, text in texts.items() if text]
    lines.append(f"**What it means**: {entry.meaning}\n")
    verdicts = {"Measured": finding.printed, "Without the premise": finding.without, "Corrected": finding.corrected}
    lines += [f"* {name}: {_number(verdict)}." for name, verdict in verdicts.items() if verdict is not None]
    if result.timed:
        lines.append(f"{TIMED}{result.timed}.")
    return "\n".join(line if line.startswith("$$") else _escaped(line) for line in lines) + "\n"


def _escaped(text: str) -> str:
    """Subscripts and brackets that Markdown would read as emphasis and links."""
    return text.replace("_", "\\_").replace("[", "\\[")


def _number(verdict: Verdict) -> str:
    relation = "at most" if verdict.holds else "not at most"
    # rounding errors differ from machine to machine
    measured = "rounding" if 0 < abs(verdict.measured) < 1e-9 else f"{verdict.measured:.3g}"
    return f"{verdict.claim}: {measured}, {relation} {verdict.bound:.3g}"
