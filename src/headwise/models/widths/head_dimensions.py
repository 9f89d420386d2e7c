"""q' = [q A_q | x B_q + b],  k' = [k A_k | c B_k]: the queries and keys of one attention module at other widths.

q and k are what the module computes, rotated already where it has rotary positions; x is its input and c what its keys
are computed from.  B adds dimensions (growth), A drops some (shrinking); scores are scaling * q'.k' with the module's
own scaling, so that a zero B and an identity A change nothing.  Added dimensions are not rotated: their part of the
score depends on the two tokens alone.  A rotated one would need a frequency that the model never learned, and could not
write a change of the scores that is the same at every distance.  With rotary positions A keeps whole pairs, which turn
together (`rotary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError


@final
class HeadDimensions(nn.Module):
    """The submodule of an attention module with `heads` query heads of width `key_width`, which share `key_heads` keys.

    `inputs`  widths of x and c
    `added`   dimensions added to each key head, and to the query heads that share it
    `kept`    dimensions that A keeps of every head; None keeps them all
    """

    query_map: Tensor  # (h, k, r)
    key_map: Tensor  # (h_kv, k, r)

    def __init__(
        self,
        heads: int,
        key_heads: int,
        key_width: int,
        inputs: Sequence[int],
        added: Sequence[int] | None = None,
        kept: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.key_width, self.inputs = heads, key_heads, key_width, tuple(inputs)
        self.added = (0,) * key_heads if added is None else tuple(added)
        self.kept = kept
        total = sum(self.added)
        self.query_weight = nn.Parameter(torch.zeros(self.group * total, inputs[0]))
        self.query_bias = nn.Parameter(torch.zeros(self.group * total))
        self.key_weight = nn.Parameter(torch.zeros(total, inputs[1]))
        if kept is not None:
            self.register_buffer("query_map", torch.zeros(heads, key_width, kept))
            self.register_buffer("key_map", torch.zeros(key_heads, key_width, kept))

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def base(self) -> int:
        """The dimensions of the module's own that are left."""
        return self.key_width if self.kept is None else self.kept

    @property
    def width(self) -> int:
        """The width of q' and k': that of the widest head, narrower ones end in zeros."""
        return self.base + max(self.added)

    @property
    def widths(self) -> tuple[int, ...]:
        """The query/key width of each key head."""
        return tuple(self.base + p for p in self.added)

    def query_rows(self, key_head: int) -> slice:
        """The rows of `query_weight` of the heads that share a key head: head by head, p rows each."""
        rows = head_slices_of(self.added, key_head)
        return slice(self.group * rows.start, self.group * rows.stop)

    def key_rows(self, key_head: int) -> slice:
        return head_slices_of(self.added, key_head)

    def queries(self, q: Tensor, x: Tensor) -> Tensor:
        """(b, h, m, k) -> (b, h, m, width)"""
        q = q if self.kept is None else q @ self.query_map.to(q)
        if not any(self.added):
            return q
        weight = _padded(self.query_weight, self.added, self.group)
        bias = _padded(self.query_bias.unsqueeze(-1), self.added, self.group).squeeze(-1)
        new = torch.nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))
        return torch.cat([q, _heads(new, self.heads).to(q.dtype)], -1)

    def keys(self, k: Tensor, context: Tensor) -> Tensor:
        """(b, h_kv, n, k) -> (b, h_kv, n, width)"""
        if (k.shape[-3], k.shape[-1]) != (self.key_heads, self.key_width):
            raise UnsupportedError(
                f"HeadDimensions: {k.shape[-3]} heads of width {k.shape[-1]} are cached, but attention has "
                f"{self.key_heads} key heads of width {self.key_width}: this model computes keys from what it caches, "
                "so they cannot be cached at another width; pass use_cache=False"
            )
        k = k if self.kept is None else k @ self.key_map.to(k)
        if not any(self.added):
            return k
        if context.shape[-2] != k.shape[-2]:
            raise InputError(
                f"HeadDimensions: there are {k.shape[-2]} keys, but {context.shape[-2]} tokens that added dimensions "
                "of keys could be computed from; pass a cache of transformers as past_key_values, or use_cache=False"
            )
        new = torch.nn.functional.linear(context, _padded(self.key_weight, self.added, 1).to(context.dtype))
        return torch.cat([k, _heads(new, self.key_heads).to(k.dtype)], -1)

    @torch.no_grad()
    def resize_(self, added: Sequence[int]) -> None:
        """Change `added` in place, keeping the leading dimensions of each head; a Parameter stays the same object."""
        old, self.added = self.added, tuple(added)
        for name, group in (("query_weight", self.group), ("query_bias", self.group), ("key_weight", 1)):
            parameter = getattr(self, name)
            new = parameter.new_zeros(group * sum(self.added), *parameter.shape[1:])
            for head, (before, after) in enumerate(zip(old, self.added, strict=True)):
                for i in range(group):
                    size = min(before, after)
                    source = group * sum(old[:head]) + i * before
                    target = group * sum(self.added[:head]) + i * after
                    new[target : target + size] = parameter[source : source + size]
            parameter.grad = None  # it has the old shape
            parameter.data = new

    def keep_(self, query_map: Tensor, key_map: Tensor) -> None:
        """Set A_q (h, k, r) and A_k (h_kv, k, r)."""
        self.kept = query_map.shape[-1]
        for name, new in (("query_map", query_map), ("key_map", key_map)):
            self.register_buffer(name, new.to(self.query_weight))

    def keep_all_(self) -> None:
        """Undo `keep_`: the maps would be saved, and their sizes are not in the config."""
        self.kept = None
        for name in ("query_map", "key_map"):
            self._buffers.pop(name, None)

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, for config.json."""
        sizes = {"heads": self.heads, "key_heads": self.key_heads, "key_width": self.key_width}
        return {**sizes, "inputs": list(self.inputs), "added": list(self.added), "kept": self.kept}

    def extra_repr(self) -> str:
        return f"key_width={self.key_width}, kept={self.kept}, added={self.added}"


def head_slices_of(added: Sequence[int], key_head: int) -> slice:
    """The rows of one key head among those of all; heads without any have an empty slice."""
    start = sum(added[:key_head])
    return slice(start, start + added[key_head])


def _padded(weight: Tensor, added: Sequence[int], group: int) -> Tensor:
    """Rows of heads with p_i dimensions -> rows of heads with max p each, zeros in the gaps."""
    p = max(added)
    if min(added) == p:
        return weight
    each = [q for q in added for _ in range(group)]
    slots = [i * p + j for i, size in enumerate(each) for j in range(size)]
    return weight.new_zeros(len(each) * p, weight.shape[-1]).index_copy(
        0, torch.tensor(slots, device=weight.device), weight
    )


def _heads(y: Tensor, heads: int) -> Tensor:
    """(b, n, h p) -> (b, h, n, p)"""
    return y.unflatten(-1, (heads, -1)).transpose(-3, -2)
