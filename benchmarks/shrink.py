"""Fewer query/key dimensions: drift of the output against the share that is kept, beside plain SVD of W_Q W_K^T.

    python -m benchmarks.shrink [--model minilm smollm2] [--length 128] [--texts 8] [--keep 0.75 0.5 0.375 0.25]
                                [--into FILE] [--figure FILE.svg]

plain SVD        truncated SVD of W_Q W_K^T of each head, from the weights and biases alone, one width everywhere
plain, pairs     with rotary positions: the pairs whose blocks of W_Q W_K^T are largest
metric           headwise, the same width everywhere
metric, chosen   headwise, widths chosen by layer: what `headwise shrink` does

In a model with rotary positions plain SVD cannot shorten rotated keys; there its product of rank r is put into W_K and
the keys, r numbers before the rotation, are rotated whole: as many numbers a key, and more work.  Half of the texts
choose, the others measure; the intervals are 95 % of Student's t over those.  Finished points are kept in FILE.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.grow_rows import interval
from headwise.growth.shrinking import (
    JUDGES,
    allocate,
    drift,
    drift_curves,
    gather,
    narrow_copy,
    narrowed_to,
    outputs,
)
from headwise.growth.site_statistics import SiteStatistics, subspace
from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.outputs import write_json

COLOURS = {"plain SVD": "C0", "plain, pairs": "C1", "metric": "C2", "metric, chosen": "C3"}
PROJECTIONS = (("query", "key"), ("q_proj", "k_proj"))


def weights(module: nn.Module, x: SiteStatistics) -> tuple[Tensor, Tensor]:
    """W_Q (h, k, d), with its bias as one more input, and W_K (h_kv, k, d), float64."""
    q, k = next(pair for pair in PROJECTIONS if hasattr(module, pair[0]))
    wq, wk = (getattr(module, name).weight.detach().double() for name in (q, k))
    bias = getattr(module, q).bias
    wq = wq if bias is None else torch.cat([wq, bias.detach().double().unsqueeze(-1)], -1)
    return wq.unflatten(0, (x.heads, x.width)), wk.unflatten(0, (x.key_heads, x.width))


def plain(module: nn.Module, x: SiteStatistics) -> SiteStatistics:
    """What the data say replaced by what the weights say: inputs are taken to be white."""
    wq, wk = weights(module, x)
    other = copy.copy(x)
    other.c_q, other.c_k = wq @ wq.mT, wk @ wk.mT
    other.between, other.rows = torch.zeros_like(x.between), 1
    for c, pair in enumerate(map(list, x.pairs)):
        blocks = other.c_q[:, pair][:, :, pair].unflatten(0, (x.key_heads, x.group)).sum(1)
        other.between[:, c, c] = (blocks * other.c_k[:, pair][:, :, pair]).sum((-2, -1))
    return other


def with_plain_svd(model: nn.Module, statistics: Mapping[str, SiteStatistics], share: float) -> nn.Module:
    """Rotary positions: W_K of rank r, so that keys before the rotation are r numbers."""
    new = copy.deepcopy(model)
    for site, x in statistics.items():
        module = new.get_submodule(site)
        wq, wk = weights(module, x)
        for g in range(x.key_heads):
            own = wq[g * x.group : (g + 1) * x.group]
            a_q, a_k = subspace(own @ own.mT, wk[g] @ wk[g].mT, int(x.width * share))
            # the query heads of a group share keys: the mean of what each of them would ask for
            wk[g] = (a_q.mean(0) @ a_k.mT) @ wk[g]
        name = next(pair[1] for pair in PROJECTIONS if hasattr(module, pair[1]))
        getattr(module, name).weight.data = wk.flatten(0, 1).to(getattr(module, name).weight)
    return new


def measure(name: str, options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    loaded = load_model(name, with_head=True)
    model = loaded.model.eval()
    batches = text_input(loaded, None, length=options.length, texts=options.texts).batches
    chosen_by, measured_by = batches[0::2], batches[1::2]
    new = narrow_copy(model, chosen_by[0])
    statistics = gather(new, chosen_by)
    without = {site: plain(new.get_submodule(site), x) for site, x in statistics.items()}
    heads = {site: x.key_heads for site, x in statistics.items()}
    rotary = any(x.pairs for x in statistics.values())
    before = outputs(model, measured_by)
    record = kept.setdefault(f"{name}, {options.length} tokens, {len(measured_by)} texts", {})
    record["measure"] = "nats per token" if before[0].logits else "1 - cosine"
    for share in options.keep:
        row = record.setdefault(str(share), {})
        same = {site: int(x.width * share) for site, x in statistics.items()}
        ways: dict[str, tuple[Mapping[str, SiteStatistics], dict[str, int]]] = {
            "plain, pairs" if rotary else "plain SVD": (without, same),
            "metric": (statistics, same),
        }
        for way, (what, widths) in ways.items():
            if way not in row:
                with narrowed_to(new, what, {s: w for s, w in widths.items() if w < statistics[s].width}):
                    row[way] = [drift(a, b) for a, b in zip(before, outputs(new, measured_by), strict=True)]
        if rotary and "plain SVD" not in row:
            other = with_plain_svd(model, statistics, share)
            row["plain SVD"] = [drift(a, b) for a, b in zip(before, outputs(other, measured_by), strict=True)]
        if options.into is not None:
            write_json(options.into, kept)
    curves = record.setdefault("curves", {})
    for site, x in statistics.items():
        if site not in curves:
            (curve,) = drift_curves(new, {site: x}, chosen_by[:JUDGES]).values()
            curves[site] = {str(w): moved for w, moved in curve.items()}
            if options.into is not None:
                write_json(options.into, kept)
    read = {site: {int(w): moved for w, moved in curve.items()} for site, curve in curves.items()}
    for share in options.keep:
        widths = allocate(read, share, heads)
        with narrowed_to(new, statistics, {s: w for s, w in widths.items() if w < statistics[s].width}):
            after = outputs(new, measured_by)
        record[str(share)]["metric, chosen"] = [drift(a, b) for a, b in zip(before, after, strict=True)]
    if options.into is not None:
        write_json(options.into, kept)
    numbers = sum(heads[s] * x.width for s, x in statistics.items())
    values = sum(heads[s] * x.value_width for s, x in statistics.items())
    record["numbers"] = [numbers, values]
    show(name, record, options.keep)
    return record


def show(name: str, record: dict[str, Any], shares: Sequence[float]) -> None:
    numbers, values = record["numbers"]
    print(f"\n{name}: {record['measure']} | keys {numbers:,} numbers a token, values {values:,}")
    for share in shares:
        row = record[str(share)]
        best = min(sum(row[way]) for way in row if way.startswith("plain"))
        saved = f"key cache {1 - share:.1%} saved, whole cache {(1 - share) * numbers / (numbers + values):.1%}"
        print(f"  keep {share:g} ({saved})")
        for way, values_of in row.items():
            ratio = sum(values_of) / best
            print(f"    {way:16s} {interval(values_of)}   {ratio:.3f} of the best plain SVD", flush=True)


def draw(path: Path, records: Mapping[str, dict[str, Any]], shares: Sequence[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(records), 3.4), layout="constrained")
    axes = figure.subplots(1, len(records), squeeze=False)[0]
    for axis, (name, record) in zip(axes, records.items(), strict=True):
        for way in record[str(shares[0])]:
            means = [sum(record[str(s)][way]) / len(record[str(s)][way]) for s in shares]
            style = {
                "color": COLOURS[way],
                "linestyle": "--" if way.startswith("plain") else "-",
                "marker": "o",
                "markersize": 4,
            }
            axis.plot([100 * (1 - s) for s in shares], means, label=way, **style)
        axis.set_yscale("log")
        axis.set_xlabel("key cache saved, %")
        axis.set_ylabel(f"drift, {record['measure']}")
        axis.set_title(name, fontsize="medium")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["minilm", "smollm2"])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--keep", nargs="+", type=float, default=[0.75, 0.5, 0.375, 0.25])
    parser.add_argument("--into", type=Path, default=None, metavar="FILE")
    parser.add_argument("--figure", type=Path, default=None, metavar="FILE.svg")
    options = parser.parse_args()
    into = options.into
    kept = json.loads(into.read_text()) if into is not None and into.exists() else {}
    records = {name: measure(name, options, kept) for name in options.model}
    if options.figure is not None:
        draw(options.figure, records, options.keep)


if __name__ == "__main__":
    main()
