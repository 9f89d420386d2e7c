"""softmax(q k^T) v replaced head by head: heads with the same choice run as one batched call.

Heads at even distances (neighbours, every second one) are a view, other groups are gathered by one index_select; every
group writes its part of the output, which is laid out (b, m, h, d) as models want it next.  All heads alike: nothing is
split at all.  Queries and keys are left where they are by kinds that do not look at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.operators.softmax import softmax
from headwise.replacement.choice import Choice
from headwise.shapes import same_axis


class Group(nn.Module):
    """The heads of one choice, and their learned tensors stacked: (heads of the group, *shape)."""

    def __init__(self, choice: Choice, heads: Sequence[int], width: int, length: int) -> None:
        super().__init__()
        self.choice, self.heads = choice, tuple(heads)
        for name, x in choice.of.initial(choice, length, width).items():
            self.register_parameter(name, nn.Parameter(x.expand(len(self.heads), *x.shape).clone()))

    @property
    def span(self) -> slice | None:
        """Heads at even distances, so that a slice will do."""
        first, step = self.heads[0], self.heads[1] - self.heads[0] if len(self.heads) > 1 else 1
        even = tuple(range(first, first + step * len(self.heads), step)) == self.heads
        return slice(first, first + step * (len(self.heads) - 1) + 1, step) if even else None

    def take(self, x: Tensor) -> Tensor:
        """Its heads of x (b, h, ...)"""
        return x[:, self.span] if self.span is not None else _gather(x, self.heads)

    def put(self, part: Tensor, out: Tensor) -> None:
        """Its heads (b, m, heads of the group, d) into out (b, m, h, d)"""
        if self.span is not None:
            out[:, :, self.span] = part
            return
        for place, head in enumerate(self.heads):  # measured: four times as fast as one assignment by index
            out[:, :, head] = part[:, :, place]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float) -> Tensor:
        """P v: (b, heads of the group, m, d); k and v may have fewer heads, each serving consecutive ones of q."""
        if self.choice.kind == "exact":
            return exact_attention(q, k, v, keep=keep, causal=causal, scale=scale)
        kind, own = self.choice.of, dict(self.named_parameters(recurse=False))
        P = kind.build(self.choice, q, k, keep=keep, causal=causal, scale=scale, parameters=own)
        if not kind.looks and not own:  # the same P for every head: before the values are repeated
            return _repeat(P(v), q).expand(-1, q.shape[1], -1, -1)
        return P(_repeat(v, q))

    def extra_repr(self) -> str:
        return f"{self.choice}, heads {', '.join(map(str, self.heads))}"


class Heads(nn.Module):
    """The operators of all heads of one attention call.

    >>> heads = Heads([Choice("exact"), Choice("window", {"width": 3})], width=4, length=8)
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> heads(q, k, v, scale=0.5).shape
    torch.Size([1, 2, 8, 4])
    """

    def __init__(self, choices: Sequence[Choice], width: int, length: int) -> None:
        super().__init__()
        if not choices:
            raise ShapeError("Heads: needs a choice for at least one head, got none")
        self.choices, self.width, self.length = tuple(choices), width, length
        members: dict[tuple[Choice, int], list[int]] = {}
        run = 0
        for head, choice in enumerate(self.choices):
            run = run if head and choice == self.choices[head - 1] else head
            # the fused kernel has nothing around it: a call for every run, which is a view, is cheaper than a gather
            members.setdefault((choice, run if choice.kind == "exact" else 0), []).append(head)
        self.groups = nn.ModuleList(Group(choice, heads, width, length) for (choice, _), heads in members.items())

    @property
    def exact(self) -> bool:
        """Nothing was replaced."""
        return all(choice.kind == "exact" for choice in self.choices)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        causal: bool = False,
        scale: float,
    ) -> Tensor:
        """q (b, h, m, k), k (b, h_kv, n, k), v (b, h_kv, n, d) -> (b, h, m, d); `keep` (b, n) is True at real keys.

        Causal is aligned to the bottom right: the last query sees the last key, so new queries meet a cache.
        """
        h, m, n = len(self.choices), q.shape[-2], k.shape[-2]
        same_axis("Heads", "h", choices=h, q=q.shape[1])
        if h % k.shape[1]:
            raise ShapeError(f"Heads: axis 'h' must divide, but q has {h} heads and k has {k.shape[1]}")
        if keep is not None:
            same_axis("Heads", "n", keys=n, keep=keep.shape[-1])
        first = self._padding_before(keep)
        if first is not None and keep is not None and m == n:
            turn = (torch.arange(n, device=q.device) + first) % n  # (b, n): the first real key comes first
            back = (torch.arange(n, device=q.device) - first) % n
            q, k, v = (_along(x, turn) for x in (q, k, v))
            keep = keep.gather(-1, turn)
            return _along(self._groups(q, k, v, keep, causal, scale, None), back)
        return self._groups(q, k, v, keep, causal, scale, first)

    def _groups(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float, first: Tensor | None
    ) -> Tensor:
        """`first` (b, 1): padding before the first real key, that could not be moved away."""

        def run(group: Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if first is None:
                return group(q, k, v, keep, causal, scale)
            return _from_cache(group, q, k, v, keep, causal, scale, first)

        groups = self._parts()
        if len(groups) == 1:
            return run(groups[0], q, k, v)
        b, h, m, _ = q.shape
        shared = h // k.shape[1]  # query heads that one key head serves
        out = None
        for group in groups:
            part_v = _take_shared(group, v, shared)
            if group.choice.of.looks:
                part = run(group, group.take(q), _take_shared(group, k, shared), part_v)
            else:
                part = run(group, q[:, : len(group.heads)], k[:, :1], part_v)
            out = part.new_empty(b, m, h, part.shape[-1]) if out is None else out
            group.put(part.transpose(1, 2), out)
        assert out is not None
        return out.transpose(1, 2)

    def _padding_before(self, keep: Tensor | None) -> Tensor | None:
        """Where the first real key is, (b, 1), if some choice counts positions from there and it is not the first."""
        if keep is None or not any(group.choice.of.anchored for group in self._parts()):
            return None
        first = keep.int().argmax(-1, keepdim=True)
        if torch.compiler.is_compiling() or bool(first.any()):
            return first
        return None

    def _parts(self) -> list[Group]:
        return [group for group in self.groups if isinstance(group, Group)]

    def _place(self, head: int) -> tuple[Group, int]:
        group = next(group for group in self._parts() if head in group.heads)
        return group, group.heads.index(head)

    def head_parameters(self, head: int) -> dict[str, Tensor]:
        """The learned tensors of one head, as views."""
        group, place = self._place(head)
        return {name: x.data[place] for name, x in group.named_parameters(recurse=False)}

    def load_head(self, head: int, tensors: Mapping[str, Tensor]) -> None:
        """Set the learned tensors of one head; names and shapes as `Kind.parameters` says."""
        own = self.head_parameters(head)
        for name, x in tensors.items():
            if name not in own or own[name].shape != x.shape:
                known = ", ".join(f"{key} {tuple(t.shape)}" for key, t in own.items()) or "none"
                raise ShapeError(
                    f"Heads: head {head} is {self.choices[head]} with learned tensors {known}, "
                    f"but was given {name} {tuple(x.shape)}"
                )
            own[name].copy_(x)


def parameter_key(site: str, head: int, name: str) -> str:
    """How a plan names the learned tensor `name` of a head."""
    return f"{site}|{head}|{name}"


def _from_cache(
    group: Group, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float, first: Tensor
) -> Tensor:
    """New queries, and padding before the first key: a window that counts from there is written out as a mask."""
    choice = group.choice
    if keep is None or choice.kind != "window" or not choice.options["first"]:
        return group(q, k, v, keep, causal, scale)
    m, n = q.shape[-2], k.shape[-2]
    at, key = torch.arange(n - m, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    near = (key <= at) & (key > at - choice.options["width"])
    sink = (key <= at) & (key < (first + choice.options["first"]).unsqueeze(-1))  # (b, m, n)
    seen = (near | sink) & keep.unsqueeze(-2)
    return softmax(q, k, scale=scale, pair_mask=seen.unsqueeze(1))(_repeat(v, q))


def exact_attention(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The kernel itself, which knows grouped queries; its causality begins at the top left and goes with no mask."""
    m, n = q.shape[-2], k.shape[-2]
    if causal and m > 1 and (m != n or keep is not None):
        return softmax(q, k, scale=scale, causal=True, key_mask=keep)(_repeat(v, q))
    mask = None if keep is None else keep[:, None, None, :]
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and m > 1, scale=scale, enable_gqa=grouped
    )


def _take_shared(group: Group, x: Tensor, shared: int) -> Tensor:
    """The key heads that serve a group's query heads; as many or fewer, never more."""
    if shared == 1:
        return group.take(x)
    serving = tuple(head // shared for head in group.heads)
    whole = tuple(range(group.heads[0], group.heads[0] + len(group.heads))) == group.heads
    if whole and len(serving) % shared == 0 and group.heads[0] % shared == 0:
        return x.narrow(1, serving[0], len(serving) // shared)
    if serving[0] == serving[-1]:
        return x.narrow(1, serving[0], 1)
    return _gather(x, serving)


def _gather(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Heads of x (b, h, n, d) in any order; selected along the axis order in memory, which is three times as fast."""
    index = torch.tensor(heads, device=x.device)
    if x.stride(1) < x.stride(2):
        return x.transpose(1, 2).index_select(2, index).transpose(1, 2)
    return x.index_select(1, index)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Grouped queries: each head of x for the consecutive heads of q it serves."""
    return x if x.shape[1] in (1, q.shape[1]) else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _along(x: Tensor, index: Tensor) -> Tensor:
    """x (b, h, n, d) with positions taken in the order of index (b, n)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
