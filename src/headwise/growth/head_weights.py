"""Weights in and out of a layer: W_q (d_q, k) with bias row and scale folded in  <->  the rows of `query` and `key`.

    query.weight[head] = (W_q without its last row)^T sqrt(k),   query.bias[head] = (last row of W_q) sqrt(k)
    key.weight[head] = W_k^T,   key.bias[head] = the old one, zero for new directions

The layer divides scores by sqrt(k) of the head, so a wider head has its queries multiplied by sqrt(new k): scores do
not jump.  A key bias adds the same to every score of a row, which softmax does not see: any value is right.
New Parameter objects are made, because autograd graphs that are still alive remember the shapes of the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from headwise.growth.solve import Factors
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices

NAMES = (("query", "weight"), ("query", "bias"), ("key", "weight"), ("key", "bias"))


def factors(layer: MultiHead, head: int) -> Factors:
    """The head's weights as the solver sees them: (1, d_q, k) and (d_k, k), float64."""
    rows = head_slices(layer.key_widths)[head]
    wq = layer.query.weight.detach()[rows].double().mT
    if layer.query.bias is not None:
        wq = torch.cat([wq, layer.query.bias.detach()[rows].double().unsqueeze(0)])
    return Factors((wq / math.sqrt(layer.key_widths[head])).unsqueeze(0), layer.key.weight.detach()[rows].double().mT)


def parameters(layer: MultiHead) -> dict[tuple[str, str], nn.Parameter]:
    """The four (or two) parameters that a change of key width replaces, by name."""
    found = {}
    for part, kind in NAMES:
        parameter = getattr(getattr(layer, part), kind)
        if parameter is not None:
            found[part, kind] = parameter
    return found


@final
@dataclass(frozen=True, eq=False)
class Installed:
    """What a layer was before: enough to put it back."""

    layer: MultiHead
    widths: tuple[int, ...]
    before: dict[tuple[str, str], nn.Parameter]
    after: dict[tuple[str, str], nn.Parameter]

    def undo(self) -> None:
        _set(self.layer, self.widths, self.before)


def install(layer: MultiHead, grown: Mapping[int, Factors]) -> Installed:
    """Give the heads named the weights named; the others keep theirs."""
    before, widths = parameters(layer), layer.key_widths
    sizes = tuple(grown[h].width if h in grown else k for h, k in enumerate(widths))
    after = {}
    for name, old in before.items():
        if name == ("key", "bias"):
            rows = [_kept_bias(old.detach()[s], k) for s, k in zip(head_slices(widths), sizes, strict=True)]
        else:
            rows = [
                _rows(grown[h], name, old).to(old) if h in grown else old.detach()[s]
                for h, s in enumerate(head_slices(widths))
            ]
        after[name] = nn.Parameter(torch.cat(rows).to(old), requires_grad=old.requires_grad)
    _set(layer, sizes, after)
    return Installed(layer, widths, before, after)


def write(installed: Installed, grown: Mapping[int, Factors]) -> None:
    """Other numbers of the same widths into weights already installed: what a line search does."""
    slices = head_slices(installed.layer.key_widths)
    with torch.no_grad():
        for name, parameter in installed.after.items():
            if name != ("key", "bias"):
                for head, weights in grown.items():
                    parameter[slices[head]] = _rows(weights, name, parameter).to(parameter)


def _rows(weights: Factors, name: tuple[str, str], like: Tensor) -> Tensor:
    """The rows of one parameter, in the layer's own scale."""
    if name == ("key", "weight"):
        return weights.wk.mT
    wq = weights.wq[0] * math.sqrt(weights.width)
    if name == ("query", "bias"):
        return wq[-1]
    return wq[: like.shape[1]].mT


def _kept_bias(old: Tensor, k: int) -> Tensor:
    kept = old[:k]
    return torch.cat([kept, kept.new_zeros(k - len(kept))])


def _set(layer: MultiHead, sizes: tuple[int, ...], new: Mapping[tuple[str, str], nn.Parameter]) -> None:
    for (part, kind), parameter in new.items():
        setattr(getattr(layer, part), kind, parameter)
    layer.key_heads.resize_(sizes)
    layer.query.out_features = layer.key.out_features = sum(sizes)
