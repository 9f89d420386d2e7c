"""One line a sparse or linear-cost operator and variant, for `cases`."""

from __future__ import annotations

import torch

from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.factored_blocks import factored_blocks
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projected_blocks import projected_blocks
from headwise.operators.linear.projections import convolution, count_sketch, dense, hadamard, identity, pooling
from headwise.operators.sparse.fixed import fixed, fixed_steps
from headwise.operators.sparse.hashed import hashed, random_rotations
from headwise.operators.sparse.strided import strided, strided_steps
from headwise.operators.sparse.window import window
from headwise.testing import Case
from headwise.testing import references_sparse as twins

PADDING = torch.arange(9) < torch.tensor([[9], [5]])
SELF = {"q": (2, 3, 9, 4), "k": (2, 3, 9, 4)}
LONG = {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)}
EARLY = {"q": (2, 3, 9, 4), "k": (2, 3, 5, 4)}
LARGER = {"q": (1, 2, 19, 4), "k": (1, 2, 19, 4)}
LATE = {"q": (2, 3, 5, 4), "k": (2, 3, 9, 4)}


def both(name: str, builder, twin, inputs, *args, tolerance: float = 1.0, **options) -> Case:
    """A builder and a twin that take the same arguments; a padding (b, n) is given heads for the twin."""
    key_mask = options.get("key_mask")
    slow = options if key_mask is None else {**options, "key_mask": key_mask.unsqueeze(1)}
    return Case(
        name,
        lambda q, k: builder(q, k, *args, **options),
        inputs,
        lambda q, k: twin(q, k, *args, **slow),
        tolerance=tolerance,
    )


ROTATIONS = random_rotations(4, 4, 3, generator=torch.Generator().manual_seed(0))


def hashing(name: str, *, shared: bool = False, **options) -> Case:
    """Hashed attention with chunks of 2: which pairs meet must not depend on rounding, so rotations stay as drawn."""
    key_mask = options.get("key_mask")
    slow = options if key_mask is None else {**options, "key_mask": key_mask.unsqueeze(1)}
    return Case(
        name,
        (lambda q: hashed(q, None, ROTATIONS.to(q.dtype), chunk=2, **options))
        if shared
        else (lambda q, k: hashed(q, k, ROTATIONS.to(q.dtype), chunk=2, **options)),
        {"q": (2, 3, 9, 4)} if shared else SELF,
        lambda q, k=None: twins.hashed(q, k, ROTATIONS, chunk=2, **slow),
    )


SKETCH = count_sketch(9, 4, generator=torch.Generator().manual_seed(0))
MIXED = hadamard(9, 4, generator=torch.Generator().manual_seed(0))
FIXED = {  # projections without parameters, and the matrices they stand for
    "identity": (identity(9), twins.projection("identity", 9)),
    "pooling": (pooling(9, 2), twins.projection("pooling", 9, size=2)),
    "count sketch": (SKETCH, twins.projection("count_sketch", 9, slot=SKETCH.slot, sign=SKETCH.sign, r=4)),
    "Hadamard": (MIXED, twins.projection("hadamard", 9, sign=MIXED.sign, rows=MIXED.rows)),
}


def shortening(name: str, builder, twin) -> list[Case]:
    """`factored` and `projected` with every kind of projection, learned ones as inputs that have gradients."""
    learned = {**LATE, "e": (3, 4, 9), "f": (4, 9)}
    cases = [
        Case(f"{name}, learned", lambda q, k, e, f: builder(q, k, dense(e), dense(f)), learned, twin),
        Case(
            f"{name}, learned, padding",
            lambda q, k, e, f: builder(q, k, dense(e), dense(f), key_mask=PADDING),
            learned,
            lambda q, k, e, f: twin(q, k, e, f, key_mask=PADDING[:, None]),
        ),
        Case(
            f"{name}, convolution",
            lambda q, k, w: builder(q, k, convolution(9, 2, w)),
            {**LATE, "w": torch.tensor([0.5, -0.2, 0.7])},
            lambda q, k, w: twin(q, k, *[twins.projection("convolution", 9, stride=2, weight=w)] * 2),
        ),
    ]
    for kind, (e, matrix) in FIXED.items():
        mean = {"mean": True} if kind in ("pooling", "identity") else {}
        cases += [
            Case(
                f"{name}, {kind}, padding",
                lambda q, k, e=e: builder(q, k, e, key_mask=PADDING),
                LATE,
                lambda q, k, e=matrix, mean=mean: twin(q, k, e, e, key_mask=PADDING[:, None], **mean),
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
            lambda q, k: builder(q, k, pooling(4, 2), key_mask=PADDING),
            SELF,
            lambda q, k: twin(
                q, k, *[twins.projection("pooling", 4, size=2)] * 2, key_mask=PADDING[:, None], mean=True
            ),
        ),
    ]


