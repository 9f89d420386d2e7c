"""Building and loading: in the background or not, by two processes at once, without a compiler, after failures."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from headwise.cli.main import main
from headwise.errors import InputError
from headwise.operators._kernels import native
from headwise.operators._kernels.native import kernel_build, kernel_cache
from headwise.operators._kernels.native.kernel_library import KernelLibrary

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are compiled on Linux only")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing is loaded into this process a second time."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADWISE_KERNELS", "build")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return tmp_path / "cache"


class FakeCompiler:
    """A script as $CXX that copies a library instead of compiling one, and counts how often it was asked to."""

    def __init__(self, folder: Path, library: Path | None) -> None:
        self.file, self.log = folder / "compiler", folder / "log"
        work = "echo nothing; echo 'x.cpp:1: error: no' >&2; exit 3" if library is None else f'cp {library} "$output"'
        self.file.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exit\n'
            'for word; do [ "$last" = -o ] && output=$word; last=$word; done\n'
            f'case " $* " in *" -c "*) echo one >> {self.log}; sleep 0.2; touch "$output";; esac\n{work}\n'
        )
        self.file.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0


@pytest.fixture
def built(kernels: None) -> Path:
    """The library that the suite has built."""
    return kernel_cache.library_file()


@pytest.fixture
def compiler(built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    made = FakeCompiler(tmp_path, built)
    monkeypatch.setenv("CXX", str(made.file))
    monkeypatch.setattr(kernel_build, "_check", lambda library: None)  # of this process; a second each
    return made


@pytest.fixture
def failing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    made = FakeCompiler(tmp_path, None)
    monkeypatch.setenv("CXX", str(made.file))
    return made


def test_a_build_is_loaded_and_found_by_the_next_process(compiler: FakeCompiler) -> None:
    first, second = KernelLibrary(), KernelLibrary()
    assert first.state == "not built"
    assert first.ready()
    assert first.state == "ready"
    assert second.ready()
    assert compiler.runs == 1
    assert oct(kernel_cache.directory().stat().st_mode & 0o777) == "0o700"
    left = {file.name for file in kernel_cache.directory().iterdir()}
    assert left == {"kernels.so", "build.json"}


def test_auto_builds_in_the_background_and_says_no_meanwhile(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_KERNELS", "auto")
    library = KernelLibrary()
    assert not library.ready()
    assert library.state == "building"
    assert not library.ready()
    assert library._background is not None
    library._background.join(60)
    assert library.ready()
    assert compiler.runs == 1


def test_off_neither_builds_nor_loads(compiler: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_KERNELS", "off")
    library = KernelLibrary()
    assert not library.ready()
    assert library.state == "off"
    assert compiler.runs == 0
    assert not cache.exists()


@linux
def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_KERNELS", "of")
    with pytest.raises(InputError, match="HEADWISE_KERNELS is 'of'; it must be auto, build or off"):
        KernelLibrary().ready()


PROCESS = """
import sys, torch
from headwise.operators._kernels import native
x = torch.linspace(-3, 3, 40)
assert native.usable(x), native.LIBRARY.reason
torch.testing.assert_close(torch.ops.headwise.self_test(x), x.exp())
"""


def test_two_processes_that_build_at_once_end_with_one_good_library(compiler: FakeCompiler) -> None:
    started = [subprocess.Popen([sys.executable, "-c", PROCESS]) for _ in range(2)]
    assert [process.wait(120) for process in started] == [0, 0]
    assert compiler.runs == 1
    record = kernel_cache.read_record()
    assert record is not None
    assert not kernel_cache.damaged(record)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_stopped_leaves_nothing_behind(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pids, slow = tmp_path / "pids", tmp_path / "slow"
    slow.write_text(  # a compiler that starts another process, as g++ does, with a temporary file
        '#!/bin/sh\n[ "$1" = --version ] && exit\n'
        'for word; do [ "$last" = -o ] && output=$word; last=$word; done\n'
        f'touch "$output" "$(mktemp)"; sh -c \'echo $$ > {pids}; sleep 30; exit\'; exit 1\n'
    )
    slow.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "CXX": str(slow), "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-m", "headwise", "kernels", "build"], env=environment) as process:
        for _ in range(1000):
            if pids.exists() and pids.read_text().endswith("\n"):
                break
            time.sleep(0.05)
        process.send_signal(number)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    if number == signal.SIGTERM:
        stat = Path(f"/proc/{pids.read_text().strip()}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"  # dead, and perhaps unburied
    else:
        os.kill(int(pids.read_text()), signal.SIGKILL)
    assert list(temporary.iterdir()) == []
    assert kernel_build.build().reason is None
    assert {file.name for file in kernel_cache.directory().iterdir()} == {"kernels.so", "build.json"}


def test_what_could_not_be_removed_is_removed_by_the_next_build(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(shutil, "rmtree", lambda path, **options: None)
        assert kernel_build.build().reason is None
    assert any(kernel_cache.directory().glob(".building-*"))
    assert kernel_build.build().reason is None
    assert compiler.runs == 1
    assert {file.name for file in kernel_cache.directory().iterdir()} == {"kernels.so", "build.json"}


def test_a_library_that_vanishes_during_the_build_is_an_error(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = kernel_cache.write_record

    def vanish(record: kernel_cache.BuildRecord) -> None:
        kernel_cache.library_file().unlink()
        write(record)

    with monkeypatch.context() as removed:
        removed.setattr(kernel_cache, "write_record", vanish)
        assert main(["kernels", "build"]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(r"headwise kernels: .*kernels.so was removed or changed while .*; build it again\n", said.err)
    assert said.out == ""
    assert main(["kernels", "build"]) == 0


@linux
def test_without_a_compiler_torch_runs_and_the_reason_is_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library = KernelLibrary()
    assert not library.ready()
    assert library.state == "unavailable"
    assert library.reason == "no C++ compiler was found (g++, c++ or clang++; or set CXX)"
    assert not cache.exists()
    assert main(["kernels", "build"]) == 2
    assert "no C++ compiler was found" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "/no/such/compiler", '"unclosed', " "])
def test_a_compiler_that_cannot_be_started_is_passed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    other = kernel_build.find_compiler()
    monkeypatch.setenv("CXX", name)
    assert kernel_build.find_compiler() == other


@linux
def test_a_failed_build_is_not_tried_again_until_it_is_asked_for(failing: FakeCompiler) -> None:
    library = KernelLibrary()
    assert not library.ready()
    assert not library.ready()
    assert library.reason is not None
    assert re.search(r"compiler ended with 3: x.cpp:1: error: no", library.reason)
    assert not KernelLibrary().ready()
    assert failing.runs == 1
    assert kernel_build.build(force=True).reason is not None
    assert failing.runs == 2  # each of them failed while compiling: nothing was linked
    assert not kernel_cache.library_file().exists()


def test_another_compiler_is_tried_after_a_failure(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    other = compiler.file.with_name("other")
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    with monkeypatch.context() as first:
        first.setenv("CXX", str(other))
        assert not KernelLibrary().ready()
    assert KernelLibrary().ready()


@linux
def test_a_library_that_does_not_work_counts_as_a_failed_build(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("not a library")
    monkeypatch.setenv("CXX", str(FakeCompiler(tmp_path, tmp_path / "text").file))
    library = KernelLibrary()
    assert not library.ready()
    assert "the compiled library does not work" in str(library.reason)


@pytest.mark.parametrize("damage", ["cut", "removed", "record"])
def test_a_damaged_build_is_built_again(compiler: FakeCompiler, damage: str) -> None:
    assert KernelLibrary().ready()
    file = kernel_cache.library_file()
    if damage == "cut":
        os.truncate(file, 1000)
    elif damage == "removed":
        file.unlink()
    else:
        (file.parent / "build.json").write_text('{"sha256": 3}')
    assert KernelLibrary().ready()
    assert compiler.runs == 2


def test_a_cache_that_others_can_write_is_not_used(compiler: FakeCompiler, cache: Path) -> None:
    assert KernelLibrary().ready()
    for place in (kernel_cache.library_file(), kernel_cache.directory(), cache):
        mode = place.stat().st_mode
        place.chmod(0o777)
        library = KernelLibrary()
        assert not library.ready()
        assert library.reason is not None
        assert f"{place} can be written by other users" in library.reason
        place.chmod(mode)
    assert KernelLibrary().ready()


def test_a_directory_that_cannot_be_made_is_a_reason(compiler: FakeCompiler, cache: Path) -> None:
    cache.write_text("a file")
    library = KernelLibrary()
    assert not library.ready()
    assert library.state == "unavailable"


def test_the_command_reports_the_build(compiler: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    with native.switched("build"):
        assert main(["kernels", "--json"]) == 1
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (facts["state"], facts["runs"], facts["build"]) == ("not built", "torch", None)
        assert main(["kernels", "build"]) == 0
        assert "self_test" in capsys.readouterr().out
        assert main(["kernels", "where"]) == 0
        assert Path(capsys.readouterr().out.strip(), "kernels.so").is_file()
        assert main(["kernels", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["state"], facts["runs"], facts["build"]["compiler"]) == ("ready", "kernels", str(compiler.file))
    with native.switched("off"):
        assert main(["kernels"]) == 1
        assert "HEADWISE_KERNELS=off" in capsys.readouterr().out


def test_a_directory_that_is_removed_after_the_build_is_said(
    compiler: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = kernel_build.build

    def build_and_remove(**options: Any) -> Any:
        record = whole(**options)
        shutil.rmtree(cache)
        return record

    monkeypatch.setattr(kernel_build, "build", build_and_remove)
    with native.switched("build"):
        assert main(["kernels", "build"]) == 2
    assert "was removed or changed while the kernels were built; build them again" in capsys.readouterr().err


@linux
def test_the_command_explains_a_failed_build(failing: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    for runs in (1, 2):  # a failed build is tried again
        assert main(["kernels", "build"]) == 2
        assert "the build failed: compiler ended with 3: x.cpp:1: error: no" in capsys.readouterr().err
        assert failing.runs == runs


def test_the_command_keeps_a_good_build(compiler: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    with native.switched("build"):
        assert main(["kernels", "build"]) == 0
        assert "up to date" not in capsys.readouterr().out
        runs = compiler.runs
        assert main(["kernels", "build"]) == 0
        assert "up to date, built in" in capsys.readouterr().out
        assert compiler.runs == runs
        assert main(["kernels", "build", "--force"]) == 0
        assert compiler.runs == 2 * runs
        os.truncate(kernel_cache.library_file(), 1000)
        assert main(["kernels", "build"]) == 0
        assert compiler.runs == 3 * runs


def test_an_import_builds_nothing(tmp_path: Path) -> None:
    code = (
        "import headwise, headwise.operators, headwise.examination\n"
        "from headwise.operators._kernels import native\n"
        "assert native.LIBRARY.state == 'not built'"
    )
    environment = {**os.environ, "HEADWISE_CACHE": str(tmp_path / "cache"), "HEADWISE_KERNELS": "auto"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not (tmp_path / "cache").exists()


# ---- what runs for which tensors ----


def test_plain_cpu_tensors_of_single_and_half_precision_are_usable(kernels: None) -> None:
    x = torch.randn(3, 4)
    assert native.usable(x, None, x.bfloat16(), x > 0, torch.nn.Parameter(x), x.mT)
    assert not native.usable(x, x.double())
    assert not native.usable(x.half())
    assert not native.usable(x.to_sparse())
    assert not native.usable(x.to("meta"))
    with native.switched("off"):
        assert not native.usable(x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transformations_of_the_program_see_torch_calls(kernels: None) -> None:
    seen: list[bool] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append(native.usable(x))
        return x * 2

    x = torch.randn(3, 4)
    torch.func.vmap(see)(x)
    torch.func.jvp(see, (x,), (x,))
    torch.func.grad(lambda x: see(x).sum())(x)
    make_fx(see)(x)
    torch.jit.trace(see, x, check_trace=False)
    with FlopCounterMode(display=False):
        see(x)
    with FakeTensorMode() as fake:
        see(fake.from_tensor(x))
    with torch.autograd.forward_ad.dual_level():
        see(x)
    assert seen == [False] * len(seen)
    assert len(seen) >= 8
    assert native.usable(x)


def test_a_compiled_function_takes_the_torch_path_without_a_break(kernels: None) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if native.usable(x) else x - 1

    x = torch.randn(3)
    assert torch.equal(torch.compile(branch, fullgraph=True, backend="eager")(x), x - 1)
    assert torch.equal(branch(x), x + 1)


def test_an_operation_has_a_schema_and_a_fake(kernels: None) -> None:
    torch.library.opcheck(torch.ops.headwise.self_test.default, (torch.randn(5, 7),))
    x = torch.randn(50)
    compiled = torch.compile(torch.ops.headwise.self_test, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x.exp())


def test_there_is_one_openmp_and_it_is_torchs(kernels: None) -> None:
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if re.search(r"lib[gi]?omp", line)}) <= 1


def test_the_sources_are_part_of_the_build_key(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_cache.key()
    shutil.copytree(kernel_cache.SOURCES, tmp_path / "native")
    (tmp_path / "native" / "common.h").write_text("// another")
    monkeypatch.setattr(kernel_cache, "SOURCES", tmp_path / "native")
    for name in ("key", "flags"):
        monkeypatch.setattr(kernel_cache, name, functools.cache(getattr(kernel_cache, name).__wrapped__))
    assert kernel_cache.key() != before
