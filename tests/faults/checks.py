"""What must hold of a directory and of a finished process after a fault."""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.server import Ended
from tests.faults.subjects import Subject

MINE = b"not yours\n"
"""Content of the files that stand for the user's own."""
PARTIAL = ".unfinished"
OURS = {".headwise.json", ".headwise.lock"}
"""Kept beside results: what was written, and who is writing."""


@dataclass
class Trial:
    """One fault: what was done to which command, and what broke, as (category, sentence)."""

    fault: str
    command: str
    detail: str = ""
    reached: bool = True  # False: the run ended before the fault
    problems: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def broken(self, category: str, sentence: str) -> None:
        self.problems.append((category, sentence))


CATEGORIES = {
    "half-written": "half-written files",
    "mixed": "results mixed from two runs",
    "traceback": "tracebacks or messages that are not one sentence",
    "exit code": "wrong exit codes",
    "lost": "files of the user changed or deleted",
    "leftover": "files or processes left behind",
    "different": "resumed or repeated results that differ",
    "silent": "wrong results without a message",
    "stuck": "runs that could not be finished afterwards",
}


def plant(directory: Path, subject: Subject) -> None:
    """Put files of the user where the command works."""
    for name in subject.planted:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MINE)


def tree(directory: Path) -> set[str]:
    """Relative paths of all files."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def check_planted(trial: Trial, directory: Path, subject: Subject) -> None:
    for name in subject.planted:
        path = directory / name
        if not path.is_file() or path.read_bytes() != MINE:
            trial.broken("lost", f"{name} was changed or deleted")


def check_files(trial: Trial, directory: Path, subject: Subject, finished: set[str], *, temporaries: bool) -> None:
    """Every file under a final name is whole; nothing else but partial results and, if allowed, temporary files."""
    for name in sorted(tree(directory) - set(subject.planted)):
        parts = Path(name).parts
        hidden = any(part.startswith(".") for part in parts)
        if name in finished or not hidden:
            problem = whole(directory / name)
            if problem:
                trial.broken("half-written", f"{name}: {problem}")
            if name not in finished:
                trial.broken("leftover", name)
        elif PARTIAL not in parts and not OURS & set(parts) and not temporaries:
            trial.broken("leftover", name)


def check_sentence(trial: Trial, ended: Ended, *, codes: set[int], lines: int = 1) -> None:
    """The exit code is one of `codes`, and standard error is one sentence of ours, or nothing if code 0 is fine."""
    if ended.code not in codes:
        trial.broken("exit code", f"{ended.code} instead of {sorted(codes)}: {ended.err.strip()[-200:]!r}")
    said = ended.err.strip().splitlines()
    unexplained = "Traceback" in ended.err or "bug in headwise" in ended.err
    if unexplained or len(said) > lines or any(not line.startswith(("headwise ", "headwise: ")) for line in said):
        trial.broken("traceback", f"{(said or [''])[-1][:300]!r}, {len(said)} lines")
    elif ended.code not in (0, 1, 137, 143) and not said:
        trial.broken("traceback", f"exit code {ended.code} without a word")


def whole(path: Path) -> str | None:
    """What is wrong with a file that should be complete, or None."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
        elif path.suffix == ".jsonl":
            for line in path.read_text(encoding="utf-8").splitlines()[:-1]:
                json.loads(line)
        elif path.suffix == ".html":
            text = path.read_text(encoding="utf-8").strip()
            assert text.endswith("</html>"), "no end tag"
        elif path.suffix == ".svg":
            ElementTree.fromstring(path.read_bytes())
        elif path.suffix == ".png":
            assert path.read_bytes()[-8:-4] == b"IEND", "no end chunk"
        elif path.suffix == ".safetensors":
            from safetensors.torch import load

            load(path.read_bytes())
        elif path.suffix == ".pt":
            import torch

            torch.load(path, weights_only=True)
        elif path.name == "kernels.so":
            record = path.with_name("build.json")
            if record.exists():
                expected = json.loads(record.read_text())["sha256"]
                assert hashlib.sha256(path.read_bytes()).hexdigest() == expected, "build.json is of another library"
        elif path.suffix == ".pt2":
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, "damaged archive"
    except Exception as error:  # whatever a parser raises means that the file is not whole
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def count_problems(trials: list[Trial]) -> Counter[str]:
    return Counter(category for trial in trials for category, _ in trial.problems)
