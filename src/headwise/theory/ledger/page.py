"""docs/claims.md from the ledger: what was claimed, what is true, and what it means for someone who builds a model."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.theory.ledger.entry import Entry, Finding, Outcome
from headwise.theory.verdict import Verdict

TITLES = {
    "S0": "S0: the loss of rank",
    "S1": "S1: growing attention",
    "S2": "S2: linear attention",
    "S3": "S3: a mathematical view",
    "S4": "S4: attention and convolution",
}
HEAD = """# Claims

Made by `headwise verify --docs docs/claims.md` from the ledger; every verdict is the outcome of a computation.
*HOLDS WITH PREMISE*: true under a premise that the source leaves out, and false without it. *CORRECTED*: false as
printed; the corrected statement was tested too. *REFUTED*: false, with a counter-example.
"""


def page(results: Sequence[tuple[Entry, Finding]]) -> str:
    """The whole page; the same results give the same text."""
    parts = [HEAD, _overview(results)]
    for source, title in TITLES.items():
        mine = [(entry, finding) for entry, finding in results if entry.source == source]
        if mine:
            parts.append(f"## {title}\n")
            parts += [_entry(entry, finding) for entry, finding in mine]
    return "\n".join(parts)


def _overview(results: Sequence[tuple[Entry, Finding]]) -> str:
    rows = ["| | " + " | ".join(outcome.value for outcome in Outcome) + " |", "|---|" + "---:|" * len(Outcome)]
    for source in TITLES:
        mine = [finding.outcome for entry, finding in results if entry.source == source]
        rows.append(f"| {source} | " + " | ".join(str(mine.count(outcome)) for outcome in Outcome) + " |")
    return "\n".join(rows) + "\n"


def _entry(entry: Entry, finding: Finding) -> str:
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
        lines.append(f"**Example**: {finding.example}.\n")
    lines.append(f"**What it means**: {entry.meaning}\n")
    lines.append(f"Measured: {_number(finding.printed)}.")
    if finding.without is not None:
        lines.append(f"Without the premise: {_number(finding.without)}.")
    if finding.corrected is not None:
        lines.append(f"Corrected: {_number(finding.corrected)}.")
    return "\n".join(lines) + "\n"


def _number(verdict: Verdict) -> str:
    # one digit: rounding errors differ in the second from machine to machine
    said = "at most" if verdict.holds else "not at most"
    measured = "rounding" if abs(verdict.measured) < 1e-9 else f"{verdict.measured:.1g}"
    return f"{verdict.claim}: {measured}, {said} {verdict.bound:.2g}"
