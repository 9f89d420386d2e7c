"""One line a variant of near keys with far features, for `cases`."""

from __future__ import annotations

import torch

from headwise.operators.linear.near_far import near_far
from headwise.testing import Case
from headwise.testing.references_near_far import near_far as twin

PADDING = torch.arange(11) < torch.tensor([[11], [6]])
SIZES = {"q": (2, 3, 11, 4), "k": (2, 3, 11, 4), "a": (3, 2, 4), "b": (3, 2, 4), "c": (3, 2)}


def case(name: str, **options) -> Case:
    key_mask = options.get("key_mask")
    slow = options if key_mask is None else {**options, "key_mask": key_mask[:, None]}
    return Case(
        f"near and far, {name}",
        lambda q, k, a, b, c: near_far(q, k, a, b, c, **options),
        SIZES,
        lambda q, k, a, b, c: twin(q, k, a, b, c, **slow),
    )


NEAR_FAR_CASES = [
    case("blocks of 2", block=2),
    case("a short last block, first", block=3, first=2),
    case("two blocks", block=20),
    case("causal", block=2, causal=True),
    case("causal, first", block=3, first=1, causal=True),
    case("key_mask", block=2, first=1, key_mask=PADDING),
]
