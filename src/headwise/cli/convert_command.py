"""`headwise convert MODEL -o OUT`: convert every convolution of a model to attention, and print a receipt."""

from __future__ import annotations

import argparse
import io
import math
import warnings
from pathlib import Path
from typing import Any

from headwise.cli.options import Parser, add_force, add_output, nonempty, number
from headwise.errors import InputError

LARGEST_INPUT = 1 << 31


def run(argv: list[str]) -> int:
    # torch.export opens progress bars that it does not show; with little memory their idle thread cannot be started
    warnings.filterwarnings("ignore", "tqdm:disabling monitor support")
    parser = Parser(
        prog="headwise convert",
        description="Convert every convolution of a model to attention with one head per kernel cell; "
        "outputs are equal up to rounding.",
        epilog="OUT.pt2 is an exported program (python:module:factory then needs --input); OUT.pt is a state dict for "
        "headwise.convert(factory())[0], given soft(ALPHA) or with_content(ALPHA) as here.  Exit code: 0 if every "
        "convolution was converted, 1 if some were left.",
    )
    parser.add_argument(
        "model",
        type=nonempty,
        metavar="MODEL",
        help="an exported program (MODEL.pt2), or python:module:factory, which runs your code",
    )
    add_output(parser, metavar="OUT", required=True, help="file to write: .pt2 or .pt")
    parser.add_argument("--allow-pickle", action="store_true", help="load a program that could run code")
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--soft", type=number(0), metavar="ALPHA", help="quadratic softmax heads with trainable centres")
    heads.add_argument(
        "--content",
        type=number(0),
        metavar="ALPHA",
        help="the same, with queries and keys of content that start at zero",
    )
    parser.add_argument(
        "--input", type=_sizes, metavar="SIZES", help="shape of an input to run and export with, such as 1,3,32,32"
    )
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    options = parser.parse_args(argv)
    if options.out.suffix not in (".pt", ".pt2"):
        raise InputError(f"OUT must end in .pt or .pt2, but is {options.out}")
    from headwise.outputs import new_file

    with new_file(options.out, force=options.force) as file:
        receipt = _convert(options, file)
    if options.json:
        from headwise.outputs import json_text

        print(json_text(receipt.to_json(), indent=2))
    else:
        _print_receipt(receipt, options.out)
    return 1 if receipt.left else 0


def _convert(options: argparse.Namespace, file: Path) -> Any:
    import torch

    from headwise.convolution import convert, exact, soft, with_content
    from headwise.convolution.exported_program import convert_exported
    from headwise.models.factory import call_factory
    from headwise.models.gate import Trust, load_program

    written = io.BytesIO()
    mode = exact if options.soft is None else soft(options.soft)
    if options.content is not None:
        mode = with_content(options.content)
    if options.model.endswith(".pt2"):
        if options.out.suffix != ".pt2":
            raise InputError(f"an exported program is written as .pt2, but OUT is {options.out}")
        program, receipt = convert_exported(load_program(options.model, Trust(options.allow_pickle)), mode)
    else:
        if not options.model.startswith("python:"):
            raise InputError(f"MODEL must be a .pt2 file or python:module:factory, but is {options.model!r}")
        model, _ = call_factory(options.model)
        generator = torch.Generator().manual_seed(0)
        probe = None if options.input is None else torch.randn(options.input, generator=generator)
        if options.out.suffix == ".pt2" and probe is None:
            raise InputError("exporting needs the shape of an input: add --input with its sizes, such as 1,3,32,32")
        new, receipt = convert(model, mode, probe=probe)
        if options.out.suffix == ".pt":
            torch.save(new.state_dict(), written)
            _write(options.out, file, written)
            return receipt
        program = torch.export.export(new.eval(), (probe,))
    torch.export.save(program, written)
    _write(options.out, file, written)
    return receipt


def _write(out: Path, file: Path, written: io.BytesIO) -> None:
    """Write what torch has saved in memory: its own writer ends the process when the disk is full."""
    from headwise.outputs import writing

    with writing(out):
        file.write_bytes(written.getbuffer())


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is {text[:40]!r}; it must be sizes such as 1,3,32,32") from error
    if min(sizes) < 1 or len(sizes) > 16 or math.prod(sizes) > LARGEST_INPUT:
        raise argparse.ArgumentTypeError(
            f"is {text[:40]!r}; it must be at most 16 positive sizes of 2^31 numbers in all"
        )
    return sizes


def _print_receipt(receipt: Any, out: Path) -> None:
    from headwise.cli.tables import print_table

    title = f"{receipt.what}: {len(receipt.parts) or 1} convolutions are now attention ({receipt.weights})"
    headings = ("layer", "parameters", "multiply-adds", "after", "change", "output")  # the last two: largest values
    rows = [
        (
            "whole model" if part is receipt and receipt.parts else part.what,
            f"{part.parameters_after:,}",
            f"{part.cost_before.multiply_adds:,}",
            f"{part.cost_after.multiply_adds:,}",
            f"{part.largest_change:.1e}",
            f"{part.scale:.3g}",
        )
        for part in (*receipt.parts, receipt)
    ]
    print_table(title, headings, rows, bold=-1)
    for entry in receipt.left:
        print(f"not converted: {entry.what}: {entry.why}")
    for note in {note: None for part in (receipt, *receipt.parts) for note in part.notes}:
        print(note)
    print(f"written to {out}")
