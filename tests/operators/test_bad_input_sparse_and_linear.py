"""The sparse and linear-cost builders refuse bad input in headwise's own words, and never become dense instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import HeadwiseError, ShapeError, UnsupportedError
from headwise.nn.builders import LearnedBlocks, LearnedProjection
from headwise.operators import (
    efficient,
    factored,
    factored_blocks,
    fixed,
    hashed,
    nystrom,
    projected,
    projected_blocks,
    strided,
    window,
)
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.projections import count_sketch, dense, hadamard, pooling
from headwise.testing import strategies
from headwise.testing.strategies import Bad
from tests.operators.properties import draw
from tests.operators.test_bad_input import refused

Builder = Callable[..., AttentionOperator]


def shortening(build: Builder) -> Builder:
    """`build` with a projection that fits the keys, so that what is wrong with them is what is refused."""

    def with_projection(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
        n = k.shape[-2] if k.dim() > 1 else 1
        return build(q, k, pooling(max(1, n), 2), **masks)

    return with_projection


BUILDERS: dict[str, Builder] = {
    "Window": partial(window, width=3),
    "Strided": strided,
    "Fixed": fixed,
    "Hashed": hashed,
    "Efficient": efficient,
    "EfficientCausal": partial(efficient, causal=True),
    "Nystrom": partial(nystrom, landmarks=1),
    "Projected": shortening(projected),
    "Factored": shortening(factored),
    "ProjectedBlocks": shortening(projected_blocks),
    "FactoredBlocks": shortening(factored_blocks),
}


@pytest.mark.parametrize("kind", strategies.BAD_TENSORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_bad_queries_and_keys(name: str, kind: Callable[[], st.SearchStrategy[Bad]], data: st.DataObject) -> None:
    bad = data.draw(kind())
    refused(lambda: BUILDERS[name](bad.q, bad.k), name, *bad.names)


PADDINGS = (strategies.wrong_padding, strategies.not_boolean, strategies.mask_elsewhere)


@pytest.mark.parametrize("kind", PADDINGS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_bad_padding(name: str, kind: Callable[[], st.SearchStrategy[Bad]], data: st.DataObject) -> None:
    bad = data.draw(kind().filter(lambda bad: "key_mask" in bad.masks))
    refused(lambda: BUILDERS[name](bad.q, bad.k, **bad.masks), name, *bad.names)


INSTEAD = {
    "a stride longer than the sequence": (lambda q: strided(q, q, 9), r"Strided: stride .* between 1 and n = 8"),
    "a block longer than the sequence": (lambda q: fixed(q, q, 9), r"Fixed: block .* between 1 and n = 8"),
    "more leading keys than keys": (lambda q: window(q, q, 3, leading=9), r"Window: leading .* between 0 and n = 8"),
    "more queries than keys": (lambda q: window(q, q[:5], 3), r"m = 8 .* n has 5; use softmax with a pair_mask"),
    "a pattern over another sequence": (lambda q: strided(q, q[:5]), r"m has 8, n has 5; use window"),
    "hashing another sequence": (lambda q: hashed(q, q[:5]), r"m has 8, n has 5; use window"),
    "more slots than keys": (lambda q: projected(q, q, dense(torch.ones(9, 8))), r"r = 9 .* n = 8 .* identity\(8\)"),
    "more slots in a sketch": (lambda q: factored(q, q, count_sketch(8, 9)), r"r = 9 slots for n = 8 keys"),
    "more rows than a transform has use for": (lambda q: hadamard(8, 9), r"r = 9 slots for n = 8 keys"),
    "more landmarks than keys": (lambda q: nystrom(q, q, 9), r"landmarks .* between 1 and n = 8.*use softmax"),
    "a projection for another length": (
        lambda q: projected(q, q, pooling(7, 2)),
        r"n = 7 keys, but there are 8; slice",
    ),
    "learned for a shorter one": (
        lambda q: LearnedProjection(projected, 7, 2)(q, q),
        r"at most 7 positions, but there are 8; use fit='interpolate', a larger length, or LearnedBlocks",
    ),
    "learned of too high a rank": (lambda q: LearnedBlocks(projected_blocks, 4, 5), r"rank .* block = 4, but is 5"),
    "causal projections": (lambda q: projected(q, q, pooling(8, 2), causal=True), r"use projected_blocks"),
    "a causal double softmax": (lambda q: factored(q, q, pooling(8, 2), causal=True), r"use factored_blocks"),
    "projected blocks that are not causal": (
        lambda q: projected_blocks(q, q, pooling(8, 2), causal=False),
        r"is always causal; for causal=False use projected",
    ),
    "factored blocks that are not causal": (
        lambda q: factored_blocks(q, q, pooling(8, 2), causal=False),
        r"is always causal; for causal=False use factored",
    ),
    "causal landmarks": (
        lambda q: nystrom(q, q, 2, causal=True),
        r"does not support causal; use window_low_rank_blocks",
    ),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_one_sentence_says_what_to_use_instead(what: str) -> None:
    build, sentence = INSTEAD[what]
    with pytest.raises((ShapeError, UnsupportedError), match=sentence) as caught:
        build(torch.ones(8, 4))
    assert isinstance(caught.value, HeadwiseError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_odd_widths_are_hashed_like_any_others(width: int) -> None:
    """A hash is an argmax over turned coordinates and their negatives: nothing is split in halves."""
    q, v = draw(2, 2, 50, width).unbind(0)
    op = hashed(q, q, chunk=8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(op(torch.ones_like(v)), torch.ones_like(v))
