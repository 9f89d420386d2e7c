"""SAN(X) = sum over paths P_path X W_path + 1 b^T, grouped exactly without enumerating the (H + 1)^L paths.

    T_(l+1)[j] = T_l[j] + sum_h P_h^l T_l[j-1] W_h^l            j = number of heads on the path, T_0[0] = X

with the P_h^l of the forward pass held fixed: L + 1 tensors instead of (H + 1)^L terms.  The same recursion sums the
paths through one head, and those that avoid a set of heads.  Without skip connections only j = l is nonzero.
Dong, Cordonnier & Loukas 2021, Theorem 2.1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.linalg.norms import frobenius_norm
from headwise.theory.collapse import Norm, relative_residual
from headwise.theory.stack import Stack

Head = tuple[int, int]
"""(layer, head), both from 0."""

SKIP = -1
"""In a path: the skip connection of that layer."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Sums of paths by length, the contribution of the biases, and the output of the network."""

    by_length: Tensor  # (L + 1, n, d): from X through j heads
    bias: Tensor  # (n, d): all paths that start at a bias
    output: Tensor

    @property
    def error(self) -> float:
        """||sum of all groups - output|| / ||output||: rounding only."""
        total = self.by_length.sum(0) + self.bias
        return ((total - self.output).norm() / self.output.norm()).item()

    def norms(self, norm: Norm = frobenius_norm) -> Tensor:  # (L + 1,)
        """||T_j||: the size of the contribution of all paths through j heads."""
        return norm(self.by_length)

    def residuals(self, norm: Norm = frobenius_norm) -> Tensor:  # (L + 1,)
        """||res T_j|| / ||T_j||: how much tokens differ after j heads."""
        return relative_residual(self.by_length, norm)


def by_length(stack: Stack, x: Tensor) -> Groups:
    """All paths grouped by the number of heads on them; O(L^2 H) products."""
    mixed, states = _frozen(stack, x)
    bias = torch.zeros_like(x)
    for layer, p in zip(stack.layers, mixed, strict=True):
        bias = (bias if stack.skip else 0) + _through(p, bias[None], layer.w)[0] + layer.bias
    return Groups(_grouped(stack, x, mixed, lambda index, h: True), bias, states[-1])


def through_head(stack: Stack, x: Tensor, head: Head) -> Tensor:  # (L + 1, n, d)
    """Sum of all paths from X through head (l, h), by length."""
    _exists(stack, head)
    mixed, _ = _frozen(stack, x)
    return _grouped(stack, x, mixed, lambda index, h: index != head[0] or h == head[1], no_skip=head[0])


def avoiding(stack: Stack, x: Tensor, heads: Set[Head]) -> Tensor:  # (L + 1, n, d)
    """Sum of all paths from X through none of `heads`, by length."""
    for head in heads:
        _exists(stack, head)
    mixed, _ = _frozen(stack, x)
    return _grouped(stack, x, mixed, lambda index, h: (index, h) not in heads)


def single_paths(stack: Stack, x: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Every path with its contribution, depth first; prefixes are computed once, a skipped layer is SKIP."""
    mixed, _ = _frozen(stack, x)

    def walk(index: int, path: tuple[int, ...], y: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        if index == len(stack.layers):
            yield path, y
            return
        if stack.skip:
            yield from walk(index + 1, (*path, SKIP), y)
        for h in range(len(mixed[index])):
            yield from walk(index + 1, (*path, h), mixed[index][h] @ y @ stack.layers[index].w[h])

    yield from walk(0, (), x)


@dataclass(frozen=True)
class Sampled:
    """Mean over paths of one length, with its standard error."""

    mean: float
    error: float
    paths: int  # in the sample
    total: int  # of this length


def sample_norms(
    stack: Stack, x: Tensor, length: int, count: int, *, generator: torch.Generator | None = None
) -> Sampled:
    """Mean Frobenius norm of the contributions of single paths of `length`; exact if there are at most `count`."""
    depth, heads = len(stack.layers), stack.layers[0].wq.shape[0]
    if any(layer.wq.shape[0] != heads for layer in stack.layers):
        raise InputError("paths: sample_norms needs layers with equally many heads; use single_paths")
    if not 0 <= length <= depth or (not stack.skip and length != depth):
        raise InputError(
            f"paths: length {length} does not occur in {depth} layers {'with' if stack.skip else 'without'} skips"
        )
    total = math.comb(depth, length) * heads**length
    mixed, _ = _frozen(stack, x)
    if total <= count:
        chosen = [
            dict(zip(layers, picks, strict=True))
            for layers in itertools.combinations(range(depth), length)
            for picks in itertools.product(range(heads), repeat=length)
        ]
    else:
        chosen = []
        for _ in range(count):
            layers = torch.randperm(depth, generator=generator)[:length].tolist()
            picks = torch.randint(heads, (length,), generator=generator).tolist()
            chosen.append(dict(zip(sorted(layers), picks, strict=True)))
    norms = []
    for path in chosen:
        y = x
        for index, h in path.items():
            y = mixed[index][h] @ y @ stack.layers[index].w[h]
        norms.append(y.norm().item())
    values = torch.tensor(norms, dtype=torch.float64)
    error = 0.0 if total <= count else (values.std() / math.sqrt(len(values))).item()
    return Sampled(values.mean().item(), error, len(values), total)


def _frozen(stack: Stack, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    states = stack.states(x)
    return [layer.attention(y) for layer, y in zip(stack.layers, states[:-1], strict=True)], states


def _grouped(
    stack: Stack, x: Tensor, mixed: list[Tensor], kept: Callable[[int, int], bool], no_skip: int | None = None
) -> Tensor:  # (L + 1, n, d)
    """T_L[j] over the heads with `kept(layer, head)`, without the skip connection of layer `no_skip`."""
    groups = torch.cat([x[None], x.new_zeros(len(stack.layers), *x.shape)])
    for index, (layer, p) in enumerate(zip(stack.layers, mixed, strict=True)):
        stay = groups if stack.skip and index != no_skip else torch.zeros_like(groups)
        heads = [h for h in range(len(p)) if kept(index, h)]
        groups = torch.cat([stay[:1], stay[1:] + _through(p[heads], groups[:-1], layer.w[heads])])
    return groups


def _through(p: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """sum_h P_h Y_j W_h for every group j: p (h, n, n), y (j, n, d), w (h, d, d)."""
    return sum((p[h] @ y @ w[h] for h in range(len(p))), torch.zeros_like(y))


def _exists(stack: Stack, head: Head) -> None:
    heads = [layer.wq.shape[0] for layer in stack.layers]
    if not (0 <= head[0] < len(heads) and 0 <= head[1] < heads[head[0]]):
        raise InputError(f"paths: head {head} does not exist; the layers of the stack have {heads} heads")
