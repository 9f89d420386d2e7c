"""The code in Markdown pages, as tests: `>>>` blocks are compared, plain python blocks run, and the output of
`$ headwise` blocks is compared where the page shows it.

All blocks of a page share one namespace, in order, as a reader would type them.  A block under the comment
`<!-- not run -->` is skipped.  What a page registers (measures, plan kinds, metrics) is removed after it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(
    r"(?P<skip><!-- not run -->\n+)?^(?P<indent> *)```(?P<kind>python|console)[^\n]*\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)

REGISTRIES = {
    "headwise.examination.measure.head_measures": "MEASURES",
    "headwise.growth.metric": "METRICS",
    "headwise.replacement": "KINDS",
}


@dataclass(frozen=True)
class Block:
    kind: str
    code: str
    line: int  # of the first line of code, from 1


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            kind=match["kind"],
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
            line=text.count("\n", 0, match.start("code")) + 1,
        )
        for match in FENCE.finditer(text)
        if not match["skip"]
    ]


def run_page(page: Path) -> None:
    name = "snippets_" + re.sub(r"\W", "_", page.stem)  # one a page: torch.compile remembers modules by name
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with _registries_restored():
            for block in blocks(page):
                if block.kind == "console":
                    _run_console(page, block)
                elif ">>>" in block.code:
                    _run_doctest(page, block, vars(module))
                else:
                    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
                    exec(code, vars(module))
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def _registries_restored() -> Iterator[None]:
    registries = [getattr(importlib.import_module(module), name) for module, name in REGISTRIES.items()]
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)


def _run_doctest(page: Path, block: Block, names: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, names, page.name, str(page), block.line - 1)
    test.globs = names  # get_doctest made a copy, but classes are looked up in their module
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=failures.append, clear_globs=False)
    if failures:
        pytest.fail("".join(failures), pytrace=False)


def _run_console(page: Path, block: Block) -> None:
    """Run each `$ headwise …` line whose output the page shows, in this process, and compare the output."""
    from headwise.cli.main import main

    for entry in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, _, expected = entry.partition("\n")
        if not (command.startswith("headwise ") and expected.strip()):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main(shlex.split(command)[1:])
        example = doctest.Example(command, expected)
        if not doctest.OutputChecker().check_output(expected, printed.getvalue(), FLAGS):
            difference = doctest.OutputChecker().output_difference(example, printed.getvalue(), FLAGS)
            pytest.fail(f"{page.name}:{block.line}: $ {command}\n{difference}", pytrace=False)
