"""`headwise rewrite conv MODEL -o OUT`: every convolution of a model as attention, with a table of layers."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from headwise.errors import InputError


def run(argv: list[str]) -> int:
    """The first word chooses what is rewritten; a further kind of rewriting is a further line in KINDS."""
    if argv and argv[0] in KINDS:
        return KINDS[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(prog="headwise rewrite", description="Replace layers, with a receipt.")
    parser.add_argument("kind", choices=KINDS, help="conv: every convolution becomes attention with one head a tap")
    parser.parse_args(argv)
    return 2


def _conv(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise rewrite conv",
        description="Convert every convolution of a model to attention with one head a tap, equal to rounding.",
        epilog="OUT.pt2 is an exported program (a MODULE:FACTORY then needs --input); OUT.pt is a state dict for "
        "headwise.rewrite.convert(factory()).  The exit code is 0 when every convolution was converted, 1 when some "
        "were left.",
    )
    parser.add_argument("model", metavar="MODEL.pt2|MODULE:FACTORY", help="an exported program, or a function to call")
    parser.add_argument("-o", "--out", required=True, metavar="OUT", type=Path, help="where to write: .pt2 or .pt")
    parser.add_argument("--soft", type=float, metavar="ALPHA", help="quadratic softmax heads with trainable centres")
    parser.add_argument(
        "--input", metavar="SIZES", help="sizes of an input, such as 1,3,32,32, to export and probe with"
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    options = parser.parse_args(argv)
    if options.out.suffix not in (".pt", ".pt2"):
        raise InputError(f"OUT must end in .pt or .pt2, but is {options.out}")
    receipt = _convert(options)
    print(json.dumps(receipt.to_json(), indent=2)) if options.json else _table(receipt, options.out)
    return 1 if receipt.left else 0


def _convert(options: argparse.Namespace) -> Any:
    import torch

    from headwise.rewrite import convert, exact, soft
    from headwise.rewrite.exported import convert_exported

    mode = exact if options.soft is None else soft(options.soft)
    if options.model.endswith(".pt2"):
        if options.out.suffix != ".pt2":
            raise InputError(f"an exported program is written as .pt2, but OUT is {options.out}")
        program, receipt = convert_exported(_load(options.model), mode)
        torch.export.save(program, options.out)
        return receipt
    model = _call(options.model)
    probe = None if options.input is None else torch.randn(_sizes(options.input), generator=_seeded())
    if options.out.suffix == ".pt2" and probe is None:
        raise InputError("to export a model its input must be known: add --input with its sizes, such as 1,3,32,32")
    new, receipt = convert(model, mode, probe=probe)
    if options.out.suffix == ".pt":
        torch.save(new.state_dict(), options.out)
    else:
        torch.export.save(torch.export.export(new.eval(), (probe,)), options.out)
    return receipt


def _load(path: str) -> Any:
    import torch

    if not Path(path).is_file():
        raise InputError(f"{path} is not a file")
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises whatever its unpacking meets
        raise InputError(f"{path} is not an exported program: {error}") from error


def _call(name: str) -> Any:
    from torch import nn

    module, separator, factory = name.partition(":")
    if not separator or not factory:
        raise InputError(f"MODEL must be a .pt2 file or MODULE:FACTORY, but is {name!r}")
    sys.path.insert(0, "")  # a module in the current directory, as with `python -m`
    try:
        model = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot find {name}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--input must be sizes such as 1,3,32,32, but is {text!r}") from error
    if min(sizes) < 1:
        raise InputError(f"--input must be positive sizes, but is {text!r}")
    return sizes


def _seeded() -> Any:
    import torch

    return torch.Generator().manual_seed(0)


def _table(receipt: Any, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{receipt.what}: {len(receipt.parts)} convolutions are now attention", title_justify="left")
    for heading in ("layer", "parameters", "multiply-adds before", "after", "largest change", "of"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for part in (*receipt.parts, receipt) if receipt.parts else (receipt,):
        last = part is receipt
        name = "whole model" if last and receipt.parts else part.what
        table.add_row(
            name,
            f"{part.parameters_after:,}",
            f"{part.cost_before.multiply_adds:,}",
            f"{part.cost_after.multiply_adds:,}",
            f"{part.largest_change:.1e}",
            f"{part.scale:.3g}",
            style="bold" if last else None,
        )
    console = Console()
    console.print(table)
    for entry in receipt.left:
        console.print(f"left as it is: {entry.what}: {entry.why}")
    for note in {note: None for part in (receipt, *receipt.parts) for note in part.notes}:
        console.print(note)
    console.print(f"written to {out}")


KINDS = {"conv": _conv}
