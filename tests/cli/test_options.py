"""Options that several commands share, and the tables they print."""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest
import torch
from torch import nn

from headwise.cli import options as shared
from headwise.cli.options import (
    Parser,
    add_inputs,
    add_json,
    add_model,
    add_output,
    add_seed,
    is_quiet,
    join_processes,
    make_inputs,
    named_rank,
    number,
    said_by_another,
)
from headwise.cli.tables import make_table
from headwise.errors import InputError, check_extra
from headwise.models.load import LoadedModel


def parser() -> Parser:
    made = Parser(prog="headwise probe")
    add_model(made)
    add_inputs(made, texts=16)
    add_output(made, default="somewhere")
    add_json(made)
    add_seed(made)
    made.add_argument("--tolerance", type=number(0))
    return made


def test_the_default_model_is_the_sample() -> None:
    options = parser().parse_args([])
    assert options.model == "minilm"
    assert options.out.name == "somewhere"
    assert not is_quiet(options)
    assert is_quiet(parser().parse_args(["--quiet"]))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--text", "a.txt", "--random-tokens", "8"], "argument --random-tokens: not allowed with argument --text"),
        (["--texts", "0"], "--texts is 0; it must be at least 1"),
        (["--texts", "-3"], "--texts is -3; it must be at least 1"),
        (["--texts", "2.5"], "--texts is '2.5'; it must be a whole number"),
        (["--texts", "9" * 9999], "--texts is '9999999999999999999999999999999999999999'; it must be a whole number"),
        (["--texts", ""], "--texts is ''; it must be a whole number"),
        (["--length", "0"], "--length is 0; it must be at least 4"),
        (["--length=--"], "--length is '--'; give a value"),
        (["-o--"], "-o is '--'; give a value"),
        (["-o=--"], "-o is '--'; give a value"),
        (["--random-tokens", str(10**15)], "--random-tokens is 1000000000000000; it must be at most 16777216"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; it must be at most 9223372036854775807"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--tolerance", "nan"], "--tolerance is nan; it must be a finite number of at least 0"),
        (["--tolerance", "inf"], "--tolerance is inf; it must be a finite number of at least 0"),
        (["--tolerance", "-1"], "--tolerance is -1; it must be a finite number of at least 0"),
        (["--tolerance", "much"], "--tolerance is 'much'; it must be a number"),
        (["-o", ""], "-o/--out is empty; give a name"),
        ([""], "MODEL is empty; give a name"),
        (["--text", "a", ""], "--text is empty; give a name"),
        (["a\0b"], "an argument holds a NUL character"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--seed=1", "--seed=1"], "--seed is given twice"),
        (["-o", "a", "--out", "b"], "--out is given twice"),
        (["-oa", "-o", "b"], "-o is given twice"),
        (["--see", "1"], "unrecognized arguments: --see; see headwise probe --help"),
        (["--seed"], "argument --seed: expected one argument; see headwise probe --help"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_the_option_is_named(argv: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        parser().parse_args(argv)
    assert said in str(caught.value)


def test_flags_may_be_repeated_and_names_follow_two_dashes() -> None:
    assert parser().parse_args(["--json", "--json", "--", "--seed"]).model == "--seed"


def test_a_factory_brings_its_own_batches() -> None:
    loaded = LoadedModel(nn.Identity(), "identity", "python:a:b", batches=iter(torch.arange(9)))
    inputs = make_inputs(parser().parse_args(["--texts", "3"]), loaded)
    assert list(inputs.batches) == [0, 1, 2]


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--length", "64"], "--length would have no effect, because the factory returned batches"),
        (["--text", "a.txt"], "--text would have no effect, because the factory returned batches"),
        (["--random-tokens", "9"], "--random-tokens would have no effect"),
    ],
)
def test_an_option_without_effect_beside_a_factory_is_named(argv: list[str], said: str) -> None:
    loaded = LoadedModel(nn.Linear(2, 2), "tiny", "python:tiny:build", batches=[torch.zeros(1, 2)])
    with pytest.raises(InputError, match=said):
        make_inputs(parser().parse_args(argv), loaded)


def test_a_length_beside_random_tokens_is_named() -> None:
    loaded = LoadedModel(nn.Linear(2, 2), "tiny", "tiny")
    with pytest.raises(InputError, match="--length would have no effect, because --random-tokens is given"):
        make_inputs(parser().parse_args(["--length", "64", "--random-tokens", "9"]), loaded)


def test_a_table_shows_brackets_and_never_cuts_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [("a name with [brackets] [/x] that is long enough to be wrapped", "12345678901234567890")]
    Console(width=50).print(make_table("runs[exp] [/x]", ("name [/x]", "number"), rows, bold=-1, width=50))
    printed = capsys.readouterr().out
    assert "runs[exp] [/x]" in printed
    assert "name [/x]" in printed
    assert "[brackets]" in printed
    assert "12345678901234567890" in printed


def test_a_missing_package_is_noticed_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extra("report", "the figure", "rich")
    with pytest.raises(
        InputError, match=r"the figure needs no_such, which is not installed; pip install 'headwise\[rep"
    ):
        check_extra("report", "the figure", "rich", "no_such")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', but must be a whole number from 1 to 1000000; start several"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999999999999999999999999999999999999999', but must be"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but must be a whole number from 0 to 1; start several processes with"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2', but must be a whole number from 0 to 1;"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000', but must be"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "1"}, "WORLD_SIZE is 2, but MASTER_ADDR is not set;"),
    ],
)
def test_variables_of_a_launcher_are_checked(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
        if name in given:
            monkeypatch.setenv(name, given[name])
    with pytest.raises(InputError, match=f"^{re.escape(said)}"):
        join_processes()


@pytest.mark.parametrize("given", [None, "", "1"])
def test_without_a_launcher_there_is_one_process(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("WORLD_SIZE", given)
    assert join_processes() == (0, 1)
    assert not torch.distributed.is_initialized()


def test_processes_that_cannot_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is taken by something else."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**launched, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=r"^cannot join the other 1 processes: .*; start several processes with"):
            join_processes()


def test_how_long_processes_wait_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(backend: str, timeout: object) -> None:
        raise RuntimeError(f"nobody came within {timeout}")

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="nobody came within 0:00:07; start"):
        join_processes(7)


def test_a_process_does_not_wait_for_the_store_of_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Store:
        def add(self, key: str, amount: int) -> int:
            ended.wait(60)
            return 1

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", Store)
    monkeypatch.setattr(shared, "LONGEST_ANSWER", 0.05)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    start = time.monotonic()
    assert not said_by_another("rank 1 of 2: all_reduce failed")
    ended.set()
    assert time.monotonic() - start < 30


def test_errors_on_several_processes_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_rank("no room") == "no room"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert named_rank("no room") == "rank 1 of 2: no room"
    assert named_rank("rank 1 of 2: all_reduce failed") == "rank 1 of 2: all_reduce failed"
