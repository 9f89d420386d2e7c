"""o_i = (1/C_i) sum_j f(q_i, k_j) g(v_j): the general form of attention, by the similarity f.

    gaussian            f = exp(q . k)               C_i = sum_j f    softmax with scale 1
    embedded_gaussian   f = exp(θ(q) . φ(k))         C_i = sum_j f    softmax with scale 1
    dot_product         f = θ(q) . φ(k)              C = n            in dot_product.py; f may be negative
    concatenation       f = relu(w . [θ(q); φ(k)])   C = n            in concatenation.py

Wang, Girshick, Gupta & He 2018 ("Non-local neural networks").  θ, φ and g are callables, or matrices W (out, in) as
`nn.Linear` keeps them, applied to every row: x_i -> W x_i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import ATTN_BIAS, CAUSAL, KEY_MASK, PAIR_MASK, supports
from headwise.operators.softmax import Softmax, softmax
from headwise.shapes import are_tensors, autocasting, no_empty_axis, same_axis, same_kind, shown

Embedding = Callable[[Tensor], Tensor] | Tensor | None


@supports(CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS)
def gaussian(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Softmax:
    """P_ij = exp(q_i . k_j) / C_i, C_i the sum of the row: softmax without the 1/sqrt(k)."""
    return softmax(q, k, scale=1.0, causal=causal, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias)


@supports(CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS)
def embedded_gaussian(
    q: Tensor,
    k: Tensor,
    *,
    theta: Embedding = None,
    phi: Embedding = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Softmax:
    """P_ij = exp(θ(q_i) . φ(k_j)) / C_i, C_i the sum of the row.  With no θ and φ it is `gaussian`."""
    q, k = embed("EmbeddedGaussian", "q", q, theta), embed("EmbeddedGaussian", "k", k, phi)
    return gaussian(q, k, causal=causal, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias)


def attend(operator: AttentionOperator, v: Tensor, g: Embedding = None) -> Tensor:
    """o = P g(v): (*batch, n, d) -> (*batch, m, d')"""
    return operator(embed("attend", "v", v, g))


def embed(owner: str, name: str, x: Tensor, map: Embedding) -> Tensor:
    """The rows of x through a matrix or a callable; ShapeError if the map changes the number of rows."""
    no_empty_axis(owner, **{name: x})
    if map is None:
        return x
    if isinstance(map, Tensor):
        if map.dim() != 2:
            raise ShapeError(f"{owner}: the matrix applied to {name} must be (out, in), but has {tuple(map.shape)}")
        same_axis(owner, f"width of {name}", **{name: x.shape[-1]}, matrix=map.shape[-1])
        if not autocasting(x.device):
            same_kind(owner, **{name: x}, matrix=map)
        return F.linear(x, map)
    if not callable(map):
        raise InputError(f"{owner}: the map of {name} must be a matrix or callable, but is {shown(map)}")
    y = map(x)
    are_tensors(owner, **{f"the mapped {name}": y})
    same_axis(owner, f"rows of {name}", before=x.shape[-2], after=y.shape[-2] if y.dim() > 1 else 0)
    return y
