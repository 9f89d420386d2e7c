"""Weights in and out of layers: installed, overwritten during a line search, taken back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from headwise.growth.bottleneck import HeadKey
from headwise.growth.layers.growing_layer import GrowingLayer, ParameterName, new_data, replace_data
from headwise.growth.problem import Factors

T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class InstalledWeights:
    """What a layer held before a change of widths; its parameters are the same objects."""

    layer: GrowingLayer
    widths: tuple[int, ...]
    before: dict[ParameterName, Tensor]

    def undo(self) -> None:
        for name, parameter in self.layer.parameters().items():
            replace_data(parameter, self.before[name])
        self.layer.resize(self.widths)

    def write(self, weights: Mapping[int, Factors]) -> None:
        """Overwrite the installed weights of some heads by others of the same widths, as a line search does."""
        with torch.no_grad():
            for name, parameter in self.layer.parameters().items():
                if name != ("key", "bias"):
                    slices = self.layer.slices(name, self.layer.key_widths)
                    for head, new in weights.items():
                        parameter[slices[head]] = self.layer.weight_rows(new, name).to(parameter)


def install(layer: GrowingLayer, weights: Mapping[int, Factors]) -> InstalledWeights:
    """Give some heads of a layer other weights, of any width; the others keep theirs."""
    widths = layer.key_widths
    sizes = tuple(weights[h].width if h in weights else k for h, k in enumerate(widths))
    before = {name: parameter.data for name, parameter in layer.parameters().items()}
    new = new_data(layer, weights, sizes)
    for name, parameter in layer.parameters().items():
        replace_data(parameter, new[name])
    layer.resize(sizes)
    return InstalledWeights(layer, widths, before)


def install_all(layers: Mapping[str, GrowingLayer], weights: Mapping[HeadKey, Factors]) -> dict[str, InstalledWeights]:
    """`install` layer by layer; either all or none."""
    done: dict[str, InstalledWeights] = {}
    try:
        for name, heads in by_layer(weights).items():
            done[name] = install(layers[name], heads)
    except BaseException:
        for installed in done.values():
            installed.undo()
        raise
    return done


def by_layer(values: Mapping[HeadKey, T]) -> dict[str, dict[int, T]]:
    """{(layer, head): value} as {layer: {head: value}}"""
    layers: dict[str, dict[int, T]] = {}
    for (layer, head), value in values.items():
        layers.setdefault(layer, {})[head] = value
    return layers
