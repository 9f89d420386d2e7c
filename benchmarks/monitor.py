"""What watching a training run costs, and whether its alarms come in time.

    python -m benchmarks.monitor cost       a training step at n = 1024 with and without the monitor
    python -m benchmarks.monitor memory     the peak memory of a step with and without it
    python -m benchmarks.monitor alarms     20 runs whose logits explode and 20 healthy ones, in three settings
    python -m benchmarks.monitor tune       the same on the seeds on which the rules were chosen

A spike is the first step whose loss is not finite, or is more than 0.5 nat above the lowest mean of 20 consecutive
losses before it.  An explosion counts as announced if a logit-growth alarm was raised at an earlier step than the
spike; a run without a spike counts as not announced.  A healthy run must raise no alarm of any kind.  The default
limits of `AlarmRules` were chosen on seeds 100 to 119 of the first setting alone; seeds 0 to 19 and the other settings
are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.examination.monitor import AlarmRules, Monitor

# ---- runs that explode and runs that do not ----


class Block(nn.Module):
    """Pre-norm, without normalised queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class TinyDecoder(nn.Module):
    """A causal transformer with learned positions."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, n: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(n, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Setting:
    """One kind of run: predict the token `back` places before, a share of which is noise; or text, for back = 0."""

    name: str
    width: int
    heads: int
    layers: int
    n: int
    back: int
    noise: float
    rate: float
    doubling: int  # steps in which the rising learning rate doubles, from step 150 on
    steps: int
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int = 16

    def learning_rate(self, step: int, planted: bool) -> float:
        rise = 2 ** (max(0, step - 150) / self.doubling) if planted else 1.0
        return self.rate * min(1.0, step / 30) * rise


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)


def _adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, betas=(0.9, 0.999))


def _decayed(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1)


VOCABULARY = 32
TUNED = Setting("2 layers, AdamW, copying", 32, 4, 2, 48, 3, 0.3, 3e-3, 50, 500, _adamw)
SETTINGS = (
    TUNED,
    Setting("4 layers, Adam, slower rise", 48, 3, 4, 64, 5, 0.2, 2e-3, 70, 650, _adam),
    Setting("3 layers, AdamW with decay, text", 64, 4, 3, 64, 0, 0.0, 2e-3, 40, 600, _decayed, batch=24),
)


def batches(setting: Setting, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    if not setting.back:
        text = torch.tensor(list(files("headwise.models").joinpath("data/moby-dick.txt").read_bytes()))

        def of_text() -> tuple[Tensor, Tensor]:
            starts = torch.randint(len(text) - setting.n - 1, (setting.batch,), generator=generator)
            windows = torch.stack([text[i : i + setting.n + 1] for i in starts.tolist()])
            return windows[:, :-1], windows[:, 1:]

        return of_text

    def copied() -> tuple[Tensor, Tensor]:
        x = torch.randint(VOCABULARY, (setting.batch, setting.n), generator=generator)
        noise = torch.randint(VOCABULARY, x.shape, generator=generator)
        is_noise = torch.rand(x.shape, generator=generator) < setting.noise
        y = torch.where(is_noise, noise, x.roll(setting.back, 1))
        y[:, : setting.back] = -100
        return x, y

    return copied


def train(
    setting: Setting, seed: int, *, planted: bool, rules: AlarmRules | None = None
) -> tuple[list[float], Monitor]:
    """One run with a monitor at its default cadence: the losses, and the monitor; it ends 20 steps after a spike."""
    torch.manual_seed(seed)
    vocabulary = VOCABULARY if setting.back else 256
    model = TinyDecoder(vocabulary, setting.width, setting.heads, setting.layers, setting.n)
    optimizer, draw = setting.optimizer(model.parameters()), batches(setting, seed)
    monitor = Monitor(model, rules=rules, on_alarm=lambda alarm: None)
    losses: list[float] = []
    for step in range(setting.steps):
        x, y = draw()
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate(step, planted)
        with monitor.step() as monitored:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            monitored.loss = loss
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]) or (step % 20 == 0 and spike(losses[:-20]) is not None):
            break
    return losses, monitor


def spike(losses: list[float]) -> int | None:
    """The first step whose loss is not finite, or 0.5 above the lowest mean of 20 consecutive losses before it."""
    lowest = math.inf
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) or loss > lowest + 0.5:
            return step
        if step >= 19:
            lowest = min(lowest, statistics.fmean(losses[step - 19 : step + 1]))
    return None


def alarms(seeds: range, settings: tuple[Setting, ...], rules: AlarmRules | None = None) -> None:
    print(f"rules: {rules or AlarmRules()}; seeds {seeds[0]} to {seeds[-1]}; measured at every 10th step")
    for setting in settings:
        announced, leads, unspiked, false, spikes = 0, [], 0, [], []
        for seed in seeds:
            losses, monitor = train(setting, seed, planted=True, rules=rules)
            at = spike(losses)
            first = next((alarm.step for alarm in monitor.alarms if alarm.kind == "logit growth"), None)
            unspiked += at is None
            if at is not None:
                spikes.append(at)
                if first is not None and first < at:
                    announced += 1
                    leads.append(at - first)
            healthy_losses, healthy = train(setting, seed, planted=False, rules=rules)
            false += [(seed, alarm) for alarm in healthy.alarms[:1]]
            if spike(healthy_losses) is not None:
                print(f"  seed {seed}: the healthy run has a spike at step {spike(healthy_losses)}")
        lead = f"{statistics.median(leads):.0f} steps before ({min(leads)} to {max(leads)})" if leads else "–"
        print(f"{setting.name}: announced {announced} of {len(seeds)}, {lead}; {unspiked} runs without a spike;")
        print(f"  spikes at steps {min(spikes, default=0)} to {max(spikes, default=0)}; healthy runs with an alarm:")
        print(f"  {len(false)} of {len(seeds)}" + "".join(f"\n    seed {s}: {a.kind}, {a.message}" for s, a in false))


# ---- cost ----


def _model(width: int, heads: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return TinyDecoder(1000, width, heads, layers, 4096)


def _step(model: nn.Module, ids: Tensor, monitor: Monitor | _Absent) -> None:
    with monitor.step():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    model.zero_grad()


def cost(rounds: int) -> None:
    """Processor time of a forward and backward pass: not due, measured, measured with ranks; in turns."""
    print("model (2 layers)               step, ms   measured       with ranks     not due        default cadence")
    for width, heads, batch in ((256, 4, 4), (256, 8, 1), (512, 8, 2), (768, 12, 1)):
        model, ids = _model(width, heads, 2), torch.randint(1000, (batch, 1025))
        bare = Monitor(model, every=1 << 30)
        bare.steps = 1  # not due
        kinds = {"plain": _Absent(), "not due": bare, "measured": Monitor(model, 1, rank_every=0)}
        kinds["ranks"] = Monitor(model, 1, rank_every=1)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            for kind, monitor in kinds.items():
                start = time.process_time()
                _step(model, ids, monitor)
                if turn:
                    times[kind].append(time.process_time() - start)
        base = statistics.median(times["plain"])
        extra = {kind: [x / base - 1 for x in seconds] for kind, seconds in times.items()}
        default = Monitor(model)
        mean = {kind: statistics.median(x) for kind, x in extra.items()}
        share = (mean["measured"] * (default.rank_every - 1) + mean["ranks"]) / default.rank_every / default.every
        row = "  ".join(f"{_percent(extra[kind])}" for kind in ("measured", "ranks", "not due"))
        print(f"width {width}, {heads:2} heads, {batch} × 1024   {base * 1e3:7.0f}    {row}  {share:.1%}")


class _Absent:
    """No monitor at all."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _percent(x: list[float]) -> str:
    low, middle, high = statistics.quantiles(x, n=4)
    return f"{middle:+.1%} ±{(high - low) / 2:.1%}".ljust(13)


