"""Speed ratios: operators against softmax attention and against other packages, each with the ratio expected of it.

    python -m benchmarks.speed_ratios [--quick] [--only NAME ...] [--n N ...] [-o DIR] [--fresh]

A row is (time of the slower) / (time of the faster), forward and forward with backward, timed in turns in one process;
a row that is not as expected is marked.  Results go to DIR/speed_ratios.jsonl group by group, so that
an interrupted run continues.  If DIR has the scaling.jsonl of `headwise bench scaling`, its exponents are checked too.

    "layer: NAME"      a layer of width 512 with 8 heads, ours or another package's, its linear maps included
    "attention: NAME"  the operator alone on 8 heads of 64, built anew in every call; also, by torch's own function,
                       "softmax", "softmax, causal" and "softmax, masked" (to the band of window 128)
    "product: square"  a product of two square matrices of SQUARE rows: the machine's best rate
    "product: two"     the two matrix products of the double softmax alone, into memory that is allocated already
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bench import CASES, Scaling, Times, Timing, forward_and_backward, load_scaling, times_in_turns
from headwise.bench.clock import Call
from headwise.bench.peers import HEADS, WIDTH, layer_calls
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.operators import factored, fixed, strided
from headwise.operators.linear.projections import identity
from headwise.outputs import append_line, read_lines

SQUARE = 2048
Result = dict[str, Times]


@final
@dataclass(frozen=True)
class RatioGroup:
    """Work that is timed in turns at one length."""

    name: str
    n: int
    work: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name} at {self.n}"


@final
@dataclass(frozen=True)
class ExpectedRatio:
    """`fast` is expected to be at least `forward` and `forward_backward` times as fast as `slow`."""

    slow: str
    fast: str
    forward: float
    forward_backward: float


@final
@dataclass(frozen=True)
class RatioRow:
    """A measured ratio or exponent beside the expected one; None where a package is not installed."""

    what: str
    n: int | None
    expected: str
    forward: float | None
    forward_backward: float | None
    as_expected: bool | None


LINEAR = ("layer: linear-attention-transformer", "layer: performer-pytorch")
LINFORMERS = ("layer: linformer", "layer: linformer-pytorch")
BIDIRECTIONAL = {"strided, not causal": strided, "fixed, not causal": fixed}
LENGTHS = (1024, 4096, 16384)


def _groups() -> Iterator[RatioGroup]:
    yield RatioGroup("linear cost", 16384, ("layer: softmax", "layer: efficient", "layer: factored pooling", *LINEAR))
    yield RatioGroup("window", 16384, ("attention: softmax, masked", "attention: window 128"))
    for n in (4096, 16384):
        yield RatioGroup("patterns", n, ("attention: softmax, causal", "attention: strided", "attention: fixed"))
        names = tuple(f"attention: {name}" for name in ("softmax", *BIDIRECTIONAL))
        yield RatioGroup("patterns, not causal", n, names)
        yield RatioGroup("hashed", n, ("attention: softmax", "attention: hashed"))
    for n in LENGTHS:
        yield RatioGroup("reformer", n, ("layer: hashed", "layer: reformer-pytorch"))
        yield RatioGroup("projected", n, ("layer: projected 256", "layer: LinformerAttention 256", *LINFORMERS))
    yield RatioGroup("peak rate", 16384, ("product: square", "product: two", "attention: factored identity"))


GROUPS = tuple(_groups())


def expected_ratios(group: RatioGroup) -> Iterator[ExpectedRatio]:
    """The ratios expected within a group."""
    if group.name == "linear cost":
        for ours in group.work[1:3]:
            yield ExpectedRatio(group.work[0], ours, 12.0, 15.0)
            yield from (ExpectedRatio(peer, ours, 1.0, 1.0) for peer in LINEAR)
    elif group.name == "projected":
        yield from (ExpectedRatio(peer, ours, 1.0, 1.0) for ours in group.work[:2] for peer in LINFORMERS)
    elif group.name == "reformer":
        yield ExpectedRatio(group.work[1], group.work[0], 2.0, 2.0)
    elif group.name != "peak rate":
        least = {"window": 10.0, "hashed": 1.0}.get(group.name, 3.0 if group.n < 16384 else 10.0)
        yield from (ExpectedRatio(group.work[0], ours, least, least) for ours in group.work[1:])


def ratio_rows(results: Mapping[str, Result], groups: Sequence[RatioGroup] = GROUPS) -> list[RatioRow]:
    """Every expected ratio of the groups that were measured."""
    rows = []
    for group in groups:
        if group.key in results:
            rows += [_row(ratio, group, results[group.key]) for ratio in expected_ratios(group)]
    peaks = [group for group in groups if group.name == "peak rate" and group.key in results]
    return rows + [row for group in peaks for row in peak_rate_rows(group, results[group.key])]


def _row(ratio: ExpectedRatio, group: RatioGroup, result: Result) -> RatioRow:
    least = (ratio.forward, ratio.forward_backward)
    expected = f">= {least[0]:g}" if least[0] == least[1] else f">= {least[0]:g} and {least[1]:g}"
    what = f"{ratio.fast} against {ratio.slow.split(': ')[1]}"
    if ratio.slow not in result or ratio.fast not in result:
        return RatioRow(what, group.n, expected, None, None, None)
    measured = result[ratio.slow].over(result[ratio.fast])
    return RatioRow(what, group.n, expected, *measured, all(x >= y for x, y in zip(measured, least, strict=True)))


def peak_rate_rows(group: RatioGroup, result: Result) -> list[RatioRow]:
    """(time of the double softmax's operations at the machine's best rate) / (time it takes).

    Two products forward, six with backward; the softmaxes count as no operations.
    """
    square, two, ours = (result[name] for name in group.work)
    operations = 2 * 2 * HEADS * group.n * (WIDTH // HEADS) ** 2
    rate = 2 * SQUARE**3 / square.forward.median
    forward = operations / rate / ours.forward.median
    backward = 3 * operations / rate / ours.forward_backward.median
    products = two.forward.over(ours.forward)
    name = f"double softmax, share of the best matrix product ({rate / 1e9:.0f} GFLOP/s)"
    return [
        RatioRow(name, group.n, ">= 0.5", forward, backward, min(forward, backward) >= 0.5),
        RatioRow("double softmax, share of its two products alone", group.n, ">= 0.5", products, None, products >= 0.5),
    ]


EXPONENTS = {
    "softmax": (2.0, 0.15),
    "strided": (1.5, 0.15),
    "fixed": (1.5, 0.15),
    "hashed": (-math.inf, 1.2),
    **dict.fromkeys(
        ("window 128", "projected 256", "efficient", "factored pooling", "factored CountSketch", "factored dense"),
        (1.0, 0.1),
    ),
}
"""(expected, tolerance) of the exponent of time; -inf: only the upper limit `tolerance`"""


def exponent_rows(scaling: Scaling) -> list[RatioRow]:
    """Fitted exponents of time, and of memory where it is expected to be linear."""
    rows = []
    for name, (middle, tolerance) in EXPONENTS.items():
        if name not in scaling.names():
            continue
        fitted = _exponents(scaling, name, "")
        if math.isinf(middle):
            fine, expected = max(fitted) <= tolerance, f"<= {tolerance:g}"
        else:
            fine, expected = all(abs(x - middle) <= tolerance for x in fitted), f"{middle:g} ± {tolerance:g}"
        rows.append(RatioRow(f"exponent of time, {name}", None, expected, *fitted, fine))
    for name in ("efficient", "factored pooling"):
        if name in scaling.names():
            fitted = _exponents(scaling, name, "_mb")
            rows.append(RatioRow(f"exponent of memory, {name}", None, "<= 1.1", *fitted, max(fitted) <= 1.1))
    return rows


def _exponents(scaling: Scaling, name: str, unit: str) -> tuple[float, float]:
    fit = scaling.exponent
    return fit(name, f"forward{unit}").value, fit(name, f"forward_backward{unit}").value


def calls_of(name: str, n: int) -> tuple[Call, Call] | None:
    """The forward and the forward and backward call; None for a package that is not installed."""
    kind, _, what = name.partition(": ")
    return {"layer": layer_calls, "attention": _attention, "product": _product}[kind](what, n)


def _attention(name: str, n: int) -> tuple[Call, Call]:
    q, k, v = (torch.randn(1, n, HEADS, WIDTH // HEADS).transpose(1, 2).requires_grad_() for _ in range(3))
    call = _attention_function(name, n)
    return forward_and_backward(lambda: call(q, k, v), (q, k, v), torch.randn_like(v))


def _attention_function(name: str, n: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == "softmax, masked":
        distance = torch.arange(n) - torch.arange(n).unsqueeze(-1)
        return partial(F.scaled_dot_product_attention, attn_mask=(distance >= -64) & (distance < 64))
    if name in ("softmax", "softmax, causal"):
        return partial(F.scaled_dot_product_attention, is_causal=name != "softmax")
    others = {**BIDIRECTIONAL, "factored identity": partial(factored, e=identity(n))}
    build = others[name] if name in others else CASES[name].build(n)
    return lambda q, k, v: build(q, k)(v)


def _product(name: str, n: int) -> tuple[Call, Call]:
    if name == "square":
        a, b, out = torch.randn(3, SQUARE, SQUARE).unbind(0)
        call = partial(torch.mm, a, b, out=out)
        return call, call
    q, k, v, out = (torch.randn(n, HEADS, WIDTH // HEADS).transpose(0, 1) for _ in range(4))
    means = torch.empty(HEADS, WIDTH // HEADS, WIDTH // HEADS)

    def two() -> Tensor:
        return torch.bmm(q, torch.bmm(k.mT, v, out=means), out=out)

    return two, two


def measure(group: RatioGroup, *, rounds: int = 5, seconds: float = 30.0) -> Result:
    """The times of everything in the group that is installed."""
    torch.manual_seed(0)
    work = {name: calls for name in group.work if (calls := calls_of(name, group.n)) is not None}
    return times_in_turns(work, rounds=rounds, seconds=seconds)


def collect(groups: Sequence[RatioGroup], store: Path, *, rounds: int = 5, seconds: float = 30.0) -> dict[str, Result]:
    """The times of all groups; those that are in `store` are not measured again."""
    known = read_lines(store)
    for group in groups:
        if group.key not in known:
            result = measure(group, rounds=rounds, seconds=seconds)
            known[group.key] = {name: asdict(times) for name, times in result.items()}
            append_line(store, group.key, known[group.key])
    return {group.key: {name: _times(values) for name, values in known[group.key].items()} for group in groups}


def _times(values: dict[str, Any]) -> Times:
    return Times(Timing(**values["forward"]), Timing(**values["forward_backward"]))


def main(argv: Sequence[str] | None = None) -> None:
    names = list(dict.fromkeys(group.name for group in GROUPS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some groups of: {', '.join(names)}")
    parser.add_argument("--n", nargs="+", type=int, metavar="N", help="only groups of these lengths")
    parser.add_argument("--quick", action="store_true", help="lengths of at most 512, one round")
    parser.add_argument("--fresh", action="store_true", help="discard the measurements of earlier runs")
    parser.add_argument("-o", "--out", type=Path, default=Path("headwise-bench"), metavar="DIR")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.only or () if name not in names]:
        raise InputError(f"speed_ratios: there is no group {unknown[0]!r}; there are {', '.join(names)}")
    groups = [
        replace(group, n=min(group.n, 512)) if options.quick else group
        for group in GROUPS
        if (options.only is None or group.name in options.only) and (options.n is None or group.n in options.n)
    ]
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    store = out / ("speed_ratios-quick.jsonl" if options.quick else "speed_ratios.jsonl")
    if options.fresh:
        store.unlink(missing_ok=True)
    short = {"rounds": 1, "seconds": 1.0} if options.quick else {}
    rows = ratio_rows(collect(groups, store, **short), groups) + exponent_rows(load_scaling(out / "scaling.jsonl"))
    number = lambda x: "" if x is None else f"{x:.2f}"  # noqa: E731
    mark = {True: "", False: "not as expected", None: "not installed"}
    cells = [
        [
            row.what,
            str(row.n or ""),
            row.expected,
            number(row.forward),
            number(row.forward_backward),
            mark[row.as_expected],
        ]
        for row in rows
    ]
    print_table("How many times as fast", ["what", "n", "expected", "forward", "f + b", ""], cells)


if __name__ == "__main__":
    main()
