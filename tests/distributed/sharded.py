"""What the processes of a pool run: an operator on slices beside the same operator in one process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.distributed import CountedTraffic, Slices, sequence_parallel, traffic
from headwise.distributed.traffic import head_traffic
from headwise.operators import (
    add,
    concatenation,
    dot_product,
    efficient,
    factored,
    factored_blocks,
    fixed,
    fixed_steps,
    gaussian,
    hashed,
    kronecker,
    near_far,
    nystrom,
    offset,
    positional,
    product,
    projected,
    projected_blocks,
    quadratic,
    shift,
    softmax,
    strided,
    strided_steps,
    toeplitz,
    toeplitz_softmax,
    uniform,
    window,
    window_low_rank,
    window_low_rank_blocks,
)
from headwise.operators._kernels import native
from headwise.operators.linear.projections import convolution, count_sketch, dense, hadamard, identity, pooling

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A builder of a sequence of n; what it learns is drawn with `parameters(n)`."""

    build: Callable[..., Any]  # (q, k, n, parameters, **masks)
    parameters: Callable[[int], Inputs] = field(default=lambda n: {})
    causal: bool = True
    key_mask: bool = True
    cross: bool = False  # other queries than keys
    at_least: int = 1  # positions


def _plain(builder: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda q, k, n, p, **masks: builder(q, k, **options, **masks)


def _matrices(r: int, heads: int = 4) -> Callable[[int], Inputs]:
    return lambda n: {"e": torch.randn(heads, r, n), "f": torch.randn(r, n)}


def _features(n: int) -> Inputs:
    return {"a": torch.randn(4, 3, 4), "b": torch.randn(4, 3, 4), "c": torch.randn(4, 3)}


def _hashed(*rounds: int, chunk: int = 4, shared: bool = False) -> Callable[..., Any]:
    drawn = torch.randn(*rounds, 4, 2, generator=torch.Generator().manual_seed(1))

    def build(q: Tensor, k: Tensor, n: int, p: Inputs, **masks: Any) -> Any:
        return hashed(q, None if shared else k, drawn, chunk=chunk, **masks)

    return build


def _by_position(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, n, p, **masks: build(n, p, **masks)


def _grid(n: int) -> tuple[int, int]:
    side = next(side for side in range(int(n**0.5), 0, -1) if n % side == 0)
    return side, n // side


def _reach(n: int, reach: int = 2) -> Tensor:
    at = torch.arange(-(n - 1), n)
    return torch.where(at.abs() <= reach, 0.0, -torch.inf)


SUBJECTS: dict[str, Subject] = {
    "softmax": Subject(_plain(softmax), cross=True),
    "gaussian": Subject(_plain(gaussian), cross=True),
    "window": Subject(_plain(window, width=5)),
    "window, even width": Subject(_plain(window, width=4)),
    "window, leading": Subject(_plain(window, width=3, leading=2), at_least=2),
    "fixed": Subject(_plain(fixed, block=3), at_least=3),
    "fixed, two summaries": Subject(_plain(fixed, block=4, summaries=2), at_least=4),
    "fixed_steps": Subject(_plain(fixed_steps, block=3), at_least=3),
    "strided": Subject(_plain(strided, stride=3), at_least=3),
    "strided, one column": Subject(_plain(strided, stride=1)),
    "strided, long": Subject(_plain(strided, stride=11), at_least=11),
    "strided_steps": Subject(_plain(strided_steps, stride=4), at_least=4),
    "hashed": Subject(_hashed(2)),
    "hashed, one round": Subject(_hashed(1, chunk=3)),
    "hashed, two hashes": Subject(_hashed(2, 3, chunk=5)),
    "hashed, shared": Subject(_hashed(2, shared=True)),
    "efficient": Subject(_plain(efficient), cross=True),
    "dot_product": Subject(_plain(dot_product), cross=True),
    "concatenation": Subject(
        lambda q, k, n, p, **masks: concatenation(q, k, p["w"].to(q), **masks), lambda n: {"w": torch.randn(8)}
    ),
    "uniform": Subject(_by_position(lambda n, p, **masks: uniform(n, n, **masks))),
    "projected": Subject(
        lambda q, k, n, p, **masks: projected(q, k, dense(p["e"]), dense(p["f"]), **masks),
        _matrices(3),
        causal=False,
        at_least=3,
    ),
    "projected, pooling": Subject(lambda q, k, n, p, **masks: projected(q, k, pooling(n, 3), **masks), causal=False),
    "projected, convolution": Subject(
        lambda q, k, n, p, **masks: projected(q, k, convolution(n, 2, p["w"]), **masks),
        lambda n: {"w": torch.randn(3)},
        causal=False,
    ),
    "projected, mixed": Subject(
        lambda q, k, n, p, **masks: projected(q, k, pooling(n, -(-n // 2)), dense(p["f"]), **masks),
        lambda n: {"f": torch.randn(-(-n // -(-n // 2)), n)},
        causal=False,
    ),
    "projected, Hadamard": Subject(
        lambda q, k, n, p, **masks: projected(
            q, k, hadamard(n, 2, generator=torch.Generator().manual_seed(0)), **masks
        ),
        causal=False,
        at_least=2,
    ),
    "factored": Subject(
        lambda q, k, n, p, **masks: factored(q, k, dense(p["e"]), dense(p["f"]), **masks),
        _matrices(3),
        causal=False,
        at_least=3,
    ),
    "factored, pooling": Subject(lambda q, k, n, p, **masks: factored(q, k, pooling(n, 2), **masks), causal=False),
    "factored, identity": Subject(lambda q, k, n, p, **masks: factored(q, k, identity(n), **masks), causal=False),
    "factored, sketch": Subject(
        lambda q, k, n, p, **masks: factored(
            q, k, count_sketch(n, 2, generator=torch.Generator().manual_seed(0)), **masks
        ),
        causal=False,
        at_least=2,
    ),
    "nystrom": Subject(_plain(nystrom, landmarks=2), causal=False, at_least=2),
    "near_far": Subject(
        lambda q, k, n, p, **masks: near_far(q, k, p["a"], p["b"], p["c"], block=2, **masks), _features
    ),
    "near_far, leading": Subject(
        lambda q, k, n, p, **masks: near_far(q, k, p["a"], p["b"], p["c"], block=2, leading=2, **masks),
        _features,
        at_least=3,
    ),
    "projected_blocks": Subject(
        lambda q, k, n, p, **masks: projected_blocks(q, k, pooling(4, 2), **masks), causal=False
    ),
    "factored_blocks": Subject(lambda q, k, n, p, **masks: factored_blocks(q, k, pooling(4, 2), **masks), causal=False),
    "window_low_rank": Subject(
        lambda q, k, n, p, **masks: window_low_rank(q, k, 3, pooling(n, 2), **masks), causal=False
    ),
    "window_low_rank_blocks": Subject(
        lambda q, k, n, p, **masks: window_low_rank_blocks(q, k, 3, pooling(4, 2), **masks), causal=False
    ),
    "shift": Subject(_by_position(lambda n, p: shift((n,), (3,))), causal=False, key_mask=False),
    "shift, grid": Subject(
        _by_position(lambda n, p: shift(_grid(n), (1, -1), border="zeros")), causal=False, key_mask=False
    ),
    "offset": Subject(_by_position(lambda n, p, **masks: offset(n, n, -2, **masks)), causal=False),
    "toeplitz": Subject(
        _by_position(lambda n, p: toeplitz(p["w"], n, n)),
        lambda n: {"w": torch.randn(2 * n - 1)},
        causal=False,
        key_mask=False,
    ),
    "toeplitz, short": Subject(
        _by_position(lambda n, p: toeplitz(p["w"] * _reach(n).exp().to(p["w"]), n, n)),
        lambda n: {"w": torch.randn(2 * n - 1)},
        causal=False,
        key_mask=False,
    ),
    "toeplitz_softmax": Subject(
        _by_position(lambda n, p, **masks: toeplitz_softmax(p["w"], n, n, **masks)),
        lambda n: {"w": torch.randn(4, 2 * n - 1)},
    ),
    "toeplitz_softmax, short": Subject(
        _by_position(lambda n, p, **masks: toeplitz_softmax(p["w"] + _reach(n).to(p["w"]), n, n, **masks)),
        lambda n: {"w": torch.randn(2 * n - 1)},
    ),
    "positional": Subject(
        _by_position(lambda n, p, **masks: positional([p["x"], p["y"]], **masks)),
        lambda n: {"x": torch.randn(4, _grid(n)[0], _grid(n)[0]), "y": torch.randn(_grid(n)[1], _grid(n)[1])},
    ),
    "quadratic": Subject(
        _by_position(lambda n, p, **masks: quadratic(_grid(n), p["centres"], p["widths"], **masks)),
        lambda n: {"centres": torch.randn(4, 2), "widths": torch.zeros(2)},
    ),
    "kronecker": Subject(
        _by_position(lambda n, p: kronecker(uniform(_grid(n)[0], _grid(n)[0]), shift((_grid(n)[1],), (1,)))),
        causal=False,
        key_mask=False,
    ),
    "product": Subject(lambda q, k, n, p, **masks: product(window(q, k, 3, **masks), softmax(q, k, **masks))),
    "add": Subject(lambda q, k, n, p, **masks: add(efficient(q, k, **masks), softmax(q, k, **masks))),
    "of other keys": Subject(lambda q, k, n, p, **masks: softmax(2 * q, k + 1, **masks)),
}


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    subject: str
    lengths: tuple[int, ...]
    query_lengths: tuple[int, ...] | None = None  # of other queries
    zigzag: bool = False
    causal: bool = False
    hidden: str = ""  # keys: "some", "of one rank", "of one text"
    dtype: torch.dtype = torch.float64
    batch: tuple[int, ...] = (2, 4)
    key_heads: int | None = None
    width: int = 4
    values: int = 5
    exchange: str = "cheapest"
    seed: int = 0


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def differences(setting: Setting, kernel_cache: str | None = None) -> dict[str, float]:
    """Rows and gradients of this rank beside those of one process: differences over the largest entry and TOLERANCE.

    With a `kernel_cache` the slices are computed by the compiled kernels, and one process by torch's operations.

    Where one process errs by more than the tolerance in its own precision (torch's fused kernel does, and the compiled
    ones do), the slices may err twice as much, all measured against one process in float64.
    """
    rank, subject = dist.get_rank(), SUBJECTS[setting.subject]
    torch.manual_seed(setting.seed)
    keys = Slices(setting.lengths, setting.zigzag)
    queries = keys if setting.query_lengths is None else Slices(setting.query_lengths, setting.zigzag)
    key_batch = setting.batch if setting.key_heads is None else (*setting.batch[:-1], setting.key_heads)
    drawn = {
        "q": torch.randn(*setting.batch, queries.n, setting.width),
        "k": torch.randn(*key_batch, keys.n, setting.width),
        "v": torch.randn(*setting.batch, keys.n, setting.values),
    }
    drawn, parameters = (
        {name: x.to(setting.dtype) for name, x in tensors.items()} for tensors in (drawn, subject.parameters(keys.n))
    )
    pull = torch.randn(*setting.batch, queries.n, setting.values).to(setting.dtype)
    masks: dict[str, Any] = {"causal": True} if setting.causal else {}
    mask = _mask(setting, keys)

    def one_process(dtype: torch.dtype) -> Inputs:
        leaves, learned = (
            {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
            for tensors in (drawn, parameters)
        )
        given = {} if mask is None else {"key_mask": mask}
        out = _call(subject, keys.n, learned, leaves["q"], leaves["k"], **masks, **given)(leaves["v"])
        out.backward(pull.to(dtype))
        return {"out": out.detach(), **{name: _gradient(x) for name, x in {**leaves, **learned}.items()}}

    def cut(name: str, x: Tensor) -> Tensor:
        return (queries if name in ("out", "q") else keys).cut(x, rank) if name in ("out", "q", "k", "v") else x

    leaves = {name: cut(name, x).clone().requires_grad_() for name, x in drawn.items()}
    learned = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    build = partial(_call, subject, keys.n, learned)
    sharded = sequence_parallel(build, zigzag=setting.zigzag, exchange=setting.exchange)
    own_mask = {} if mask is None else {"key_mask": keys.cut(mask, rank, dim=-1)}
    if kernel_cache is not None:
        os.environ["HEADWISE_CACHE"] = kernel_cache
    with native.switched("off" if kernel_cache is None else "build"):
        assert kernel_cache is None or native.LIBRARY.ready(), native.LIBRARY.reason
        out = sharded(leaves["q"], leaves["k"], **masks, **own_mask)(leaves["v"])
        out.backward(queries.cut(pull, rank))
    found = {"out": out.detach(), **{name: _gradient(x) for name, x in leaves.items()}}
    sizes: Inputs = {}
    for name, x in learned.items():
        found[name] = _gradient(x).double()
        sizes[name] = found[name].abs().amax()  # each rank rounds its own part
        dist.all_reduce(sizes[name])
        dist.all_reduce(found[name])

    with native.switched("off"):
        same, exact = one_process(setting.dtype), one_process(torch.float64)
    runs = [same]
    if kernel_cache is not None:
        with native.switched("build"):
            runs.append(one_process(setting.dtype))
    tolerance, worst = TOLERANCE[setting.dtype], {}
    for name, x in found.items():
        scale = max(1.0, float(exact[name].abs().amax()), float(sizes.get(name, 0)))
        ratio = _difference(x, cut(name, same[name])) / scale / tolerance
        if ratio > 1 and setting.dtype != torch.float64:
            # in half precision every other rank rounds its part of the gradient of a key or value that it has fetched
            parts = dist.get_world_size() - 1 if name in ("k", "v") and setting.dtype.itemsize == 2 else 0
            own = max(_difference(run[name], exact[name]) for run in runs)
            allowed = 2 * own + tolerance * scale * (1 + parts / 2)
            ratio = _difference(x, cut(name, exact[name])) / allowed
        worst[name] = ratio
    return worst


def second_derivatives(subject: str, lengths: tuple[int, ...], zigzag: bool, causal: bool) -> float:
    """Gradients of sum cos(u . gradients of sum tanh(P v)) on this rank, less those of one process."""
    rank, held = dist.get_rank(), Slices(lengths, zigzag)
    torch.manual_seed(0)
    drawn, pulls = (torch.randn(3, 3, held.n, 4, dtype=torch.float64).unbind(0) for _ in range(2))
    build = partial(_call, SUBJECTS[subject], held.n, {})
    masks = {"causal": True} if causal else {}

    def twice(build: Callable[..., Any], tensors: Sequence[Tensor], pulls: Sequence[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = leaves = [x.clone().requires_grad_() for x in tensors]
        loss = build(q, k, **masks)(v).tanh().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        total = sum((x.cos() * u).sum() for x, u in zip(first, pulls, strict=True))
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    own = [[held.cut(x, rank) for x in tensors] for tensors in (drawn, pulls)]
    found, same = twice(sequence_parallel(build, zigzag=zigzag), *own), twice(build, drawn, pulls)
    return max(_difference(x, held.cut(y, rank)) for x, y in zip(found, same, strict=True))


def unread(subject: str, lengths: tuple[int, ...], causal: bool) -> float:
    """How much this rank's rows, and their gradients, change if masked keys and their values hold NaN.

    Where queries are keys: rows of unmasked positions alone.
    """
    rank, held, shared = dist.get_rank(), Slices(lengths), subject.endswith("shared")
    torch.manual_seed(0)
    drawn = torch.randn(3, 1, held.n, 4, dtype=torch.float64)
    mask = torch.rand(1, held.n) < 0.6
    build = sequence_parallel(partial(_call, SUBJECTS[subject], held.n, {}))
    own, found = held.cut(mask, rank, dim=-1), []
    for hidden in (0.0, torch.nan):
        changed = torch.where(mask.unsqueeze(-1), drawn, hidden)
        leaves = (changed if shared else drawn)[0], *changed[1:]
        q, k, v = (held.cut(x, rank).requires_grad_() for x in leaves)
        out = build(q, k, causal=causal, key_mask=own)(v)
        gradients = () if shared else torch.autograd.grad(out.sum(), (q, k, v))
        found.append(torch.cat([x.detach()[own] if shared else x.detach() for x in (out, *gradients)]))
    return _difference(*found)


def _mask(setting: Setting, keys: Slices) -> Tensor | None:
    """(b, 1, n), True = attend: some keys hidden, and all of those that a rank holds, or that a text has."""
    if not setting.hidden:
        return None
    mask = torch.rand(*setting.batch[:1], *(1,) * (len(setting.batch) - 1), keys.n) < 0.7
    if setting.hidden == "of one rank":
        mask[..., keys.positions(setting.seed % len(keys.lengths))] = False
    elif setting.hidden == "of one text":
        mask[0] = False
    return mask


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _call(subject: Subject, n: int, parameters: Inputs, q: Tensor, k: Tensor, **masks: Any) -> Any:
    return subject.build(q, k, n, parameters, **masks)


def _difference(x: Tensor, y: Tensor) -> float:
    assert x.shape == y.shape, (x.shape, y.shape)
    assert not x.isnan().any()
    return float((x.double() - y.double()).abs().amax()) if x.numel() else 0.0


def products(subject: str, lengths: tuple[int, ...], heads: int) -> tuple[float, float]:
    """This rank's parts of <P v, u> and <v, P^T u>."""
    rank, held = dist.get_rank(), Slices(lengths)
    torch.manual_seed(0)
    q, k, v, u = (held.cut(torch.randn(heads, held.n, 4, dtype=torch.float64), rank) for _ in range(4))
    build = partial(_call, SUBJECTS[subject], held.n, SUBJECTS[subject].parameters(held.n))
    operator = sequence_parallel(build)(q, k, pair_mask=None)
    return float((operator(v) * u).sum()), float((v * operator.adjoint(u)).sum())


def counted(subject: str, n: int, causal: bool, d: int, heads: int, seed: int = 0) -> dict[str, Any]:
    """Bytes received by this rank in one `apply`: as collectives count them, as sockets do, and by the formula."""
    rank, size = dist.get_rank(), dist.get_world_size()
    held = Slices.even(n, size)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(heads, n, width) for width in (4, 4, d))
    parameters = SUBJECTS[subject].parameters(n)
    masks = {"causal": True} if causal else {}
    build = partial(_call, SUBJECTS[subject], n, parameters)
    operator = sequence_parallel(build)(*(held.cut(x, rank) for x in (q, k)), **masks)
    whole = build(q, k, **masks)
    # heads are not exchanged for operators with parameters, and for those that read neither q nor k
    own_only = bool(parameters) or "_by_position" in SUBJECTS[subject].build.__qualname__
    # without values of q and k
    bound = traffic(build(q.to("meta"), k.to("meta"), **masks), d, size).received(size) if not own_only else 0
    by_heads = heads % size == 0 and not own_only and head_traffic(whole, d, size).received(size) < bound
    operator(held.cut(v, rank))  # connections, and what is said once
    dist.barrier()
    before = socket_bytes()
    with CountedTraffic() as count:
        operator(held.cut(v, rank))
    after = socket_bytes()
    dist.barrier()
    return {
        "counted": count.bytes(torch.float32),
        "all": count.bytes(),
        "sockets": after - before,
        "calls": count.calls.total(),
        "dtypes": {dtype for _, dtype in count.received},
        "bound": 4 * heads * bound,
        "formula": 4 * heads * (head_traffic if by_heads else traffic)(whole, d, size).received(size),
    }


def socket_bytes() -> int:
    """Bytes that the TCP connections of this process have received, as the kernel of the system counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if not os.path.islink(path) or not os.readlink(path).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received
    return total
