"""The commands that the campaign interrupts, on models so small that a run takes about a second.

A `Subject` is a command line whose output is always `out` in the working directory, the arguments that finish an
interrupted run, and `numbers`: everything in its result that a second run must reproduce bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.faults.server import Server

Numbers = Callable[[Path, str], Any]
"""(working directory, standard output) -> values to compare"""


@dataclass(frozen=True)
class Subject:
    """One long command.  `{session}` in its arguments is the directory of the models."""

    name: str
    arguments: tuple[str, ...]
    numbers: Numbers
    again: tuple[str, ...] = ()  # arguments that finish an interrupted run
    other: tuple[str, ...] = ()  # arguments of another run whose result could be mixed with this one's
    planted: tuple[str, ...] = ("mine.txt", "out/mine.txt")  # files of the user
    share: float = 1.0  # of the kills; less for long runs
    environment: tuple[tuple[str, str], ...] = ()  # variables
    target: str = "out"  # what it writes

    def request(self, session: Path) -> dict[str, Any]:
        """What `Server.start` needs beside the command line."""
        return {"environment": {name: value.format(session=session) for name, value in self.environment}}

    def command(self, session: Path, *more: str) -> list[str]:
        return [argument.format(session=session) for argument in self.arguments] + list(more)


def encoder() -> tuple[nn.Module, list[torch.Tensor]]:
    """A model that is not of transformers, with its batches."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [torch.randn(1, 20, 16) for _ in range(6)]


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2), nn.ReLU()).eval()


