"""Sparse attention over exact attention, with the compiled kernels and without them.

    python -m benchmarks.sparse_kernels                  windows, near_far, patterns, a mixed layer, rates: minutes
    python -m benchmarks.sparse_kernels --quick          n <= 512, three rounds
    python -m benchmarks.sparse_kernels --only mixed     one of the tables
    python -m benchmarks.sparse_kernels --flex           flex_attention under torch.compile too (forward only)
    python -m benchmarks.sparse_kernels --plan DIR       the layers of all-MiniLM-L6-v2 under a plan of `headwise plan`

Each figure is (processor time of a call) / (that of exact attention) on one thread, operators built anew in every call;
the median over rounds in which all calls take turns.  Exact attention is torch's fused call, with the quartiles, and
after "|" ours with kernels, which is faster.  "kernels" and "torch" are the two paths of the same call.  Beside them
are the simplest competitors: torch's fused attention with the pattern as a mask, and the two-line formula with that
mask.  The mixed layer has the kinds that plans for all-MiniLM-L6-v2 choose at a drift of .05, in an order that makes no
two neighbours alike.  With --plan, every layer has the operators and learned tensors of that plan, and q, k and v of a
text of the planned length; the last row is all layers one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bench import forward_and_backward
from headwise.bench.clock import Call
from headwise.cli.tables import print_table
from headwise.models.inputs import text_input
from headwise.models.intercept import intercept
from headwise.models.load import load_model
from headwise.models.run import run_model
from headwise.operators import fixed, near_far, softmax, strided, window
from headwise.operators._kernels import native
from headwise.operators._kernels.key_patterns import KeyPattern, attend
from headwise.replacement import Choice, MixedHeads, Plan

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Times = dict[str, list[float]]
P = ParamSpec("P")
FUSED, TILES = "exact, torch", "exact, kernels"


def seconds(call: Call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def in_turns(work: Mapping[str, Call], rounds: int) -> Times:
    """Seconds of every call, in rounds in which all take turns, after one that is not counted."""
    for call in work.values():
        call()
    times: Times = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            times[name].append(seconds(call))
    return times


def ratios(times: Times, name: str) -> str:
    """median (quartiles) over torch's exact attention | median over ours."""
    fused, ours = ([x / y for x, y in zip(times[name], times[exact], strict=True)] for exact in (FUSED, TILES))
    low, middle, high = statistics.quantiles(fused, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f}) | {statistics.median(ours):.3f}"