MEMORY = """
import json, resource, sys, torch
sys.path.insert(0, ".")
from benchmarks.monitor import _Absent, _model, _step, Monitor
n, kind = int(sys.argv[1]), sys.argv[2]
model, ids = _model(256, 8, 2), torch.randint(1000, (1, n + 1))
_step(model, ids[:, :65], Monitor(model, 1, rank_every=1))
monitor = _Absent() if kind == "plain" else Monitor(model, 1, rank_every=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_step(model, ids, monitor)
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
"""


def memory() -> None:
    """Peak memory of one step in a fresh process, with and without measuring, against n x n of all heads."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for n in (1024, 2048, 4096):
        peaks = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", MEMORY, str(n), kind],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=environment,
                ).stdout
            )
            for kind in ("plain", "measured")
        ]
        dense = 8 * n * n * 4 / 2**20
        print(
            f"n = {n}: peak {peaks[0]:.0f} MB, measured with ranks {peaks[1]:.0f} MB; 8 heads of n × n: {dense:.0f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "memory", "alarms", "tune"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--setting", type=int, help="one of the settings, from 0")
    parser.add_argument("--rules", type=json.loads, default={}, help='limits to try, such as {"growth": 3}')
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.rounds)
        return
    if options.what == "memory":
        memory()
        return
    rules = replace(AlarmRules(), **options.rules)
    if options.what == "tune":
        alarms(range(100, 100 + options.seeds), (TUNED,), rules)
    else:
        chosen = SETTINGS if options.setting is None else (SETTINGS[options.setting],)
        alarms(range(options.seeds), chosen, rules)


if __name__ == "__main__":
    main()
