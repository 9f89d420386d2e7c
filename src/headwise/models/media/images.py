"""Batches of images: prepared by the model's own processor, with the row and column of each patch as its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.errors import InputError, needs_extra
from headwise.models import gate
from headwise.models.gate import one_line
from headwise.models.inputs import (
    IMAGE_WORDS,
    Inputs,
    check_takes,
    known_arguments,
    needs_text,
    preprocessor,
    with_decoder,
)
from headwise.models.load import LoadedModel

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
CAPTION = "a photograph"
"""The text beside each image, for models that take both at once."""

SPECIAL_TOKENS = (
    ("[CLS]", ("cls_token", "class_token", "class_embedding")),
    ("[DIST]", ("distillation_token", "dist_token")),
    ("[REG]", ("register_tokens", "reg_token")),
)
"""Learned tokens before the patches, in their order: (its name, the names that models give the parameter)."""


def image_input(loaded: LoadedModel, directory: Path, *, limit: int) -> Inputs:
    """The first `limit` images of a directory, prepared by the model's own processor."""
    check_takes(loaded, "images")
    if not directory.is_dir():
        raise InputError(f"--images {directory}: no such directory")
    paths = sorted(p for p in directory.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)[:limit]
    if not paths:
        raise InputError(f"--images {directory}: no .png, .jpg, .bmp or .webp file in it")
    with needs_extra("models", "reading images"):
        from PIL import Image
    both = needs_text(loaded.model)
    processor = preprocessor(loaded, *(("AutoProcessor", "processor") if both else IMAGE_PROCESSOR))
    beside = {"text": CAPTION} if both else {}
    batches = []
    for path in paths:
        try:
            image = Image.open(path).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"{path} cannot be read as an image ({one_line(error)})") from error
        with gate.failures(f"{path} cannot be prepared for {loaded.name}"):
            features = known_arguments(loaded.model, processor(images=image, return_tensors="pt", **beside))
        batches.append(with_decoder(loaded.model, features))
    return Inputs(
        batches,
        None if both else lambda batch: [patch_names(loaded.model, image) for image in batch["pixel_values"]],
        {"kind": "images", "source": [p.name for p in paths], **beside, "words": IMAGE_WORDS},
    )


IMAGE_PROCESSOR = ("AutoImageProcessor", "image processor")


def patch_names(model: nn.Module, image: Tensor) -> list[str]:
    """Special tokens, then "row,column" for each patch of an image (channels, height, width).

    Empty if the model cuts images in another way.  Models with windows or several resolutions attend over other
    sequences than this one; the names are for those sites that have this length.
    """
    size: Any = getattr(getattr(model, "config", None), "patch_size", None)
    height, width = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    if not isinstance(height, int) or not isinstance(width, int) or image.dim() != 3:
        return []
    parameters = {name.rpartition(".")[2]: x for name, x in model.named_parameters()}
    special = []
    for token, names in SPECIAL_TOKENS:
        found = next((parameters[name] for name in names if name in parameters), None)
        count = 0 if found is None else found.numel() // found.shape[-1]
        special += [token] if count == 1 else [f"{token[:-1]}{i}]" for i in range(count)]
    rows, columns = image.shape[-2] // height, image.shape[-1] // width
    return special + [f"{row},{column}" for row in range(rows) for column in range(columns)]
