"""M_h = X_q^T D_h X with D_h = -dL/dS_h = -P_h * (dO_h V_h^T - rowsum(dO_h * O_h)).

The gradient of every head's scores, seen through its tokens, from what a training step leaves behind.  No n x n tensor.

Two ways, which share nothing:

  direct    rows of P are formed again in blocks and multiplied out.  m n (k + d + d_k) multiply-adds a head.
  appended  q' = [q | x_q], k' = [k | x Z^T] with Z = 0 a leaf: the fused kernel's own backward pass gives Z.grad = -M.
            Works for every operator that is a function of q.k, about six times the work of the direct way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import Softmax

CHUNK = 1 << 21
"""Scores alive at once over batch and heads."""


@final
@dataclass(frozen=True, eq=False)
class Call:
    """One pass of a batch through a layer, and what came back.

    x (b, m, d_e) asks, context (b, n, d_c) is asked; values (b, h, n, d), outputs and their gradient (b, h, m, d).
    """

    operator: AttentionOperator
    x: Tensor
    context: Tensor
    values: Tensor
    outputs: Tensor
    gradient: Tensor

    def live(self) -> Tensor:
        """Boolean (b, m): the rows that the loss looks at.  Elsewhere scores may change and nothing happens."""
        return (self.gradient != 0).any(-1).any(1)


def augmented(x: Tensor, bias: bool) -> Tensor:
    """[x | 1] when queries have a bias, so that the bias is one more row of W_q.  (A key bias changes no softmax.)"""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if bias else x


def allowed_rows(operator: Softmax, rows: Tensor) -> Tensor | None:
    """Boolean (b | 1, h | 1, r, n) for the query rows given, or None when every query sees every key."""
    s = operator.scores
    seen = None
    if s.keep is not None:
        seen = _take(s.keep, rows)
    if s.bias is not None:
        finite = _take(s.bias, rows) > -math.inf
        seen = finite if seen is None else seen & finite
    if s.ahead is not None:
        causal = torch.arange(s.k.shape[-2], device=rows.device) <= rows[:, None] + s.ahead
        seen = causal if seen is None else seen & causal
    return None if seen is None else seen.reshape(*(1,) * (4 - seen.dim()), *seen.shape)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x if x.shape[-2] == 1 else x.index_select(-2, rows)


def direct(call: Call, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(r, D X): the query rows given, block by block, and D_h X (b, h, r, d_k) for each block."""
    operator = call.operator
    assert isinstance(operator, Softmax)
    s = operator.scores
    compute = torch.promote_types(call.gradient.dtype, torch.float32)
    context, values, keys = (t.to(compute) for t in (call.context, call.values, s.k))
    b, h, n = values.shape[:3]
    for part in rows.split(max(1, CHUNK // (b * h * n))):
        scores = (s.q.index_select(-2, part).to(compute) * s.scale) @ keys.mT
        if s.bias is not None:
            scores = scores + _take(s.bias, part).to(compute)
        seen = allowed_rows(operator, part)
        if seen is None:
            p = torch.softmax(scores, -1)
        else:  # a row that sees nothing is zero, not NaN
            p = torch.softmax(scores.masked_fill_(~seen, -math.inf), -1).nan_to_num_(0)
        g = call.gradient.index_select(-2, part).to(compute)
        inner = (g * call.outputs.index_select(-2, part).to(compute)).sum(-1, keepdim=True)
        d = p.mul_(inner - g @ values.mT)  # -P * (dP - inner)
        # heads side by side: one product a sequence, and no copy of the context for every head
        d = d.expand(b, h, *d.shape[-2:])
        yield part, (d.flatten(1, 2) @ context).unflatten(1, (h, len(part)))


def appended(call: Call, build: Callable[..., AttentionOperator], *, bias: bool) -> Tensor:
    """M (h, d_q, d_k) over the batch by appended operands; `build(q, k)` makes P from q.k / sqrt(width of q)."""
    operator = call.operator
    assert isinstance(operator, Softmax)
    s = operator.scores
    x, context = augmented(call.x, bias), call.context
    h, k = call.values.shape[1], s.q.shape[-1]
    wide = k + x.shape[-1]
    z = torch.zeros(h, x.shape[-1], context.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
    b, m, n = x.shape[0], x.shape[1], context.shape[1]
    with torch.enable_grad():
        q = torch.cat([s.q.detach() * (s.scale * math.sqrt(wide)), x.detach().unsqueeze(1).expand(b, h, m, -1)], -1)
        tail = math.sqrt(wide) * context.detach().unsqueeze(1) @ z.mT
        keys = torch.cat([s.k.detach().expand(b, h, n, -1), tail], -1)
        out = build(q, keys)(call.values.detach())
        (grad,) = torch.autograd.grad(out, z, call.gradient)
    return -grad
