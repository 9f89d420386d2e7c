"""M_ij = 1 where query i may attend to key j: the one mask type, its validation, and how foreign masks are read.

A mask is kept in the form it came in; nothing is expanded to m x n unless an m x n mask was given.  Causal masks are
aligned to the bottom right (the last query attends to the last key): M_ij = 0 for j > i + n - m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from headwise.errors import DtypeError, ShapeError
from headwise.operators._kernels import limits
from headwise.operators.mask_support import MaskKind
from headwise.shapes import are_tensors, broadcasts_to, finite_or_minus_infinity, read, truth_values


@final
@dataclass(frozen=True, eq=False)
class Mask:
    """M_ij = 1 where query i may attend to key j; attn_bias_ij is added to the scores there.

    >>> Mask(2, 3, causal=True).rows(0, 2).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """

    m: int
    n: int
    causal: bool = False  # key j <= i + n - m
    key_mask: Tensor | None = None  # (*batch, n), True = attend
    pair_mask: Tensor | None = None  # broadcasts to (*batch, m, n), True = attend
    attn_bias: Tensor | None = None  # broadcasts to (*batch, m, n), additive
    _ahead: int | None = None  # j <= i + _ahead instead of n - m: only in transposes

    @classmethod
    def checked(
        cls,
        owner: str,
        m: int,
        n: int,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        batch: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> Mask:
        """A Mask whose tensors have the right dtype and axes, are on `device`, and broadcast to `batch` if given.

        A key_mask (b, n) against a batch (b, h) is shared by the heads.
        """
        truth_values(owner, causal=causal)
        for name, x in (("key_mask", key_mask), ("pair_mask", pair_mask), ("attn_bias", attn_bias)):
            if x is None:
                continue
            are_tensors(owner, **{name: x})
            if name == "attn_bias" and not x.dtype.is_floating_point:
                raise DtypeError(
                    f"{owner}: attn_bias must be floating point, but is {x.dtype}; pass a boolean mask as pair_mask"
                )
            if name != "attn_bias" and x.dtype != torch.bool:
                hint = "; pass an additive mask as attn_bias" if name == "pair_mask" else ""
                raise DtypeError(f"{owner}: {name} must be boolean (True = attend), but is {x.dtype}{hint}")
            if device is not None and x.device != device:
                raise DtypeError(
                    f"{owner}: devices must agree, but q is on {device}, {name} is on {x.device}; "
                    "move one with .to(device)"
                )
        if key_mask is not None:
            if key_mask.dim() == 0 or key_mask.shape[-1] != n:
                raise ShapeError(f"{owner}: key_mask has shape {tuple(key_mask.shape)}, but there are n = {n} keys")
            if batch is not None:
                key_mask = broadcasts_to(owner, "key_mask", share_between_heads(key_mask, batch), (*batch, n))
        pair_mask, attn_bias = (
            None if x is None else _pairs(owner, name, x, m, n, batch)
            for name, x in (("pair_mask", pair_mask), ("attn_bias", attn_bias))
        )
        return cls(m, n, causal, key_mask, pair_mask, attn_bias)

    @classmethod
    def from_sdpa(
        cls, attn_mask: Tensor | None, is_causal: bool, m: int, n: int, *, device: torch.device | None = None
    ) -> Mask:
        """The mask of a call scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal).

        The axes of `attn_mask` are those of torch, (b, h, m, n) from the right; the Mask has batch axes (b, h), so a
        recognised padding mask is a key_mask (b, 1, n).  torch aligns causality to the top left, which for m != n
        becomes a pair_mask.
        """
        if attn_mask is None:
            if is_causal and m != n:
                return cls(m, n, pair_mask=torch.ones(1, 1, m, n, dtype=torch.bool, device=device).tril())
            return cls(m, n, causal=is_causal)
        return _recognised(attn_mask.reshape(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape), m, n, is_causal)

    @classmethod
    def from_transformers(cls, attention_mask: Tensor | None, causal: bool, m: int, n: int) -> Mask:
        """The mask of a transformers attention function: None, (b, n) for causal with padding, or (b, h, m, n).

        `causal` is the module's flag; it applies only without a mask, where it is aligned to the bottom right.
        The Mask has batch axes (b, h).
        """
        if attention_mask is None:
            return cls(m, n, causal=causal)
        if attention_mask.dim() == 2:
            if attention_mask.shape[-1] != n:
                raise ShapeError(
                    f"Mask: attention_mask has shape {tuple(attention_mask.shape)}, but there are n = {n} keys"
                )
            return cls(m, n, True, _none_if_all(attention_mask.bool().unsqueeze(1)))
        if attention_mask.dim() != 4:
            raise ShapeError(
                f"Mask: attention_mask must be (b, n) or (b, h, m, n), but has shape {tuple(attention_mask.shape)}"
            )
        return _recognised(attention_mask, m, n, causal)

    @classmethod
    def from_multihead(
        cls, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, m: int, n: int, heads: int
    ) -> Mask:
        """The masks of a call of nn.MultiheadAttention: boolean ones are True where a key is ignored, others are added.

        key_padding_mask (b, n); attn_mask (m, n) or (b h, m, n); the Mask has batch axes (b, h).  As in torch,
        `is_causal` is a hint about attn_mask, which is relied on only where values cannot be read.
        """
        mask = cls(m, n)
        if attn_mask is not None and is_causal and m == n and torch.compiler.is_compiling():
            mask = cls(m, n, causal=True)
        elif attn_mask is not None:
            pairs = attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
            mask = _recognised(~pairs if pairs.dtype == torch.bool else pairs, m, n, False)
        if key_padding_mask is None:
            return mask
        keys = key_padding_mask.unsqueeze(-2)  # (b, 1, n)
        if keys.dtype == torch.bool:
            visible, bias = _none_if_all(~keys), None
        elif torch.compiler.is_compiling():  # torch writes boolean padding in this form
            visible, bias = keys > torch.finfo(keys.dtype).min / 2, None
            torch.ops.aten._assert_async.msg(
                ((keys == 0) | ~visible).all(), "a floating key_padding_mask must be 0 or -inf"
            )
        else:
            visible, bias = _split(keys)
            visible = None if visible is None else _none_if_all(visible)
        if bias is not None:
            bias = bias.unsqueeze(-2)
            mask = mask.with_bias(bias if mask.attn_bias is None else mask.attn_bias + bias)
        return mask if visible is None else replace(mask, key_mask=_both(mask.key_mask, visible))

    def settled(self, owner: str) -> Mask:
        """The same mask with a finite attn_bias, and with every key that no query attends to in key_mask.

        -inf in attn_bias becomes part of key_mask or pair_mask, so that no gradient meets it; NaN and +inf raise.
        Masks that hide no key altogether are left as they are, except where values cannot be read.
        """
        key_mask, pair_mask, bias = self._tensors
        if bias is not None:
            # one reduction in the common case of a finite bias
            total = read(bias.detach().sum(dtype=torch.promote_types(bias.dtype, torch.float32)))
            if total is None or not math.isfinite(total):
                finite_or_minus_infinity(owner, attn_bias=bias)
                hidden = bias == -math.inf
                bias = bias.masked_fill(hidden, 0)
                pair_mask = ~hidden if pair_mask is None else pair_mask & ~hidden
        if pair_mask is not None and pair_mask.shape[-2] == 1:
            key_mask, pair_mask = _both(key_mask, pair_mask.squeeze(-2)), None
        elif pair_mask is not None:
            causal = self.causal and self.m > 1
            attended = (pair_mask & self.causal_pairs(pair_mask.device) if causal else pair_mask).any(-2)
            if not read(attended.all()):
                key_mask = _both(key_mask, attended)
        return replace(self, key_mask=key_mask, pair_mask=pair_mask, attn_bias=bias)

    def causal_pairs(self, device: torch.device | None = None) -> Tensor:
        """j <= i + ahead as a boolean (m, n)."""
        assert self.ahead is not None
        return torch.ones(self.m, self.n, dtype=torch.bool, device=device).tril(self.ahead)

    @property
    def batch(self) -> torch.Size:
        """The batch axes of the tensors, broadcast."""
        shapes = [x.shape[:-2] for x in (self.pair_mask, self.attn_bias) if x is not None]
        return torch.broadcast_shapes(() if self.key_mask is None else self.key_mask.shape[:-1], *shapes)

    @property
    def ahead(self) -> int | None:
        """Causal: query i attends to keys j <= i + ahead; None otherwise."""
        if not self.causal:
            return None
        return self.n - self.m if self._ahead is None else self._ahead

    @property
    def overlap(self) -> int:
        """Side of the causal square: the last min(m, n) queries against as many last keys."""
        return min(self.m, self.n)

    @property
    def visible(self) -> Tensor | None:
        """key_mask and pair_mask as one boolean (*batch, 1 | m, n), without causality; None if there is neither."""
        if self.key_mask is None:
            return self.pair_mask
        keys = self.key_mask.unsqueeze(-2)
        return keys if self.pair_mask is None else keys & self.pair_mask

    def hides_later_keys(self) -> bool:
        """Whether no query attends to a key beyond j = i + n - m, whichever way the mask says it."""
        return self.causal or (
            self.m > 1
            and self.pair_mask is not None
            and self.pair_mask.shape[-2] == self.m
            and not bool(self.pair_mask.triu(self.n - self.m + 1).any())
        )

    def rows(self, start: int, stop: int, device: torch.device | None = None, keys: int | None = None) -> Tensor:
        """M for queries start:stop, and the first `keys` keys if given, as a boolean (*batch, stop - start, n)."""
        keys = self.n if keys is None else keys
        rows = torch.ones(stop - start, keys, dtype=torch.bool, device=self.device if device is None else device)
        if self.ahead is not None:
            rows = rows.tril(start + self.ahead)
        visible = _take_rows(self.visible, start, stop)
        return rows if visible is None else rows & visible[..., :keys]

    def pairs(self, device: torch.device | None = None) -> Tensor | None:
        """M in the smallest form that broadcasts to (*batch, m, n); None if nothing is hidden."""
        return self.rows(0, self.m, device) if self.causal else self.visible

    def part(self, start: int, stop: int, device: torch.device | None = None) -> Mask:
        """The mask of queries start:stop over the keys that they can reach, causality written out as a pair_mask."""
        bias = _take_rows(self.attn_bias, start, stop)
        if self.ahead is None:
            return Mask(stop - start, self.n, False, self.key_mask, _take_rows(self.pair_mask, start, stop), bias)
        n = max(1, min(stop + self.ahead, self.n))  # no query before `stop` attends beyond this
        pairs = self.rows(start, stop, device, n)
        return Mask(stop - start, n, pair_mask=pairs, attn_bias=None if bias is None else bias[..., :n])

    def select(self, queries: Tensor, keys: Tensor) -> Mask:
        """The mask of some queries and keys, each given by a boolean (m,) and (n,)."""
        m, n = int(queries.sum()), int(keys.sum())
        # alignment to the bottom right survives if both are cut alike
        keeps_order = self._ahead is None and self.m == self.n and bool((queries == keys).all())

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x if x.shape[-2] == 1 else x[..., queries, :])[..., keys]

        pairs = self.pair_mask if not self.causal or keeps_order else self.rows(0, self.m, queries.device)
        key_mask = None if self.key_mask is None else _none_if_all(self.key_mask[..., keys])
        pairs = cut(pairs)
        pairs = None if pairs is None else _none_if_all(pairs)
        return Mask(m, n, self.causal and keeps_order, key_mask, pairs, cut(self.attn_bias))

    def index(self, i: int) -> Mask:
        """The mask of entry i of the first batch axis; all tensors must have that axis (of size one if shared)."""
        tensors = (None if x is None else x[i if len(x) > 1 else 0] for x in self._tensors)
        return Mask(self.m, self.n, self.causal, *tensors, _ahead=self._ahead)

    def transposed(self) -> Mask:
        """M^T; if causal, with both sequences reversed, so that it is causal again."""
        pairs, bias = (
            None if x is None else x.expand(*x.shape[:-2], self.m, self.n).mT for x in (self.visible, self.attn_bias)
        )
        if self.ahead is None:
            return Mask(self.n, self.m, pair_mask=pairs, attn_bias=bias)
        pairs, bias = (None if x is None else x.flip(-2, -1) for x in (pairs, bias))
        return Mask(self.n, self.m, True, None, pairs, bias, self.ahead + self.m - self.n)

    def with_bias(self, attn_bias: Tensor | None) -> Mask:
        """The same mask with another additive bias."""
        return replace(self, attn_bias=attn_bias)

    def counts(self, device: torch.device | None = None) -> Tensor:
        """C_i = sum_j M_ij, the number of keys of each query, as (*batch, m); O(m + n) without a pair_mask."""
        device = self.device if device is None else device
        if self.pair_mask is not None:
            return self.rows(0, self.m, device).sum(-1)
        if self.ahead is None:
            keys = torch.tensor([self.n], device=device) if self.key_mask is None else self.key_mask.sum(-1, True)
            return keys.expand(*keys.shape[:-1], self.m)
        reach = (torch.arange(self.m, device=device) + (self.ahead + 1)).clamp(min=0, max=self.n)
        if self.key_mask is None:
            return reach
        return torch.nn.functional.pad(self.key_mask.cumsum(-1), (1, 0)).index_select(-1, reach)

    def attended_keys(self) -> Tensor | None:
        """(n,) boolean: the keys that some query attends to; None if that is all of them."""
        if self.visible is None:
            return None
        keys = self.visible.flatten(0, -2).any(dim=0)
        return None if bool(keys.all()) else keys

    def empty_rows(self, device: torch.device | None = None) -> Tensor | None:
        """Boolean (*batch, m), True where a query attends to no key at all; None if that cannot happen."""
        device = self.device if device is None else device
        if self.key_mask is None and self.pair_mask is None and self.attn_bias is None:
            if self.ahead is None or self.ahead >= 0:
                return None
            return torch.arange(self.m, device=device) < -self.ahead
        allowed = torch.ones(1, self.n, dtype=torch.bool, device=device) if self.visible is None else self.visible
        if self.attn_bias is not None:
            allowed = allowed & (self.attn_bias > -math.inf)
        if self.ahead is None:
            return ~allowed.any(-1).expand(*allowed.shape[:-2], self.m)
        if allowed.shape[-2] == 1:  # the first visible key is the same for all queries
            first = allowed.squeeze(-2).int().argmax(-1, keepdim=True)
            last = torch.arange(self.m, device=device) + self.ahead
            return (first > last) | ~allowed.squeeze(-2).any(-1, keepdim=True)
        return ~(allowed & self.causal_pairs(device)).any(-1)

    def has_empty_rows(self) -> bool:
        """Whether some query attends to no key."""
        empty = self.empty_rows()
        return empty is not None and bool(empty.any())

    def hide(self, x: Tensor) -> Tensor:
        """x (*batch, n, d) with the rows of masked keys set to zero, whatever they hold."""
        return x if self.key_mask is None else torch.where(self.key_mask.unsqueeze(-1), x, 0)

    def average(self, sums: Tensor) -> Tensor:
        """sums_i / C_i for (*batch, m, d); rows without keys, which are zero already, are left alone."""
        return sums / self.counts(sums.device).clamp(min=1).to(sums.dtype).unsqueeze(-1)

    def sdpa_arguments(self, dtype: torch.dtype, device: torch.device | None = None) -> dict[str, Any]:
        """attn_mask and is_causal for scaled_dot_product_attention; m x n is formed only where torch needs it."""
        if self.causal and self.ahead == 0 and self.m == self.n and self.visible is None and self.attn_bias is None:
            return {"attn_mask": None, "is_causal": True}
        return {"attn_mask": self.kernel_mask(self.pairs(device), dtype), "is_causal": False}

    def kernel_mask(self, visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """`visible` and attn_bias as the one mask that torch's kernel takes: boolean, or additive with a bias."""
        if self.attn_bias is None:
            return visible
        bias = self.attn_bias.to(dtype)
        return bias if visible is None else torch.where(visible, bias, -math.inf)

    def arguments(self) -> dict[str, Any]:
        """The masks that are given, as keyword arguments of a builder."""
        arguments = {kind.value: getattr(self, kind.value) for kind in MaskKind}
        return {name: x for name, x in arguments.items() if x is not None and x is not False}

    @property
    def device(self) -> torch.device:
        """The device of the tensors, or the CPU if there are none."""
        return next((x.device for x in self._tensors if x is not None), torch.device("cpu"))

    @property
    def _tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.key_mask, self.pair_mask, self.attn_bias


