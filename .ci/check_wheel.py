"""Builds the sdist, from it the wheel, installs that into a new environment and runs the contract suite there.

The new environment borrows torch and pytest from .venv by one .pth line instead of installing them again; the .pth
files of .venv are not read through it, so the editable headwise of .venv cannot be found and only the wheel can.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# what the suite needs besides the wheel: its cases, the seeds and markers, the pytest settings
SUITE = ["pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/operators"]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\ncheck_wheel: {' '.join(map(str, command))} failed with {done.returncode}")
    return done.stdout.strip()


def missing_from(wheel: Path) -> set[str]:
    """Files of the package that the wheel lacks."""
    package = ROOT / "src"
    ours = {
        path.relative_to(package).as_posix()
        for path in (package / "headwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return ours - set(zipfile.ZipFile(wheel).namelist())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headwise-wheel-") as name:
        work = Path(name)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", ROOT, cwd=ROOT)
        (wheel,) = (work / "dist").glob("*.whl")
        if missing := missing_from(wheel):
            sys.exit(f"check_wheel: {wheel.name} lacks {', '.join(sorted(missing))}")

        venv.create(work / "env", with_pip=False, symlinks=True)
        python = work / "env" / "bin" / "python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=work)

        imported = run(python, "-c", "import headwise; print(headwise.__file__)", cwd=work)
        if not Path(imported).is_relative_to(site):
            sys.exit(f"check_wheel: headwise was imported from {imported}, not from the wheel in {site}")
        version = run(work / "env" / "bin" / "headwise", "--version", cwd=work)

        for part in SUITE:
            source, target = ROOT / part, work / "suite" / part
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        report = run(
            python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "-k", "not compile and not trace",
            "-p", "no:cacheprovider", "tests/operators/test_contract.py",
            cwd=work / "suite",
        )  # fmt: skip
        print(f"{wheel.name} ({wheel.stat().st_size // 1024} kB), {version}: {report.splitlines()[-1]}")


if __name__ == "__main__":
    main()
