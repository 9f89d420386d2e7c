"""A mkdocs hook that writes the reference: public names from docstrings, commands from their `--help`.

Public names are those in the `__all__` of `headwise` and of each package, so a new export is documented without another
line anywhere.  Nothing private is shown.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SOURCE = Path(__file__).parents[1] / "src"
# packages by layer, from what people use first to what it is made of; one that is not listed comes last
ORDER = [
    "operators",
    "nn",
    "examination",
    "replacement",
    "convolution",
    "growth",
    "ledger",
    "theory",
    "testing",
    "models",
]
BASICS = ["errors", "cost", "shapes", "outputs"]
HIDDEN = ["cli"]
VERBS = ["examine", "Monitor", "MonitorCallback", "verify", "plan", "rewrite", "convert", "Grower"]
NOT_BUILDERS = ["supported", "supports"]
RESULTS = ["Examination", "Ledger", "ModelAudit", "Plan", "Receipt"]


class Definition(NamedTuple):
    module: str
    name: str


def packages() -> list[str]:
    found = {path.parent.name for path in (SOURCE / "headwise").glob("*/__init__.py")} - set(HIDDEN)
    public = {name for name in found if public_names(f"headwise.{name}")}
    return [name for name in ORDER if name in public] + sorted(public - set(ORDER))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    pages = [{"headwise: the verbs": "reference/headwise.md"}, {"The command line": "reference/cli.md"}]
    pages += [{f"headwise.{name}": f"reference/{name}.md"} for name in packages() if name != "operators"]
    pages += [{"Errors, costs, shapes": "reference/basics.md"}]
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference[:0] = [*pages[:2], {"headwise.operators": "reference/operators-api.md"}]
    reference += pages[2:]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    def add(name: str, text: str) -> None:
        files.append(File.generated(config, f"reference/{name}.md", content=text))

    add("headwise", verbs_page())
    add("cli", commands_page())
    for package in packages():
        module = f"headwise.{package}"
        about = f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}\n"
        entries = []
        for name in public_names(module):
            where = definition(module, name)
            elsewhere = f"[`{module}.{name}`][{'.'.join(where)}] is described with the verbs.\n"
            entries.append(elsewhere if where in shown_with_verbs() else entry(f"{module}.{name}", where))
        file = "operators-api" if package == "operators" else package
        add(file, "\n".join([f"# {module}\n", about, *entries]))
    basics = [
        entry(f"headwise.{module}.{name}", Definition(f"headwise.{module}", name))
        for module in BASICS
        for name in public_names(f"headwise.{module}")
    ]
    add("basics", "\n".join(["# Errors, costs, shapes\n", *basics]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lists builders that the table of operators does not name yet, from their docstrings."""
    if page.file.src_uri != "reference/operators.md":
        return markdown
    names = [name for name in public_names("headwise.operators") if name.islower() and name not in NOT_BUILDERS]
    unlisted = [name for name in names if f"`{name}" not in markdown]
    rows = [f"| [`{name}`][{'.'.join(where)}] | {summary(where)} |" for name, where in located(unlisted)]
    return markdown + "\n".join(["\n## More operators\n", "| builder | P |", "|---|---|", *rows]) if rows else markdown


def located(names: list[str]) -> list[tuple[str, Definition]]:
    return [(name, definition("headwise.operators", name)) for name in names]


def summary(where: Definition) -> str:
    """The first line of a docstring."""
    body = ast.parse(path_of(where.module).read_text(encoding="utf-8")).body
    node = next(x for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == where.name)
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("|", "&#124;")


def shown_with_verbs() -> list[Definition]:
    return [definition("headwise", name) for name in (*VERBS, *RESULTS) if name in public_names("headwise")]


def verbs_page() -> str:
    """`headwise` itself: verbs, what they return, then every other name with a link to its package's page."""
    names = [name for name in public_names("headwise") if not name.startswith("__")]
    shown = [name for name in (*VERBS, *RESULTS) if name in names]
    rest = [f"[`{name}`][{'.'.join(definition('headwise', name))}]" for name in names if name not in shown]
    head = "# headwise: the verbs\n\nEach verb is a function (or class) of `headwise` and a command of the same name.\n"
    others = "## Everything else at the top level\n\n" + ", ".join(rest) + ".\n"
    return "\n".join([head, *(entry(f"headwise.{name}", definition("headwise", name)) for name in shown), others])


def entry(title: str, where: Definition) -> str:
    options = f'{{heading: "{title}", toc_label: "{title.rpartition(".")[2]}"}}'
    return f"::: {where.module}.{where.name}\n    options: {options}\n"


def commands_page() -> str:
    """What `--help` prints, for every command and for the subcommands that its first line lists."""
    from headwise.cli.main import COMMANDS

    parts = ["# The command line\n", "```text", help_of([]), "```\n"]
    for name in COMMANDS:
        text = help_of([name])
        parts += [f"## headwise {name}\n", "```text", text, "```\n"]
        choices = re.search(r"^  (\w+(?: \| \w+)+|\{\w+(?:,\w+)+\})$", text.split("positional arguments:")[-1], re.M)
        for sub in re.findall(r"\w+", choices[1]) if choices else ():
            parts += [f"### headwise {name} {sub}\n", "```text", help_of([name, sub]), "```\n"]
    return "\n".join(parts)


def help_of(arguments: list[str]) -> str:
    from headwise.cli.main import main

    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return printed.getvalue().rstrip()


def path_of(module: str) -> Path:
    base = SOURCE.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """The `__all__` of a module; without one, what it re-exports (`import x as x`) and its public definitions."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    if module == "headwise":  # resolved lazily: the import block for type checkers has the same names
        return [alias.name for alias in imports(tree)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    defined = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    return [alias.name for alias in imports(tree) if alias.exported] + defined


def definition(module: str, name: str) -> Definition:
    """Where `module.name` is defined: the imports are followed.

    The name alone is ambiguous: `headwise.operators.softmax` is a function in Python and a file to mkdocstrings.
    """
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    for alias in imports(tree):
        if alias.name == name:
            return definition(alias.module, alias.original)
    return Definition(module, name)


class Import(NamedTuple):
    module: str
    original: str
    name: str
    exported: bool


def imports(tree: ast.Module) -> list[Import]:
    return [
        Import(node.module, alias.name, alias.asname or alias.name, alias.asname == alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headwise")
        for alias in node.names
    ]
