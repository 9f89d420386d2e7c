"""Damage every file that a command reads back: the run must say so, or give the right answer.

A file that people write or edit (a model's weights, plan.json, a report of another machine) may change into another
valid file; then any result is allowed, but no traceback.  A file that only headwise writes must never lead to another
result silently.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.checks import Trial, check_sentence, whole
from tests.faults.kills import Reference
from tests.faults.server import Server
from tests.faults.subjects import Numbers, Subject, printed


@dataclass(frozen=True)
class Target:
    """Files that a command reads: `pattern` below the working directory, where `source` has been copied."""

    name: str
    source: str  # below the session
    pattern: str
    command: tuple[str, ...]
    numbers: Numbers
    editable: bool  # by people
    share: float = 1.0


Mutation = Callable[[bytes, random.Random], bytes]


def _flip(content: bytes, rng: random.Random, bits: int = 1) -> bytes:
    changed = bytearray(content)
    for _ in range(bits if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


OTHER_VALUES = (b"[]", b"7", b"null", b'"x"', b"{}", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe\x00", b"key")
MUTATIONS: dict[str, Mutation] = {
    "truncated": lambda content, rng: content[: rng.randrange(max(1, len(content)))],
    "empty": lambda content, rng: b"",
    "one bit": _flip,
    "many bits": lambda content, rng: _flip(content, rng, 20),
    "zeros": lambda content, rng: bytes(len(content)),
    "noise": lambda content, rng: rng.randbytes(len(content)),
    "longer": lambda content, rng: content + rng.randbytes(100),
    "other values": lambda content, rng: rng.choice(OTHER_VALUES),
    "middle cut out": lambda content, rng: content[: len(content) // 3] + content[len(content) // 2 :],
}
REPLACEMENTS = ("missing", "a directory", "a dangling link")


@dataclass(frozen=True)
class Damage:
    target: Target
    mutation: str
    seed: int


def draw_damage(targets: Sequence[Target], each: int, rng: random.Random) -> Iterator[Damage]:
    """`each` damaged files of each target: the mutations in turn."""
    kinds = [*MUTATIONS, *REPLACEMENTS, "truncated", "one bit", "truncated", "one bit"]
    for target in targets:
        for index in range(max(1, round(each * target.share))):
            yield Damage(target, kinds[index % len(kinds)], rng.randrange(1 << 30))


def damage_once(server: Server, directory: Path, session: Path, damage: Damage, expected: Any) -> Trial:
    target, rng = damage.target, random.Random(damage.seed)
    shutil.copytree(session / target.source, directory, symlinks=True, dirs_exist_ok=True)
    files = sorted(path for path in directory.glob(target.pattern) if path.is_file())
    if not files:
        raise AssertionError(f"{target.name}: nothing matches {target.pattern} in {session / target.source}")
    file = rng.choice(files)
    trial = Trial(f"damage: {damage.mutation}", target.name, f"{file.relative_to(directory)}, seed {damage.seed}")
    content = file.read_bytes()
    _apply(file, damage.mutation, content, rng)
    changed = not file.is_file() or file.read_bytes() != content
    valid = file.is_file() and whole(file) is None
    command = [argument.format(session=session) for argument in target.command]
    ended = server.run(command, directory)
    # partial results that are damaged are named, and measured again
    told = "".join(line for line in ended.err.splitlines(keepends=True) if "and is measured again" not in line)
    check_sentence(trial, replace(ended, err=told), codes={0, 2})
    if ended.code == 0 and not (target.editable and changed and valid):
        try:
            same = target.numbers(directory, ended.out) == expected
        except Exception as error:
            trial.broken("silent", f"{type(error).__name__}: {error}")
        else:
            if not same:
                trial.broken("silent", "exit code 0 and another result")
    return trial


def _apply(file: Path, mutation: str, content: bytes, rng: random.Random) -> None:
    if mutation in MUTATIONS:
        file.write_bytes(MUTATIONS[mutation](content, rng))
        return
    file.unlink()
    if mutation == "a directory":
        file.mkdir()
    elif mutation == "a dangling link":
        file.symlink_to("nowhere")


def make_targets(
    server: Server, session: Path, subjects: Mapping[str, Subject], references: Mapping[str, Reference]
) -> list[tuple[Target, Any]]:
    """Every file we read back, with the result of reading it whole."""
    examine, plan, rewrite, bench = (subjects[name] for name in ("examine", "plan", "rewrite", "bench scaling"))
    for subject in (examine, plan):
        _interrupted(server, session, subject, references[subject.name])
    finished = server.run(bench.command(session), session / "damage" / "benched")
    assert finished.code == 0, finished.err
    by_plan = ("rewrite", "{session}/bert", "--plan", "plan/out", "-o", "out", "--json")
    tokens = ("--random-tokens", "24", "--texts", "2")
    examined = ("examine", "model", *tokens, "--spectra-every", "0", "--no-ablations", "--quiet", "-o", "out")
    compared = ("compare", "{session}/bert", "out", *tokens, "--json")
    reports = ("compare", "out", "{session}/examined-bert-2/out", "--json")
    again = (*bench.arguments, "--force")
    for name, source in {"plan": "plan", "model": "bert"}.items():
        shutil.copytree(session / source, session / "damage" / f"with-{name}" / name)
    for name in ("cnn.pt2", "heads.pt", "bert/model.safetensors"):
        (session / "damage" / "files").mkdir(parents=True, exist_ok=True)
        shutil.copy(session / name, session / "damage" / "files")
    found = [
        Target("plan.json", "damage/with-plan", "plan/out/plan.json", by_plan, rewrite.numbers, True, 2.0),
        Target("report.json", "examined-bert", "out/report.json", reports, printed, True, 2.0),
        Target(
            "partial results of examine",
            "damage/examine",
            "out/.unfinished/**/*",
            _again(examine),
            examine.numbers,
            False,
        ),
        Target(
            "partial results of plan", "damage/plan", "out/.unfinished/**/*", _again(plan), plan.numbers, False, 0.7
        ),
        Target("cache of bench", "damage/benched", "out/*.jsonl", again, bench.numbers, False, 0.5),
        Target("rewritten config.json", "rewritten", "out/config.json", compared, printed, True),
        Target("rewritten weights", "rewritten", "out/*.safetensors", compared, printed, False),
        Target("narrowed config.json", "narrowed", "out/config.json", compared, printed, True, 0.7),
        Target("narrowed weights", "narrowed", "out/*.safetensors", compared, printed, False),
        Target(
            "marker, lock",
            "examined-bert",
            "out/.headwise*",
            (*examine.arguments, "--force"),
            examine.numbers,
            False,
            0.7,
        ),
        Target("model's config.json", "damage/with-model", "model/config.json", examined, _records, True),
        Target("model's weights", "damage/with-model", "model/*.safetensors", examined, _records, True),
        Target(
            "exported program",
            "damage/files",
            "cnn.pt2",
            ("convert", "cnn.pt2", "-o", "out.pt2", "--json"),
            subjects["convert"].numbers,
            True,
        ),
        Target(
            "tensors of bench",
            "damage/files",
            "heads.pt",
            ("bench", "fidelity", "--tensors", "heads.pt", "--json"),
            printed,
            True,
        ),
        Target(
            "weights of verify",
            "damage/files",
            "model.safetensors",
            ("verify", "--weights", "model.safetensors", "--heads", "2", "--json"),
            printed,
            True,
        ),
    ]
    made = []
    for index, target in enumerate(found):
        directory = session / "damage" / f"whole-{index}"
        shutil.copytree(session / target.source, directory)
        if not any(directory.glob(target.pattern)):
            continue
        ended = server.run([argument.format(session=session) for argument in target.command], directory)
        assert ended.code == 0, f"{target.name}: {ended.err}"
        made.append((target, target.numbers(directory, ended.out)))
    return made


def _records(directory: Path, _: str) -> Any:
    from tests.faults.subjects import steady_json

    return steady_json(directory / "out" / "report.json")["records"]


def _again(subject: Subject) -> tuple[str, ...]:
    return (*subject.arguments, *subject.again)


def _interrupted(server: Server, session: Path, subject: Subject, reference: Reference) -> None:
    """Leave the partial results of a killed run in damage/NAME."""
    for at in range(reference.writes // 2, 0, -4):
        directory = session / "damage" / subject.name
        shutil.rmtree(directory, ignore_errors=True)
        server.run(subject.command(session), directory, at=at, do="kill")
        if len(list(directory.glob("out/.unfinished/**/*"))) > 2:
            return
    raise AssertionError(f"{subject.name} leaves no partial results")
