"""Contract cases of the linear-cost operators."""

from __future__ import annotations

from functools import partial

import torch

from headwise.operators import (
    efficient,
    factored,
    factored_blocks,
    near_far,
    nystrom,
    projected,
    projected_blocks,
    window_low_rank,
    window_low_rank_blocks,
)
from headwise.operators.linear.projections import convolution, count_sketch, dense, hadamard, identity, pooling
from headwise.testing import Case, references
from tests.operators.properties import same

PADDING = torch.arange(9) < torch.tensor([[9], [5]])
SELF = {"q": (2, 3, 9, 4), "k": (2, 3, 9, 4)}
LATE = {"q": (2, 3, 5, 4), "k": (2, 3, 9, 4)}
LONG = {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)}
EARLY = {"q": (2, 3, 9, 4), "k": (2, 3, 5, 4)}

SKETCH = count_sketch(9, 4, generator=torch.Generator().manual_seed(0))
MIXED = hadamard(9, 4, generator=torch.Generator().manual_seed(0))
FIXED = {  # projections without parameters, and the matrices they stand for
    "identity": (identity(9), references.projection("identity", 9)),
    "pooling": (pooling(9, 2), references.projection("pooling", 9, size=2)),
    "count sketch": (SKETCH, references.projection("count_sketch", 9, slot=SKETCH.slot, sign=SKETCH.sign, r=4)),
    "Hadamard": (MIXED, references.projection("hadamard", 9, sign=MIXED.sign, rows=MIXED.rows)),
}


def shortening(name: str, builder, twin) -> list[Case]:
    """`factored` and `projected` with every kind of projection, learned ones as inputs that have gradients."""
    learned = {**LATE, "e": (3, 4, 9), "f": (4, 9)}
    cases = [
        Case(f"{name}, learned", lambda q, k, e, f: builder(q, k, dense(e), dense(f)), learned, twin),
        Case(
            f"{name}, learned, padding",
            lambda q, k, e, f, key_mask: builder(q, k, dense(e), dense(f), key_mask=key_mask),
            {**learned, "key_mask": PADDING},
            lambda q, k, e, f, key_mask: twin(q, k, e, f, key_mask=key_mask[:, None]),
        ),
        Case(
            f"{name}, convolution",
            lambda q, k, w: builder(q, k, convolution(9, 2, w)),
            {**LATE, "w": torch.tensor([0.5, -0.2, 0.7])},
            lambda q, k, w: twin(q, k, *[references.projection("convolution", 9, stride=2, weight=w)] * 2),
        ),
    ]
    for kind, (e, matrix) in FIXED.items():
        mean = {"mean": True} if kind in ("pooling", "identity") else {}
        cases += [
            Case(
                f"{name}, {kind}, padding",
                lambda q, k, key_mask, e=e: builder(q, k, e, key_mask=key_mask),
                {**LATE, "key_mask": PADDING},
                lambda q, k, key_mask, e=matrix, mean=mean: twin(q, k, e, e, key_mask=key_mask[:, None], **mean),
            )
        ]
    return cases


def in_blocks(name: str, builder, twin) -> list[Case]:
    """The causal forms: learned projections of blocks of 4, one for each head; means of 2 with padding."""
    return [
        Case(
            f"{name}, learned",
            lambda q, k, e, f: builder(q, k, dense(e), dense(f)),
            {**SELF, "e": (3, 2, 4), "f": (2, 4)},
            twin,
        ),
        Case(
            f"{name}, pooling, padding",
            lambda q, k, key_mask: builder(q, k, pooling(4, 2), key_mask=key_mask),
            {**SELF, "key_mask": PADDING},
            lambda q, k, key_mask: twin(
                q, k, *[references.projection("pooling", 4, size=2)] * 2, key_mask=key_mask[:, None], mean=True
            ),
        ),
    ]


LEARNED = {"e": (3, 2, 9), "f": (2, 9), "slot_bias": (3, 2)}
MEANS = references.projection("pooling", 150, size=50)


def _learned(name: str, inputs, width: int, **options) -> Case:
    masks = {"key_mask": options.pop("key_mask")} if "key_mask" in options else {}

    def slow(q, k, e, f, slot_bias, key_mask=None):
        masks = {} if key_mask is None else {"key_mask": key_mask[:, None]}
        return references.window_low_rank(q, k, width, e, f, slot_bias, **options, **masks)

    return Case(
        name,
        lambda q, k, e, f, slot_bias, **masks: window_low_rank(
            q, k, width, dense(e), dense(f), slot_bias, **options, **masks
        ),
        {**inputs, **LEARNED, **masks},
        slow,
    )


