"""Time the same workloads in this checkout and in another one, in turns: is a change slower?

    python -m benchmarks.checkouts ../other-checkout [--only TEXT] [--rounds 9] [--json FILE]

Each checkout runs in a process of its own, which stays alive; the two take turns, so that a busy machine slows both
alike.  A row is one workload: processor seconds on one thread, medians over rounds, and this checkout over the other
with the quartiles of the ratio round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# run in both checkouts: names that moved are looked up in both places
WORKER = """
import json, sys, time
import torch
import headwise
from headwise import operators
torch.set_num_threads(1)
torch.manual_seed(0)
try:
    convert = headwise.convert
except AttributeError:
    from headwise.rewrite import convert

def both(make, x):
    def call():
        leaf = x.clone().requires_grad_()
        make(leaf).square().sum().backward()
    return call

q, k, v = (torch.randn(1, 8, 2048, 64) for _ in range(3))
encoder = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True), 2, enable_nested_tensor=False
).eval()
text = torch.randn(1, 512, 384)
WORK = {
    "softmax forward, n = 2048": lambda: headwise.softmax(q, k)(v),
    "softmax with backward, n = 2048": both(lambda x: headwise.softmax(x, k)(v), q),
    "examine, 24 heads, n = 512, no spectra": lambda: headwise.examine(encoder, [(text,)], spectra_every=0),
    "examine, 24 heads, n = 512, spectra": lambda: headwise.examine(encoder, [(text,)], spectra_every=1),
}
BUILDERS = {
    "window": lambda q: operators.window(q, k, 129),
    "window, causal": lambda q: operators.window(q, k, 129, causal=True),
    "strided, causal": lambda q: operators.strided(q, k, causal=True),
    "fixed, causal": lambda q: operators.fixed(q, k, causal=True),
    "hashed": lambda q: operators.hashed(q, k, rounds=2, generator=torch.Generator().manual_seed(0)),
    "efficient": lambda q: operators.efficient(q, k),
    "efficient, causal": lambda q: operators.efficient(q, k, causal=True),
    "nystrom": lambda q: operators.nystrom(q, k, 64),
}
for name, build in BUILDERS.items():
    WORK[f"{name} forward, n = 2048"] = lambda build=build: build(q)(v)
    WORK[f"{name} with backward, n = 2048"] = both(lambda x, build=build: build(x)(v), q)
for side in (32, 64, 128):
    conv = torch.nn.Conv2d(32, 32, 3, padding=1)
    attention, _ = convert(conv)
    image = torch.randn(4, 32, side, side)
    for name, layer in (("conv2d", conv), ("convolution as attention", attention)):
        WORK[f"{name} forward, {side} x {side}"] = lambda layer=layer, image=image: layer(image)
        WORK[f"{name} with backward, {side} x {side}"] = both(layer, image)
for call in WORK.values():
    call()
print(json.dumps(list(WORK)), flush=True)
for line in sys.stdin:
    start = time.process_time()
    with torch.set_grad_enabled("backward" in line):
        WORK[json.loads(line)]()
    print(time.process_time() - start, flush=True)
"""


class Checkout:
    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=root,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.work: list[str] = json.loads(self._line())

    def seconds(self, name: str) -> float:
        assert self.process.stdin is not None
        print(json.dumps(name), file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("checkouts: a worker ended early; its error is above")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkouts", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the root of another checkout")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    here, other = Checkout(ROOT), Checkout(options.other.resolve())
    rows = []
    print(f"{'workload':49} {'here':>9} {'other':>9} {'ratio':>7}  quartiles, {options.rounds} rounds")
    for name in (name for name in here.work if options.only in name):
        pairs = []
        for round_number in range(options.rounds):  # either one goes first in every second round
            first, second = (here, other) if round_number % 2 else (other, here)
            times = {id(first): first.seconds(name), id(second): second.seconds(name)}
            pairs.append((times[id(here)], times[id(other)]))
        ratios = [a / b for a, b in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append({"workload": name, "here": ours, "other": theirs, "ratio": middle, "quartiles": [low, high]})
        print(f"{name:49} {ours * 1e3:7.1f}ms {theirs * 1e3:7.1f}ms {middle:7.3f}  {low:.3f} … {high:.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