TABLE_CASES = [
    both("window", window, twins.window, SELF, 3),
    both("window, even, wider than n", window, twins.window, SELF, 24),
    both("window, causal", window, twins.window, SELF, 4, causal=True),
    both("window, bands", window, twins.window, LONG, 17),
    both("window, bands, causal, tokens", window, twins.window, LONG, 9, causal=True, tokens=2),
    both("window, tokens", window, twins.window, SELF, 3, tokens=2),
    both("window, late queries", window, twins.window, LATE, 3, tokens=1),
    both("window, padding", window, twins.window, SELF, 3, key_mask=PADDING, tokens=1),
    both("window, causal, padding", window, twins.window, SELF, 3, key_mask=PADDING.flip(-1), causal=True),
    both("efficient", efficient, twins.efficient, LATE),
    both("efficient, padding", efficient, twins.efficient, LATE, key_mask=PADDING, scale=1.0),
    both("efficient, causal", efficient, twins.efficient, SELF, causal=True),
    both("efficient, causal, blocks", efficient, twins.efficient, LONG, causal=True),
    both("efficient, causal, late queries", efficient, twins.efficient, LATE, causal=True, key_mask=PADDING),
    both("efficient, causal, early queries", efficient, twins.efficient, EARLY, causal=True, key_mask=PADDING[:, 4:]),
    *shortening("factored", factored, twins.factored),
    *shortening("projected", projected, twins.projected),
    both("strided", strided, twins.strided, LARGER, 3),
    both("strided, causal", strided, twins.strided, LARGER, 4, causal=True),
    both("strided, steps", strided_steps, twins.strided_steps, SELF, 3),
    both("strided, steps, causal", strided_steps, twins.strided_steps, SELF, 3, causal=True),
    both("strided, padding", strided, twins.strided, SELF, 4, key_mask=PADDING),
    both("strided, causal, padding", strided, twins.strided, SELF, 2, causal=True, key_mask=PADDING.flip(-1)),
    both("fixed", fixed, twins.fixed, LARGER, 3),
    both("fixed, causal", fixed, twins.fixed, LARGER, 4, causal=True),
    both("fixed, causal, summaries", fixed, twins.fixed, LARGER, 4, 2, causal=True),
    both("fixed, steps", fixed_steps, twins.fixed_steps, SELF, 3),
    both("fixed, steps, causal", fixed_steps, twins.fixed_steps, SELF, 3, 2, causal=True),
    both("fixed, padding", fixed, twins.fixed, SELF, 4, 2, key_mask=PADDING),
    both("nystrom", nystrom, twins.nystrom, LATE, 3, tolerance=10.0),
    both("nystrom, padding", nystrom, twins.nystrom, SELF, 4, key_mask=PADDING, tolerance=10.0),
    hashing("hashed"),
    hashing("hashed, causal", causal=True),
    hashing("hashed, shared", shared=True),
    hashing("hashed, shared, causal", shared=True, causal=True),
    hashing("hashed, padding", key_mask=PADDING),
    hashing("hashed, shared, causal, padding", shared=True, causal=True, key_mask=PADDING),
    *in_blocks("factored blocks", factored_blocks, twins.factored_blocks),
    *in_blocks("projected blocks", projected_blocks, twins.projected_blocks),
]
