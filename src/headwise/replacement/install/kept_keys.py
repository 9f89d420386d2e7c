"""What the heads of a causal layer keep of the past, and the attention of new queries to it.

    window of width w, s leading keys    the first s keys and a ring of the last w
    softmax                              all keys
    efficient, uniform                   sums over the keys, and no key
    other kinds                          all keys

Query heads that share a key head decide together: it keeps the most that one of them needs.  Key heads that keep the
same are a block: one tensor, and one call for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.operators._kernels.key_patterns import UNBOUNDED, KeyPattern
from headwise.operators.masks import Mask
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.install.running_sums import RunningSums
from headwise.replacement.kinds import Choice, HeadInputs

ROWS = 512
"""Queries of a continued prompt that are computed at once: their mask has ROWS x n entries."""

SHORT = 1024
"""Keys below which a cache has no room to spare: it is copied for every token, as that of transformers is."""


class NewKeys(NamedTuple):
    """Positions before .. n - 1 are new.

    scale   of the scores
    keep    (b, n), True for real keys, False for padding; None if all are real
    first   (b,), position of the first real key; None without padding
    """

    before: int
    n: int
    scale: float
    keep: Tensor | None = None
    first: Tensor | None = None

    def up_to(self, n: int, before: int = 0) -> NewKeys:
        return self._replace(before=before, n=n, keep=None if self.keep is None else self.keep[:, :n])


class Reach(NamedTuple):
    """The keys of a query: the last `width`, its own included, and the first `leading`."""

    width: int = UNBOUNDED
    leading: int = 0


def reach(choice: Choice) -> Reach | None:
    """The keys of a causal query, if P is a softmax over the last ones and the first ones."""
    if choice.definition.pattern is None:
        return None
    q, k = torch.empty(1, 1, 1, 1, device="meta"), torch.empty(1, 1, UNBOUNDED, 1, device="meta")
    pattern = choice.definition.pattern(HeadInputs(q, k, Mask(1, UNBOUNDED, causal=True), 1.0), choice.options)
    if pattern != KeyPattern(pattern.left, pattern.right, pattern.leading):
        return None
    return Reach(min(pattern.left + 1, UNBOUNDED), pattern.leading)


class KeyRing:
    """The first `leading` and the last `ring` keys: position p in slot p, or leading + (p - leading) mod ring.

    Where padding comes first, the leading slots of a sequence hold its first real keys.  `spare` keys more than the
    queries need are kept to be able to crop.
    """

    def __init__(self, reaches: Sequence[Reach], k: Tensor, v: Tensor, *, spare: int = 0) -> None:
        """`reaches` of the query heads; k and v show shape and dtype."""
        self.reaches, self.spare = tuple(reaches), spare
        self.leading = max(each.leading for each in reaches)
        self.ring = min(UNBOUNDED, max(each.width for each in reaches) + spare)
        self.capacity = min(UNBOUNDED, self.leading + self.ring)
        self.alike = not spare and len(set(reaches)) == 1
        self.highest = 0  # positions written so far
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[-1]) for x in (k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, new: NewKeys) -> Tensor:
        """P v (b, h, m, d) of new queries (b, h, m, k); also writes the new keys."""
        if new.n - new.before == 1:
            self.write(k, v, new)
            keys, values = _first(self.keys, min(new.n, self.capacity)), _first(self.values, min(new.n, self.capacity))
            if new.keep is None and self.alike:  # every slot is visible
                return _shared_keys(q, keys, values, None, new.scale)
            return _shared_keys(
                q, keys, values, self._visible(self.positions(new, new.n), new, new.before, 1), new.scale
            )
        used = min(new.before, self.capacity)
        keys, values = torch.cat([self.keys[:, :, :used], k], 2), torch.cat([self.values[:, :, :used], v], 2)
        at, ahead = self.positions(new, new.before), torch.arange(new.before, new.n, device=k.device)
        if new.keep is not None:
            ahead = torch.where(new.keep[:, new.before :], ahead, -1)
        at = torch.cat([at, ahead], -1)
        self.write(k, v, new)
        parts = [
            _shared_keys(rows, keys, values, self._visible(at, new, start, rows.shape[2]), new.scale)
            for start, rows in zip(range(new.before, new.n, ROWS), q.split(ROWS, 2), strict=True)
        ]
        return torch.cat(parts, 2)

    def write(self, k: Tensor, v: Tensor, new: NewKeys) -> None:
        before, n, room = new.before, new.n, self.keys.shape[2]
        if room < n <= min(SHORT, self.capacity):
            self.keys = torch.cat([_first(self.keys, before), k], 2)
            self.values = torch.cat([_first(self.values, before), v], 2)
        else:
            self._grow(n)
            self._put(self.keys, k, before)
            self._put(self.values, v, before)
        if new.first is not None and self.leading and before < int(new.first.max()) + self.leading:
            self._put_leading(self.keys, k, new)
            self._put_leading(self.values, v, new)
        self.highest = max(self.highest, n)

    def _put(self, stored: Tensor, x: Tensor, before: int) -> None:
        n = before + x.shape[2]
        if n <= self.capacity:
            stored.narrow(2, before, x.shape[2]).copy_(x)
        elif n - before == 1:
            stored.narrow(2, self.leading + (before - self.leading) % self.ring, 1).copy_(x)
        else:
            kept = torch.arange(before, n, device=x.device)
            kept = kept[(kept < self.leading) | (kept >= n - self.ring)]
            slots = torch.where(kept < self.leading, kept, self.leading + (kept - self.leading) % self.ring)
            stored[:, :, slots] = x[:, :, kept - before]

    def _put_leading(self, stored: Tensor, x: Tensor, new: NewKeys) -> None:
        """The first real keys of each sequence, where padding comes first."""
        assert new.first is not None
        leading = stored[:, :, : self.leading]
        wanted = new.first.unsqueeze(-1) + torch.arange(leading.shape[2], device=x.device) - new.before
        here = (wanted >= 0) & (wanted < x.shape[2])
        index = wanted.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
        leading.copy_(torch.where(here[:, None, :, None], x.gather(2, index), leading))

    def _grow(self, n: int) -> None:
        n, room = min(n, self.capacity), self.keys.shape[2]
        if n > room:
            size = min(self.capacity, n + n // 64)  # so that few tokens copy
            for name in ("keys", "values"):
                old = getattr(self, name)
                grown = old.new_empty(*old.shape[:2], size, old.shape[-1])
                grown[:, :, :room] = old
                setattr(self, name, grown)

    def positions(self, new: NewKeys, count: int) -> Tensor:
        """The position in every used slot when `count` were written, (slots,) or (b, slots); -1 for padding."""
        slot = torch.arange(min(count, self.capacity), device=self.keys.device)
        if count > self.capacity:  # the last position that belongs there
            last = count - 1 - (count - 1 - slot) % self.ring
            slot = torch.where(slot < self.leading, slot, last)
        if new.keep is None or new.first is None:
            return slot
        first = new.first.unsqueeze(-1)
        leading, others = slot[: self.leading] + first, slot[self.leading :].expand(len(first), -1)
        leading = leading.masked_fill(leading >= count, -1)
        others = others.masked_fill(others < first + self.leading, -1)
        at = torch.cat([leading, others], -1)
        return at.masked_fill(~new.keep.gather(-1, at.clamp(min=0)), -1)

    def _visible(self, at: Tensor, new: NewKeys, start: int, rows: int) -> Tensor:
        """(b or 1, h or 1, rows, slots): whether the query at start + row attends to the key at position `at`."""
        p = torch.arange(start, start + rows, device=at.device).unsqueeze(-1)
        at = at.reshape(-1, 1, 1, at.shape[-1])
        first = 0 if new.first is None else new.first[:, None, None, None]
        seen = (at >= 0) & (at <= p)
        by_reach = {each: seen & ((at > p - each.width) | (at < first + each.leading)) for each in set(self.reaches)}
        return torch.cat([by_reach[each] for each in (self.reaches if len(by_reach) > 1 else self.reaches[:1])], 1)

    def crop(self, count: int) -> None:
        """Take back the positions from `count` on."""
        if self.highest <= self.capacity:
            self.highest = count

    def check_crop(self, count: int) -> None:
        """Raise UnsupportedError if a query at `count` needs keys that are gone."""
        if self.highest > self.capacity and self.highest - count > 1 + self.spare:
            raise UnsupportedError(
                f"crop: {self.highest - count} tokens cannot be taken back, because of {self.highest} keys only the "
                f"last {self.ring} were kept; take back at most {1 + self.spare}, call activate_past_recording() on a "
                "new cache first, or use HeadCache(model, keep_all=True)"
            )

    def select(self, index: Tensor) -> None:
        """Reorder or repeat the sequences of the batch."""
        self.keys, self.values = (x.index_select(0, index) for x in (self.keys, self.values))

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]


class AllKeys(KeyRing):
    """All keys, for heads whose operators are built from them."""

    def __init__(self, heads: MixedHeads, k: Tensor, v: Tensor) -> None:
        super().__init__([Reach()], k, v)
        self.heads = heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, new: NewKeys) -> Tensor:
        self.write(k, v, new)
        return self.heads(q, *(x[:, :, : new.n] for x in self.tensors), key_mask=new.keep, causal=True, scale=new.scale)


Block = KeyRing | RunningSums


class LayerPast:
    """The past of one layer: a block for every group of key heads that keep the same.

    While the layer runs the original attention (`MixedHeads.runs_exact`, or every window still reaches all keys), and
    always with `keep_all`, it holds all keys of all heads instead.
    """

    def __init__(self, heads: MixedHeads, *, keep_all: bool = False, spare: int = 0) -> None:
        self.heads, self.keep_all, self.spare = heads, keep_all, spare
        reaches = [reach(choice) for choice in heads.choices]
        narrowest = min(each.width + each.leading if each else 0 for each in reaches)
        # keys that every head attends to, if some head drops any
        self.covered = narrowest if narrowest < UNBOUNDED else 0
        self.count = 0
        self.whole: AllKeys | None = None
        self.blocks: list[Block] = []
        self.sizes: list[int] = []  # key heads of every block
        self.order: Tensor | None = None  # of the key heads in the blocks, if it is another

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, new: NewKeys, original: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """P v (b, h, m, d) of new queries; `original(k, v)` is the attention of q in the model as it was."""
        exact = self.heads.runs_exact(new.n) or new.n <= self.covered
        if not new.before:
            unchanged = exact or self.heads.runs_original(q, k, v)
            out = original(k, v) if unchanged else self.heads(q, k, v, key_mask=new.keep, causal=True, scale=new.scale)
            self._open(k.detach(), v.detach(), new, whole=exact or self.keep_all)
        else:
            _check_no_gradient(q, k, v)
            out = self._continue(q, k, v, new, original, exact)
        self.count = new.n
        return out

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """All keys and values, the new ones too, where the original attention runs; None elsewhere."""
        n = self.count + k.shape[2]
        if self.whole is None or not self.heads.runs_exact(n):
            return None
        _check_no_gradient(k, v)
        self.whole.write(k, v, NewKeys(self.count, n, 1.0))
        self.count = n
        return _first(self.whole.keys, n), _first(self.whole.values, n)

    def fill(self, k: Tensor, v: Tensor, scale: float) -> None:
        """Hold the keys and values of a beginning that is attended to by later queries only."""
        self.count = k.shape[2]
        exact = self.heads.runs_exact(self.count) or self.count <= self.covered
        self._open(k, v, NewKeys(0, self.count, scale), whole=exact or self.keep_all)

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, new: NewKeys, original: Callable[[Tensor, Tensor], Tensor], exact: bool
    ) -> Tensor:
        if self.whole is not None and exact:
            self.whole.write(k, v, new)
            return original(_first(self.whole.keys, new.n), _first(self.whole.values, new.n))
        if self.whole is not None and self.keep_all:
            return self.whole.attend(q, k, v, new)
        if self.whole is not None:
            keys, values = (x[:, :, : self.count] for x in self.whole.tensors)
            self._open(keys, values, new.up_to(self.count), whole=False)
        if exact and new.n > self.heads.length:
            raise UnsupportedError(
                f"HeadCache: the model was planned for {self.heads.length} keys and attends to all keys beyond, but "
                f"of {self.count} some were dropped; pass past_key_values=HeadCache(model, keep_all=True) from the "
                "start, or plan for a greater length"
            )
        if len(self.blocks) == 1:
            return self.blocks[0].attend(q, k, v, new)
        shared = q.shape[1] // k.shape[1]
        if self.order is not None:
            q, k, v = _reordered(q, self.order, shared), _reordered(k, self.order), _reordered(v, self.order)
        queries = q.split([shared * size for size in self.sizes], 1)
        parts = zip(self.blocks, queries, k.split(self.sizes, 1), v.split(self.sizes, 1), strict=True)
        out = torch.cat([block.attend(q, k, v, new) for block, q, k, v in parts], 1)
        return out if self.order is None else _reordered(out, self.order.argsort(), shared)

    def _open(self, k: Tensor, v: Tensor, new: NewKeys, *, whole: bool) -> None:
        """Start with the keys and values of new.n positions."""
        self.whole, self.blocks = None, []
        if whole:
            self.whole = AllKeys(self.heads, k, v)
            self.whole.write(k, v, new)
            return
        shared, members = len(self.heads.choices) // k.shape[1], _blocks(self.heads.choices, k.shape[1])
        order, self.sizes = [g for own in members for g in own], [len(own) for own in members]
        self.order = None if order == sorted(order) else torch.tensor(order, device=k.device)
        if self.order is not None:
            k, v = _reordered(k, self.order), _reordered(v, self.order)
        parts = k.split(self.sizes, 1), v.split(self.sizes, 1)
        for own, keys, values in zip(members, *parts, strict=True):
            queries = [g * shared + i for g in own for i in range(shared)]
            choices = [self.heads.choices[i] for i in queries]
            reaches = [reach(choice) for choice in choices]
            block: Block
            if all(reaches):
                block = KeyRing([r for r in reaches if r], keys, values, spare=self.spare)
            elif choices[0].definition.features is not None and len(set(choices)) == 1:
                block = RunningSums(choices[0], keys, values)
            else:
                block = AllKeys(self.heads.part(queries), keys, values)
            block.write(keys, values, new)
            self.blocks.append(block)

    def crop(self, count: int) -> None:
        """Take back the positions from `count` on; UnsupportedError, and nothing changed, if that cannot be done."""
        for block in self._parts():
            block.check_crop(count)
        for block in self._parts():
            block.crop(count)
        self.count = count

    def select(self, index: Tensor) -> None:
        """Reorder, repeat or drop sequences of the batch."""
        for block in self._parts():
            block.select(index)

    def repeat(self, times: int) -> None:
        """Repeat every sequence of the batch."""
        for x in self.tensors[:1]:
            self.select(torch.arange(len(x), device=x.device).repeat_interleave(times))

    @property
    def tensors(self) -> list[Tensor]:
        return [x for block in self._parts() for x in block.tensors]

    def _parts(self) -> list[Block]:
        return [self.whole] if self.whole is not None else self.blocks


def _check_no_gradient(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(
            "HeadCache: gradients do not pass through it; run under torch.no_grad(), or pass a DynamicCache"
        )


def _blocks(choices: Sequence[Choice], key_heads: int) -> list[list[int]]:
    """The key heads of every block."""
    shared = len(choices) // key_heads
    members: dict[tuple[Any, ...], list[int]] = {}
    for g in range(key_heads):
        own = choices[g * shared : (g + 1) * shared]
        reaches = [reach(choice) for choice in own]
        if all(reaches):
            key = max(r.width for r in reaches if r), max(r.leading for r in reaches if r)
        else:  # sums of equal features, or all keys for any operator
            key = (own[0],) if len(set(own)) == 1 and own[0].definition.features is not None else ("all",)
        members.setdefault(key, []).append(g)
    return list(members.values())


def _reordered(x: Tensor, order: Tensor, shared: int = 1) -> Tensor:
    """x (b, g * shared, ...) with its groups of `shared` heads in another order."""
    if shared == 1:
        return x.index_select(1, order)
    return x.unflatten(1, (-1, shared)).index_select(1, order).flatten(1, 2)


def _first(x: Tensor, count: int) -> Tensor:
    """The first keys of x (b, g, n, d)"""
    return x if x.shape[2] == count else x.narrow(2, 0, count)


def _shared_keys(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Softmax attention (b, h, m, d); queries that share a key head are rows of one, so that no key is repeated."""
    shared, m = q.shape[1] // k.shape[1], q.shape[2]
    if visible is not None and shared > 1:
        visible = visible.expand(-1, q.shape[1], -1, -1).unflatten(1, (-1, shared)).flatten(2, 3)
    rows = q.reshape(len(q), k.shape[1], shared * m, q.shape[-1])
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale).reshape(*q.shape[:3], -1)
