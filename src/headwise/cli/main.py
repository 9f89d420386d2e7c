"""`headwise <command> …`: finds the command's module, runs it, and turns errors into a message and an exit code.

A command is a module with `run(argv: list[str]) -> int`.  Nothing here imports torch, so `headwise --help` is instant.
Exit codes: the command's own (0: success), 2 for bad input, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from headwise import __version__
from headwise.errors import HeadwiseError

# name -> (module, one line of help); a new command is one new line here
COMMANDS: dict[str, tuple[str, str]] = {
    "examine": ("headwise.cli.examine_command", "measure every head of a model: one page, one JSON file"),
    "compare": ("headwise.cli.compare_command", "differences between two examinations, or between two models"),
    "verify": ("headwise.cli.verify_command", "test what papers claim about attention"),
    "grow": ("headwise.cli.grow_command", "train a small model that widens queries and keys where they are too narrow"),
    "plan": ("headwise.cli.plan_command", "the cheapest operator for every head within a tolerance"),
    "rewrite": ("headwise.cli.rewrite_command", "replace attention heads as a plan says, with a receipt"),
    "convert": ("headwise.cli.convert_command", "convert convolutions to attention, with a receipt"),
    "bench": (
        "headwise.cli.bench_command",
        "what attention costs: exponents over n, other packages, distance from exact",
    ),
    "tour": ("headwise.cli.tour_command", "three operators, their spectra and costs, and one verdict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        # --help and --version exit here; anything else is an unknown command, which argparse reports
        _parser().parse_args(arguments or ["--help"])
    module, _ = COMMANDS[arguments[0]]
    try:
        return importlib.import_module(module).run(arguments[1:])
    except HeadwiseError as error:
        print(f"headwise {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"headwise {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of the output (head, less) has closed it; redirect stdout so that Python's final flush is silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headwise",
        usage="headwise [--help] [--version] <command> …",
        description="Attention as a linear operator: build it, measure it, test what is claimed of it, replace it.",
        epilog=f"commands:\n{listing}\n\n`headwise <command> --help` describes one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headwise {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser
