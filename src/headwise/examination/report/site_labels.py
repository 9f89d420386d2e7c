"""Short names of the places of a model that compute attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote


def site_labels(names: Sequence[str]) -> list[str]:
    """Names without what all of them share, except the word before a number; no two are the same.

    encoder.layer.3.attention.self becomes layer.3, and decoder.block.2.layer.1.EncDecAttention keeps what differs.
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) > 1:
        while len({x[0] for x in parts}) == 1 and min(map(len, parts)) > 1 and not _counts(parts):
            parts = [x[1:] for x in parts]
        while len({x[-1] for x in parts}) == 1 and min(map(len, parts)) > 1:
            parts = [x[:-1] for x in parts]
    labels = [".".join(x) for x in parts]
    seen: Counter[str] = Counter()
    total = Counter(labels)
    found = []
    for label in labels:
        seen[label] += 1
        found.append(label if total[label] == 1 else f"{label}({seen[label]})")
    return found


def head_address(label: str, head: int) -> str:
    """The part of a page's address after # that chooses a head."""
    return f"{quote(label, safe='')}/head.{head}"


def _counts(parts: list[list[str]]) -> bool:
    """The first words are the same and the second are numbers: layer.0, layer.1, …"""
    return all(len(x) > 1 and x[1].isdigit() for x in parts)
