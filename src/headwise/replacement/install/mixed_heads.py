"""softmax(q k^T) v replaced head by head.

Heads whose kind has a `pattern` (softmax, windows, near_far) are one call of the compiled kernels, however they differ.
Without these, and for other kinds, heads with the same choice run as one batched call: heads at equal distances
(neighbours, every second one) are a view, other groups are gathered by one index_select.  The output is laid out
(b, m, h, d), as models read it next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators._kernels import key_patterns, limits
from headwise.operators._kernels.key_patterns import UNBOUNDED, KeyPattern
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators.masks import Mask
from headwise.operators.softmax import softmax
from headwise.replacement.kinds import Choice, HeadInputs, Tensors
from headwise.shapes import products_fit, same_axis


class HeadGroup(nn.Module):
    """Heads with the same choice, and their learned tensors stacked: (heads of the group, *shape)."""

    def __init__(self, choice: Choice, heads: Sequence[int], width: int, length: int) -> None:
        super().__init__()
        self.choice, self.heads = choice, tuple(heads)
        for name, x in choice.initial(length, width).items():
            self.register_parameter(name, nn.Parameter(x.expand(len(self.heads), *x.shape).clone()))

    @property
    def tensors(self) -> Tensors:
        return {name: x for name, x in self._parameters.items() if x is not None}  # named_parameters takes 20 us

    @property
    def span(self) -> slice | None:
        """The heads as a slice, if they are at equal distances."""
        first, step = self.heads[0], self.heads[1] - self.heads[0] if len(self.heads) > 1 else 1
        even = tuple(range(first, first + step * len(self.heads), step)) == self.heads
        return slice(first, first + step * (len(self.heads) - 1) + 1, step) if even else None

    def take(self, x: Tensor) -> Tensor:
        """Its heads of x (b, h, ...)"""
        return x[:, self.span] if self.span is not None else _gather(x, self.heads)

    def take_shared(self, x: Tensor, shared: int) -> Tensor:
        """The heads of x (b, h / shared, ...) that serve its query heads; as many or fewer."""
        if shared == 1:
            return self.take(x)
        serving = tuple(head // shared for head in self.heads)
        consecutive = tuple(range(self.heads[0], self.heads[0] + len(self.heads))) == self.heads
        if consecutive and len(serving) % shared == 0 and self.heads[0] % shared == 0:
            return x.narrow(1, serving[0], len(serving) // shared)
        if serving[0] == serving[-1]:
            return x.narrow(1, serving[0], 1)
        return _gather(x, serving)

    def put(self, part: Tensor, out: Tensor) -> None:
        """Write its heads (b, m, heads of the group, d) into out (b, m, h, d)."""
        if self.span is not None:
            out[:, :, self.span] = part
            return
        for place, head in enumerate(self.heads):  # measured: four times as fast as one assignment by index
            out[:, :, head] = part[:, :, place]

    def forward(self, inputs: HeadInputs, v: Tensor, tensors: Tensors | None = None) -> Tensor:
        """P v: (b, heads of the group, m, d); k and v may have fewer heads, each shared by consecutive heads of q.

        `tensors` stand in for its learned ones.
        """
        if self.choice.kind == "softmax":
            return softmax_attention(inputs, v)
        q, tensors = inputs.q, self.tensors if tensors is None else tensors
        P = self.choice.operator(inputs, tensors)
        if not self.choice.definition.reads_scores and not tensors:  # one P for every head: v need not be repeated
            return repeat_heads(P(v), q, "MixedHeads").expand(-1, q.shape[1], -1, -1)
        return P(repeat_heads(v, q, "MixedHeads"))

    def extra_repr(self) -> str:
        return f"{self.choice}, heads {', '.join(map(str, self.heads))}"


class MixedHeads(nn.Module):
    """The operators of all heads of one attention call.

    >>> heads = MixedHeads([Choice("softmax"), Choice("window", {"width": 3})], width=4, length=8)
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> heads(q, k, v, scale=0.5).shape
    torch.Size([1, 2, 8, 4])

    Below `exact_below` keys, and beyond `length` keys, a model runs its original attention (`beyond` may be "refuse").
    """

    replaces_attention = True
    exact_below = 0
    beyond = "exact"

    def __init__(
        self,
        choices: Sequence[Choice],
        width: int,
        length: int,
        fitted: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """`fitted` has learned tensors by head; the other heads keep their initial values."""
        super().__init__()
        if not choices:
            raise ShapeError("MixedHeads: needs a choice for at least one head, got none")
        self.choices, self.width, self.length = tuple(choices), width, length
        # the first head that is not softmax, and its choice; None if nothing is replaced
        self.replaced = next(((i, each) for i, each in enumerate(self.choices) if each.kind != "softmax"), None)
        members: dict[tuple[Choice, int], list[int]] = {}
        run = 0
        for head, choice in enumerate(self.choices):
            run = run if head and choice == self.choices[head - 1] else head
            # the fused kernel has no overhead: a call for every run, which is a view, is cheaper than a gather
            members.setdefault((choice, run if choice.kind == "softmax" else 0), []).append(head)
        self.groups = nn.ModuleList(HeadGroup(choice, heads, width, length) for (choice, _), heads in members.items())
        for head, tensors in (fitted or {}).items():
            self.load_head(head, tensors)

    def runs_exact(self, n: int) -> bool:
        """Whether attention to n keys is that of the original model; UnsupportedError if the plan refuses it."""
        if n >= self.exact_below and (self.replaced is None or n <= self.length):
            return False
        if n > self.length and self.beyond == "refuse" and self.replaced is not None:
            head, choice = self.replaced
            raise UnsupportedError(
                f"head {head} is {choice}, planned for at most {self.length} keys, but there are {n}, and the plan "
                'says beyond = "refuse"; shorten the input, plan for a greater length, or set beyond to "exact"'
            )
        return True

    def runs_original(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the model's own function computes this call: also for softmax alone where no kernel would."""
        if self.runs_exact(k.shape[-2]):
            return True
        few = min(q.shape[-2], k.shape[-2]) < limits.TILES_FROM
        return self.replaced is None and (few or not key_patterns.usable(q, k, v))

    @contextmanager
    def at_any_length(self) -> Iterator[None]:
        """Replaced heads run at every length."""
        kept = self.exact_below, self.length
        self.exact_below, self.length = 0, UNBOUNDED
        try:
            yield
        finally:
            self.exact_below, self.length = kept

    def part(self, heads: Sequence[int]) -> MixedHeads:
        """Some of the heads, with copies of their learned tensors."""
        part = MixedHeads([self.choices[head] for head in heads], self.width, self.length)
        like = next(self.parameters(), None)
        part = part if like is None else part.to(like.device, like.dtype)
        for place, head in enumerate(heads):
            part.load_head(place, self.head_parameters(head))
        return part

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, causal: bool = False, scale: float
    ) -> Tensor:
        """q (b, h, m, k), k (b, h_kv, n, k), v (b, h_kv, n, d) -> (b, h, m, d); key_mask (b, n), True = attend.

        Causal is aligned to the bottom right: the last query attends to the last key, as with a cache.
        """
        h, (m, n) = len(self.choices), (q.shape[-2], k.shape[-2])
        same_axis("MixedHeads", "h", choices=h, q=q.shape[1])
        if h % k.shape[1]:
            raise ShapeError(f"MixedHeads: axis 'h' must divide, but q has {h} heads and k has {k.shape[1]}")
        mask = Mask.checked("MixedHeads", m, n, causal=causal, key_mask=key_mask, batch=(len(q), 1))
        inputs = HeadInputs(q, k, mask, scale)
        padding = self._padding_before(mask.key_mask)
        if padding is None:
            return self._run(inputs, v)
        if m != n:
            return self._run(replace(inputs, padding_before=padding), v)
        inputs, v, back = padding_last(inputs, v, padding)
        return along(self._run(inputs, v), back)

    def _run(self, inputs: HeadInputs, v: Tensor) -> Tensor:
        groups = self._groups()
        patterned = [group for group in groups if group.choice.definition.pattern is not None]
        if not patterned or inputs.padding_before is not None or not key_patterns.usable(inputs.q, inputs.k, v):
            return groups[0](inputs, v) if len(groups) == 1 else self._in_groups(inputs, v, groups)
        out = self._at_once(inputs, v, patterned)
        others = [group for group in groups if group.choice.definition.pattern is None]
        if not others:
            return out
        # the kernel's backward reads its result, so others are not written into it
        return self._in_groups(inputs, v, others, (out.clone() if out.requires_grad else out).transpose(1, 2))

    def _in_groups(
        self,
        inputs: HeadInputs,
        v: Tensor,
        groups: Sequence[HeadGroup],
        out: Tensor | None = None,
        call: Callable[[HeadGroup, HeadInputs, Tensor], Tensor] = lambda group, own, v: group(own, v),
    ) -> Tensor:
        """One call for each of the groups, written into `out` (b, m, h, d)."""
        q, k = inputs.q, inputs.k
        b, h, m, _ = q.shape
        shared = h // k.shape[1]  # query heads per key head
        for group in groups:
            if group.choice.definition.reads_scores:
                own = replace(inputs, q=group.take(q), k=group.take_shared(k, shared))
            else:
                own = replace(inputs, q=q[:, : len(group.heads)], k=k[:, :1])
            part = call(group, own, group.take_shared(v, shared))
            out = part.new_empty(b, m, h, part.shape[-1]) if out is None else out
            group.put(part.transpose(1, 2), out)
        assert out is not None
        return out.transpose(1, 2)

    def _at_once(self, inputs: HeadInputs, v: Tensor, groups: Sequence[HeadGroup]) -> Tensor:
        """One call of the compiled kernels for all groups; the other heads attend to nothing and are zero."""
        q, k, key_mask = inputs.q, inputs.k, inputs.mask.key_mask
        patterns = [KeyPattern(-1, -1)] * q.shape[1]
        for group in groups:
            group.choice.check_inputs(inputs)
            definition = group.choice.definition
            assert definition.pattern is not None
            pattern = definition.pattern(inputs, group.choice.options)
            for head in group.heads:
                patterns[head] = pattern
        learned = [group for group in groups if group.tensors]
        features = self._features(inputs, learned) if learned else None
        if any(group.choice.kind != "softmax" for group in groups):
            visible_k = inputs.mask.hide(k)
            products_fit("MixedHeads", inputs.scale, limits.LARGEST_SCORE, q=q, k=visible_k)
            if features is not None:
                products_fit("MixedHeads", inputs.scale, limits.LARGEST_SCORE, q=q, a=features[0])
                products_fit("MixedHeads", inputs.scale, limits.LARGEST_SCORE, k=visible_k, b=features[1])

        def plain(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            def call(group: HeadGroup, own: HeadInputs, v: Tensor) -> Tensor:
                if group.tensors:
                    return group(own, v, _own_features(group, others))
                return _written_out(patterns[group.heads[0]], own, v)

            out = v.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[-1])
            return self._in_groups(replace(inputs, q=q, k=k), v, groups, out, call)

        return key_patterns.attend(
            q,
            k,
            v,
            patterns,
            scale=inputs.scale,
            causal=inputs.mask.causal,
            key_mask=None if key_mask is None else key_mask.expand(len(q), q.shape[1], -1),
            features=features,
            plain=plain,
        )

    def _features(self, inputs: HeadInputs, groups: Sequence[HeadGroup]) -> key_patterns.Features:
        """a, b, c of all heads, (b, h, r, k), (b, h, r, k) and (b, h, r); zeros for those that have fewer, or none."""
        b, h, _, _ = inputs.q.shape
        r = max(group.tensors["c"].shape[-1] for group in groups)
        order = [head for group in groups for head in group.heads]
        rest = [head for head in range(h) if head not in order]
        index = torch.tensor(sorted(range(h), key=[*order, *rest].__getitem__))
        stacked = []
        for name in ("a", "b", "c"):
            parts = [group.tensors[name] for group in groups]
            # zeros after the last axis of c, and before the last one of a and b
            parts = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, r - x.shape[1])) for x in parts]
            parts += [parts[0].new_zeros(len(rest), *parts[0].shape[1:])] if rest else []
            x = torch.cat(parts).to(inputs.q.dtype).index_select(0, index)
            stacked.append(x.expand(b, *x.shape))
        return stacked[0], stacked[1], stacked[2]

    def _padding_before(self, key_mask: Tensor | None) -> Tensor | None:
        """(b, 1), number of padding keys before the first real one; None if it is zero or no choice depends on it."""
        if key_mask is None or not any(group.choice.definition.from_first_key for group in self._groups()):
            return None
        padding = key_mask[:, 0].int().argmax(-1, keepdim=True)
        return padding if torch.compiler.is_compiling() or bool(padding.any()) else None

    def _groups(self) -> list[HeadGroup]:
        return [group for group in self.groups if isinstance(group, HeadGroup)]

    def head_parameters(self, head: int) -> dict[str, Tensor]:
        """The learned tensors of one head, as views."""
        group = next(group for group in self._groups() if head in group.heads)
        place = group.heads.index(head)
        return {name: x.data[place] for name, x in group.tensors.items()}

    def load_head(self, head: int, tensors: Mapping[str, Tensor]) -> None:
        """Set the learned tensors of one head; names and shapes as in `Choice.initial`."""
        own = self.head_parameters(head)
        for name, x in tensors.items():
            if name not in own or own[name].shape != x.shape:
                known = ", ".join(f"{key} {tuple(t.shape)}" for key, t in own.items()) or "none"
                raise ShapeError(
                    f"MixedHeads: head {head} is {self.choices[head]} with learned tensors {known}, "
                    f"but was given {name} {tuple(x.shape)}"
                )
            own[name].copy_(x)


