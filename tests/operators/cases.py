"""Contract cases of the exact and composed operators, and the list of all cases.

A new operator needs one line in one of the case files; `test_contract` fails for a final operator without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise.operators import (
    AttentionOperator,
    add,
    concatenation,
    dot_product,
    embedded_gaussian,
    gaussian,
    kronecker,
    low_rank,
    per_head,
    product,
    scale,
    shift,
    similarity,
    softmax,
    transpose,
    uniform,
)
from headwise.testing import Case, references
from tests.operators.cases_linear import LINEAR
from tests.operators.cases_relative import OFFSET, POSITIONAL, SHIFT, TOEPLITZ
from tests.operators.cases_sparse import SPARSE
from tests.operators.properties import NOTHING, PADDING, boolean, same

# d_v = d_k = 4 is among the widths tried, so the 4-D cases meet the fused kernel at its own shape; the others do not
HEADS = {"q": (2, 3, 6, 4), "k": (2, 3, 6, 4)}
CROSS = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4)}  # more keys than queries
TALL = {"q": (2, 3, 7, 4), "k": (2, 3, 5, 4)}  # fewer
FLAT = {"q": (5, 4), "k": (7, 4)}
THREE = {"q": (2, 5, 3), "k": (2, 7, 3)}
FIVE = {"q": (2, 1, 2, 4, 3), "k": (1, 3, 2, 6, 3)}  # batch axes that broadcast against one another
GROUPED = {"q": (2, 4, 5, 4), "k": (2, 2, 6, 4)}
ONE = {"q": (2, 1, 4), "k": (2, 1, 4)}  # one token

MASK = boolean(2, 1, 5, 7)
HOLES = MASK & (torch.arange(5) != 3)[:, None]  # row 3 is fully masked
BIAS = torch.where(boolean(5, 7, seed=1), torch.linspace(-1, 1, 35, dtype=torch.float64).reshape(5, 7), -torch.inf)

_softmax = partial(same, build=softmax, twin=references.softmax)
SOFTMAX = [
    _softmax("softmax", inputs=HEADS),
    _softmax("softmax, cross", inputs=CROSS),
    _softmax("softmax, 2-D", inputs=FLAT),
    _softmax("softmax, 3-D", inputs=THREE),
    _softmax("softmax, 5-D, broadcast", inputs=FIVE),
    _softmax("softmax, one token", inputs=ONE),
    _softmax("softmax, scale", inputs=CROSS, scale=2.0),
    _softmax("softmax, negative scale, causal", inputs=HEADS, scale=-1.5, causal=True),
    _softmax("softmax, scale of zero, causal", inputs=HEADS, scale=0.0, causal=True),
    _softmax("softmax, causal", inputs=HEADS, causal=True),
    _softmax("softmax, causal, more keys", inputs=CROSS, causal=True),
    _softmax("softmax, causal, fewer keys", inputs=TALL, causal=True),
    _softmax("softmax, causal, 2-D", inputs=FLAT, causal=True),
    _softmax("softmax, padding", inputs=CROSS, key_mask=PADDING),
    _softmax("softmax, padding, causal", inputs=CROSS, key_mask=PADDING, causal=True),
    _softmax("softmax, nothing to see", inputs=CROSS, key_mask=NOTHING),
    _softmax("softmax, mask", inputs=CROSS, pair_mask=MASK),
    _softmax("softmax, fully masked row", inputs=CROSS, pair_mask=HOLES),
    _softmax("softmax, fully masked row, causal", inputs=CROSS, pair_mask=HOLES, causal=True),
    _softmax("softmax, bias", inputs={**CROSS, "attn_bias": (3, 5, 7)}),
    _softmax("softmax, bias, causal", inputs={**HEADS, "attn_bias": (6, 6)}, causal=True),
    _softmax("softmax, bias of -inf", inputs={**CROSS, "attn_bias": BIAS}),
    Case(
        "softmax, grouped queries",
        softmax,
        GROUPED,
        lambda q, k: references.softmax(q, references.grouped(k, 4)),
    ),
    _softmax("softmax, padding shared by heads", inputs=CROSS, key_mask=PADDING[:, 0]),
    _softmax(
        "softmax, everything", inputs={**CROSS, "attn_bias": (5, 7)}, causal=True, key_mask=PADDING, pair_mask=MASK
    ),
]

MAPS = {"theta": (3, 4), "phi": (3, 4)}
SIMILARITY = [
    same("gaussian", gaussian, references.gaussian, CROSS),
    same("gaussian, padding", gaussian, references.gaussian, CROSS, key_mask=PADDING),
    same("embedded gaussian", embedded_gaussian, references.embedded_gaussian, {**CROSS, **MAPS}),
    same("embedded gaussian, causal", embedded_gaussian, references.embedded_gaussian, {**CROSS, **MAPS}, causal=True),
]


def inverse_square(q: Tensor, k: Tensor) -> Tensor:
    """1 / (1 + |q - k|^2) of all pairs: positive."""
    return 1 / (1 + (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))


@dataclass
class Weighted:
    """sum_c w_c q_c k_c of all pairs: of either sign, with a parameter.  A class, because closures cannot be saved."""

    w: Tensor

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.w) @ k.mT


def _similarity(name: str, normalise: str = "sum", inputs=CROSS, **masks) -> Case:
    """f positive, by distance."""

    def slow(q, k, theta=None, phi=None, **masks):
        return references.similarity(
            q, k, lambda q, k: 1 / (1 + ((q - k) ** 2).sum(-1)), normalise, theta, phi, **masks
        )

    return same(name, partial(similarity, f=inverse_square, normalise=normalise), slow, inputs, **masks)


ANY_SIMILARITY = [
    _similarity("similarity"),
    _similarity("similarity, over n", "n"),
    _similarity("similarity, embedded", inputs={**CROSS, **MAPS}),
    _similarity("similarity, 2-D", inputs=FLAT),
    _similarity("similarity, 5-D, broadcast", inputs=FIVE),
    _similarity("similarity, causal", inputs=HEADS, causal=True),
    _similarity("similarity, causal, fewer keys", inputs=TALL, causal=True),
    _similarity("similarity, nothing to see", key_mask=NOTHING),
    _similarity("similarity, mask, over n", "n", pair_mask=HOLES),
    Case(  # over n, as sums of such f may vanish
        "similarity, learned, over n",
        lambda q, k, w: similarity(q, k, Weighted(w), "n"),
        {**CROSS, "w": (4,)},
        lambda q, k, w: references.similarity(q, k, lambda q, k: (q * w * k).sum(-1), "n"),
    ),
    _similarity("similarity, everything", pair_mask=HOLES, key_mask=PADDING, causal=True),
]

_dot = partial(same, build=dot_product, twin=references.dot_product)
DOT_PRODUCT = [
    _dot("dot product", inputs=CROSS),
    _dot("dot product, embedded", inputs={**CROSS, **MAPS}),
    _dot("dot product, 2-D", inputs=FLAT),
    _dot("dot product, 5-D, broadcast", inputs=FIVE),
    _dot("dot product, causal", inputs=HEADS, causal=True),
    _dot("dot product, causal, more keys", inputs=CROSS, causal=True),
    _dot("dot product, causal, fewer keys", inputs=TALL, causal=True),
    _dot("dot product, padding", inputs=CROSS, key_mask=PADDING),
    _dot("dot product, padding, causal", inputs=CROSS, key_mask=PADDING, causal=True),
    _dot("dot product, nothing to see", inputs=CROSS, key_mask=NOTHING),
    _dot("dot product, mask", inputs=CROSS, pair_mask=HOLES),
    _dot("dot product, everything", inputs=CROSS, pair_mask=HOLES, key_mask=PADDING, causal=True),
]

_concatenation = partial(same, build=concatenation, twin=references.concatenation)
CONCATENATION = [
    _concatenation("concatenation", inputs={**CROSS, "w": (8,)}),
    _concatenation("concatenation, w for each head", inputs={**CROSS, "w": (3, 8)}),
    _concatenation("concatenation, two widths", inputs={"q": (2, 5, 3), "k": (2, 7, 2), "w": (5,)}),
    _concatenation("concatenation, embedded", inputs={**CROSS, **MAPS, "w": (6,)}),
    _concatenation("concatenation, 2-D", inputs={**FLAT, "w": (8,)}),
    _concatenation("concatenation, 5-D, broadcast", inputs={**FIVE, "w": (6,)}),
    _concatenation("concatenation, causal", inputs={**HEADS, "w": (8,)}, causal=True),
    _concatenation("concatenation, causal, more keys", inputs={**CROSS, "w": (8,)}, causal=True),
    _concatenation("concatenation, causal, fewer keys", inputs={**TALL, "w": (8,)}, causal=True),
    _concatenation("concatenation, padding", inputs={**CROSS, "w": (8,)}, key_mask=PADDING),
    _concatenation("concatenation, padding, causal", inputs={**CROSS, "w": (8,)}, key_mask=PADDING, causal=True),
    _concatenation("concatenation, mask", inputs={**CROSS, "w": (8,)}, pair_mask=HOLES),
    _concatenation(
        "concatenation, everything", inputs={**CROSS, "w": (8,)}, pair_mask=MASK, key_mask=PADDING, causal=True
    ),
]

_uniform = partial(same, build=uniform, twin=references.uniform)
UNIFORM = [
    _uniform("uniform", m=5, n=5),
    _uniform("uniform, fewer queries", m=3, n=7),
    _uniform("uniform, causal", m=6, n=6, causal=True),
    _uniform("uniform, causal, more keys", m=5, n=7, causal=True),
    _uniform("uniform, causal, fewer keys", m=7, n=5, causal=True),
    _uniform("uniform, padding", m=5, n=7, key_mask=PADDING),
    _uniform("uniform, padding, causal", m=5, n=7, key_mask=PADDING, causal=True),
    _uniform("uniform, nothing to see", m=5, n=7, key_mask=NOTHING),
]


def _pair(q: Tensor, k: Tensor) -> tuple[AttentionOperator, AttentionOperator]:
    """An attention of queries over keys, and one of keys over themselves."""
    return softmax(q, k), softmax(k, k, causal=True)


def _twins(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return references.softmax(q, k), references.softmax(k, k, causal=True)


SMALL = {"q": (2, 3, 4), "k": (2, 4, 4)}
HEAD = {"q": (2, 1, 3, 4), "k": (1, 2, 4, 4)}
COMPOSED = [
    Case("product", lambda q, k: product(*_pair(q, k)), CROSS, lambda q, k: references.product(*_twins(q, k))),
    Case(
        "product, broadcast",
        lambda q, k: product(uniform(5, 4), softmax(q, k)),
        {"q": (2, 3, 4, 4), "k": (2, 1, 7, 4)},
        lambda q, k: references.product(references.uniform(5, 4), references.softmax(q, k)),
    ),
    Case(
        "sum",
        lambda q, k: add(softmax(q, k), uniform(5, 7), softmax(q, k, scale=0.1)),
        CROSS,
        lambda q, k: references.total(
            references.softmax(q, k), references.uniform(5, 7), references.softmax(q, k, scale=0.1)
        ),
    ),
    Case("scale", lambda q, k: scale(softmax(q, k), -0.5), CROSS, lambda q, k: -0.5 * references.softmax(q, k)),
    Case(
        "scale, one factor a row",
        lambda q, k, factor: scale(softmax(q, k), factor),
        {**CROSS, "factor": (3, 5)},
        lambda q, k, factor: factor[..., None] * references.softmax(q, k),
    ),
    Case(
        "transpose",
        lambda q, k: transpose(softmax(q, k, causal=True)),
        CROSS,
        lambda q, k: references.transposed(references.softmax(q, k, causal=True)),
    ),
    Case(
        "transpose of a shift",
        lambda: transpose(shift((3, 4), (1, -1), border="zeros")),
        {},
        lambda: references.transposed(references.shift((3, 4), (1, -1), border="zeros")),
    ),
    Case("kronecker", lambda q, k: kronecker(*_pair(q, k)), SMALL, lambda q, k: references.kronecker(*_twins(q, k))),
    Case(
        "kronecker of three",
        lambda q, k: kronecker(softmax(q, k), shift((2,), (1,)), uniform(2, 1)),
        {"q": (2, 1, 2, 4), "k": (3, 3, 4)},
        lambda q, k: references.kronecker(
            references.kronecker(references.softmax(q, k), references.shift((2,), (1,))), references.uniform(2, 1)
        ),
    ),
    *(
        Case(
            f"low rank, {name}",
            lambda q, k, r=r, masks=masks: low_rank(softmax(q, k, **masks), r),
            inputs,
            lambda q, k, r=r, masks=masks: references.low_rank(references.softmax(q, k, **masks), r),
            skip={
                "vmap": "a decomposition looks at the values of P",
                "trace": "a decomposition is made once, outside of a graph",
            },
        )
        for name, inputs, r, masks in (
            ("more keys", CROSS, 2, {}),
            ("fewer keys", TALL, 3, {"causal": True}),
            ("all of it", HEADS, 6, {}),
        )
    ),
    Case(
        "per head",
        lambda q, k: per_head([softmax(q, k), uniform(5, 7), softmax(q, k, causal=True)]),
        {"q": (2, 5, 4), "k": (2, 7, 4)},
        lambda q, k: torch.stack(
            [
                references.softmax(q, k),
                references.uniform(5, 7).expand(2, 5, 7),
                references.softmax(q, k, causal=True),
            ],
            dim=-3,
        ),
    ),
]

# the last variant of each operator, usually the one with everything at once, is compiled in the fast tier
EXACT = [*SIMILARITY, *ANY_SIMILARITY, *SOFTMAX, *DOT_PRODUCT, *CONCATENATION, *UNIFORM, *SHIFT, *TOEPLITZ, *COMPOSED]
CASES = [*EXACT, *OFFSET, *POSITIONAL, *SPARSE, *LINEAR]
