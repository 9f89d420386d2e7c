"""Encoders of speech and images, planned and rewritten: what is recognised, and the seconds, before and after.

    python -m benchmarks.rewrite_media speech [--tolerance 0.02] [--sentences 4] [--test 16]
    python -m benchmarks.rewrite_media images [--tolerance 0.02] [--steps 150]

speech: the encoder of whisper tiny.en at 1500 frames.  Sentences spoken by espeak-ng; each voice is a kind, so that the
bound is for voices that were not tried; other sentences and other voices test.  The word error rate is of greedy
decoding with the model's own decoder.
images: a ViT of 197 tokens, trained here on Fashion-MNIST for --steps steps; each class of images is a kind.  Accuracy
on test images.
Seconds are processor time of one thread and one input, medians of neighbouring runs.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import headwise
from benchmarks import image_data
from benchmarks.speech import FIT_VOICES, TEST_VOICES, Recogniser, sentences, speak, word_errors, words
from headwise.cli.tables import print_table
from headwise.models import load_model
from headwise.replacement import Plan

VOICES = (*FIT_VOICES, "en-gb-scotland", "en-us+f5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speech", "images"))
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--sentences", type=int, default=4, help="of each voice that plans")
    parser.add_argument("--test", type=int, default=16, help="recordings that test")
    parser.add_argument("--steps", type=int, default=150, help="of training the ViT")
    parser.add_argument("--evaluations", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (speech if options.what == "speech" else images)(options)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{time.process_time():.0f} processor seconds, {memory:.1f} GB at most")


def speech(options: argparse.Namespace) -> None:
    recogniser = Recogniser()
    encoder: Any = load_model("whisper").model.encoder  # one of its own: the recogniser replaces attention in its model
    texts = sentences(options.sentences * len(VOICES) + options.test)
    spoken, heard = texts[: -options.test], texts[-options.test :]
    kinds = {
        voice: [{"input_features": x.features} for x in speak(recogniser, spoken[i :: len(VOICES)], [voice])]
        for i, voice in enumerate(VOICES)
    }
    made = _plan(encoder, kinds, options)
    probe = kinds[VOICES[0]][0]
    new, _ = headwise.rewrite(encoder, made, probe=probe)
    test = speak(recogniser, heard, TEST_VOICES)
    rows = []
    for name, model in (("exact", encoder), ("rewritten", new)):
        errors = count = 0
        for recording in test:
            with torch.no_grad():
                encoded = model(input_features=recording.features)[0]
            said = words(recording.sentence)
            errors += word_errors(words(recogniser.transcribe(encoded)), said)
            count += len(said)
        rows.append((name, f"{errors / count:.1%} of {count}"))
    drifts = [_drift(encoder, new, {"input_features": x.features}) for x in test]
    _print(made, "whisper tiny.en, 1500 frames", "words wrong", rows, _seconds(encoder, new, probe), drifts)


def images(options: argparse.Namespace) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    x, y, test_x, test_y = image_data.load("fashion")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 28, "patch_size": 2, "num_channels": 1, "num_labels": 10, "hidden_size": 64}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model: Any = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(options.steps):
        batch = torch.randint(len(x), (64,))
        model(pixel_values=x[batch], labels=y[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            print(f"step {step + 1} of {options.steps}", flush=True)
    model.eval()
    kinds = {f"class {label}": [{"pixel_values": part} for part in x[y == label][:32].split(8)] for label in range(10)}
    made = _plan(model, kinds, options)
    probe = {"pixel_values": test_x[:1]}
    new, _ = headwise.rewrite(model, made, probe=probe)
    shown = torch.randperm(len(test_x))[:1000]
    rows = []
    with torch.no_grad():
        for name, each in (("exact", model), ("rewritten", new)):
            found = torch.cat([each(pixel_values=part).logits.argmax(-1) for part in test_x[shown].split(100)])
            rows.append((name, f"{(found == test_y[shown]).float().mean():.1%} of {len(shown)}"))
    drifts = [_drift(model, new, {"pixel_values": image.unsqueeze(0)}) for image in test_x[shown[:100]]]
    _print(made, "ViT, 197 tokens", "right", rows, _seconds(model, new, probe), drifts)


def _plan(model: Any, kinds: dict[str, list[Any]], options: argparse.Namespace) -> Plan:
    start = time.process_time()
    made = headwise.plan(model, kinds, tolerance=options.tolerance, evaluations=options.evaluations)
    print(f"planned in {time.process_time() - start:.0f} processor seconds, {len(kinds)} kinds", flush=True)
    for point in made.curve:
        mark = "→" if point is made.point else " "
        print(f"{mark} cost {point.cost:6.1%}, largest drift {point.largest:.4f}, bound {point.bound:.4f}")
    return made


def _drift(old: Any, new: Any, batch: dict[str, torch.Tensor]) -> float:
    """1 - cosine of the mean final states, or of the logits"""
    with torch.no_grad():
        a, b = (model(**batch)[0].double() for model in (old, new))
    a, b = (x.flatten(1, -2).mean(1) if x.dim() > 2 else x for x in (a, b))
    return float(1 - torch.cosine_similarity(a, b))


def _seconds(old: Any, new: Any, batch: dict[str, torch.Tensor], rounds: int = 9) -> list[float]:
    """Median seconds of both models, and of the ratio of neighbouring runs."""
    times: list[list[float]] = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            times.append([])
            for model in (old, new):
                start = time.process_time()
                model(**batch)
                times[-1].append(time.process_time() - start)
    a, b = zip(*times[1:], strict=True)
    return [statistics.median(a), statistics.median(b), statistics.median(y / x for x, y in zip(a, b, strict=True))]


def _print(
    made: Plan, title: str, quality: str, rows: Sequence[tuple[str, str]], seconds: Sequence[float], drifts: list[float]
) -> None:
    cells = [(*rows[0], f"{seconds[0]:.3f}", "1.00"), (*rows[1], f"{seconds[1]:.3f}", f"{seconds[2]:.2f}")]
    cost = 1.0 if made.point is None else made.point.cost
    print_table(f"{title}, planned for {made.tolerance:g}: {cost:.0%} of the cost of attention",
                ("model", quality, "seconds", "over exact"), cells, words=("model",))  # fmt: skip
    kept = sum(x <= made.tolerance for x in drifts)
    print(f"drift of {len(drifts)} test inputs: largest {max(drifts):.4f}, {kept} within {made.tolerance:g}")


if __name__ == "__main__":
    main()
