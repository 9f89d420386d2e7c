"""Where the heads look, epoch by epoch: a callback that records receptive fields, and pictures of the record.

    recorder = FieldRecorder(lambda: tap_fields(model, sample))
    for epoch in range(epochs):
        ...
        recorder(epoch)
    recorder.png("layer", "fields.png"); recorder.gif("layer", "fields.gif")

Any function that returns fields by layer will do, so heads of content (`receptive_fields(layer.operator(x), grid)`) are
recorded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import InputError
from headwise.nn.tap_layers import TapLayer
from headwise.theory.receptive_fields import ReceptiveField, receptive_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Fields = Mapping[str, Sequence[ReceptiveField]]


def tap_fields(model: nn.Module, sample: Tensor) -> dict[str, list[ReceptiveField]]:
    """Fields of every layer of taps, by its name, as seen by the middle query when the model runs on `sample`."""
    grids: dict[str, tuple[int, ...]] = {}

    def watch(name: str, layer: TapLayer) -> RemovableHandle:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            grids[name] = tuple(inputs[0].shape[-len(layer.taps.kernel) :])

        return layer.register_forward_pre_hook(note)

    hooks = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, TapLayer)]
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: layer_fields(model.get_submodule(name), grid) for name, grid in grids.items()}


def layer_fields(layer: nn.Module, grid: tuple[int, ...]) -> list[ReceptiveField]:
    """Fields of one layer of taps on a map of this size, measured from the cell the output stands for."""
    if not isinstance(layer, TapLayer):
        raise InputError(f"layer_fields: {type(layer).__name__} is not a layer of taps; use receptive_fields")
    taps = layer.taps
    return receptive_fields(
        layer.heads(grid),
        taps.extended(grid),
        queries=taps.queries(grid),
        stride=taps.stride,
        origin=[before for before, _ in taps.padding],
    )


@final
@dataclass
class FieldRecorder:
    """Call it with the number of an epoch; `record` then holds that epoch's fields by layer."""

    measure: Callable[[], Fields]
    record: dict[int, Fields] = field(default_factory=dict)

    def __call__(self, epoch: int) -> None:
        self.record[epoch] = dict(self.measure())

    def to_json(self) -> dict[str, Any]:
        return {
            str(epoch): {name: [f.to_json() for f in fields] for name, fields in layers.items()}
            for epoch, layers in self.record.items()
        }

    def png(self, layer: str, path: str | Path, *, panels: int = 6) -> None:
        """Small multiples: the layer's heads at `panels` epochs from first to last."""
        epochs = self._epochs(layer)
        count = min(panels, len(epochs))
        chosen = [epochs[round(i * (len(epochs) - 1) / max(1, count - 1))] for i in range(count)]
        figure = _figure(len(chosen))
        for place, epoch in enumerate(chosen, start=1):
            axes = figure.add_subplot(1, len(chosen), place)
            draw_fields(axes, self.record[epoch][layer], reach=self._reach(layer), title=f"epoch {epoch}")
        figure.savefig(path, dpi=100)

    def gif(self, layer: str, path: str | Path, *, milliseconds: int = 250) -> None:
        """One frame an epoch, the last one held."""
        from PIL import Image

        frames = []
        for epoch in self._epochs(layer):
            figure = _figure(1)
            axes = figure.add_subplot(1, 1, 1)
            draw_fields(axes, self.record[epoch][layer], reach=self._reach(layer), title=f"{layer}, epoch {epoch}")
            frames.append(_pixels(figure))
        held = [milliseconds] * (len(frames) - 1) + [6 * milliseconds]
        images = [Image.fromarray(frame).quantize(32) for frame in frames]
        images[0].save(path, save_all=True, append_images=images[1:], duration=held, loop=0)

    def _epochs(self, layer: str) -> list[int]:
        epochs = sorted(epoch for epoch, layers in self.record.items() if layer in layers)
        if not epochs:
            known = sorted({name for layers in self.record.values() for name in layers})
            raise InputError(f"FieldRecorder: nothing is recorded of layer {layer!r}; known are {known}")
        return epochs

    def _reach(self, layer: str) -> float:
        """Half the side of the picture: the same for all epochs, so that movement is movement."""
        furthest = [2.0]
        for layers in self.record.values():
            for f in layers.get(layer, ()):
                half = f.ellipses[0].half_axes[0] if f.ellipses else 0.0
                furthest += [abs(c) + half for c in f.centre if math.isfinite(c)]
        return min(max(furthest) * 1.1, 64.0)


def draw_fields(axes: Axes, fields: Sequence[ReceptiveField], *, reach: float, title: str = "") -> None:
    """Heads of a plane: a dot at the centre, a filled 50 % and an open 90 % ellipse; the query is the cross.

    A line is drawn as a plane whose second axis is empty; of more axes the first two are shown.
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


def _figure(panels: int) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(2.6 * panels, 2.9), layout="constrained")


def _pixels(figure: Figure) -> Any:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
