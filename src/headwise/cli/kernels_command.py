"""`headwise kernels [status | build | where]`: the compiled kernels, where they are and how they were built."""

from __future__ import annotations

import argparse
from typing import Any

from headwise.cli.options import Parser, add_json, is_quiet
from headwise.errors import InputError
from headwise.outputs import json_text
from headwise.progress import bar

ACTIONS = ("status", "build", "where")


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise kernels",
        description="The compiled CPU kernels: without them the same results come from torch's own operations.",
        epilog=(
            "actions:\n"
            "  status   what would run now, and why (the default); exit code 1 if it is not the kernels\n"
            "  build    compile them now, also after a failed build; a good build is kept unless --force\n"
            "  where    print the directory of the build\n\n"
            "HEADWISE_KERNELS=auto|build|off says when they are compiled: in the background of the first use, during\n"
            "the first use, or never.  HEADWISE_CACHE is the directory for builds (default: ~/.cache/headwise)."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="status", help="see below")
    parser.add_argument("--force", action="store_true", help="build: compile even if the build is up to date")
    add_json(parser, "the status")
    options = parser.parse_args(argv)

    from headwise.operators._kernels.native import kernel_build, kernel_cache

    if options.action == "where" and not options.json:
        print(kernel_cache.directory())
        return 0
    up_to_date = succeeded = False
    if options.action == "build":
        before = kernel_cache.read_record()
        failed = before is not None and before.reason is not None
        with bar("compiling", None, quiet=is_quiet(options)):
            record = kernel_build.build(force=options.force or failed)
        if record.reason is not None and not options.json:
            raise InputError(f"the build failed: {record.reason}")
        up_to_date, succeeded = record == before, record.reason is None
    facts = _facts()
    if succeeded and facts["state"] in ("not built", "unavailable"):
        raise InputError(f"{facts['directory']} was removed or changed while the kernels were built; build them again")
    if options.json:
        print(json_text(facts, indent=2))
    else:
        _print(facts, up_to_date)
    return 0 if facts["runs"] == "kernels" or options.action == "where" else 1


def _facts() -> dict[str, Any]:
    """What is known without building or loading anything."""
    import torch

    from headwise.operators._kernels.native import kernel_build, kernel_cache
    from headwise.operators._kernels.native.kernel_library import LIBRARY

    record, mode, reason = kernel_cache.read_record(), LIBRARY.mode, None
    compiler = kernel_build.find_compiler()
    if mode == "off":
        state = "off"
    elif record is not None and not kernel_build.is_out_of_date(record):
        reason = record.reason or kernel_cache.untrusted(kernel_cache.library_file())
        state = "ready" if reason is None else "unavailable"
    else:
        reason = kernel_build.cannot_build()
        state = "not built" if reason is None else "unavailable"
    return {
        "mode": mode,
        "state": state,
        "reason": reason,
        "runs": "kernels" if state == "ready" else "torch",
        "directory": str(kernel_cache.directory()),
        "build": None if record is None else record.to_json(),
        "compiler": None if compiler is None else compiler[0],
        "torch": torch.__version__,
        "cpu_capability": kernel_cache.capability(),
        "operations": kernel_cache.operations(),
    }


def _print(facts: dict[str, Any], up_to_date: bool) -> None:
    record = facts["build"]
    built = "no"
    if record is not None:
        outcome = "failed" if record["reason"] is not None else "up to date, built" if up_to_date else "built"
        built = f"{outcome} in {record['seconds']} s by {record['version']}, {record['finished']}"
    rows = {
        "state": facts["state"] if facts["reason"] is None else f"{facts['state']}: {facts['reason']}",
        "runs": "the compiled kernels" if facts["runs"] == "kernels" else "torch's own operations",
        "when": f"HEADWISE_KERNELS={facts['mode']}",
        "build": built,
        "compiler": facts["compiler"] or "none",
        "for": f"torch {facts['torch']}, {facts['cpu_capability']}",
        "where": facts["directory"],
        "kernels": ", ".join(facts["operations"]),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
