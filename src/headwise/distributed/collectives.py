"""Three collectives with gradients: rows exchanged, small states gathered, sums reduced.  Only torch.distributed.

    exchange    rows to every rank and from every rank, as many as agreed    backward: the same, the other way
    gathered    x of every rank, stacked                                     backward: the sum of what comes back
    summed      sum over the ranks                                           backward: the sum of the gradients

The loss of a sharded model is the sum of the losses of all ranks, so a gradient is the sum of the parts from all ranks.
Every rank must call the same collectives in the same order, backward too: `tied` keeps those in the graph whose result
a rank happens not to need.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import HeadwiseError, InputError


class LostRankError(HeadwiseError):
    """A collective failed: another process has ended, or does not answer in time."""


@final
@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that share a sequence, and which of them this one is.

    The group is not kept alive: one that outlives `destroy_process_group` aborts the process when it ends.
    """

    rank: int
    size: int
    reference: weakref.ref[dist.ProcessGroup] | None = None  # None: all processes

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Of `group`, or of all processes."""
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "sequence_parallel: torch.distributed is not initialised; start the program with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            raise InputError("sequence_parallel: group must be a ProcessGroup that this process belongs to")
        reference = None if group is None else weakref.ref(group)
        return cls(dist.get_rank(group), dist.get_world_size(group), reference)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None for all processes."""
        group = None if self.reference is None else self.reference()
        if not dist.is_initialized() or (self.reference is not None and group is None):
            raise InputError("sequence_parallel: its process group was destroyed; make another builder for a new one")
        return group

    @property
    def device(self) -> torch.device:
        """Where numbers are that this group sends: the CPU, but for groups that have a backend for GPUs only."""
        backends = dist.get_backend_config(self.group)  # cpu:gloo,cuda:nccl
        return torch.device("cpu") if "cpu:" in backends else torch.device(backends.partition(":")[0])

    @property
    def processes(self) -> Sequence[tuple[str, int]]:
        """(host, process) of every rank, once they are `introduced`."""
        return INTRODUCED.get(self.group or dist.group.WORLD, ())

    def introduced(self) -> Ranks:
        """The same, once the ranks know one another's processes, so that an error can name one that has ended."""
        if not self.processes:
            found: list[Any] = [None] * self.size
            self.call(dist.all_gather_object, found, (_host(), os.getpid()))
            INTRODUCED[self.group or dist.group.WORLD] = found
        return self

    def check(self) -> None:
        """LostRankError if a process of this host has ended: for long work between collectives."""
        if lost := self.ended():
            raise LostRankError(f"rank {self.rank} of {self.size}: {lost} has ended {AGAIN}")

    def ended(self) -> str:
        """Those processes of this host that have ended, in words."""
        here = _host()
        lost = [x for x in enumerate(self.processes) if x[1][0] == here and not _is_running(x[1][1])]
        return ", ".join(f"rank {rank} (process {pid})" for rank, (_, pid) in lost)

    def call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run one collective (with async_op=True, start it and return its work); a failure becomes one sentence."""
        with self.saying(collective.__name__):
            return collective(*args, group=self.group, **options)

    @contextlib.contextmanager
    def saying(self, name: str) -> Iterator[None]:
        """Around what may fail because of another rank: an error becomes a LostRankError that names the collective."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
            lost, until = "", time.monotonic() + LAST_WORDS
            while self.processes and not (lost := self.ended()) and time.monotonic() < until:
                time.sleep(0.05)
            cause = f"{lost} has ended" if lost else "most likely because another rank has ended or hangs"
            raise LostRankError(
                f"rank {self.rank} of {self.size}: {name} failed: {cause} {AGAIN}; torch says: {reason}"
            ) from error


AGAIN = "(see the output of the other ranks); start all ranks again"

INTRODUCED: weakref.WeakKeyDictionary[Any, Sequence[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""(host, process) of every rank of a group."""

LAST_WORDS = 2.0
"""Seconds after which a process that has closed its connections has ended, also on a busy machine."""


def _host() -> str:
    """This machine, as far as it has numbers of processes of its own: containers may share a name."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    try:  # one that has ended and was not waited for yet is still there
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks) -> Tensor:
    """x (rows, ...): the first send[0] rows to rank 0, and so on; receive[0] rows from rank 0 first, and so on."""
    return _Exchange.apply(x, list(send), list(receive), ranks)  # type: ignore[return-value]


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """(P, *x.shape): x of every rank, which has the same shape on all of them."""
    return _Gather.apply(x, ranks)  # type: ignore[return-value]


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of x over the ranks."""
    return _Sum.apply(x, ranks)  # type: ignore[return-value]


def largest(x: Tensor, ranks: Ranks) -> Tensor:
    """The maximum of x over the ranks, without a gradient."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    ranks.call(dist.all_reduce, out, op=dist.ReduceOp.MAX)
    return out


def tied(x: Tensor, *others: Tensor) -> Tensor:
    """x; the gradients of `others` are zeros, so that the collectives they come from run backward on every rank.

    In derivatives of any order.
    """
    return _Tie.apply(x, *others)  # type: ignore[return-value]


def nothing_of(x: Tensor) -> Tensor:
    """0, but not a constant: as a gradient it takes second derivatives to the collectives that x comes from."""
    return 0 * x[(slice(1),) * x.dim()].sum()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], ranks: Ranks) -> Tensor:
        ctx.send, ctx.receive, ctx.ranks = send, receive, ranks
        out = x.new_empty(sum(receive), *x.shape[1:])
        ranks.call(dist.all_to_all_single, out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return exchange(gradients[0], ctx.receive, ctx.send, ctx.ranks), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        out = x.new_empty(ranks.size, *x.shape)
        ranks.call(dist.all_gather, list(out.unbind(0)), x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        ones = [1] * ctx.ranks.size
        return exchange(gradients[0], ones, ones, ctx.ranks).sum(0), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        out = x.clone(memory_format=torch.contiguous_format)
        ranks.call(dist.all_reduce, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return summed(gradients[0], ctx.ranks), None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        zero = nothing_of(gradients[0])
        return gradients[0], *(zero.to(device, dtype).expand(shape) for shape, dtype, device in ctx.others)