def inputs(h: int, n: int, d: int) -> list[Tensor]:
    """q, k, v as a layer computes them: views (b, h, n, d) of (b, n, h d)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, h, d, generator=generator).transpose(1, 2) for _ in range(3)]


def with_kernels(call: Callable[P, Tensor], mode: str) -> Callable[P, Tensor]:
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        with native.switched(mode):
            return call(*args, **kwargs)

    return run


def formula(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def flex(mask: Tensor, n: int) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, n, n, device="cpu")
    return torch.compile(partial(flex_attention, block_mask=blocks))


def captured(name: str, length: int) -> dict[str, list[Tensor]]:
    """q, k and v of every attention call of a model that reads one text."""
    loaded, found = load_model(name), {}
    with torch.no_grad(), intercept(loaded.model, lambda call: found.update({call.site: [call.q, call.k, call.v]})):
        run_model(loaded.model, text_input(loaded, None, length=length, texts=1).batches[0])
    return found


def planned(directory: str, rounds: int) -> list[list[str]]:
    """Attention of every layer that a plan for MiniLM changes, and of all of them one after the other."""
    plan = Plan.load(directory)
    found, layers = [], []
    for site, (q, k, v) in captured("minilm", plan.length).items():
        if site in plan.sites:
            heads = plan.mixed_heads(site)
            layers.append((heads, q, k, v))
            kinds = ", ".join(f"{count} {name}" for name, count in Counter(x.kind for x in heads.choices).items())
            found.append((f"{site}: {kinds}", [layers[-1]]))

    def calls(some: Sequence[tuple[MixedHeads, Tensor, Tensor, Tensor]]) -> dict[str, Call]:
        def each(call: Callable[[MixedHeads, Tensor, Tensor, Tensor], Tensor]) -> Call:
            return lambda: [call(*layer) for layer in some][-1]

        def ours(heads: MixedHeads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return heads(q, k, v, scale=q.shape[-1] ** -0.5)

        return {
            FUSED: each(lambda heads, q, k, v: F.scaled_dot_product_attention(q, k, v)),
            TILES: with_kernels(each(lambda heads, q, k, v: softmax(q, k)(v)), "build"),
            "kernels": with_kernels(each(ours), "build"),
            "torch": with_kernels(each(ours), "off"),
        }

    table = []
    with torch.no_grad():
        for name, some in [*found, (f"all {len(layers)} layers", layers)]:
            times = in_turns(calls(some), rounds)
            table += [[name, str(plan.length), x, ratios(times, x)] for x in (TILES, "kernels", "torch")]
    return table


def rows(
    name: str,
    sizes: tuple[int, int, int],
    ours: Attention,
    rounds: int,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    with_flex: bool = False,
) -> list[list[str]]:
    """One row for each way, with its forward and its forward and backward ratio."""
    h, n, d = sizes
    calls: dict[str, Attention] = {FUSED: partial(F.scaled_dot_product_attention, is_causal=causal)}
    calls[TILES] = with_kernels(lambda q, k, v: softmax(q, k, causal=causal)(v), "build")
    calls |= {"kernels": with_kernels(ours, "build"), "torch": with_kernels(ours, "off")}
    if mask is not None:
        calls["fused, masked"] = partial(F.scaled_dot_product_attention, attn_mask=mask)
        if n <= 4096:
            calls["formula, masked"] = partial(formula, mask=mask)
        if with_flex:
            calls["flex_attention"] = flex(mask, n)
    tensors = inputs(h, n, d)
    leaves = [x.detach().requires_grad_() for x in tensors]
    pull = torch.randn(1, h, n, d)
    forward = {x: forward_and_backward(partial(call, *tensors), ())[0] for x, call in calls.items()}
    backward = {
        x: forward_and_backward(partial(call, *leaves), leaves, pull)[1]
        for x, call in calls.items()
        if x != "flex_attention"
    }
    ahead, both = in_turns(forward, rounds), in_turns(backward, max(3, rounds // 3))
    return [[name, str(n), x, ratios(ahead, x), ratios(both, x) if x in both else ""] for x in calls if x != FUSED]


def band(n: int, before: int, after: int) -> Tensor:
    distance = torch.arange(n) - torch.arange(n).unsqueeze(-1)
    return (distance >= -before) & (distance <= after)


def windows(quick: bool, with_flex: bool) -> list[list[str]]:
    found = []
    for n, rounds in ((512, 41), (2048, 15), (16384, 3)):
        if n <= 512 or not quick:
            call = lambda q, k, v: window(q, k, 65)(v)  # noqa: E731
            mask = band(n, 32, 32) if n <= 4096 else None
            found += rows("window 65", (12, n, 32), call, 3 if quick else rounds, mask=mask, with_flex=with_flex)
            if n <= 2048:
                call = lambda q, k, v: window(q, k, 65, leading=1)(v)  # noqa: E731
                found += rows("window 65 and the first key", (12, n, 32), call, 3 if quick else rounds)
    return found


def near_fars(quick: bool, with_flex: bool) -> list[list[str]]:
    n, h, d = (512 if quick else 4096), 12, 64
    generator = torch.Generator().manual_seed(1)
    found = []
    for block, r in ((32, 4), (16, 4)):
        a, b = (0.3 * torch.randn(h, r, d, generator=generator) for _ in range(2))
        call = lambda q, k, v, a=a, b=b, block=block: near_far(q, k, a, b, a[..., 0], block=block)(v)  # noqa: E731
        found += rows(f"blocks of {block}, {r} features", (h, n, d), call, 3 if quick else 7)
    return found


def patterns(quick: bool, with_flex: bool) -> list[list[str]]:
    n = 512 if quick else 4096
    found = []
    for name, build in (("strided", strided), ("fixed", fixed)):
        call = lambda q, k, v, build=build: build(q, k, causal=True)(v)  # noqa: E731
        found += rows(f"{name}, causal", (8, n, 64), call, 3 if quick else 7, causal=True)
    return found


def layer() -> list[Choice]:
    def far(block: int, rank: int) -> Choice:
        return Choice("near_far", {"block": block, "rank": rank, "leading": 1})

    rest = [Choice("uniform"), Choice("offset", {"by": -1}), Choice("window", {"width": 17, "leading": 1})]
    a, b, c, d = far(4, 1), far(8, 3), far(4, 3), far(16, 3)
    return [a, b, a, rest[0], a, c, rest[1], d, a, b, a, rest[2]]


def mixed(quick: bool, with_flex: bool) -> list[list[str]]:
    n, d, rounds = 512, 32, 3 if quick else 41
    found = []
    widths = [9, 17, 33, 65, 129, 257] * 2
    for name, choices in (
        ("kinds of a MiniLM plan", layer()),
        ("windows of six widths", [Choice("window", {"width": width, "leading": 1}) for width in widths]),
        ("all softmax", [Choice("softmax")] * 12),
    ):
        heads = MixedHeads(choices, d, n)
        for x in heads.parameters():
            torch.nn.init.normal_(x, std=0.3)
        call = lambda q, k, v, heads=heads: heads(q, k, v, scale=d**-0.5)  # noqa: E731
        found += rows(name, (12, n, d), call, rounds)
    return found


def rates(quick: bool, with_flex: bool) -> list[list[str]]:
    """Billions of floating-point operations a second: what bounds the other tables."""
    n, h, d = (512 if quick else 2048), 8, 64
    q, k, v = inputs(h, n, d)
    square, pairs = torch.randn(1024, 1024), torch.randn(h * n // 64, 64, d)
    keys = torch.randn(h * n // 64, d, 128)
    whole, scores = torch.randn(1 << 18), 4 * h * n * n * d

    def ours(pattern: KeyPattern) -> Call:
        def run() -> Tensor:
            return attend(q, k, v, [pattern] * h, scale=d**-0.5, plain=lambda *x: x[0])

        return run

    work: dict[str, tuple[Call, float]] = {
        "product of two square matrices of 1024": (lambda: square @ square, 2 * 1024**3),
        "products of blocks, 64 x 64 by 64 x 128": (lambda: pairs @ keys, 2 * pairs.numel() * 128),
        "torch's fused attention": (lambda: F.scaled_dot_product_attention(q, k, v), scores),
        "kernel, all keys": (ours(KeyPattern()), scores),
        "kernel, window 65, visible pairs only": (ours(KeyPattern(32, 32)), 4 * h * n * 65 * d),
        "exponentials (one each)": (lambda: whole.exp(), whole.numel()),
    }
    found = []
    with torch.no_grad(), native.switched("build"):
        for name, (call, operations) in work.items():
            call()
            times = sorted(operations / seconds(call) / 1e9 for _ in range(5 if quick else 15))
            found.append([name, str(n), "", f"{statistics.median(times):.1f}", ""])
    return found


TABLES: dict[str, tuple[str, Callable[[bool, bool], list[list[str]]]]] = {
    "windows": ("Windows, 12 heads of 32: time over exact attention", windows),
    "near_far": ("Near and far keys, 12 heads of 64: time over exact attention", near_fars),
    "patterns": ("Strided and fixed patterns, 8 heads of 64: time over exact causal attention", patterns),
    "mixed": ("A rewritten layer, 12 heads of 32: time over exact attention", mixed),
    "rates": ("Rates, 8 heads of 64: 10^9 operations a second", rates),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n <= 512, three rounds")
    parser.add_argument("--only", choices=tuple(TABLES), help="one table")
    parser.add_argument("--flex", action="store_true", help="flex_attention under torch.compile too")
    parser.add_argument("--plan", metavar="DIR", help="a plan for all-MiniLM-L6-v2 instead of the tables")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with native.switched("build"):
        if not native.LIBRARY.ready():
            parser.error(f"the kernels cannot be used: {native.LIBRARY.reason}")
    headings = ["what", "n", "path", "forward", "forward and backward"]
    if options.plan:
        title = "The layers of a plan for all-MiniLM-L6-v2: time over exact attention"
        print_table(title, headings[:-1], planned(options.plan, 3 if options.quick else 41))
        return
    for name, (title, measure) in TABLES.items():
        if options.only in (None, name):
            print_table(title, headings, measure(options.quick, options.flex))


if __name__ == "__main__":
    main()
