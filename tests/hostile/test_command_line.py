"""Whatever is typed after `headwise <command>`: an exit code of the documented set, and no traceback.

Command lines are generated from each command's own parser, with good and hostile values for every option.  What takes
long (measuring, fitting, training, timing, exporting) is replaced by results made once.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from headwise.cli.main import COMMANDS, main
from headwise.cli.options import Parser
from headwise.examination import examine
from headwise.models.fingerprint import weights_hash
from headwise.replacement import Choice, Plan, PlanPoint
from tests.bench.test_sharded_cost import canned
from tests.hostile.counting import count, hostile
from tests.models.tiny_models import ALL
from tests.replacement.plans import describe

pytest.importorskip("transformers")

HERE = "python:tests.hostile.test_command_line"


def tiny() -> tuple[nn.Module, list]:
    torch.manual_seed(0)
    return ALL["bert"]()[0], [{"input_ids": torch.randint(99, (1, 12))} for _ in range(7)]


def convolution() -> nn.Module:
    return nn.Conv2d(1, 2, 3)


def raising() -> nn.Module:
    raise RuntimeError("a factory that fails\nin two lines")


def text() -> str:
    return "not a model"


GOOD: dict[str, list[str]] = {
    "model": [f"{HERE}:tiny", f"{HERE}:convolution", "saved"],
    "weights": [f"{HERE}:tiny"],
    "a": ["report", "saved"],
    "b": ["report", "saved"],
    "plan": ["plan"],
    "report": ["report"],
    "out": ["new", "new/er", "x.pt", "x.pt2"],
    "docs": ["page.md"],
    "figures": ["figures"],
    "text": ["text.txt"],
    "images": ["."],
    "audio": ["text.txt"],
    "tensors": ["tensors.pt", "text.txt"],
    "input": ["1,1,8,8"],
    "source": ["S0", "S4"],
    "claim": ["S0.low-rank"],
    "operators": ["efficient"],
    "layers": ["softmax", "2"],
    "random_tokens": ["12"],
    "length": ["12"],
}
NUMBERS = [
    "0",
    "1",
    "2",
    "8",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "9" * 30,
    "9" * 5000,
    "1_000",
    "٣",
    "0x10",
    "",
]
TEXTS = [
    *(
        "",
        " ",
        "-",
        "--",
        "--x",
        "-x",
        "x",
        "\0",
        "a\0b",
        "\udcff",
        "a\nb",
        "[/x]",
        "runs[exp]",
        "$\\frac$",
        "\x1b[31m",
    ),
    *("x" * 5000, "~nobody", "..", "../..", "/dev/null", "/proc/none", "text.txt", "text.txt/in", "damaged", "a/b/c"),
    *("python:", "python::", "python:x", "python:no_such:thing", "python:os:", f"{HERE}:nothing", f"{HERE}:raising"),
    *(f"{HERE}:text", "hub/name", "name.gguf", "x.safetensors", "text.safetensors", "S9", "S0.nothing", "1,2", "1,,2"),
    *("9,9,9,9,9,9,9,9,9,9,9", "0,1", "1," * 40 + "1"),
]


class Found(Exception):
    """Raised in place of parsing, with the parser."""


def parsers(command: str) -> list[tuple[list[str], argparse.ArgumentParser]]:
    """The parser of a command, or those of its subcommands, each with the words that lead to it."""

    def stop(self: Parser, argv: list[str]) -> None:
        raise Found(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", stop)
        with pytest.raises(Found) as caught:
            importlib.import_module(COMMANDS[command][0]).run([])
    parser = caught.value.args[0]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [([command, name], sub) for name, sub in action.choices.items()]
    return [([command], parser)]


def values(action: argparse.Action) -> st.SearchStrategy[str]:
    good = [*map(str, action.choices or ()), *GOOD.get(action.dest, ["3"])]
    bad = NUMBERS if action.dest not in GOOD else TEXTS
    return st.sampled_from(good) | st.sampled_from(good) | st.sampled_from(bad) | st.text(max_size=6)


@st.composite
def lines(draw: st.DrawFn, words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """A command line: each positional argument or not, some of the options, in any order."""
    parts = []
    for action in parser._actions:
        is_likely = action.required or not action.option_strings
        if draw(st.integers(0, 9)) >= (9 if is_likely else 2):
            continue
        option = [draw(st.sampled_from(action.option_strings))] if action.option_strings else []
        some = action.nargs == "+"
        given = [] if action.nargs == 0 else draw(st.lists(values(action), min_size=1, max_size=2 if some else 1))
        if option and given and option[0].startswith("--") and draw(st.booleans()):
            option, given = [f"{option[0]}={given[0]}"], given[1:]
        parts.append(option + given)
    if parts and draw(st.integers(0, 9)) == 0:
        parts.append(draw(st.sampled_from(parts)))  # given twice
    if draw(st.integers(0, 19)) == 0:
        parts.append([draw(st.sampled_from(TEXTS))])
    return [*words, *(word for part in draw(st.permutations(parts)) for word in part)]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the long functions return."""
    from headwise.cli.tour_command import check_symmetries, measure_operators
    from headwise.growth.demo import TASKS, train_and_grow
    from headwise.ledger import verify

    model, batches = tiny()
    sites = describe(model, batches[0])
    about = {"class": "BertModel", "name": "tiny", "fingerprint": weights_hash(model.eval()), "sites": sites}
    choices = {name: [Choice("uniform")] * 4 for name in sites}
    point = PlanPoint(choices, 0.1, 0.01, {"prose": {12: 0.01}}, 0.02)
    timing = {"ratio": 0.5}
    plan = Plan(about, 12, choices, {}, 0.05, "cosine", [point], timing, provenance={"objective": "seconds"})
    return {
        "examination": examine(model, batches[:2], spectra_every=0),
        "plan": plan,
        "ledger": verify(claim="S0.low-rank"),
        "operators": measure_operators(4),
        "symmetries": check_symmetries(4),
        "snapshots": list(train_and_grow(TASKS["lookup"](keys=16), steps=2, every=1, key_width=1, layers=1, heads=1)),
    }