def _own_features(group: HeadGroup, features: Sequence[Tensor]) -> Tensors:
    """The first a, b and c of a group's heads, as many as it has, of (b, h, r, k), (b, h, r, k) and (b, h, r)."""
    if not group.tensors:
        return {}
    rank = group.tensors["c"].shape[-1]
    return {name: group.take(x)[:, :, :rank] for name, x in zip(("a", "b", "c"), features[:3], strict=True)}


def _written_out(pattern: KeyPattern, inputs: HeadInputs, v: Tensor) -> Tensor:
    """P v of a band and leading keys from the whole m x n scores: differentiable any number of times."""
    q, keys, v = inputs.q, repeat_heads(inputs.k, inputs.q, "MixedHeads"), repeat_heads(v, inputs.q, "MixedHeads")
    p, j = torch.arange(inputs.n - inputs.m, inputs.n)[:, None], torch.arange(inputs.n)
    pairs = (j >= p - pattern.left) & (j <= p + pattern.right) | (j < pattern.leading)
    pairs = pairs & (j <= p) if inputs.mask.causal else pairs | (p < pattern.leading)
    if inputs.mask.key_mask is not None:
        pairs = pairs & inputs.mask.key_mask.unsqueeze(-2)
        keys, v = inputs.mask.hide(keys), inputs.mask.hide(v)
    # a row without keys has equal weights, all of which are then hidden
    weights = (inputs.scale * (q @ keys.mT)).masked_fill(~pairs, limits.HIDDEN).softmax(-1)
    return weights.masked_fill(~pairs, 0) @ v


