"""A mkdocs hook: one reference page for each package, one section for each of its modules, made from docstrings.

Pages follow the source tree, so a new module is documented without another line anywhere.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1] / "src" / "headwise"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name != "cli")
MODULES = ["errors", "cost", "shapes"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{f"headwise.{name}": f"reference/{name}.md"} for name in [*PACKAGES, "basics"]]
    assert config.nav is not None
    config.nav.append({"Reference": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for package in PACKAGES:
        modules = sorted(path.stem for path in (SOURCE / package).glob("[!_]*.py"))
        sections = [f"headwise.{package}.{module}" for module in modules]
        files.append(page(config, package, f"headwise.{package}", sections))
    files.append(page(config, "basics", "Errors, costs and shapes", [f"headwise.{module}" for module in MODULES]))
    return files


def page(config: MkDocsConfig, name: str, title: str, modules: list[str]) -> File:
    text = f"# {title}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
    return File.generated(config, f"reference/{name}.md", content=text)
