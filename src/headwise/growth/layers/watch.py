"""M_h = X_q^T D_h X with D_h = -dL/dS_h = -P_h * (dO_h V_h^T - rowsum(dO_h * O_h)), from the user's own backward pass.

`Watch` stores what passes through a layer: module hooks keep references to tensors that the forward pass made anyway,
the layer's builder is wrapped to note the operator it makes, and a tensor hook stores the gradient of the heads'
outputs.  Nothing is added to the graph.  `score_gradients` forms rows of P again in blocks and multiplies them out:
m n (k + d + d_k) multiply-adds per head, and no n x n tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.growth.normal_equations import take_rows, visible_rows
from headwise.nn.attention_layer import Builder
from headwise.nn.multihead import MultiHead
from headwise.operators._kernels.scores import Scores
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax, softmax

CHUNK = 1 << 21
"""Scores alive at once over batch and heads."""

PENDING = 16
"""Passes of one layer that may wait for their backward: more are only made by calls without one."""


@final
@dataclass(frozen=True, eq=False)
class ObservedPass:
    """One forward and backward pass of a batch through a layer.

    scores (b | 1, h, m, n) with their mask; x (b, m, d_e) makes the queries, context (b, n, d_c) the keys; values
    (b, h, n, d), outputs and their gradient (b, h, m, d).  `own` are the queries (b, h, m, k) and keys (b, h_kv, n, k)
    that the layer computed itself, where its weights are not read.
    """

    scores: Scores
    x: Tensor
    context: Tensor
    values: Tensor
    outputs: Tensor
    gradient: Tensor
    own: tuple[Tensor, Tensor] | None = None

    def rows_with_gradient(self) -> Tensor:
        """Boolean (b, m): the rows that the loss depends on.  Other rows may change freely."""
        return (self.gradient != 0).any(-1).any(1)


def augmented(x: Tensor, bias: bool) -> Tensor:
    """[x | 1] when queries have a bias, so that the bias is one more row of W_q.  (A key bias changes no softmax.)"""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if bias else x


def score_gradients(observed: ObservedPass, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(part, D X): the query rows listed, block by block, and D_h X (b, h, r, d_k) for each block."""
    s = observed.scores
    bias = s.mask.attn_bias
    compute = torch.promote_types(observed.gradient.dtype, torch.float32)
    context, values, keys = (t.to(compute) for t in (observed.context, observed.values, s.k))
    b, h, n = values.shape[:3]
    for part in rows.split(max(1, CHUNK // (b * h * n))):
        scores = (s.q.index_select(-2, part).to(compute) * s.scale) @ keys.mT
        if bias is not None:
            scores = scores + take_rows(bias, part).to(compute)
        allowed = visible_rows(s.mask, part)
        if allowed is None:
            p = torch.softmax(scores, -1)
        else:  # a row without keys is zero, not NaN
            p = torch.softmax(scores.masked_fill_(~allowed, -math.inf), -1).nan_to_num_(0)
        g = observed.gradient.index_select(-2, part).to(compute)
        inner = (g * observed.outputs.index_select(-2, part).to(compute)).sum(-1, keepdim=True)
        d = p.mul_(inner - g @ values.mT)  # -P * (dP - inner)
        # heads side by side: one product per sequence, and no copy of the context for every head
        d = d.expand(b, h, *d.shape[-2:])
        yield part, (d.flatten(1, 2) @ context).unflatten(1, (h, len(part)))


@dataclass(eq=False)
class _Pass:
    """One forward pass, filled in as it goes."""

    x: Tensor
    context: Tensor = field(init=False)
    operator: str = ""
    scores: Scores | None = None
    values: Tensor = field(init=False)
    outputs: Tensor = field(init=False)
    gradient: Tensor | None = None


class _NotingBuilder:
    """The layer's builder, which also notes the operator it made.  Scores stay a function of q.k / sqrt(k)."""

    by_dot_product = True

    def __init__(self, build: Builder, watch: Watch) -> None:
        self.build, self.note = build, torch.compiler.disable(watch.note_operator)

    def __call__(self, q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
        operator = self.build(q, k, **masks)
        self.note(operator)
        return operator


@final
class Watch:
    """Watches one layer from construction until `close`; `take` returns the passes that have had their backward."""

    def __init__(self, name: str, layer: MultiHead) -> None:
        if layer.build is not softmax and not getattr(layer.build, "by_dot_product", False):
            raise UnsupportedError(
                f"Grower: {name} is built by {getattr(layer.build, '__name__', type(layer.build).__name__)}, which "
                "does not say that P depends on q.k / sqrt(k) alone; set by_dot_product = True on it if it does"
            )
        self.name, self.layer = name, layer
        self.paused = False
        self.passes: list[_Pass] = []
        self._open: dict[int, _Pass] = {}  # the forward pass of each thread
        self._original = layer.build
        layer.build = _NotingBuilder(layer.build, self)
        outside: Any = torch.compiler.disable  # notes are taken between compiled graphs, not in them
        self._hooks = [
            layer.query.register_forward_pre_hook(outside(self._before_query)),
            layer.key.register_forward_pre_hook(outside(self._before_key)),
            layer.value.register_forward_hook(outside(self._after_value)),
            layer.out.register_forward_pre_hook(outside(self._before_out)),
        ]

    def _before_query(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        # a pass begins with its queries; one that never reached its output was only inspected
        self._open.pop(threading.get_ident(), None)
        if not self.paused and torch.is_grad_enabled():
            self._open[threading.get_ident()] = _Pass(args[0].detach())

    def _before_key(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        current = self._open.get(threading.get_ident())
        if current is not None:
            current.context = args[0].detach()

    def note_operator(self, operator: AttentionOperator) -> None:
        current = self._open.get(threading.get_ident())
        if current is not None:
            current.operator = type(operator).__name__
            current.scores = _flat(operator.scores) if isinstance(operator, Softmax) else None

    def _after_value(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        current = self._open.get(threading.get_ident())
        if current is not None:
            current.values = output.detach()

    def _before_out(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        current = self._open.pop(threading.get_ident(), None)
        outputs = args[0]
        if current is None or not outputs.requires_grad:
            return
        # passes that were not taken, and passes that no backward ever reached, are dropped
        if any(p.gradient is not None for p in self.passes):
            self.passes.clear()
        del self.passes[:-PENDING]
        current.outputs = outputs.detach()
        self.passes.append(current)

        def store(gradient: Tensor) -> None:
            current.gradient = gradient.detach()

        outputs.register_hook(store)

    def take(self) -> list[ObservedPass]:
        """The finished passes, which are forgotten here; empty when there was no backward pass."""
        done = [p for p in self.passes if p.gradient is not None]
        self.passes.clear()
        return [self._observed(p) for p in done]

    def _observed(self, p: _Pass) -> ObservedPass:
        assert p.gradient is not None
        if p.scores is None:
            raise UnsupportedError(f"observe: {self.name} attends with {p.operator}, but only softmax can be grown")
        heads = self.layer.value_heads
        x, context = (t.reshape(-1, *t.shape[-2:]) for t in (p.x, p.context))
        values, outputs, gradient = (
            heads.split(t).reshape(len(x), len(heads.sizes), t.shape[-2], -1) for t in (p.values, p.outputs, p.gradient)
        )
        return ObservedPass(p.scores, x, context.expand(len(x), -1, -1), values, outputs, gradient)

    def forget(self) -> None:
        self.passes.clear()

    def close(self) -> None:
        """Restore the layer."""
        for hook in self._hooks:
            hook.remove()
        self.passes.clear()
        if isinstance(self.layer.build, _NotingBuilder):
            self.layer.build = self._original


def _flat(s: Scores) -> Scores:
    """The same scores with batch axes (*batch, h) as (b, h), detached: a stored pass must not keep the graph alive."""
    batch = s.shape[:-3]

    def four(x: Tensor) -> Tensor:
        x = x.detach()
        if x.dim() > 4:
            return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)

    pairs, bias = (None if x is None else four(x) for x in (s.mask.visible, s.mask.attn_bias))
    return Scores(four(s.q), four(s.k), s.scale, Mask(s.mask.m, s.mask.n, s.mask.causal, None, pairs, bias))
