"""`headwise shrink MODEL -o DIR`: fewer query/key dimensions for the heads of a model, and what that changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli import options as shared
from headwise.errors import InputError, check_extra

if TYPE_CHECKING:
    from headwise.growth.shrinking import Shrinking

FILE = "shrink.json"


def run(argv: list[str]) -> int:
    parser = shared.Parser(
        prog="headwise shrink",
        description="Drop query/key dimensions of attention heads where the data show that they matter least: half of "
        "the texts choose, the others measure the drift.",
        epilog="DIR is loaded by AutoModel once headwise is imported; stock classes refuse it.",
    )
    shared.add_model(parser)
    shared.add_inputs(parser, texts=8, kinds=("images",))
    parser.add_argument(
        "--keep",
        type=shared.number(0),
        default=0.5,
        metavar="SHARE",
        help="share of all query/key dimensions that are kept (default: %(default)s)",
    )
    shared.add_output(parser, required=True, help="a new directory for the narrowed model")
    shared.add_force(parser)
    shared.add_seed(parser, "of --random-tokens")
    shared.add_json(parser, "the result")
    options = parser.parse_args(argv)
    if not 0 < options.keep <= 1:
        raise InputError(f"--keep is a share above 0 and at most 1, but is {options.keep}")
    check_extra("models", "a narrowed model", "safetensors")
    from headwise.growth.shrinking import shrink
    from headwise.models.gate import quiet
    from headwise.models.load import save_preprocessor
    from headwise.output_directory import OutputDirectory
    from headwise.outputs import json_text, writing

    with OutputDirectory(options.out, command="shrink", force=options.force, exclusive=True) as out:
        loaded = shared.load(options, with_head=True)
        inputs = shared.make_inputs(options, loaded)
        progress = not shared.is_quiet(options)
        new, result = shrink(loaded.model, inputs.batches, keep=options.keep, progress=progress)
        with writing(out.path), quiet():
            new.save_pretrained(out.staged)  # type: ignore[operator]
            save_preprocessor(loaded, out.staged)
        facts = {"model": loaded.name, "keep": options.keep, **result.to_dict()}
        out.write_json(FILE, facts)
    if options.json:
        print(json_text(facts, indent=2))
    else:
        _print(result, loaded.name, options.out)
    return 0


def _print(result: Shrinking, name: str, out: Path) -> None:
    from headwise.cli.tables import print_table

    rows = [(site, str(before), str(after)) for site, (before, after) in result.widths.items()]
    print_table(f"{name}: query/key width of each head", ("module", "before", "after"), rows, words=("module",))
    texts = len(result.drifts)
    print(
        f"drift {result.drift:.4f} ({result.measure}) on {texts} batch{'es' * (texts != 1)} that nothing was chosen by"
    )
    before, after = result.key_numbers
    print(f"key cache: {before:,} numbers a token before, {after:,} after, {result.key_cache_saved:.1%} saved")
    print(f"cache of keys and values: {result.cache_saved:.1%} saved")
    print(f"written to {out}")
