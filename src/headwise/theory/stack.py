"""The weights of a stack of self-attention layers, to which the theorems about depth apply.

    SA(X) = sum_h P_h X W_h + 1 b^T,      P_h = softmax(X A_h X^T / sqrt(d_qk) + 1 a_h^T),      W_h = W_V,h W_O,h

A_h = W_Q,h W_K,h^T and a_h = X W_K,h b_Q,h (the part of the biases that does not cancel in the softmax).  With `skip`
each layer adds X.  Weights are float64 tensors with heads as the first axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headwise.errors import NonFiniteError, ShapeError, UnsupportedError
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices
from headwise.operators.softmax import softmax


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: wq, wk (h, d, k), wv (h, d, v), wo (h, v, d), bias (d,) after the output, bq (h, k)."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    bias: Tensor
    bq: Tensor

    def attention(self, x: Tensor) -> Tensor:  # (n, d) -> (h, n, n)
        q = x @ self.wq + self.bq[:, None]
        return torch.softmax(q @ (x @ self.wk).mT / math.sqrt(self.wq.shape[-1]), dim=-1)

    @property
    def w(self) -> Tensor:
        """W_h = W_V,h W_O,h, (h, d, d)."""
        return self.wv @ self.wo

    def __call__(self, x: Tensor) -> Tensor:
        return (self.attention(x) @ x @ self.w).sum(0) + self.bias

    def split(self, mean: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:  # (d,), (n, d) -> (d,), (n, d)
        """Mean and residual of the output from those of X = 1 mean' + rest, without cancellation.

        Row i of the scores is r + e_i with r the same for all rows, so with s = softmax(r)
        P_ij - s_j = s_j (expm1(e_ij) - c_i) / (1 + c_i),  c_i = sum_j s_j expm1(e_ij):  exact however small e is.
        """
        keys, scale = rest @ self.wk, math.sqrt(self.wq.shape[-1])
        r = (mean @ self.wq + self.bq).unsqueeze(-2) @ keys.mT / scale  # (h, 1, n)
        e = (rest @ self.wq) @ keys.mT / scale
        s = torch.softmax(r, dim=-1)
        grown = e.expm1()
        c = (s * grown).sum(-1, keepdim=True)
        moved = (s * (grown - c) / (1 + c)) @ rest  # (P - 1 s') R, small where R is
        mean = ((mean + (s @ rest).squeeze(-2) + moved.mean(-2)).unsqueeze(-2) @ self.w).sum(0).squeeze(0) + self.bias
        return mean, ((moved - moved.mean(-2, keepdim=True)) @ self.w).sum(0)


@dataclass(frozen=True, eq=False)
class Stack:
    """A sequence of layers, with or without skip connections."""

    layers: tuple[Layer, ...]
    skip: bool = False

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            widths = (layer.wq.shape[1], layer.wk.shape[1], layer.wv.shape[1], layer.wo.shape[2])
            expected = self.layers[0].wq.shape[1]
            if any(width != expected for width in widths):
                raise ShapeError(
                    f"Stack: layer {i} maps width {widths[0]} to {widths[3]}, but the stack has width {expected}"
                )
            for name in ("wq", "wk", "wv", "wo", "bias", "bq"):
                if not bool(getattr(layer, name).isfinite().all()):
                    raise NonFiniteError(f"Stack: {name} of layer {i} has non-finite entries")

    def states(self, x: Tensor) -> list[Tensor]:
        """X_0 ... X_L."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]) + (states[-1] if self.skip else 0))
        return states

    def residuals(self, x: Tensor) -> list[Tensor]:
        """res X_0 ... res X_L, accurate to the smallest float64; differences of `states` would end in rounding."""
        mean = x.mean(-2)
        residuals = [x - mean]
        for layer in self.layers:
            moved, rest = layer.split(mean, residuals[-1])
            mean = moved + (mean if self.skip else 0)
            residuals.append(rest + (residuals[-1] if self.skip else 0))
        return residuals


def random_stack(
    depth: int,
    heads: int,
    width: int,
    *,
    key_width: int | None = None,
    scale: float = 1.0,
    bias: float = 0.0,
    skip: bool = False,
    generator: torch.Generator | None = None,
) -> Stack:
    """Gaussian weights of variance scale^2 / fan-in, and Gaussian biases of standard deviation `bias`."""
    k = key_width or max(1, width // heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    layers = tuple(
        Layer(
            scale * draw(heads, width, k) / math.sqrt(width),
            scale * draw(heads, width, k) / math.sqrt(width),
            scale * draw(heads, width, k) / math.sqrt(width),
            scale * draw(heads, k, width) / math.sqrt(heads * k),
            bias * draw(width),
            bias * draw(heads, k),
        )
        for _ in range(depth)
    )
    return Stack(layers, skip)


def layer_of(module: MultiHead) -> Layer:
    """The weights of a MultiHead self-attention module in float64; value biases join the output bias (P 1 = 1)."""
    if module.build is not softmax:
        raise UnsupportedError(
            f"Stack: the theorems apply to softmax attention, not to "
            f"{getattr(module.build, '__name__', type(module.build).__name__)}"
        )
    if module.width != module.out_width or set(module.context_widths) != {module.width}:
        raise ShapeError(
            f"Stack: a layer from width {module.width} and context {module.context_widths} to {module.out_width} "
            "does not chain; the theorems apply to self-attention of one width"
        )
    keys, values = head_slices(module.key_widths), head_slices(module.value_widths)
    widest = max(module.key_widths)

    def rows(linear: nn.Linear, slices: tuple[slice, ...]) -> Tensor:
        return pad_sequence([linear.weight.detach().double()[part] for part in slices], batch_first=True).mT

    def biases(linear: nn.Linear, slices: tuple[slice, ...]) -> Tensor:
        whole = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        return pad_sequence([whole.double()[part] for part in slices], batch_first=True)

    # the stack divides by the root of the padded width
    scale = torch.tensor([math.sqrt(widest / k) for k in module.key_widths], dtype=torch.float64)
    wo = pad_sequence([module.out.weight.detach().double().mT[part] for part in values], batch_first=True)
    through = torch.einsum("hv,hvd->d", biases(module.value, values), wo)
    out = 0 if module.out.bias is None else module.out.bias.detach().double()
    return Layer(
        rows(module.query, keys) * scale[:, None, None],
        rows(module.key, keys),
        rows(module.value, values),
        wo,
        through + out,
        biases(module.query, keys) * scale[:, None],
    )