def write_models(directory: Path) -> None:
    """Write the models and inputs that the commands read."""
    import transformers
    from PIL import Image

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    small = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(**small, hidden_size=16, intermediate_size=24, max_position_embeddings=48)
    transformers.BertModel(bert).save_pretrained(directory / "bert")
    gpt2 = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=48, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2Model(gpt2).save_pretrained(directory / "gpt2")
    vit = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
    )
    transformers.ViTModel(vit).save_pretrained(directory / "vit")
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessor(size=size).save_pretrained(directory / "vit")
    (directory / "images").mkdir()
    for index in range(3):
        pixels = torch.randint(256, (16, 16, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(directory / "images" / f"{index}.png")
    torch.export.save(torch.export.export(cnn(), (torch.randn(1, 3, 8, 8),)), directory / "cnn.pt2")
    torch.save({name: torch.randn(1, 32, 8) for name in "qkv"}, directory / "heads.pt")
    write_history(directory)


def write_history(directory: Path) -> None:
    """What a Monitor saved: 40 steps of 8 heads."""
    from headwise.examination.monitor.history import NAMES, Head, History

    draws, history = torch.Generator().manual_seed(0), History(model="tiny")
    heads = [Head(f"layers.{layer}", head) for layer in range(2) for head in range(4)]
    for step in range(40):
        numbers = torch.rand(len(heads), len(NAMES), generator=draws).tolist()
        history.add(step, dict(zip(heads, numbers, strict=True)))
    history.save(directory / "history.json")


COMPILER = """#!/bin/sh
# copies a library that was compiled before, in two parts, in a process of its own as g++ starts cc1plus
[ "$1" = --version ] && { echo stand-in; exit; }
for word; do [ "$last" = -o ] && output=$word; last=$word; done
export output
sh -c 'head -c 50000 "{library}" > "$output" && sleep 0.3 && cat "{library}" > "$output"; exit $?'
"""


def write_compiler(directory: Path, server: Server) -> None:
    """Compile the kernels once, and write a script that gives the result as if it had just compiled it."""
    environment = {"HEADWISE_CACHE": str(directory / "compiled"), "HEADWISE_KERNELS": "auto"}
    ended = server.run(["kernels", "build", "--json"], directory / "compiling", seconds=900, environment=environment)
    assert ended.code == 0, ended.err
    (library,) = (directory / "compiled").rglob("kernels.so")
    (directory / "compiler").write_text(COMPILER.replace("{library}", str(library)))
    (directory / "compiler").chmod(0o755)


def write_results(directory: Path, server: Server) -> None:
    """Write the plan, the rewritten and narrowed models and the examinations that other commands read."""
    for name, arguments in {
        "plan": PLAN.command(directory),
        "examined-bert": EXAMINE.command(directory),
        "examined-bert-2": EXAMINE.command(directory, *SEED),
        "rewritten": REWRITE.command(directory),
        "narrowed": SHRINK.command(directory),
    }.items():
        ended = server.run(arguments, directory / name)
        assert ended.code == 0, ended.err


VOLATILE = {
    "command",
    "seconds",
    "exact_below",
    "timing",
    "timed",
    "timings",
    "forward",
    "forward_backward",
    "date",
    "time",
}
"""Keys whose values are measured times or name the command line."""


def steady(value: Any) -> Any:
    """JSON without the keys that differ between two runs of one command."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VOLATILE}
    return [steady(item) for item in value] if isinstance(value, list) else value


def steady_json(path: Path) -> Any:
    return steady(json.loads(path.read_text()))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _examined(directory: Path, _: str) -> Any:
    out = directory / "out"
    figures = {path.name: _digest(path) for path in sorted((out / "figures").glob("*.png"))}
    assert (out / "report.html").exists(), "no report.html"
    return steady_json(out / "report.json"), figures


def _planned(directory: Path, _: str) -> Any:
    return steady_json(directory / "out" / "plan.json")


def _rewritten(directory: Path, out: str) -> Any:
    names = sorted((directory / "out").glob("*.safetensors"))
    return (
        steady_json(directory / "out" / "plan.json"),
        {path.name: _digest(path) for path in names},
        steady(json.loads(out)),
    )


def _grown(directory: Path, _: str) -> Any:
    return steady_json(directory / "out" / "grow.json"), _digest(directory / "out" / "widths.png")


def _narrowed(directory: Path, _: str) -> Any:
    weights = _digest(directory / "out" / "model.safetensors")
    return steady_json(directory / "out" / "shrink.json"), weights, steady_json(directory / "out" / "config.json")


def _verified(directory: Path, _: str) -> Any:
    return steady_json(directory / "out.json")


LOADING = threading.Lock()
"""torch.export.load keeps its state in a global variable, and trials run in several threads."""


def _converted(directory: Path, out: str) -> Any:
    with LOADING:
        program = torch.export.load(directory / "out.pt2")
    return {name: x.tolist() for name, x in program.state_dict.items()}, steady(json.loads(out))


def _benched(directory: Path, _: str) -> Any:
    facts = json.loads((directory / "out" / "scaling.json").read_text())
    return [(row["name"], row["n"], row["rank"], row["multiply_adds"], row["depth"]) for row in facts["rows"]]


def printed(_: Path, out: str) -> Any:
    facts = json.loads(out)
    for measured in ("seconds_old", "seconds_new", "ratio"):
        facts.pop(measured, None)
    return steady(facts)


def printed_list(_: Path, out: str) -> Any:
    return json.loads(out)


def _compared(directory: Path, out: str) -> Any:
    assert (directory / "out" / "comparison.html").exists(), "no comparison.html"
    return steady_json(directory / "out" / "comparison.json"), printed(directory, out)


def _monitored(directory: Path, out: str) -> Any:
    return _digest(directory / "out" / "history.html"), _digest(directory / "out" / "history.json"), json.loads(out)


def _built(directory: Path, out: str) -> Any:
    assert "the compiled kernels" in out, out
    (library,) = (directory / "out").rglob("kernels.so")
    record = json.loads(library.with_name("build.json").read_text())
    assert record["sha256"] == _digest(library), "build.json is of another library"
    return _digest(library)


def _toured(directory: Path, out: str) -> Any:
    return steady(json.loads(out)), _digest(directory / "out" / "tour.png")


TOKENS = ("--random-tokens", "24", "--quiet")
BESIDE = ("mine.txt",)
REPORT = ("mine.txt", "out/mine.txt", "out/figures/mine.svg")
SEED = ("--seed", "1")
EXAMINE = Subject(
    "examine",
    ("examine", "{session}/bert", *TOKENS, "--texts", "4", "--spectra-every", "2", "-o", "out"),
    _examined,
    again=("--resume",),
    other=SEED,
    planted=REPORT,
)
PLAN = Subject(
    "plan",
    (
        "plan",
        "{session}/bert",
        *TOKENS,
        "--objective",
        "multiply-adds",
        "--texts",
        "6",
        "--tolerance",
        "0.1",
        "-o",
        "out",
    ),
    _planned,
    again=("--resume",),
    other=SEED,
)
REWRITE = Subject(
    "rewrite",
    ("rewrite", "{session}/bert", "--plan", "{session}/plan/out", "-o", "out", "--json"),
    _rewritten,
    planted=BESIDE,
)
SHRINK = Subject(
    "shrink",
    ("shrink", "{session}/bert", "--random-tokens", "12", "--texts", "4", "--json", "-o", "out"),
    _narrowed,
    planted=BESIDE,
    other=SEED,
    share=0.6,
)
SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        EXAMINE,
        Subject(
            "examine a factory",
            ("examine", "python:tests.faults.subjects:encoder", "--quiet", "--no-ablations", "-o", "out"),
            _examined,
            again=("--resume",),
            other=SEED,
            planted=REPORT,
        ),
        Subject(
            "examine images",
            (
                "examine",
                "{session}/vit",
                "--images",
                "{session}/images",
                "--quiet",
                "--spectra-every",
                "0",
                "-o",
                "out",
            ),
            _examined,
            again=("--resume",),
            planted=REPORT,
            share=0.5,
        ),
        PLAN,
        REWRITE,
        Subject(
            "rewrite --all",
            ("rewrite", "{session}/gpt2", "--all", "window", "--width", "5", "-o", "out", "--json"),
            _rewritten,
            planted=BESIDE,
            share=0.5,
        ),
        Subject(
            "grow",
            ("grow", "--steps", "20", "--every", "10", "--keys", "16", "--json", "-o", "out"),
            _grown,
            other=SEED,
        ),
        SHRINK,
        Subject(
            "verify",
            ("verify", "--source", "S3", "--quiet", "-o", "out.json"),
            _verified,
            planted=BESIDE,
            share=0.6,
            target="out.json",
        ),
        Subject(
            "verify a model",
            ("verify", "{session}/gpt2", "--quiet", "-o", "out.json"),
            _verified,
            planted=BESIDE,
            share=0.3,
            target="out.json",
        ),
        Subject(
            "convert",
            ("convert", "{session}/cnn.pt2", "-o", "out.pt2", "--json"),
            _converted,
            planted=BESIDE,
            target="out.pt2",
        ),
        Subject(
            "bench scaling",
            ("bench", "scaling", "--operators", "softmax", "--n", "64", "128", "--quick", "--quiet", "-o", "out"),
            _benched,
            share=0.3,
        ),
        Subject(
            "compare",
            ("compare", "{session}/examined-bert/out", "{session}/examined-bert-2/out", "--json"),
            printed,
            planted=BESIDE,
            share=0.3,
        ),
        Subject(
            "compare models",
            ("compare", "{session}/bert", "{session}/rewritten/out", "--random-tokens", "24", "--texts", "4", "--json"),
            printed,
            planted=BESIDE,
            share=0.6,
        ),
        Subject(
            "compare -o",
            ("compare", "{session}/examined-bert/out", "{session}/examined-bert-2/out", "--json", "-o", "out"),
            _compared,
            share=0.6,
        ),
        Subject("monitor", ("monitor", "{session}/history.json", "--json", "-o", "out"), _monitored, share=0.6),
        Subject(
            "kernels build",
            ("kernels", "build"),
            _built,
            share=0.5,
            environment=(
                ("HEADWISE_CACHE", "out"),
                ("HEADWISE_KERNELS", "auto"),
                ("CXX", "{session}/compiler"),
            ),
        ),
        Subject("models", ("models", "--json"), printed_list, planted=BESIDE, share=0.2),
        Subject("tour", ("tour", "--side", "8", "--out", "out", "--json"), _toured),
    )
}