def share_between_heads(key_mask: Tensor, batch: Sequence[int]) -> Tensor:
    """key_mask (b, n) as (b, 1, n) against a batch (b, h); (n,) stays as it is."""
    missing = len(batch) - (key_mask.dim() - 1)
    if key_mask.dim() < 2 or missing <= 0:
        return key_mask
    return key_mask.reshape(*key_mask.shape[:-1], *(1,) * missing, key_mask.shape[-1])


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def _pairs(owner: str, name: str, x: Tensor, m: int, n: int, batch: Sequence[int] | None) -> Tensor:
    """x with at least two axes, checked to broadcast to (*batch, m, n)."""
    broadcasts_to(owner, name, x, (*(x.shape[:-2] if batch is None else batch), m, n))
    return x.reshape(*(1,) * (2 - x.dim()), *x.shape)


def _take_rows(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    return x if x is None or x.shape[-2] == 1 else x[..., start:stop, :]


def _none_if_all(mask: Tensor) -> Tensor | None:
    """None where all entries are True and can be read."""
    return None if read(mask.all()) else mask


def _recognised(attn_mask: Tensor, m: int, n: int, causal: bool) -> Mask:
    """A mask (b, h, m, n) or one that broadcasts to it, recognised as padding or causal where it is."""
    attn_mask = attn_mask[..., :n]  # caches of fixed size make masks longer than the keys
    visible, bias = _split(attn_mask)
    if visible is None:
        return Mask(m, n, attn_bias=bias)
    shared = visible[:, :1]
    per_head = visible.shape[1] > 1 and visible.stride(1) != 0
    if per_head and not read((visible == shared).all()):
        return Mask(m, n, pair_mask=visible, attn_bias=bias)
    if visible.shape[-2] == 1:
        # a decoder that generates has a single query, which attends to every key; its flag still says causal
        return Mask(m, n, causal and m == 1, _none_if_all(shared.squeeze(-2)), attn_bias=bias)
    keys = shared[..., -1:, :].all(-2)  # padding alone, or with causality, shows in the row of the last query
    same = read((shared == keys.unsqueeze(-2)).all())
    if same is None:
        return Mask(m, n, pair_mask=visible, attn_bias=bias)
    if same:
        return Mask(m, n, False, _none_if_all(keys), attn_bias=bias)
    square = torch.ones(m, n, dtype=torch.bool, device=keys.device).tril(n - m)
    if m <= n and bool((shared == (keys.unsqueeze(-2) & square)).all()):
        return Mask(m, n, True, _none_if_all(keys), attn_bias=bias)
    return Mask(m, n, pair_mask=shared, attn_bias=bias)


def _split(attn_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask, additive bias) of an attn_mask; either may be None, and the bias is None if it only masks."""
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    if torch.compiler.is_compiling() or (attn_mask.requires_grad and torch.is_grad_enabled()):
        return None, attn_mask  # learned numbers are no mask, even where all of them are zero
    # masks hold the most negative number of their dtype as often as -inf
    visible = attn_mask > torch.finfo(attn_mask.dtype).min / 2
    only_masks = read(((attn_mask == 0) | ~visible).all())
    if only_masks is None:
        return None, attn_mask
    if only_masks:
        return visible, None
    near = attn_mask > limits.LARGE_NEGATIVE
    if bool(((attn_mask == 0) | ~near).all()) and bool(near.any(-1).all()):
        return near, None
    return _none_if_all(visible), torch.where(visible, attn_mask, 0.0)
