"""Causal families of transformers, built tiny: nothing is broken without an explanation."""

from __future__ import annotations

import re

import pytest

from headwise.ledger.model_audit.cached_decoding import BY_TOKEN
from headwise.ledger.model_audit.causality import GRADIENT, PERTURBATION
from headwise.ledger.model_audit.layer_reach import WINDOWS
from tests.ledger.model_audit.causal_families import EXPLAINED, PAGE, audit_families, causal_families, in_a_process

SAMPLE = ["emu3", "gemma3", "gpt2", "granitemoe", "mixtral", "moshi"]
CHUNKS = 6


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_breaks_only_what_is_explained(family: str) -> None:
    (found,) = audit_families([family])
    assert not found.why
    assert found.violated == EXPLAINED.get(family, (set(), ""))[0]
    kept = {name for name, standing in found.standings.items() if standing == "kept"}
    assert {PERTURBATION, GRADIENT, BY_TOKEN} - EXPLAINED.get(family, (set(), ""))[0] <= kept
    assert (WINDOWS in kept) == (family == "gemma3")  # its blocks are found beside those of its vision model


def test_the_page_counts_enough_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    numbers = [re.search(rf"## {heading}[^\d\n]*(\d+) families", text) for heading in ("Promises", "Broken", "Kept")]
    audited, broken, kept = (int(match[1]) for match in numbers if match is not None)
    assert audited == broken + kept >= 150
    assert broken == len(EXPLAINED)
    assert all(f"| {family} |" in text for family in EXPLAINED)


@pytest.mark.slow
def test_every_family_breaks_only_what_is_explained() -> None:
    names, built = causal_families(), 0
    for chunk in range(CHUNKS):
        for found in in_a_process(names[chunk::CHUNKS]):
            if found.why:
                assert found.family not in EXPLAINED or "seconds" in found.why, found
                continue
            built += 1
            assert found.violated == EXPLAINED.get(found.family, (set(), ""))[0], found
            for name, size in found.measured.items():
                if size is not None and found.standings[name] == "VIOLATED":
                    assert size > 1000 * found.floor, (found.family, name)  # not a matter of rounding
    assert built >= 150