@pytest.fixture
def place(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one file of each kind, and the long functions replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "text.safetensors").write_text("some words")
    torch.save({name: torch.randn(1, 4, 2) for name in "qkv"}, tmp_path / "tensors.pt")
    tiny()[0].save_pretrained(tmp_path / "saved")
    (tmp_path / "damaged").mkdir()
    for name in ("config.json", "plan.json", "report.json", "model.safetensors"):
        (tmp_path / "damaged" / name).write_text("[1")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(results["examination"].to_json())
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(results["plan"].to_dict()))
    replace_long_functions(results, monkeypatch.setattr)
    return tmp_path


def replace_long_functions(results: dict[str, Any], put: Callable[..., None]) -> None:
    from headwise.bench.clock import Times, Timing
    from headwise.bench.peers import LayerTimes
    from headwise.bench.scaling import Scaling
    from headwise.growth.shrinking import Shrinking
    from headwise.models.receipt import Receipt
    from headwise.operators._kernels.native.kernel_cache import BuildRecord
    from headwise.replacement.model_comparison import ModelDifference
    from headwise.replacement.trials import Trial

    timing = Timing(0.1, float("nan"))
    receipt = Receipt(
        "tiny", 1, 1, Choice("softmax").cost(12, 8, False), Choice("uniform").cost(12, 8, False), 0.1, 1.0
    )
    difference = ModelDifference("a", "b", "cosine", [0.1], [0.1], [0.1], {"uniform": 8})
    narrowed = Shrinking({"a": (8, 4)}, "1 - cosine", (0.1,), (32, 16), 32)
    layers = [LayerTimes("softmax", 8, Times(timing, timing), "", (float("nan"), float("nan")))]
    for name, result in {
        "headwise.examination.examine": results["examination"],
        "headwise.examination.with_depth": results["examination"],
        "headwise.examination.report.page.write_report": [Path("report.html"), Path("report.json"), Path("figures")],
        "headwise.examination.report.page.add_plan": Path("report.html"),
        "headwise.replacement.plan": results["plan"],
        "headwise.replacement.rewrite": (nn.Identity(), receipt),
        "headwise.replacement.install.saved.save": None,
        "headwise.replacement.planning.uniform_plan.uniform_plan": results["plan"],
        "headwise.replacement.install.stock_models.stock_model": nn.Identity(),
        "headwise.replacement.trials.trial": Trial("prose", 12, "cosine", 0.1, 0.1, None, (0.1, 0.1), None),
        "headwise.replacement.model_comparison.compare_models": difference,
        "headwise.ledger.verify": results["ledger"],
        "headwise.ledger.claim_figures.draw": None,
        "headwise.growth.demo.train_and_grow": results["snapshots"],
        "headwise.growth.shrinking.shrink": (tiny()[0], narrowed),
        "headwise.cli.tour_command.measure_operators": results["operators"],
        "headwise.cli.tour_command.check_symmetries": results["symmetries"],
        "headwise.bench.scaling.measure_scaling": Scaling({}),
        "headwise.bench.peers.compare_layers": (layers, {}),
        "headwise.bench.fidelity.measure_fidelity": ([], {}),
        "torch.export.export": None,
        "torch.export.save": None,
    }.items():
        put(name, lambda *args, result=result, **options: result)
    put("headwise.bench.sharded_runs.run_sharded", canned)
    record = BuildRecord("g++", "g++ 12", 1.0, "now", None, "g++ ended with 1: it printed nothing")
    put("headwise.operators._kernels.native.kernel_build.build", lambda **options: record)
    put("headwise.cli.widths.grow_command._draw_widths", lambda path, snapshots: path.touch())
    for name in (
        "headwise.replacement.planning.trade_off_figure.draw",
        "headwise.cli.tour_command.draw",
        "headwise.bench.scaling_figure.draw_scaling",
    ):
        put(name, lambda *args: Path(args[-1]).touch())


FOUND = {
    "examine": [["examine", "--length=--", "-o", "new", "--importance"]],
    "verify": [["verify", "--weights=--", "-o", "new", "--force"]],
    "tour": [["tour", "--out=--"], ["tour", "-o--"], ["tour", "-o=--"]],
}
"""Command lines that once ended in a bug."""
LINES = [line for command in COMMANDS for line in parsers(command)]


@pytest.mark.parametrize("words, parser", LINES, ids=[" ".join(words) for words, _ in LINES])
def test_command_lines(
    words: list[str], parser: argparse.ArgumentParser, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = set()

    @hostile(20)
    @given(lines(words, parser))
    def check(argv: list[str]) -> None:
        count("command line")
        try:
            code = main(argv)
        except SystemExit as error:  # --help
            code = error.code or 0
        printed = capsys.readouterr()
        assert code in (0, 1, 2), (argv, printed.err)
        assert "Traceback" not in printed.err
        if code == 2:
            assert printed.out == "", printed.err
            assert printed.err.splitlines()[-1].startswith(f"headwise {words[0]}: ")
        elif "--json" in argv and "--help" not in argv and "-h" not in argv:
            json.loads(printed.out, parse_constant=pytest.fail)
        codes.add(code)

    for argv in FOUND.get(" ".join(words), ()):
        check = example(argv)(check)
    check()
    assert codes >= {0, 2}
