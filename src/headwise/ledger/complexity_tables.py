"""The complexity tables of S0 and S2, row by row, and what S2 says of memory: counted, traced and timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from headwise.ledger.draws import draw
from headwise.ledger.entry import Entry, Finding, Outcome
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projections import dense
from headwise.theory.complexity import (
    LENGTHS,
    RECURRENT,
    claimed_growth,
    formed_memory_growth,
    growth,
    memory_growth,
    time_growth,
)
from headwise.theory.exponent import exponent
from headwise.theory.verdict import Verdict

SLACK = 0.05  # of an exponent: lower-order terms at these lengths
STEPS: dict[str, Callable[[int], float]] = {"O(1)": lambda n: 1.0, "O(log n)": math.log2, "O(n)": float}


def row(name: str) -> Finding:
    """One row's complexity: counted multiply-adds against the claim; traced memory beside them."""
    found, claimed = growth(name, "multiply_adds"), claimed_growth(name)
    return Finding(
        Verdict("fitted exponent of counted multiply-adds", "", found.value, claimed + SLACK, {}),
        example=f"over n = {LENGTHS[0]} … {LENGTHS[-1]}: multiply-adds {found}, the claim n^{claimed:.2f}, "
        f"peak memory {memory_growth(name)}",
    )


def steps(name: str, claimed: str) -> Finding:
    found = growth(name, "depth")
    limit = exponent(LENGTHS, [STEPS[claimed](n) for n in LENGTHS]).value
    return Finding(
        Verdict("fitted exponent of the longest chain of steps", "", found.value, limit + 0.02, {}),
        example=f"longest chain {found}, the claim n^{limit:.2f}",
    )


def linformer_in_k() -> Finding:
    """O(nk): the work of a fixed length against the projection size."""
    n, sizes = 512, (32, 64, 128, 256)
    q, k = draw(n, 16).float(), draw(n, 16, seed=1).float()
    work = [projected(q, k, dense(draw(size, n, seed=2).float())).cost(16).multiply_adds for size in sizes]
    found = exponent(sizes, work)
    in_n = growth("projected", "multiply_adds")
    return Finding(
        Verdict("larger of the fitted exponents in n and in k", "", max(found.value, in_n.value), 1 + SLACK, {}),
        example=f"in k: exponent {found.value:.2f}, in n: {in_n.value:.2f}",
    )


def quadratic_space() -> Finding:
    """Exact attention with P formed, and the same result from a kernel that never forms it."""
    formed, fused = formed_memory_growth(), memory_growth("softmax")
    return Finding(
        Verdict("distance of the exponent of peak memory from 2, P formed", "", abs(formed.value - 2), SLACK, {}),
        without=Verdict("the same with a fused kernel", "", abs(fused.value - 2), SLACK, {}),
        example=f"peak memory {formed} with P formed, {fused} with torch's fused attention, for the same output",
    )


def linear_space() -> Finding:
    found = {name: memory_growth(name) for name in ("efficient", "factored")}
    return Finding(
        Verdict("exponent of peak memory", "", max(each.value for each in found.values()), 1 + SLACK, {}),
        example=", ".join(f"{name} {each}" for name, each in found.items()),
    )


ROWS = {
    RECURRENT: ("A recurrent layer", "O(n)", "Linear, but one step after the other."),
    "softmax": ("A Transformer", "O(n^2)", "Exact attention."),
    "strided": ("A Sparse Transformer", r"O(n\sqrt n)", "Each query meets about 2 sqrt n keys."),
    "hashed": ("A Reformer", r"O(n\log n)", "Its matrix products are linear for a fixed chunk; sorting adds the log."),
}
CHAINS = {
    RECURRENT: ("A recurrent layer", "O(n)", "It cannot be computed in parallel over tokens."),
    "softmax": ("A Transformer", "O(1)", "All queries at once."),
    "strided": ("A Sparse Transformer", "O(1)", "All queries at once."),
    "hashed": ("A Reformer", "O(log n)", "The sort."),
    "projected": ("A Linformer", "O(1)", "Two products."),
}

TIMED_ABOVE = {("S2", name) for name in ROWS}  # the same rows as in S0's table


def _entries(source: str, rows: dict[str, tuple[str, str, str]], chains: dict[str, tuple[str, str, str]]):
    for name, (title, cost, meaning) in rows.items():
        plain = cost.replace("\\", " ").replace("  ", " ").strip()
        yield Entry(
            f"{source}.table-{name}",
            "Table 1",
            f"{title} costs {plain} a layer",
            rf"\text{{{title}}}: {cost}",
            Outcome.HOLDS,
            meaning,
            partial(row, name),
            timed=partial(_timed, name) if (source, name) not in TIMED_ABOVE else None,
        )
    for name, (title, chain, meaning) in chains.items():
        yield Entry(
            f"{source}.steps-{name}",
            "Table 1",
            f"{title} needs {chain} sequential operations",
            rf"\text{{{title}}}: {chain}",
            Outcome.HOLDS,
            meaning,
            partial(steps, name, chain),
        )


def _timed(name: str) -> str:
    return f"time {time_growth(name)}"


S0_ENTRIES = tuple(
    _entries("S0", {**ROWS, "projected": ("A Linformer", "O(n)", "For a fixed projection size.")}, CHAINS)
)
S2_ENTRIES = (
    *_entries(
        "S2",
        {**ROWS, "efficient": ("This model", "O(nd^2)", "For E = F = I, that is, Efficient Attention.")},
        {**CHAINS, "efficient": ("This model", "O(1)", "Three products.")},
    ),
    Entry(
        "S2.table-projected",
        "Table 1",
        "A Linformer costs O(nk) a layer",
        r"\text{Linformer}: O(nk)",
        Outcome.HOLDS,
        "Choose k once; it does not grow with n.",
        linformer_in_k,
        timed=partial(_timed, "projected"),
    ),
    Entry(
        "S2.quadratic-space",
        "1",
        "Self-attention uses quadratic time and space",
        r"O(n^2)\text{ space}",
        Outcome.HOLDS_WITH_PREMISE,
        "Memory is no longer the reason to leave exact attention; time is.",
        quadratic_space,
        premise="P is formed; a fused kernel needs quadratic time and linear space",
    ),
    Entry(
        "S2.linear-space",
        "Abstract",
        "The new attention is linear in space",
        r"O(n)\text{ space}",
        Outcome.HOLDS,
        "So is exact attention in a fused kernel; what is won is time.",
        linear_space,
    ),
)
