"""`headwise models`: the sample models, which of them are installed, and how to install the others."""

from __future__ import annotations

from headwise.cli.options import Parser, add_json
from headwise.cli.tables import print_table
from headwise.outputs import json_text


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise models",
        description="Models that come as Python packages; their names can be given wherever a command takes a MODEL.",
    )
    add_json(parser, "the list")
    options = parser.parse_args(argv)

    from headwise.models.samples.sample_models import SAMPLES

    samples = [sample.to_dict() for sample in SAMPLES.values()]
    if options.json:
        print(json_text(samples))
        return 0
    rows = [
        (
            sample["name"],
            f"{sample['model']}\n{sample['about']}",
            "yes" if sample["installed"] else "no",
            f"{sample['megabytes']} MB",
            sample["takes"],
        )
        for sample in samples
    ]
    headings = ("MODEL", "what it is", "installed", "size", "inputs")
    print_table("Sample models", headings, rows, words=("MODEL", "what it is", "inputs"), no_wrap=("MODEL",))
    for sample in samples:
        if not sample["installed"]:
            print(f"{sample['name']}: {sample['install']}")
    print("MODEL may also be a directory, a .gguf file, a name on the hub, or python:module:factory.")
    return 0