def softmax_attention(inputs: HeadInputs, v: Tensor) -> Tensor:
    """The fused kernel, which supports grouped queries; its causal form is top-left aligned and excludes a mask."""
    q, k, m = inputs.q, inputs.k, inputs.m
    if inputs.mask.causal and m > 1 and (m != inputs.n or inputs.mask.key_mask is not None):
        P = softmax(q, k, scale=inputs.scale, causal=True, key_mask=inputs.mask.key_mask)
        return P(repeat_heads(v, q, "MixedHeads"))
    mask = None if inputs.mask.key_mask is None else inputs.mask.key_mask.unsqueeze(-2)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=inputs.mask.causal and m > 1,
        scale=inputs.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def padding_last(inputs: HeadInputs, v: Tensor, padding: Tensor) -> tuple[HeadInputs, Tensor, Tensor]:
    """The same call with the first `padding` (b, 1) positions moved to the end, and the index (b, n) that undoes it."""
    assert inputs.mask.key_mask is not None
    position = torch.arange(inputs.n, device=v.device)
    forth, back = position + padding, position - padding  # modulo n, which ONNX does not have for symbols
    forth, back = torch.where(forth < inputs.n, forth, forth - inputs.n), torch.where(back < 0, back + inputs.n, back)
    key_mask = inputs.mask.key_mask.expand(len(forth), 1, -1).gather(-1, forth.unsqueeze(1))
    mask = replace(inputs.mask, key_mask=key_mask)
    return replace(inputs, q=along(inputs.q, forth), k=along(inputs.k, forth), mask=mask), along(v, forth), back


def is_padding_or_causal(mask: Mask) -> bool:
    """Whether every kind of operator can take the mask; others are for softmax alone."""
    return mask.pair_mask is None and mask.attn_bias is None


def along(x: Tensor, index: Tensor) -> Tensor:
    """x (b, h, n, d) with positions in the order of index (b, n)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _gather(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Heads of x (b, h, n, d) in any order; selected along the axis order in memory, which is three times as fast."""
    index = torch.tensor(heads, device=x.device)
    if x.stride(1) < x.stride(2):
        return x.transpose(1, 2).index_select(2, index).transpose(1, 2)
    return x.index_select(1, index)
