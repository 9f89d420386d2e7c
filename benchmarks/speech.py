"""Attention of linear cost on speech: whisper tiny.en with every encoder head replaced, and what it then hears.

    python -m benchmarks.speech                                24 sentences to fit, 24 others to test: about ten minutes
    python -m benchmarks.speech --fit 4 --test 4 --steps 20    a minute

The encoder attends over 1500 frames (30 s, mostly silence here).  Everyday sentences are spoken by espeak-ng; test
sentences and test voices are not among those fitted.  All 24 heads become the same operator, whose
parameters (if it has any) are fitted, layer by layer, to the outputs of the exact heads at the frames that are spoken.

    features   ||encoder output - exact one||_F / ||exact one||_F over spoken frames, mean over test recordings and
               standard error
    words      word error rate of greedy decoding against the sentence, pooled over test recordings
    attention  processor time of one layer's attention over torch's exact attention, one thread, median of rounds

Needs espeak-ng, and the packages of requirements-weights-slow.txt.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import itertools
import json
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.models import load_model
from headwise.models.media.recordings import read_audio
from headwise.operators import AttentionOperator, efficient, factored, near_far, nystrom, projected, uniform, window
from headwise.operators.linear.projections import Dense

FIT_VOICES = ("en-us", "en-gb", "en-us+f2", "en-gb+m3")
TEST_VOICES = ("en-us+m7", "en-gb+f4", "en-gb-x-rp", "en-us+m1")
START, NO_TIMESTAMPS, END = 50257, 50362, 50256
RATE = 16000
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v), each (1, heads, n, d), with the scale inside q -> (1, heads, n, d)"""
QKV = tuple[Tensor, Tensor, Tensor]


class Fitted(nn.Module):
    """An operator with learned parameters, by name: `build(q, k, **parameters)`."""

    def __init__(self, build: Callable[..., AttentionOperator], **initial: Tensor) -> None:
        super().__init__()
        self.build = build
        self.learned = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, x in initial.items()})

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.build(q, k, **dict(self.learned.items()))(v)


def _efficient(q: Tensor, k: Tensor, sharp: Tensor) -> AttentionOperator:
    return efficient(q * sharp[0].exp(), k * sharp[1].exp(), scale=1.0)


def _factored(q: Tensor, k: Tensor, sharp: Tensor, e: Tensor, f: Tensor) -> AttentionOperator:
    return factored(q * sharp[0].exp(), k * sharp[1].exp(), Dense(e), Dense(f), scale=1.0)


def _projected(q: Tensor, k: Tensor, e: Tensor, f: Tensor) -> AttentionOperator:
    return projected(q, k, Dense(e), Dense(f), scale=1.0)


def _near_far(q: Tensor, k: Tensor, a: Tensor, b: Tensor, c: Tensor, block: int) -> AttentionOperator:
    return near_far(q, k, a, b, c, block=block, leading=1, scale=1.0)


def candidates(heads: int, n: int, d: int) -> dict[str, Attention]:
    """Operators by name; parameters begin at means of segments, or at zero."""
    generator = torch.Generator().manual_seed(0)

    def segments(r: int) -> Tensor:
        slots = torch.arange(n) * r // n
        rows = (slots == torch.arange(r).unsqueeze(-1)).float()
        return (rows / rows.sum(-1, keepdim=True)).expand(heads, r, n)

    def features(r: int) -> Tensor:
        return 0.3 * torch.randn(heads, r, d, generator=generator)

    sharp = torch.zeros(2, heads, 1, 1)
    return {
        "uniform": lambda q, k, v: uniform(n, n)(v),
        "window 65, 1 leading": lambda q, k, v: window(q, k, 65, leading=1, scale=1.0)(v),
        "window 257, 1 leading": lambda q, k, v: window(q, k, 257, leading=1, scale=1.0)(v),
        "nystrom 64": lambda q, k, v: nystrom(q, k, 64, scale=1.0)(v),
        "efficient, fitted": Fitted(_efficient, sharp=sharp),
        "factored 128, fitted": Fitted(_factored, sharp=sharp, e=segments(128), f=segments(128)),
        "projected 128, fitted": Fitted(_projected, e=segments(128), f=segments(128)),
        "near_far 32 + 16, fitted": Fitted(
            partial(_near_far, block=32), a=features(16), b=features(16), c=torch.zeros(heads, 16)
        ),
    }


@final
@dataclass(frozen=True)
class Recording:
    """A spoken sentence as the features the encoder takes, (1, 80, 3000)."""

    sentence: str
    voice: str
    features: Tensor
    frames: int  # spoken ones of the encoder's 1500, 50 a second; the rest is silence


