"""The attention operator: three abstract members (shape, apply, cost), from which everything else follows."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.linalg.krylov import Spectrum, singular_values
from headwise.operators.claims import Claim
from headwise.shapes import are_tensors, autocasting, broadcast_batch, same_axis, same_kind

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_autocast(method: Method) -> Method:
    """`method` without autocast, on the device of its first tensor or of the operator."""

    @functools.wraps(method)
    def run(self: AttentionOperator, *args: Any, **kwargs: Any) -> Any:
        device = next((x.device for x in args if isinstance(x, Tensor)), None) or self.like.device
        if not autocasting(device):
            return method(self, *args, **kwargs)
        with torch.autocast(device.type, enabled=False):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class AttentionOperator(ABC):
    """A batch of m x n matrices P, defined by P v.  Rows are queries, columns are keys.

    The methods of every operator run outside autocast: sums over n keys are not half-precision numbers.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_") and not name.endswith("cost"):
                setattr(cls, name, outside_autocast(method))

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(*batch, m, n)"""

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """P v: (*batch, n, d) -> (*batch, m, d), batch axes broadcast."""

    @abstractmethod
    def cost(self, d: int) -> Cost:
        """The cost of one `apply` to d columns, over the whole batch of the operator."""

    def adjoint(self, u: Tensor) -> Tensor:
        """P^T u: (*batch, m, d) -> (*batch, n, d).  `apply` is linear in v, so its vjp at zero is the transpose."""
        *batch, _, n = self.shape
        batch = broadcast_batch(type(self).__name__, operator=batch, u=u.shape[:-2])
        u = u.expand(*batch, *u.shape[-2:])
        return torch.func.vjp(self.apply, u.new_zeros(*batch, n, u.shape[-1]))[1](u)[0]

    def adjoint_cost(self, d: int) -> Cost:
        """What one `adjoint` of d columns costs; the cost of `apply` unless overridden."""
        return self.cost(d)

    def dense(self, like: Tensor | None = None) -> Tensor:
        """P as a tensor (*batch, m, n), with the dtype and device of `like` (default: the operator's own)."""
        like = self.like if like is None else like
        *batch, _, n = self.shape
        return self.apply(torch.eye(n, dtype=like.dtype, device=like.device).expand(*batch, n, n))

    def spectrum(self, r: int, *, generator: torch.Generator | None = None) -> Spectrum:
        """The r leading singular values of P with an error estimate each, from apply and adjoint alone."""
        return singular_values(self.apply, self.adjoint, self.shape, r, like=self.like, generator=generator)

    @property
    def claims(self) -> frozenset[Claim]:
        """The properties of this P; they belong to the instance because a mask may take one away."""
        return frozenset()

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of P: the first floating tensor, operator or `q` of the fields."""
        if is_dataclass(self):
            for part in (getattr(self, field.name) for field in fields(self)):
                if isinstance(part, int):  # also a symbol, of which torch.compile does not know the attributes
                    continue
                for x in part if isinstance(part, tuple) else (getattr(part, "q", part),):
                    if isinstance(x, AttentionOperator):
                        return x.like
                    if isinstance(x, Tensor) and x.dtype.is_floating_point:
                        return x
        return torch.empty(0)

    def __call__(self, v: Tensor) -> Tensor:
        """P v with its axes checked."""
        name, like = type(self).__name__, self.like
        are_tensors(name, v=v)
        if v.dim() < 2:
            raise ShapeError(f"{name}: v must be (*batch, n, d), but has shape {tuple(v.shape)}; add a column axis")
        if 0 in v.shape:
            raise ShapeError(f"{name}: v has shape {tuple(v.shape)}: an empty axis has no attention")
        same_axis(name, "n", operator=self.shape[-1], v=v.shape[-2])
        broadcast_batch(name, operator=self.shape[:-2], v=v.shape[:-2])
        # an operator without tensors acts on any floating dtype and device
        if not like.numel():
            same_kind(name, v=v)
        elif like.dtype != v.dtype and v.dtype.is_floating_point and autocasting(v.device):
            return self.apply(v.to(like.dtype)).to(v.dtype)  # parameters stay in single precision under autocast
        else:
            same_kind(name, operator=like, v=v)
        return self.apply(v)

    def __matmul__(self, v: Tensor) -> Tensor:
        """`op @ v` for interactive use; library code calls `op(v)`, which torch.compile can trace."""
        return self(v)
