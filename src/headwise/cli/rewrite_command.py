"""`headwise rewrite MODEL --plan PLAN -o DIR`: heads replaced as a plan says; `headwise rewrite conv MODEL -o OUT`:
every convolution as attention.  Both print a receipt.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from headwise.errors import InputError


def run(argv: list[str]) -> int:
    """`conv` as the first word chooses convolutions; otherwise attention is rewritten by a plan."""
    if argv and argv[0] == "conv":
        return _conv(argv[1:])
    return _attention(argv)


def _attention(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise rewrite",
        usage="headwise rewrite [MODEL] --plan PLAN -o DIR [--tolerance T] [--json]\n"
        "       headwise rewrite conv MODEL -o OUT",
        description="Replace the attention heads of a model by the operators a plan names, with a receipt.",
        epilog="DIR is loaded by headwise.replacement.load(DIR), a python: model by load(DIR, model=factory()).  "
        "`headwise rewrite conv --help` is about convolutions as attention.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as in `headwise examine`; default all-MiniLM-L6-v2")
    parser.add_argument(
        "--plan", required=True, metavar="PLAN", help="plan.json, or its directory, as `headwise plan` wrote"
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", type=Path, help="a new directory")
    parser.add_argument("--tolerance", type=float, help="another point of the plan's trade-off curve")
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    parser.add_argument("--allow-pickle", action="store_true", help="load weights that are pickled")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options = parser.parse_args(argv)
    receipt = _rewrite_attention(options)
    if options.json:
        print(json.dumps(_without_nan(receipt.to_json()), indent=2))
    else:
        _attention_table(receipt, options.out)
    return 0


def _rewrite_attention(options: argparse.Namespace) -> Any:
    from headwise.cli.progress import bar
    from headwise.models.load import load_model
    from headwise.replacement.install.saved import new_directory, save
    from headwise.replacement.plan import Plan

    with new_directory(options.out) as out:  # refused now if it exists, and removed again if anything goes wrong
        plan = Plan.load(options.plan)
        plan = plan if options.tolerance is None else plan.at(options.tolerance)
        with bar("loading", None, quiet=options.json):
            loaded = load_model(
                options.model,
                with_head=True,
                allow_pickle=options.allow_pickle,
                trust_remote_code=options.trust_remote_code,
            )
        with bar("rewriting", None, quiet=options.json):
            from headwise.replacement.rewrite import rewrite

            new, receipt = rewrite(loaded.model, plan)
            save(new, plan, out, loaded)
    return receipt


def _without_nan(value: Any) -> Any:
    """What was not measured is null: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(x) for x in value]
    return None if isinstance(value, float) and value != value else value


def _attention_table(receipt: Any, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{receipt.what}: {len(receipt.parts)} attention sites", title_justify="left")
    table.add_column("site", overflow="fold")
    table.add_column("heads", no_wrap=True)
    table.add_column("cost left", justify="right", no_wrap=True)
    for part in (*receipt.parts, receipt):
        last = part is receipt
        before, after = part.cost_before.multiply_adds, part.cost_after.multiply_adds
        heads = "" if last else part.notes[0].replace(", ", "\n")
        share = f"{100 * after / before:.1f} %"
        name = "all" if last else part.what
        table.add_row(name, heads, share, style="bold" if last else None)
    console = Console()
    console.print(table)
    before, after = receipt.cost_before.multiply_adds, receipt.cost_after.multiply_adds
    console.print(f"multiply-adds of attention: {before:,} before, {after:,} after")
    added = receipt.parameters_after - receipt.parameters_before
    console.print(f"{receipt.parameters_after:,} parameters, {added:,} of them new")
    if receipt.largest_change == receipt.largest_change:
        console.print(f"largest change of the output on a probe {receipt.largest_change:.1e} of {receipt.scale:.3g}")
    for note in receipt.notes:
        console.print(note)
    console.print(f"written to {out}")


def _conv(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise rewrite conv",
        description="Convert every convolution of a model to attention with one head a tap, equal to rounding.",
        epilog="OUT.pt2 is an exported program (a MODULE:FACTORY then needs --input); OUT.pt is a state dict for "
        "headwise.replacement.convert(factory()).  The exit code is 0 when every convolution was converted, 1 when some "
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

    from headwise.convolution import convert, exact, soft
    from headwise.convolution.exported_program import convert_exported

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
