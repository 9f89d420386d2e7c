"""What passes through a layer during the user's own forward and backward pass, kept until it is asked for.

Nothing is computed here and nothing is added to the graph: module hooks keep references to tensors that the forward
pass made anyway, the layer's builder is wrapped to see the operator it makes, and a tensor hook catches the gradient
of the heads' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.growth.score_gradients import Call
from headwise.nn.attention_layer import Builder
from headwise.nn.multihead import MultiHead
from headwise.operators._kernels.scores import Scores
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import Softmax, softmax

PENDING = 16
"""Passes of one layer that may wait for their backward: more are only made by calls without one."""


@dataclass(eq=False)
class _Pass:
    """One forward pass, filled in as it goes."""

    x: Tensor
    context: Tensor | None = None
    operator: AttentionOperator | None = None
    values: Tensor | None = None
    outputs: Tensor | None = None
    gradient: Tensor | None = None


class _Seen:
    """The layer's builder, and a note of the operator it made.  The scores stay a function of q.k / sqrt(k)."""

    by_dot_product = True

    def __init__(self, build: Builder, watch: Watch) -> None:
        self.build, self.note = build, torch.compiler.disable(watch.saw_operator)

    def __call__(self, q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
        operator = self.build(q, k, **masks)
        self.note(operator)
        return operator


@final
class Watch:
    """Watches one layer from construction until `close`; `take` gives the passes that have had their backward."""

    def __init__(self, name: str, layer: MultiHead) -> None:
        if layer.build is not softmax and not getattr(layer.build, "by_dot_product", False):
            raise UnsupportedError(
                f"Grower: {name} is built by {getattr(layer.build, '__name__', type(layer.build).__name__)}, which "
                "does not say that P depends on q.k / sqrt(k) alone; set by_dot_product = True on it if it does"
            )
        self.name, self.layer = name, layer
        self.paused = False
        self.passes: list[_Pass] = []
        self._open: _Pass | None = None
        self._original = layer.build
        layer.build = _Seen(layer.build, self)
        outside: Any = torch.compiler.disable  # notes are taken between compiled graphs, not in them
        self._hooks = [
            layer.query.register_forward_pre_hook(outside(self._asked)),
            layer.key.register_forward_pre_hook(outside(self._keyed)),
            layer.value.register_forward_hook(outside(self._valued)),
            layer.out.register_forward_pre_hook(outside(self._left)),
        ]

    def _asked(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        # a pass begins with its queries; one that never came to its output was only looked at
        self._open = None if self.paused or not torch.is_grad_enabled() else _Pass(args[0].detach())

    def _keyed(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._open is not None:
            self._open.context = args[0].detach()

    def saw_operator(self, operator: AttentionOperator) -> None:
        if self._open is not None:
            # detached: a note must not keep the graph alive
            self._open.operator = _flat(operator) if isinstance(operator, Softmax) else operator

    def _valued(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._open is not None:
            self._open.values = output.detach()

    def _left(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        current, self._open = self._open, None
        outputs = args[0]
        if current is None or not outputs.requires_grad:
            return
        # a finished pass that nobody asked for, and passes that no backward ever reached, are not kept for ever
        if any(p.gradient is not None for p in self.passes):
            self.passes.clear()
        del self.passes[:-PENDING]
        current.outputs = outputs.detach()
        self.passes.append(current)

        def arrived(gradient: Tensor) -> None:
            current.gradient = gradient.detach()

        outputs.register_hook(arrived)

    def take(self) -> list[Call]:
        """The finished passes, which are forgotten here; empty when no backward pass has come by."""
        done = [p for p in self.passes if p.gradient is not None]
        self.passes.clear()
        return [self._call(p) for p in done]

    def _call(self, p: _Pass) -> Call:
        operator = p.operator
        assert p.context is not None
        assert p.values is not None
        assert p.outputs is not None
        assert p.gradient is not None
        if not isinstance(operator, Softmax):
            raise UnsupportedError(
                f"observe: {self.name} attends with {type(operator).__name__}, but only softmax scores can be grown"
            )
        heads = self.layer.value_heads
        x, context = (t.reshape(-1, *t.shape[-2:]) for t in (p.x, p.context))
        values, outputs, gradient = (
            heads.split(t).reshape(len(x), len(heads.sizes), t.shape[-2], -1) for t in (p.values, p.outputs, p.gradient)
        )
        return Call(operator, x, context.expand(len(x), -1, -1), values, outputs, gradient)

    def close(self) -> None:
        """The layer as it was."""
        for hook in self._hooks:
            hook.remove()
        self.passes.clear()
        if isinstance(self.layer.build, _Seen):
            self.layer.build = self._original


def _flat(operator: Softmax) -> Softmax:
    """The same P with its batch axes (*batch, h) as (b, h), cut off from the graph."""
    s = operator.scores
    batch = operator.shape[:-3]

    def four(x: Tensor) -> Tensor:
        x = x.detach()
        if x.dim() > 4:
            return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)

    keep, bias = (None if x is None else four(x) for x in (s.keep, s.bias))
    return Softmax(
        Scores(four(s.q), four(s.k), s.scale, replace(s.mask, key_mask=None, pair_mask=keep, attn_bias=bias))
    )
