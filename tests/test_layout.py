"""One concept, one name, one place: what can be checked of the layout by looking at names."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headwise"
FILES = sorted(SOURCE.rglob("*.py"))


def test_no_two_modules_share_a_basename() -> None:
    names = Counter(file.name for file in FILES if not file.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(set)
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(str(file.relative_to(SOURCE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_folder_is_too_large_to_read() -> None:
    sizes = Counter(file.parent.relative_to(SOURCE) for file in FILES if file.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > 16} == {}


def test_every_package_says_what_it_holds() -> None:
    silent = [f for f in FILES if f.name == "__init__.py" and not ast.get_docstring(ast.parse(f.read_text()))]
    assert silent == []