WINDOW_LOW_RANK = [
    Case(
        "window and low rank, means, bands",
        lambda q, k: window_low_rank(q, k, 9, pooling(150, 50), leading=1),
        {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)},
        lambda q, k: references.window_low_rank(q, k, 9, MEANS, leading=1),
    ),
    _learned("window and low rank, late queries", LATE, 3),
    _learned("window and low rank, leading", SELF, 4, leading=2, scale=0.3),
    _learned("window and low rank, padding", SELF, 3, key_mask=PADDING, leading=1),
]


LATER = torch.arange(9) >= torch.tensor([[0], [5]])  # the second sequence is padded at the start
IN_BLOCKS = {**SELF, "e": (3, 2, 4), "f": (2, 4), "slot_bias": (3, 2)}


def _causal_slots(name: str, width: int, **options) -> Case:
    masks = {"key_mask": options.pop("key_mask")} if "key_mask" in options else {}

    def slow(q, k, e, f, slot_bias, key_mask=None):
        masks = {} if key_mask is None else {"key_mask": key_mask[:, None]}
        return references.window_low_rank_blocks(q, k, width, e, f, slot_bias, **options, **masks)

    return Case(
        name,
        lambda q, k, e, f, slot_bias, **masks: window_low_rank_blocks(
            q, k, width, dense(e), dense(f), slot_bias, **options, **masks
        ),
        {**IN_BLOCKS, **masks},
        slow,
    )


BLOCK_MEANS = references.projection("pooling", 20, size=10)
WINDOW_LOW_RANK_BLOCKS = [
    Case(
        "window and slots of earlier blocks, means, bands",
        lambda q, k: window_low_rank_blocks(q, k, 9, pooling(20, 10), leading=1),
        LONG,
        lambda q, k: references.window_low_rank_blocks(q, k, 9, BLOCK_MEANS, leading=1, mean=True),
    ),
    _causal_slots("window and slots of earlier blocks", 3),
    _causal_slots("window and slots of earlier blocks, leading, itself only", 1, leading=2, scale=0.3),
    _causal_slots("window and slots of earlier blocks, padding", 3, key_mask=PADDING, leading=1),
    Case(
        "window and slots of earlier blocks, means, padding at the start",
        lambda q, k, key_mask: window_low_rank_blocks(q, k, 2, pooling(4, 2), key_mask=key_mask),
        {**SELF, "key_mask": LATER},
        lambda q, k, key_mask: references.window_low_rank_blocks(
            q, k, 2, references.projection("pooling", 4, size=2), key_mask=key_mask[:, None], mean=True
        ),
    ),
]

LONGER_PADDING = torch.arange(11) < torch.tensor([[11], [6]])
NEAR_FAR_INPUTS = {"q": (2, 3, 11, 4), "k": (2, 3, 11, 4), "a": (3, 2, 4), "b": (3, 2, 4), "c": (3, 2)}
_near_far = partial(same, build=near_far, twin=references.near_far, inputs=NEAR_FAR_INPUTS)
NEAR_FAR = [
    _near_far("near and far, blocks of 2", block=2),
    _near_far("near and far, a short last block, leading", block=3, leading=2),
    _near_far("near and far, two blocks", block=20),
    _near_far("near and far, causal", block=2, causal=True),
    _near_far("near and far, causal, leading", block=3, leading=1, causal=True),
    _near_far("near and far, padding", block=2, leading=1, key_mask=LONGER_PADDING),
]

LINEAR = [
    same("efficient", efficient, references.efficient, LATE),
    same("efficient, padding", efficient, references.efficient, LATE, key_mask=PADDING, scale=1.0),
    same("efficient, causal", efficient, references.efficient, SELF, causal=True),
    same("efficient, causal, blocks", efficient, references.efficient, LONG, causal=True),
    same("efficient, causal, late queries", efficient, references.efficient, LATE, causal=True, key_mask=PADDING),
    same(
        "efficient, causal, early queries", efficient, references.efficient, EARLY, causal=True, key_mask=PADDING[:, 4:]
    ),
    *shortening("factored", factored, references.factored),
    *shortening("projected", projected, references.projected),
    same("nystrom", nystrom, references.nystrom, LATE, landmarks=3, tolerance=10.0),
    same("nystrom, padding", nystrom, references.nystrom, SELF, landmarks=4, key_mask=PADDING, tolerance=10.0),
    *in_blocks("factored blocks", factored_blocks, references.factored_blocks),
    *in_blocks("projected blocks", projected_blocks, references.projected_blocks),
    *WINDOW_LOW_RANK,
    *WINDOW_LOW_RANK_BLOCKS,
    *NEAR_FAR,
]
