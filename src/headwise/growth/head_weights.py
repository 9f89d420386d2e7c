"""Weights in and out of a layer: W_q (d_q, k) with bias row and scale folded in  <->  the rows of `query` and `key`.

    query.weight[head] = (W_q without its last row)^T sqrt(k),   query.bias[head] = (last row of W_q) sqrt(k)
    key.weight[head] = W_k^T,   key.bias[head] = the old one, zero for new directions

The layer divides scores by sqrt(k) of the head, so a wider head has its queries multiplied by sqrt(new k): scores do
not jump.  A key bias adds the same to every score of a row, which softmax ignores, so any value is correct.
New Parameter objects are made, because autograd graphs that are still alive remember the shapes of the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.growth.bottleneck import HeadKey
from headwise.growth.problem import Factors
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices

T = TypeVar("T")

ParameterName = tuple[str, str]
"""(linear map of the layer, weight or bias)"""


def factors(layer: MultiHead, head: int) -> Factors:
    """The head's weights as the solver sees them: (1, d_q, k) and (d_k, k), float64."""
    rows = head_slices(layer.key_widths)[head]
    wq = layer.query.weight.detach()[rows].double().mT
    if layer.query.bias is not None:
        wq = torch.cat([wq, layer.query.bias.detach()[rows].double().unsqueeze(0)])
    return Factors((wq / math.sqrt(layer.key_widths[head])).unsqueeze(0), layer.key.weight.detach()[rows].double().mT)


def parameters(layer: MultiHead) -> dict[ParameterName, nn.Parameter]:
    """The four (or, without biases, two) parameters that a change of key width replaces, by name."""
    linears = {"query": layer.query, "key": layer.key}
    return {(part, name): x for part, linear in linears.items() for name, x in linear.named_parameters()}


@final
@dataclass(frozen=True, eq=False)
class InstalledWeights:
    """The parameters of a layer before and after a change of widths."""

    layer: MultiHead
    widths: tuple[int, ...]
    before: dict[ParameterName, nn.Parameter]
    after: dict[ParameterName, nn.Parameter]

    def undo(self) -> None:
        _set(self.layer, self.widths, self.before)

    def write(self, weights: Mapping[int, Factors]) -> None:
        """Overwrite the installed weights of some heads by others of the same widths, as a line search does."""
        slices = head_slices(self.layer.key_widths)
        with torch.no_grad():
            for name, parameter in self.after.items():
                if name != ("key", "bias"):
                    for head, new in weights.items():
                        parameter[slices[head]] = _rows(new, name, parameter).to(parameter)


def install(layer: MultiHead, weights: Mapping[int, Factors]) -> InstalledWeights:
    """Give some heads of a layer other weights, of any width; the others keep theirs."""
    before, widths = parameters(layer), layer.key_widths
    sizes = tuple(weights[h].width if h in weights else k for h, k in enumerate(widths))
    after = {}
    for name, old in before.items():
        rows = []
        for head, (old_rows, k) in enumerate(zip(head_slices(widths), sizes, strict=True)):
            if name == ("key", "bias"):
                rows.append(F.pad(old.detach()[old_rows][:k], (0, max(0, k - widths[head]))))
            else:
                rows.append(_rows(weights[head], name, old).to(old) if head in weights else old.detach()[old_rows])
        after[name] = nn.Parameter(torch.cat(rows).to(old), requires_grad=old.requires_grad)
    _set(layer, sizes, after)
    return InstalledWeights(layer, widths, before, after)


def install_all(layers: Mapping[str, MultiHead], weights: Mapping[HeadKey, Factors]) -> dict[str, InstalledWeights]:
    """`install` layer by layer; either all or none."""
    done: dict[str, InstalledWeights] = {}
    try:
        for name, heads in by_layer(weights).items():
            done[name] = install(layers[name], heads)
    except BaseException:
        for installed in done.values():
            installed.undo()
        raise
    return done


def by_layer(values: Mapping[HeadKey, T]) -> dict[str, dict[int, T]]:
    """{(layer, head): value} as {layer: {head: value}}"""
    layers: dict[str, dict[int, T]] = {}
    for (layer, head), value in values.items():
        layers.setdefault(layer, {})[head] = value
    return layers


def _rows(weights: Factors, name: ParameterName, like: Tensor) -> Tensor:
    """The rows of one parameter, in the layer's own scale."""
    if name == ("key", "weight"):
        return weights.wk.mT
    wq = weights.wq[0] * math.sqrt(weights.width)
    return wq[-1] if name == ("query", "bias") else wq[: like.shape[1]].mT


def _set(layer: MultiHead, sizes: Sequence[int], new: Mapping[ParameterName, nn.Parameter]) -> None:
    for (part, name), parameter in new.items():
        setattr(getattr(layer, part), name, parameter)
    layer.key_heads.resize_(sizes)
    layer.query.out_features = layer.key.out_features = sum(sizes)
