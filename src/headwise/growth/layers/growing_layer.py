"""One attention layer whose heads change their query/key width: W_q (g, d_q, k), W_k (d_k, k)  <->  its parameters.

    query.weight[head] = (W_q without its last row)^T u,   query.bias[head] = (last row of W_q) u
    key.weight[head] = W_k^T,   key.bias[head] = the old one, zero for new directions

u undoes the scale that the layer multiplies scores by: a `MultiHead` divides by sqrt(k) of the head, so a wider head
has its queries multiplied by sqrt(new k) and scores do not jump.  A key bias adds the same to every score of a row,
which softmax ignores, so any value is correct.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.growth.layers.watch import ObservedPass, Watch
from headwise.growth.problem import Factors
from headwise.growth.statistics import LayerStatistics
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices

ParameterName = tuple[str, str]
"""(query or key, weight or bias)"""


class PassWatch(Protocol):
    """Notes the passes of a layer from construction until `close`."""

    paused: bool

    def take(self) -> list[ObservedPass]:
        """The passes that have had their backward, which are forgotten here."""
        ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class GrowingLayer(ABC):
    """Heads that share keys grow together: `heads` counts the key heads, `group` the query heads of each."""

    heads: int
    group: int = 1
    bias: bool  # of the queries
    scaling: float | None = None  # that scores are multiplied by, where it does not follow from the width

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The attention module."""

    @property
    @abstractmethod
    def key_widths(self) -> tuple[int, ...]:
        """The query/key width of each key head."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[int, int]:
        """d_q (with the bias) and d_k."""

    @abstractmethod
    def watch(self, name: str) -> PassWatch: ...

    @abstractmethod
    def parameters(self) -> dict[ParameterName, nn.Parameter]:
        """The parameters that change with the widths."""

    @abstractmethod
    def factors(self, statistics: LayerStatistics) -> list[Factors]:
        """The present weights of each key head as the solver sees them, float64."""

    @abstractmethod
    def unit(self, width: int) -> float:
        """u: rows of the query parameter are u W_q."""

    @abstractmethod
    def slices(self, name: ParameterName, widths: Sequence[int]) -> Sequence[slice]:
        """The rows of each key head in a parameter, at the given widths."""

    @abstractmethod
    def rows(self, q: Tensor, k: Tensor, name: ParameterName) -> Tensor:
        """The rows of a parameter for one key head, from q (g, d_q, k) and k (d_k, k) in the layer's own scale."""

    @abstractmethod
    def resize(self, widths: Sequence[int]) -> None:
        """Note the new widths, after the parameters were replaced."""

    @abstractmethod
    def own_factors(self, head: int, like: Factors) -> Factors:
        """The weights that the parameters hold now; `like` has them at their width, for what no parameter holds."""

    def weight_rows(self, weights: Factors, name: ParameterName) -> Tensor:
        return self.rows(weights.wq * self.unit(weights.width), weights.wk, name)

    def statistics(self, **options: object) -> LayerStatistics:
        like = next(iter(self.parameters().values()))
        heads = self.heads * self.group
        return LayerStatistics(heads, *self.inputs, dtype=like.dtype, device=like.device, **options)  # type: ignore[arg-type]


@torch.no_grad()
def replace_data(parameter: nn.Parameter, new: Tensor) -> None:
    """Give a parameter data of another shape; it stays the same object, for optimizers and lists that hold it.

    torch makes a new gradient accumulator when the dtype of the data changes, not when only the shape does; without a
    new one, a loss of before that is still alive would make the next backward fail.
    """
    parameter.grad = None  # it has the old shape
    parameter.data = new.to(torch.float32 if new.dtype == torch.float64 else torch.float64)
    parameter.data = new


@final
class MultiHeadLayer(GrowingLayer):
    """A headwise.nn.MultiHead: the rows of its `query` and `key` are the heads' dimensions."""

    def __init__(self, module: MultiHead) -> None:
        self._module = module
        self.heads, self.bias = module.heads, module.query.bias is not None

    @property
    def module(self) -> MultiHead:
        return self._module

    @property
    def key_widths(self) -> tuple[int, ...]:
        return self.module.key_widths

    @property
    def inputs(self) -> tuple[int, int]:
        return self.module.width + self.bias, self.module.context_widths[0]

    def watch(self, name: str) -> Watch:
        return Watch(name, self.module)

    def parameters(self) -> dict[ParameterName, nn.Parameter]:
        linears = {"query": self.module.query, "key": self.module.key}
        return {(part, name): x for part, linear in linears.items() for name, x in linear.named_parameters()}

    def factors(self, statistics: LayerStatistics) -> list[Factors]:
        return [self.head_factors(head) for head in range(self.heads)]

    def own_factors(self, head: int, like: Factors) -> Factors:
        return self.head_factors(head)

    def head_factors(self, head: int) -> Factors:
        """(1, d_q, k) and (d_k, k), float64."""
        query, key = self.module.query, self.module.key
        rows = head_slices(self.key_widths)[head]
        wq = query.weight.detach()[rows].double().mT
        if query.bias is not None:
            wq = torch.cat([wq, query.bias.detach()[rows].double().unsqueeze(0)])
        return Factors((wq / self.unit(self.key_widths[head])).unsqueeze(0), key.weight.detach()[rows].double().mT)

    def unit(self, width: int) -> float:
        return math.sqrt(width)

    def slices(self, name: ParameterName, widths: Sequence[int]) -> Sequence[slice]:
        return head_slices(widths)

    def rows(self, q: Tensor, k: Tensor, name: ParameterName) -> Tensor:
        if name == ("key", "bias"):
            return torch.zeros_like(k[0])
        if name == ("key", "weight"):
            return k.mT
        return q[0, -1] if name == ("query", "bias") else q[0, : self.module.width].mT

    def resize(self, widths: Sequence[int]) -> None:
        self.module.key_heads.resize_(widths)
        self.module.query.out_features = self.module.key.out_features = sum(widths)


def new_data(layer: GrowingLayer, weights: Mapping[int, Factors], widths: Sequence[int]) -> dict[ParameterName, Tensor]:
    """The data of every parameter when some heads get other weights, of `widths`; the others keep theirs."""
    new = {}
    for name, parameter in layer.parameters().items():
        old, rows = parameter.detach(), []
        for head, source in enumerate(layer.slices(name, layer.key_widths)):
            if head not in weights:
                rows.append(old[source])
            elif name == ("key", "bias"):
                kept = old[source][: widths[head]]
                rows.append(F.pad(kept, (0, widths[head] - len(kept))))
            else:
                rows.append(layer.weight_rows(weights[head], name).to(old))
        new[name] = torch.cat(rows)
    return new
