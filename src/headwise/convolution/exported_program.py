"""Convolutions inside an exported program (`MODEL.pt2`): every aten.conv node becomes the attention it is equal to.

A program has no modules, only a graph of operations: the nodes are found by their target, their weights by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from headwise.convolution.convert import WHY_NOT_TRANSPOSED
from headwise.convolution.kernel_heads import Mode, exact, rewritten
from headwise.errors import InputError
from headwise.models.probe import change_of, layer_probe, multiply_adds_of, parameters
from headwise.models.receipt import Left, Receipt
from headwise.nn.tap_layers import TapLayer
from headwise.nn.taps import Taps

aten = torch.ops.aten
AXES: dict[Any, int] = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}


def convert_exported(program: ExportedProgram, mode: Mode = exact) -> tuple[ExportedProgram, Receipt]:
    """The program with its convolutions replaced, exported again on its own example inputs, and a receipt."""
    if program.example_inputs is None:
        raise InputError("convert_exported: the program carries no example inputs; export it again with torch.export")
    args, kwargs = program.example_inputs
    old, new = program.module(), program.module()
    assert isinstance(new, GraphModule)
    parts, left = _replace(new, mode)
    if not parts:
        said = "; ".join(f"{entry.what}: {entry.why}" for entry in left) or "it calls no aten.conv1d, conv2d or conv3d"
        raise InputError(f"convert_exported: nothing to convert: {said}")
    new.recompile()
    change, scale = change_of(lambda: old(*args, **kwargs), lambda: new(*args, **kwargs))
    shapes = _dynamic(program, args, kwargs)
    exported = torch.export.export(new, tuple(args), dict(kwargs), dynamic_shapes=shapes)
    receipt = Receipt(
        what="exported program",
        parameters_before=sum(p.numel() for p in program.parameters()),
        parameters_after=parameters(new),
        cost_before=multiply_adds_of(lambda: old(*args, **kwargs)),
        cost_after=multiply_adds_of(lambda: new(*args, **kwargs)),
        largest_change=change,
        scale=scale,
        parts=tuple(parts),
        left=tuple(left),
    )
    return exported, receipt


def _replace(module: GraphModule, mode: Mode) -> tuple[list[Receipt], list[Left]]:
    parts: list[Receipt] = []
    left: list[Left] = []
    layers: dict[Any, str] = {}
    used_up: set[str] = set()
    for node in list(module.graph.nodes):
        if node.target in TRANSPOSED:
            left.append(Left(node.name, WHY_NOT_TRANSPOSED))
        if node.op != "call_function" or node.target not in AXES:
            continue
        places = {"weight": _argument(node, 1, "weight", None), "bias": _argument(node, 2, "bias", None)}
        computed = [name for name, value in places.items() if value is not None and value.op != "get_attr"]
        if computed:
            left.append(Left(node.name, f"its {' and '.join(computed)} come out of the program, not out of storage"))
            continue
        stored = {name: str(value.target) for name, value in places.items() if value is not None}
        taps = _taps(node, _get(module, stored["weight"]))
        key = (*stored.values(), taps)
        if key not in layers:  # a convolution called twice stays one layer
            layers[key] = f"{node.name}_attention"
            layer, receipt = _layer(node, taps, *(_get(module, name) for name in stored.values()), mode=mode)
            module.add_submodule(layers[key], layer)
            parts.append(receipt)
        with module.graph.inserting_after(node):
            call = module.graph.call_module(layers[key], (_argument(node, 0, "input", None),))
            call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        used_up.update(stored.values())
    module.graph.eliminate_dead_code()
    still = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in used_up - still:
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
    return parts, left


def _layer(
    node: Node, taps: Taps, weight: Tensor, bias: Tensor | None = None, *, mode: Mode
) -> tuple[TapLayer, Receipt]:
    probe = layer_probe(taps, weight)
    with torch.no_grad():
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(taps.kernel)]
        wide = taps.extend(node.name, probe, weight)
        expected = convolve(wide, weight, bias, stride=taps.stride, dilation=taps.dilation, groups=taps.groups)
    return rewritten(node.name, taps, weight, bias, mode, probe=probe, expected=expected)


def _taps(node: Node, weight: Tensor) -> Taps:
    axes, groups = AXES[node.target], _argument(node, 6, "groups", 1)
    padding = _argument(node, 4, "padding", 0)
    taps = Taps(
        channels=weight.shape[1] * groups,
        kernel=tuple(weight.shape[2:]),
        stride=_each(_argument(node, 3, "stride", 1), axes),
        dilation=_each(_argument(node, 5, "dilation", 1), axes),
        padding=((0, 0),) * axes if isinstance(padding, str) else tuple((p, p) for p in _each(padding, axes)),
        groups=groups,
    )
    return replace(taps, padding=tuple((r // 2, r - r // 2) for r in taps.reach)) if padding == "same" else taps


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    entries = (value,) if isinstance(value, int) else tuple(value)
    return entries * axes if len(entries) == 1 else entries


def _get(module: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)


def _dynamic(program: ExportedProgram, args: Any, kwargs: Any) -> Any:
    """The same axes stay dynamic: those whose size is a symbol in the program's own inputs."""
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in names}
    flat = [
        {i: torch.export.Dim.AUTO for i, size in enumerate(v.shape) if isinstance(size, torch.SymInt)}
        if isinstance(v, Tensor)
        else None
        for v in values.values()
    ]
    if not any(flat):
        return None
    if kwargs or any(not isinstance(a, Tensor) for a in args):
        raise InputError("convert_exported: dynamic shapes with inputs other than plain tensors are not handled")
    return tuple(flat)
