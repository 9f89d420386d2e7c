"""What a head may be replaced by: every kind at a few settings, as many as a search can afford to try.

Widths and ranks are spaced by factors of about two, from a hundredth of the length to a quarter of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwise.replacement.choice import EXACT, Choice

SINK = 1
"""The first key is always seen: heads that have nothing to look at look there, and a window without it breaks them."""


def candidates(length: int, *, causal: bool, fitted_length: int | None = None, quick: bool = False) -> list[Choice]:
    """Choices for sequences of `length`, exact among them.

    fitted_length   what calibration texts reach; below `length`, kinds with one learned column a position are left out
    """
    whole = fitted_length is None or fitted_length >= length
    found = [EXACT, Choice("uniform"), Choice("shift", {"offset": -1}), Choice("shift", {"offset": 0})]
    found += [] if causal else [Choice("shift", {"offset": 1})]
    found += [Choice("toeplitz", {"reach": min(64, length - 1)}), Choice("quadratic")]
    found += [Choice("window", {"width": w, "first": SINK}) for w in _below(length, WINDOWS[quick])]
    found += [
        Choice("near_far", {"block": block, "rank": rank, "first": SINK})
        for block, rank in NEAR_FAR[quick]
        if 4 * block <= length and 4 * rank <= length
    ]
    found += [Choice("double_softmax", {"sharpness": sharp}) for sharp in SHARPNESS[quick]]
    if not quick:
        found += [Choice("hashed", {"rounds": 2, "chunk": c}) for c in _below(length, (16, 32))]
    if causal:
        return found
    found += [Choice("nystrom", {"landmarks": r}) for r in _below(length, RANKS[quick])]
    if whole:
        found += [Choice("projected", {"rank": r}) for r in _below(length, RANKS[quick])]
        found += [Choice("factored", {"rank": r, "sharpness": 4.0}) for r in _below(length, RANKS[quick][-1:])]
        found += [
            Choice("window_low_rank", {"width": w, "rank": r, "first": SINK})
            for w, r in LOW_RANK[quick]
            if 2 * max(w, r) <= length
        ]
    return found


# [not quick, quick]
WINDOWS = ((9, 17, 33, 65, 129), (17, 65, 129))
NEAR_FAR = (
    (
        *((block, 1) for block in (16, 4, 8, 32)),
        *((block, 3) for block in (16, 4, 8, 32)),
        *((block, 7) for block in (16, 8, 32, 64)),
        (16, 15),
    ),
    tuple((block, 3) for block in (16, 4, 8, 32)),
)
RANKS = ((8, 16, 32, 64), (16, 64))
LOW_RANK = (((17, 8), (33, 16)), ((17, 8),))
SHARPNESS = ((1.0, 2.0, 4.0), (2.0,))


def _below(length: int, sizes: Iterable[int]) -> list[int]:
    return [size for size in sizes if 2 * size <= length]


def relative_of(choice: Choice, fitted: Iterable[Choice]) -> Choice | None:
    """A fitted choice with tensors of the same shapes, so that its fit is a good beginning: another block or width."""
    free = {"near_far": "block", "window_low_rank": "width"}.get(choice.kind)
    if free is None:
        return None
    same = {name: value for name, value in choice.options.items() if name != free}
    return next(
        (c for c in fitted if c.kind == choice.kind and all(c.options[name] == value for name, value in same.items())),
        None,
    )
