"""The complexity tables of Xie (S0) and Verma (S2), row by row: counted, traced and timed.

Verma's table repeats nine entries of Xie's; they are claims of S0, and S2 has the rows that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from headwise.ledger.entry import Finding, Outcome, Source, at_most
from headwise.theory.complexity import (
    LENGTHS,
    RECURRENT,
    chain_growth,
    claimed_growth,
    exponent,
    growth,
    memory_growth,
    time_growth,
)

SLACK = 0.05  # of an exponent, for lower-order terms at these lengths
STEPS: dict[str, Callable[[int], float]] = {"O(1)": lambda n: 1.0, "O(log n)": math.log2, "O(n)": float}
Rows = dict[str, tuple[str, str, str]]  # architecture -> name, claim, meaning

COSTS: Rows = {
    RECURRENT: ("A recurrent layer", "O(n)", "Linear, but one step after the other."),
    "softmax": ("A Transformer", "O(n^2)", "Exact attention."),
    "strided": ("A Sparse Transformer", r"O(n\sqrt n)", "Each query attends to about 2 sqrt n keys."),
    "hashed": ("A Reformer", r"O(n\log n)", "Its matrix products are linear for a fixed chunk; sorting adds the log."),
}
CHAINS: Rows = {
    RECURRENT: ("A recurrent layer", "O(n)", "It cannot be computed in parallel over tokens."),
    "softmax": ("A Transformer", "O(1)", "All queries at once."),
    "strided": ("A Sparse Transformer", "O(1)", "All queries at once."),
    "hashed": ("A Reformer", "O(log n)", "The sort."),
    "projected": ("A Linformer", "O(1)", "Two products."),
}


def add_table(source: Source, costs: Rows, chains: Rows) -> None:
    """Register the two columns of a table."""
    for name, (title, cost, meaning) in costs.items():
        plain = cost.replace("\\", " ").replace("  ", " ").strip()
        source.claim(
            f"{source.id}.table-{name}",
            "Table 1",
            f"{title} costs {plain} a layer",
            rf"\text{{{title}}}: {cost}",
            Outcome.HOLDS,
            meaning,
            timing=partial(timed_growth, name),
        )(partial(row, name))
    for name, (title, chain, meaning) in chains.items():
        source.claim(
            f"{source.id}.steps-{name}",
            "Table 1",
            f"{title} needs {chain} sequential operations",
            rf"\text{{{title}}}: {chain}",
            Outcome.HOLDS,
            meaning,
        )(partial(steps, name, chain))


def row(name: str) -> Finding:
    """The exponent of counted multiply-adds against the claim; peak memory in the example."""
    fitted, claimed = growth(name, "multiply_adds"), claimed_growth(name)
    return Finding(
        at_most("fitted exponent of counted multiply-adds", fitted.value, claimed + SLACK),
        example=f"over n = {LENGTHS[0]} … {LENGTHS[-1]}: multiply-adds {fitted}, the claim n^{claimed:.2f}, "
        f"peak memory {memory_growth(name)}",
    )


def steps(name: str, claimed: str) -> Finding:
    """The exponent of the longest chain of dependent operations, traced, against the claim."""
    fitted = chain_growth(name)
    limit = exponent(LENGTHS, [STEPS[claimed](n) for n in LENGTHS]).value
    return Finding(
        at_most("fitted exponent of the longest chain of operations", fitted.value, limit + SLACK),
        example=f"longest chain of dependent operations, traced: {fitted}, the claim n^{limit:.2f}; an operation of "
        "torch is one step, a sort log2 n",
    )


def timed_growth(name: str) -> str:
    return f"time {time_growth(name)}"