@final
@dataclass(frozen=True)
class Row:
    """How one operator does in place of every encoder head."""

    operator: str
    features: float
    standard_error: float
    word_error_rate: float
    attention: float


class Recogniser:
    """whisper tiny.en, its encoder attention replaceable, its tokens readable."""

    def __init__(self) -> None:
        import transformers

        body: Any = load_model("whisper").model
        self.model: Any = transformers.WhisperForConditionalGeneration(body.config).eval()
        self.model.model = body
        self.model.proj_out.weight = body.decoder.embed_tokens.weight
        self.extractor = transformers.WhisperFeatureExtractor(feature_size=80)
        self.layers = [layer.self_attn for layer in body.encoder.layers]
        self.instead: dict[nn.Module, Attention] = {}
        self.captured: dict[nn.Module, list[QKV]] | None = None
        transformers.AttentionInterface.register("speech_benchmark", self._attention)
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        transformers.AttentionMaskInterface.register("speech_benchmark", masks["sdpa"])
        self._exact = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        self.model.set_attn_implementation("speech_benchmark")
        self.tokens = _tokens()

    def _attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if module not in self.layers:
            return self._exact(module, q, k, v, mask, **options)
        scale = options.get("scaling")
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        if self.captured is not None:
            self.captured[module].append((q, k, v))
        attend = self.instead.get(module, exact)
        return attend(q, k, v).transpose(1, 2), None

    @torch.no_grad()
    def encode(self, recording: Recording) -> Tensor:
        return self.model.model.encoder(recording.features)[0]

    @contextmanager
    def replaced(self, attention: Mapping[nn.Module, Attention]) -> Iterator[None]:
        self.instead = dict(attention)
        try:
            yield
        finally:
            self.instead = {}

    def capture(self, recordings: Sequence[Recording]) -> dict[nn.Module, list[QKV]]:
        """The queries, keys and values of every encoder layer of the exact model."""
        self.captured = captured = {layer: [] for layer in self.layers}
        try:
            for recording in recordings:
                self.encode(recording)
        finally:
            self.captured = None
        return captured

    @torch.no_grad()
    def transcribe(self, encoded: Tensor, longest: int = 60) -> str:
        """Greedy decoding, without timestamps."""
        ids, past, spoken = torch.tensor([[START, NO_TIMESTAMPS]]), None, []
        while len(spoken) < longest:
            step = self.model(encoder_outputs=(encoded,), decoder_input_ids=ids, past_key_values=past, use_cache=True)
            token = int(step.logits[0, -1, :START].argmax())
            if token == END:
                break
            past, ids = step.past_key_values, torch.tensor([[token]])
            spoken.append(token)
        return b"".join(self.tokens[token] for token in spoken).decode(errors="replace")


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def _tokens() -> dict[int, bytes]:
    """The bytes of every text token, from the file that comes with openai-whisper."""
    package = importlib.util.find_spec("whisper")
    if package is None or not package.submodule_search_locations:
        raise InputError("benchmarks.speech needs the packages of requirements-weights-slow.txt; `make slow` has them")
    lines = (Path(package.submodule_search_locations[0]) / "assets" / "gpt2.tiktoken").read_text().splitlines()
    return {int(rank): base64.b64decode(token) for token, rank in (line.split() for line in lines)}


