"""Attention that is written out by hand: S = Q K^T …, P = softmax(S), O = P V.

Recognised by what is computed from what: a softmax over the last axis, of something that was computed from a product of
two computed tensors, and whose result is then multiplied with a third.  A router's softmax comes from a product with a
parameter, and is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models.provenance.attention_kind import Provenance, tensors
from headwise.operators.masks import Mask

SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})
PRODUCTS = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.einsum})
ADDED_PRODUCTS = frozenset({torch.baddbmm, Tensor.baddbmm})
"""Products of the second and third operand, added to the first."""

RECENT = 8
"""Products that are remembered: scores are the sum of a few of them, and older ones would only take memory."""

HIDDEN = -5e3
"""Scores below this were masked: masks are written as -inf, as the lowest number, or as -1e4 and less.  Where other
scores of the call are as large, only -inf and the lowest numbers count."""


class WrittenAttention(NamedTuple):
    """What `WrittenOut` found: scores S (…, m, n) and values (…, n, d), and the two tensors whose product S is."""

    scores: Tensor
    v: Tensor
    query: Tensor
    key: Tensor
    key_width: int


class WrittenOut:
    """Follows the functions that a model calls until a product of weights and values is found."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self._products: dict[int, tuple[Tensor, Tensor]] = {}  # the latest
        self._softmax: tuple[int, Tensor, tuple[Tensor, Tensor]] | None = None  # its number, its scores, their product

    def note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> WrittenAttention | None:
        """The attention that this call completes."""
        if func in SOFTMAX:
            self._note_softmax(args[0] if args else kwargs["input"], args, kwargs, out)
        elif func in PRODUCTS or func in ADDED_PRODUCTS:
            factors = tensors((*args, *kwargs.values()))[-2:]
            if len(factors) < 2 or out.dim() < 3 or any(type(x) is nn.Parameter for x in factors):
                return None
            weights, v = factors
            aligned = _values(args[0], weights.dim(), v) if func is torch.einsum else v
            if aligned is not None and (found := self._completed(weights, aligned)) is not None:
                return found
            self._products[self.provenance.number(out)] = weights, v
            if len(self._products) > RECENT:
                self._products.pop(next(iter(self._products)))
        return None

    def _note_softmax(self, scores: Tensor, args: tuple, kwargs: dict, out: Tensor) -> None:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if scores.dim() < 3 or axis not in (-1, scores.dim() - 1):
            return
        sources = self.provenance.sources(scores, set(self._products), same_size=True)
        if sources:  # the first one: relative positions add further products
            self._softmax = self.provenance.number(out), scores.detach(), self._products[min(sources)]

    def _completed(self, weights: Tensor, v: Tensor) -> WrittenAttention | None:
        if self._softmax is None:
            return None
        number, scores, (query, key) = self._softmax
        fits = weights.numel() == scores.numel() and weights.shape[-2:] == scores.shape[-2:]
        fits = fits and v.dim() > 1 and v.shape[-2] == scores.shape[-1]
        if not fits or not self.provenance.sources(weights, {number}, same_size=True):
            return None
        self._softmax = None  # but not the products: two kinds of scores may be sums of the same ones
        batch = weights.shape[:-2]
        if torch.broadcast_shapes(v.shape[:-2], batch) != batch:
            return None
        v = v.detach().expand(*batch, *v.shape[-2:])
        return WrittenAttention(scores.reshape(weights.shape), v, query, key, query.shape[-1])


def _values(equation: str, axes: int, v: Tensor) -> Tensor | None:
    """v with its axes in the order of a matrix product P V, P of so many axes; None if the equation is no such product.

    >>> _values("bhij,jbhd->bihd", 4, torch.empty(9, 2, 4, 5)).shape
    torch.Size([2, 4, 9, 5])
    >>> _values("...hij,...jhd->...ihd", 5, torch.empty(2, 3, 9, 4, 5)).shape
    torch.Size([2, 3, 4, 9, 5])
    """
    inputs, _, result = equation.replace(" ", "").partition("->")
    weights, _, values = inputs.partition(",")
    weights, values = _named(weights, axes), _named(values, v.dim())
    rest = [x for x in values if x not in weights]
    if "," in values or not len(weights) == axes >= 3 or len(rest) != 1 or len(values) != v.dim():
        return None
    batch, summed = [x for x in weights[:-2] if x in values], weights[-1]
    if summed in result or sorted(values) != sorted([*batch, summed, *rest]):
        return None
    v = v.permute([values.index(x) for x in (*batch, summed, *rest)])
    for axis, x in enumerate(weights[:-2]):
        v = v if x in values else v.unsqueeze(axis)
    return v


def _named(letters: str, axes: int) -> str:
    """The letters of an operand of so many axes, with a digit for each axis that the ellipsis stands for."""
    hidden = axes - (len(letters) - len("..."))
    return letters.replace("...", "".join(str(i) for i in reversed(range(hidden)))) if "..." in letters else letters


def mask_of_scores(scores: Tensor) -> Mask:
    """The mask (b, h, m, n) whose additive bias is all of the scores, without those that are masked."""
    visible = scores > HIDDEN
    if not bool(visible.any()) or bool((scores >= -HIDDEN).any()):  # large scores, not only masked ones
        visible = scores > torch.finfo(scores.dtype).min / 2
    m, n = scores.shape[-2:]
    mask = Mask.from_sdpa(None if bool(visible.all()) else visible, False, m, n, device=scores.device)
    return mask.with_bias(scores.masked_fill(~visible, 0))
