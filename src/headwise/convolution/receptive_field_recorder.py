"""Record the receptive fields of heads during training, and draw the record.

    recorder = ReceptiveFieldRecorder(lambda: model_receptive_fields(model, sample))
    for epoch in range(epochs):
        ...
        recorder(epoch)
    recorder.png("layer", "fields.png"); recorder.gif("layer", "fields.gif")

Any function that returns receptive fields by layer name can be recorded, for example those of content-based heads
(`receptive_fields(layer.operator(x), grid)`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, needs_extra
from headwise.models.run import OwnHook, as_it_was
from headwise.nn.kernel_attention import KernelAttention
from headwise.theory.receptive_fields import ReceptiveField, receptive_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FieldsByLayer = Mapping[str, Sequence[ReceptiveField]]


def model_receptive_fields(model: nn.Module, sample: Tensor) -> dict[str, list[ReceptiveField]]:
    """Receptive fields of every KernelAttention layer by its name, at the map sizes that `sample` gives."""
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, KernelAttention)}
    grids: dict[KernelAttention, tuple[int, ...]] = {}

    def record_grid(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        grids[layer] = tuple(inputs[0].shape[-layer.geometry.axes :])

    with as_it_was(model), torch.no_grad(), ExitStack() as hooks:
        for layer in names:
            hooks.enter_context(layer.register_forward_pre_hook(OwnHook(record_grid)))
        model(sample)
    return {names[layer]: layer_receptive_fields(layer, grid) for layer, grid in grids.items()}


def layer_receptive_fields(layer: nn.Module, grid: tuple[int, ...]) -> list[ReceptiveField]:
    """Receptive fields of one KernelAttention layer for the middle query of a map of this size."""
    if not isinstance(layer, KernelAttention):
        raise InputError(
            f"layer_receptive_fields: {type(layer).__name__} is not a KernelAttention layer; pass its operator to "
            "headwise.theory.receptive_fields.receptive_fields"
        )
    geometry = layer.geometry
    return receptive_fields(
        layer.operator(grid),
        geometry.padded_size(grid),
        queries=geometry.output_size(grid),
        stride=geometry.stride,
        origin=[before for before, _ in geometry.padding],
    )


@final
@dataclass
class ReceptiveFieldRecorder:
    """`recorder(epoch)` calls `measure` and stores its receptive fields in `record[epoch]`."""

    measure: Callable[[], FieldsByLayer]
    record: dict[int, FieldsByLayer] = field(default_factory=dict)

    def __call__(self, epoch: int) -> None:
        self.record[epoch] = dict(self.measure())

    def to_json(self) -> dict[str, Any]:
        return {
            str(epoch): {name: [f.to_json() for f in fields] for name, fields in layers.items()}
            for epoch, layers in self.record.items()
        }

    def png(self, layer: str, path: str | Path, *, panels: int = 6) -> None:
        """Draw the heads of a layer at `panels` epochs from first to last, side by side."""
        epochs = self._epochs(layer)
        count = min(panels, len(epochs))
        chosen = [epochs[round(i * (len(epochs) - 1) / max(1, count - 1))] for i in range(count)]
        self._figure(layer, chosen).savefig(path, dpi=100)

    def gif(self, layer: str, path: str | Path, *, milliseconds: int = 250) -> None:
        """Animate the heads of a layer: one frame per epoch, the last one shown longer."""
        with needs_extra("models", "the animation"):
            from PIL import Image

        images = []
        for epoch in self._epochs(layer):
            buffer = io.BytesIO()
            self._figure(layer, [epoch]).savefig(buffer, format="png", dpi=100)
            images.append(Image.open(buffer).convert("RGB").quantize(32))
        durations = [milliseconds] * (len(images) - 1) + [6 * milliseconds]
        images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0)

    def _figure(self, layer: str, epochs: Sequence[int]) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2.6 * len(epochs), 2.9), layout="constrained")
        for axes, epoch in zip(figure.subplots(1, len(epochs), squeeze=False)[0], epochs, strict=True):
            draw_receptive_fields(axes, self.record[epoch][layer], reach=self._reach(layer), title=f"epoch {epoch}")
        return figure

    def _epochs(self, layer: str) -> list[int]:
        epochs = sorted(epoch for epoch, layers in self.record.items() if layer in layers)
        if not epochs:
            known = sorted({name for layers in self.record.values() for name in layers})
            raise InputError(
                f"ReceptiveFieldRecorder: no receptive fields of layer {layer!r} are recorded, only of {known}"
            )
        return epochs

    def _reach(self, layer: str) -> float:
        """Half the side of the picture, the same for all epochs."""
        furthest = [2.0]
        for layers in self.record.values():
            for f in layers.get(layer, ()):
                half = f.ellipses[0].half_axes[0] if f.ellipses else 0.0
                furthest += [abs(c) + half for c in f.centre if math.isfinite(c)]
        return min(max(furthest) * 1.1, 64.0)


def draw_receptive_fields(axes: Axes, fields: Sequence[ReceptiveField], *, reach: float, title: str = "") -> None:
    """Draw a dot at each centre, a filled 50 % and a dotted 90 % ellipse; the cross is the query.

    The first two axes are shown; a single axis is drawn as a line.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Ellipse as Patch

    colours = colormaps["turbo"]
    for i, f in enumerate(fields):
        if not f.ellipses:
            continue
        colour = colours((i + 0.5) / len(fields))
        y, x = (*f.centre, 0.0)[:2]
        for ellipse, fill in zip(f.ellipses, (True, False), strict=True):
            long, short = (*ellipse.half_axes, 0.0)[:2]
            dy, dx = (*ellipse.directions[0], 0.0)[:2]
            style = {"facecolor": (*colour[:3], 0.35)} if fill else {"fill": False, "linestyle": ":"}
            axes.add_patch(
                Patch((x, y), 2 * long, 2 * short, angle=math.degrees(math.atan2(dy, dx)), edgecolor=colour, **style)
            )
        axes.plot(x, y, ".", color=colour)
    axes.plot(0, 0, "+", color="black")
    axes.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal", title=title)  # rows grow downwards
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