SENTENCE = (
    ("My brother", "The teacher", "An old farmer", "The young doctor", "Our neighbour", "The little girl"),
    ("bought some fresh bread", "was waiting", "lost a black umbrella", "told us a long story", "parked the car"),
    (
        "near the station",
        "in the garden",
        "behind the church",
        "at the market",
        "by the river",
        "in front of the school",
    ),
    ("early in the morning", "before the rain started", "after lunch", "on Sunday evening", "while we were talking"),
)
"""Who did what, where and when: everyday words, so that the recogniser's own errors stay few."""


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different ones, drawn from all combinations."""
    every = [" ".join(parts) + "." for parts in itertools.product(*SENTENCE)]
    return random.Random(seed).sample(every, count)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def word_errors(heard: Sequence[str], said: Sequence[str]) -> int:
    """Least number of insertions, deletions and substitutions that turn `said` into `heard`."""
    row = list(range(len(said) + 1))
    for i, word in enumerate(heard, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def speak(recogniser: Recogniser, texts: Sequence[str], voices: Sequence[str]) -> list[Recording]:
    """One recording a sentence, voices in turn."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise InputError("benchmarks.speech needs the program espeak-ng, which is in the package of that name")
    recordings = []
    with tempfile.TemporaryDirectory() as directory:
        for i, text in enumerate(texts):
            voice, path = voices[i % len(voices)], Path(directory) / f"{i}.wav"
            subprocess.run([program, "-v", voice, "-s", "130", "-w", str(path), text], check=True)
            samples = read_audio(path, RATE).numpy()
            features = recogniser.extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
            recordings.append(Recording(text, voice, features, min(1500, 50 * len(samples) // RATE)))
    return recordings


def fit(attention: nn.Module, samples: Sequence[QKV], recordings: Sequence[Recording], steps: int) -> None:
    """Adam on ||attention - exact||_F^2 / ||exact||_F^2 at spoken frames, mean over heads, one recording a step."""
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        q, k, v = samples[step % len(samples)]
        spoken = slice(recordings[step % len(samples)].frames)
        target = exact(q, k, v)[..., spoken, :]
        off = (attention(q, k, v)[..., spoken, :] - target).square().sum((-2, -1)) / target.square().sum((-2, -1))
        optimizer.zero_grad()
        off.mean().backward()
        optimizer.step()
        schedule.step()


def relative_time(attention: Attention, sample: QKV, rounds: int = 9) -> float:
    """Processor time over that of exact attention, in turns on one thread; the median of the ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ratios = []
    try:
        with torch.no_grad():
            for _ in range(rounds + 1):
                times = []
                for call in (attention, exact):
                    start = time.process_time()
                    call(*sample)
                    times.append(time.process_time() - start)
                ratios.append(times[0] / times[1])
    finally:
        torch.set_num_threads(threads)
    return statistics.median(ratios[1:])


def measure(recogniser: Recogniser, fitting: Sequence[Recording], test: Sequence[Recording], steps: int) -> list[Row]:
    captured = recogniser.capture(fitting)
    sample = captured[recogniser.layers[0]][0]
    _, heads, n, d = sample[0].shape
    clean = [recogniser.encode(recording) for recording in test]
    rows = [_row(recogniser, "exact", dict.fromkeys(recogniser.layers, exact), test, clean, 1.0)]
    for name in candidates(heads, n, d):
        installed: dict[nn.Module, Attention] = {}
        for layer in recogniser.layers:
            attention = candidates(heads, n, d)[name]
            if isinstance(attention, nn.Module):
                fit(attention, captured[layer], fitting, steps)
            installed[layer] = attention
        ratio = relative_time(installed[recogniser.layers[0]], sample)
        rows.append(_row(recogniser, name, installed, test, clean, ratio))
    return rows


def _row(
    recogniser: Recogniser,
    name: str,
    installed: Mapping[nn.Module, Attention],
    test: Sequence[Recording],
    clean: Sequence[Tensor],
    ratio: float,
) -> Row:
    drifts, errors, spoken = [], 0, 0
    for recording, before in zip(test, clean, strict=True):
        with recogniser.replaced(installed), torch.no_grad():
            after = recogniser.encode(recording)
        off = (after - before)[:, : recording.frames]
        drifts.append(float(off.norm() / before[:, : recording.frames].norm()))
        said = words(recording.sentence)
        errors += word_errors(words(recogniser.transcribe(after)), said)
        spoken += len(said)
    spread = statistics.stdev(drifts) / len(drifts) ** 0.5 if len(drifts) > 1 else float("nan")
    return Row(name, statistics.mean(drifts), spread, errors / spoken, ratio)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=int, default=24, metavar="N", help="sentences to fit to")
    parser.add_argument("--test", type=int, default=24, metavar="N", help="sentences to test on")
    parser.add_argument("--steps", type=int, default=120, help="steps of each fit")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    recogniser = Recogniser()
    texts = sentences(options.fit + options.test)
    fitting = speak(recogniser, texts[: options.fit], FIT_VOICES)
    test = speak(recogniser, texts[options.fit :], TEST_VOICES)
    rows = measure(recogniser, fitting, test, options.steps)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    cells = [
        [x.operator, f"{x.features:.3f} ± {x.standard_error:.3f}", f"{x.word_error_rate:.1%}", f"{x.attention:.2f}"]
        for x in rows
    ]
    title = f"whisper tiny.en, 1500 frames, {len(fitting)} recordings to fit, {len(test)} to test"
    print_table(title, ["every encoder head", "features", "words", "attention"], cells)


if __name__ == "__main__":
    main()
