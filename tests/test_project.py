"""Light imports, layered modules, pages whose code runs and whose tables are complete, versions that agree."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headwise
from headwise.cli.main import COMMANDS
from headwise.examination.measure.head_measures import MEASURES
from headwise.replacement import KINDS
from tests.snippets import blocks, run_page

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "headwise").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def loaded_by(statement: str) -> set[str]:
    """The modules a fresh interpreter holds after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    # -S and -P: no site-packages hooks and no current directory, so whatever is loaded was loaded by us
    run = subprocess.run([sys.executable, "-S", "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stderr.splitlines()[-1]))


FIND_US = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})"


@pytest.mark.parametrize(
    "statement",
    [
        "import headwise",
        "import headwise; dir(headwise); headwise.__version__",
        "import contextlib, headwise.cli.main as m\nwith contextlib.suppress(SystemExit): m.main(['--help'])",
        "import contextlib, headwise.cli.main as m\nwith contextlib.suppress(SystemExit): m.main(['--version'])",
    ],
)
def test_light_entrances_load_nothing_but_the_standard_library(statement: str) -> None:
    # what is loaded, not how long it takes: the first is the cause of the second and the same on every machine
    roots = {name.partition(".")[0] for name in loaded_by(f"{FIND_US}\n{statement}")}
    foreign = {name for name in roots - {"headwise"} if name not in sys.stdlib_module_names and name != "__main__"}
    assert foreign == set()


def test_every_public_name_resolves_and_is_the_one_of_its_home() -> None:
    assert set(headwise.__all__) == {*headwise._HOME, "__version__"}
    for name, home in headwise._HOME.items():
        assert getattr(headwise, name) is getattr(importlib.import_module(home), name), name
    for name in headwise._MODULES:
        assert getattr(headwise, name).__name__ == f"headwise.{name}"
    assert set(headwise.__all__) <= set(dir(headwise))
    with pytest.raises(AttributeError, match=r"module 'headwise' has no attribute 'sofmax'"):
        headwise.sofmax  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse((ROOT / "src/headwise/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        (alias.asname, statement.module)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert declared == set(headwise._HOME.items())


def test_imports_point_down() -> None:
    run = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_the_page_runs_and_prints_what_it_says(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)  # some pages save models
    run_page(page)


def test_the_readme_shows_code() -> None:
    # a fence the pattern misses would make the test above pass on nothing
    assert sum(block.code.count(">>>") for block in blocks(ROOT / "README.md")) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_with_run(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name][0]).run)


def test_the_page_on_measures_explains_every_measure() -> None:
    # families such as energy_8 ... energy_256 are explained once
    page = (ROOT / "docs/explanation/measures.md").read_text()
    missing = [name for name in MEASURES if f"`{name}`" not in page and f"`{name.rstrip('0123456789')}" not in page]
    assert missing == []


def test_the_page_on_plans_lists_every_kind_with_its_options() -> None:
    page = (ROOT / "docs/explanation/plans.md").read_text()
    rows = {name: ", ".join(f"`{option}`" for option in kind.options) for name, kind in KINDS.items()}
    assert [
        name for name, options in rows.items() if f"| `{name}` | {options} |".replace("|  |", "| |") not in page
    ] == []


def test_readme_and_front_page_have_the_same_verbs() -> None:
    def verbs(page: str) -> list[list[str]]:
        rows = re.findall(r"^\| \[`\w+`\].*$", (ROOT / page).read_text(), flags=re.MULTILINE)
        return [re.sub(r"\]\((docs/)?", "](", row).split("|") for row in rows]

    assert verbs("README.md") == verbs("docs/index.md") != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    generated = {"headwise.md", "cli.md", "operators-api.md"}  # by the documentation build, which checks these links
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [x for x in links if Path(x).name not in generated and not (page.parent / x).exists()] == []


def test_changelog_and_citation_have_the_version() -> None:
    newest = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0]
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)[0]
    assert newest == cited == headwise.__version__


def test_every_direct_dependency_is_pinned_for_development() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in requirements} - {"headwise"}
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names - pins == set()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_a_file_is_finished_and_of_readable_length(source: Path) -> None:
    text = source.read_text()
    assert text.count("\n") <= 450
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text)
