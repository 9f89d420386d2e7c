"""Contract cases of the sparse operators."""

from __future__ import annotations

import torch

from headwise.operators import fixed, fixed_steps, hashed, strided, strided_steps, window
from headwise.operators.sparse.hashed import random_rotations
from headwise.testing import Case, references
from tests.operators.properties import same

PADDING = torch.arange(9) < torch.tensor([[9], [5]])
SELF = {"q": (2, 3, 9, 4), "k": (2, 3, 9, 4)}
LATE = {"q": (2, 3, 5, 4), "k": (2, 3, 9, 4)}
LONG = {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)}
LARGER = {"q": (1, 2, 19, 4), "k": (1, 2, 19, 4)}

ROTATIONS = random_rotations(4, 4, 3, generator=torch.Generator().manual_seed(0))


def hashing(name: str, *, shared: bool = False, **options) -> Case:
    """Hashed attention with chunks of 2; rotations are fixed so that which pairs meet does not depend on rounding."""
    masks = {"key_mask": options.pop("key_mask")} if "key_mask" in options else {}

    def slow(q, k=None, key_mask=None):
        masks = {} if key_mask is None else {"key_mask": key_mask.unsqueeze(1)}
        return references.hashed(q, k, ROTATIONS, chunk=2, **options, **masks)

    def fast(q, k=None, **masks):
        return hashed(q, k, ROTATIONS.to(q.dtype), chunk=2, **options, **masks)

    return Case(name, fast, {**({"q": (2, 3, 9, 4)} if shared else SELF), **masks}, slow)


SPARSE = [
    same("window", window, references.window, SELF, width=3),
    same("window, even, wider than n", window, references.window, SELF, width=24),
    same("window, causal", window, references.window, SELF, width=4, causal=True),
    same("window, bands", window, references.window, LONG, width=17),
    same("window, bands, causal, leading", window, references.window, LONG, width=9, causal=True, leading=2),
    same("window, leading", window, references.window, SELF, width=3, leading=2),
    same("window, late queries", window, references.window, LATE, width=3, leading=1),
    same("window, padding", window, references.window, SELF, width=3, key_mask=PADDING, leading=1),
    same("window, causal, padding", window, references.window, SELF, width=3, key_mask=PADDING.flip(-1), causal=True),
    same("strided", strided, references.strided, LARGER, stride=3),
    same("strided, causal", strided, references.strided, LARGER, stride=4, causal=True),
    same("strided, steps", strided_steps, references.strided_steps, SELF, stride=3),
    same("strided, steps, causal", strided_steps, references.strided_steps, SELF, stride=3, causal=True),
    same("strided, padding", strided, references.strided, SELF, stride=4, key_mask=PADDING),
    same(
        "strided, causal, padding", strided, references.strided, SELF, stride=2, causal=True, key_mask=PADDING.flip(-1)
    ),
    same("fixed", fixed, references.fixed, LARGER, block=3),
    same("fixed, causal", fixed, references.fixed, LARGER, block=4, causal=True),
    same("fixed, causal, summaries", fixed, references.fixed, LARGER, block=4, summaries=2, causal=True),
    same("fixed, steps", fixed_steps, references.fixed_steps, SELF, block=3),
    same("fixed, steps, causal", fixed_steps, references.fixed_steps, SELF, block=3, summaries=2, causal=True),
    same("fixed, padding", fixed, references.fixed, SELF, block=4, summaries=2, key_mask=PADDING),
    hashing("hashed"),
    hashing("hashed, causal", causal=True),
    hashing("hashed, shared", shared=True),
    hashing("hashed, shared, causal", shared=True, causal=True),
    hashing("hashed, padding", key_mask=PADDING),
    hashing("hashed, shared, causal, padding", shared=True, causal=True, key_mask=PADDING),
]
