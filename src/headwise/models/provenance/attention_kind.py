"""Self- or cross-attention: whether keys are computed from the tensor that the queries are computed from.

    self     keys come from arguments of the layer that the queries come from too
    cross    keys come from another argument, or the queries are learned

Names and lengths do not tell: `multihead_attn` may attend to its own sequence, and two sequences may be equally long.
So every tensor of a forward pass remembers from which others it was computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class LayerCall(Protocol):
    """A call of a module that is running."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def args(self) -> tuple: ...
    @property
    def kwargs(self) -> dict: ...


class Provenance:
    """Tensors are numbered in the order in which they appear; each number knows those it was computed from."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which another tensor may get later
        self._parents: dict[int, tuple[int, ...]] = {}
        self._sizes: dict[int, int] = {}  # number of entries
        self._last = self._mark = 0

    def note(self, args: tuple, kwargs: dict, out: Any) -> None:
        """`out` was computed from `args` and `kwargs`."""
        outputs = tensors((out,))
        if outputs:
            given = tensors((*args, *kwargs.values()) if kwargs else args)
            inputs = tuple([self.number(x) for x in given if type(x) is not nn.Parameter])
            for x in outputs:
                number = self.number(x)
                if number in self._parents:  # changed in place
                    inputs = (*self._parents[number], *(i for i in inputs if i != number))
                self._parents[number] = inputs

    def number(self, x: Tensor) -> int:
        found = self._numbers.get(id(x))
        if found is not None and found[0]() is x:
            return found[1]
        self._last += 1
        self._numbers[id(x)] = weakref.ref(x), self._last
        self._sizes[self._last] = x.numel()
        return self._last

    def sources(self, x: Tensor, among: set[int], *, same_size: bool = False) -> set[int]:
        """Those numbers of `among` that x was computed from, and not through another of them.

        same_size   by steps that keep the number of entries: views, casts, scaling, masks
        """
        found, waiting, done = set[int](), [self.number(x)], set[int]()
        while waiting:
            number = waiting.pop()
            if number in done:
                continue
            done.add(number)
            if number in among:
                found.add(number)
            else:
                parents = self._parents.get(number, ())
                waiting += [i for i in parents if self._sizes.get(i) == x.numel()] if same_size else parents
        return found

    def mark(self) -> None:
        """All numbers so far belong to the present forward pass or to earlier ones."""
        self._mark = self._last

    def forget_earlier_passes(self) -> None:
        """Forget what was computed up to the last mark."""
        self._parents = {number: parents for number, parents in self._parents.items() if number > self._mark}
        self._sizes = {number: size for number, size in self._sizes.items() if number > self._mark}
        self._numbers = {key: entry for key, entry in self._numbers.items() if entry[0]() is not None}


def attention_kind(
    calls: Sequence[LayerCall], query: Tensor, key: Tensor, lengths: tuple[int, int], provenance: Provenance | None
) -> str:
    """ "self" or "cross" for one attention call; `calls` are the running modules, innermost first.

    The arguments of the innermost module with parameters decide: one without only applies the softmax.
    """
    m, n = lengths
    layer = next((call for call in calls if next(call.module.parameters(), None) is not None), None)
    if provenance is not None and layer is not None:
        given = {provenance.number(x): x for x in tensors((*layer.args, *layer.kwargs.values()))}
        of_query, of_key = (provenance.sources(x, set(given)) for x in (query, key))
        if of_key <= of_query and of_key:
            return "self"
        if of_query and of_query < of_key:  # keys are this sequence and another
            return "self" if m == n else "cross"
        if of_key:
            same = len(of_query) == len(of_key) == 1 and _equal(given[of_query.pop()], given[of_key.pop()])
            return "self" if same else "cross"
    return "self" if m == n else "cross"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among `values`, and in lists and tuples among them."""
    found = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):  # also the named results of torch
            found += [each for each in x if isinstance(each, Tensor)]
    return found
