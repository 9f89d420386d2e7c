"""An attention module of transformers: its own weights stay as they are, dimensions are added beside them.

Whatever makes its queries and keys (rotary positions, grouped or packed projections, norms, relative positions), the
scores get one more term, scaling x W_q^new (c W_k^new)^T (models/widths).  All that growth has to know of the present
weights is which changes of the scores they can make themselves: the directions that they read.  They are estimated from
what the module computes, by least squares of q on x and of k on c (own_projections.py).  A rotated pair that turns far
within a sequence has no such direction (x explains less than half of it at all positions together), and rightly so: it
cannot make a change that is the same at every distance.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.growth.layers.growing_layer import GrowingLayer, ParameterName
from headwise.growth.layers.watch import PENDING, ObservedPass
from headwise.growth.problem import Factors
from headwise.growth.statistics import LayerStatistics
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.widened_attention import WidenedCall
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask


@final
class TransformersLayer(GrowingLayer):
    """The HeadDimensions of one attention module; `scaling` is noted when the module first runs."""

    bias = True

    def __init__(self, module: nn.Module, dimensions: HeadDimensions) -> None:
        self._module, self.dimensions = module, dimensions
        self.heads, self.group = dimensions.key_heads, dimensions.group

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def key_widths(self) -> tuple[int, ...]:
        return self.dimensions.widths

    @property
    def inputs(self) -> tuple[int, int]:
        return self.dimensions.inputs[0] + 1, self.dimensions.inputs[1]

    def watch(self, name: str) -> CallWatch:
        return CallWatch(name, self)

    def parameters(self) -> dict[ParameterName, nn.Parameter]:
        d = self.dimensions
        return {("query", "weight"): d.query_weight, ("query", "bias"): d.query_bias, ("key", "weight"): d.key_weight}

    def factors(self, statistics: LayerStatistics) -> list[Factors]:
        own = statistics.own
        if own is None:
            raise InputError("grow: no statistics of the module's own queries and keys; observe() a batch first")
        q, k = own.directions()  # (h, d_q, k), (h_kv, d_k, k)
        q = q.unflatten(0, (self.heads, self.group)) / self.unit(0)
        return [self.own_factors(head, Factors(q[head], k[head])) for head in range(self.heads)]

    def own_factors(self, head: int, like: Factors) -> Factors:
        d, k = self.dimensions, self.dimensions.base
        rows = torch.cat([d.query_weight, d.query_bias.unsqueeze(-1)], -1)[d.query_rows(head)].detach().double()
        wq = rows.unflatten(0, (self.group, d.added[head])).mT / self.unit(0)
        wk = d.key_weight[d.key_rows(head)].detach().double().mT
        return Factors(like.wq[..., :k], like.wk[:, :k]).beside(Factors(wq, wk))

    def unit(self, width: int) -> float:
        assert self.scaling is not None, "a batch was observed"
        return 1 / self.scaling

    def _added(self, widths: Sequence[int]) -> tuple[int, ...]:
        return tuple(width - self.dimensions.base for width in widths)

    def slices(self, name: ParameterName, widths: Sequence[int]) -> Sequence[slice]:
        times, start, found = self.group if name[0] == "query" else 1, 0, []
        for p in self._added(widths):
            found.append(slice(start, start + times * p))
            start += times * p
        return found

    def rows(self, q: Tensor, k: Tensor, name: ParameterName) -> Tensor:
        if name == ("key", "weight"):
            return k[:, self.dimensions.base :].mT
        new = q[..., self.dimensions.base :].mT.flatten(0, 1)  # head by head
        return new[:, -1] if name == ("query", "bias") else new[:, :-1]

    def resize(self, widths: Sequence[int]) -> None:
        self.dimensions.added = self._added(widths)


@final
class CallWatch:
    """Notes the attention calls of a module: operands when it is called, the gradient of its output later."""

    def __init__(self, name: str, layer: TransformersLayer) -> None:
        self.name, self.layer = name, layer
        self.paused = False
        self.passes: list[_Call] = []
        self._lock = threading.Lock()
        layer.dimensions.observer = self.note  # type: ignore[assignment]

    def note(self, call: WidenedCall, out: Tensor) -> None:
        self.layer.scaling = call.scaling
        if self.paused or not torch.is_grad_enabled() or not out.requires_grad:
            return
        noted = _Call(call, out)
        with self._lock:
            if any(p.gradient is not None for p in self.passes):
                self.passes.clear()  # they were not taken
            del self.passes[:-PENDING]
            self.passes.append(noted)
        out.register_hook(noted.store)

    def take(self) -> list[ObservedPass]:
        with self._lock:
            done = [p for p in self.passes if p.gradient is not None]
            self.passes.clear()
        return [p.observed(self.layer.group) for p in done]

    def forget(self) -> None:
        self.passes.clear()

    def close(self) -> None:
        self.passes.clear()
        del self.layer.dimensions.observer


class _Call:
    def __init__(self, call: WidenedCall, out: Tensor) -> None:
        parts = {name: x.detach() for name, x in vars(call).items() if isinstance(x, Tensor)}
        self.call = WidenedCall(**{**vars(call), **parts})
        self.out = out.detach()
        self.gradient: Tensor | None = None

    def store(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()

    def observed(self, group: int) -> ObservedPass:
        c = self.call
        assert self.gradient is not None
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (c.wide_k, c.v))
        mask = c.mask
        bias = None if mask.attn_bias is None else mask.attn_bias.detach()
        pairs = mask.visible
        flat = Mask(mask.m, mask.n, mask.causal, None, None if pairs is None else _four(pairs), bias)
        scores = Scores(c.wide_q, k, c.scaling, flat)
        out, gradient = self.out.transpose(1, 2), self.gradient.transpose(1, 2)
        return ObservedPass(scores, c.x, c.context, v, out, gradient, own=(c.q, c.k))


def _four(x: Tensor) -> Tensor:
    return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
