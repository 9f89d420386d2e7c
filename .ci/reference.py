"""A mkdocs hook: one reference page for each package, one section for each of its modules, made from docstrings.

Pages follow the source tree, so a new module is documented without another line anywhere; so do pages of docs/.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1] / "src" / "headwise"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name != "cli")
MODULES = ["errors", "cost", "shapes"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    listed = {page for entry in config.nav for page in entry.values()}
    config.nav += [page.name for page in sorted(Path(config.docs_dir).glob("*.md")) if page.name not in listed]
    for folder in sorted(path for path in Path(config.docs_dir).iterdir() if any(path.glob("*.md"))):
        found = [page.relative_to(config.docs_dir).as_posix() for page in sorted(folder.glob("*.md"))]
        config.nav.append({folder.name.capitalize(): found})
    pages = [{f"headwise.{name}": f"reference/{name}.md"} for name in [*PACKAGES, "basics"]]
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
