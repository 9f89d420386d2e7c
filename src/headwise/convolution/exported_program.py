"""Convert the convolutions of an exported program (`MODEL.pt2`): every aten.conv node becomes an attention layer.

A program is a graph of operations without modules: nodes are found by their target, their weights by name.  Heads of
mode `exact` run as torch convolutions, so they are exported as such; the heads of `soft` become matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from headwise.convolution.conversion import WHY_NOT_TRANSPOSED, Mode, attention_from_kernel, default_probe, exact
from headwise.errors import InputError
from headwise.models.gate import one_line
from headwise.models.receipt import Left, Receipt, counted_cost, largest_change, parameter_count
from headwise.nn.kernel_attention import ConvolutionGeometry

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
    """The program with its convolutions converted, exported again on its own example inputs, and a receipt."""
    if not program.example_inputs:
        raise InputError("convert_exported: the program carries no example inputs; export it again with torch.export")
    try:
        args, kwargs = program.example_inputs
        old, new = program.module(), program.module()
        old(*args, **kwargs)
    except Exception as error:  # the graph or its inputs come from a file
        raise InputError(
            f"convert_exported: the program does not run on its own example inputs ({one_line(error)})"
        ) from error
    assert isinstance(new, GraphModule)
    parts, left = _convert_nodes(new, mode)
    if not parts:
        reasons = "; ".join(f"{entry.what}: {entry.why}" for entry in left)
        reasons = reasons or "it calls no aten.conv1d, conv2d or conv3d"
        raise InputError(f"convert_exported: nothing to convert: {reasons}")
    new.recompile()
    change, scale = largest_change(lambda: old(*args, **kwargs), lambda: new(*args, **kwargs))
    dynamic_shapes = _dynamic_shapes(program, args, kwargs)
    exported = torch.export.export(new, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes)
    receipt = Receipt(
        what="exported program",
        parameters_before=sum(p.numel() for p in program.parameters()),
        parameters_after=parameter_count(new),
        cost_before=counted_cost(lambda: old(*args, **kwargs)),
        cost_after=counted_cost(lambda: new(*args, **kwargs)),
        largest_change=change,
        scale=scale,
        parts=tuple(parts),
        left=tuple(left),
        weights="; ".join(dict.fromkeys(part.weights for part in parts)),
    )
    return exported, receipt


def _convert_nodes(module: GraphModule, mode: Mode) -> tuple[list[Receipt], list[Left]]:
    """Replace the convolution nodes of the graph in place; what was converted, and what was left."""
    parts: list[Receipt] = []
    left: list[Left] = []
    layer_names: dict[Any, str] = {}
    converted: set[str] = set()  # names of weights and biases
    for node in list(module.graph.nodes):
        if node.target in TRANSPOSED:
            left.append(Left(node.name, WHY_NOT_TRANSPOSED))
        if node.op != "call_function" or node.target not in AXES:
            continue
        sources = {"weight": _argument(node, 1, "weight"), "bias": _argument(node, 2, "bias")}
        computed = [name for name, value in sources.items() if value is not None and value.op != "get_attr"]
        if computed:
            left.append(Left(node.name, f"its {' and '.join(computed)} are computed by the program, not stored"))
            continue
        stored = {name: str(value.target) for name, value in sources.items() if value is not None}
        weight = attrgetter(stored["weight"])(module)
        bias = attrgetter(stored["bias"])(module) if "bias" in stored else None
        geometry = _geometry(node, weight)
        key = (*stored.values(), geometry)
        if key not in layer_names:  # a convolution called twice stays one layer
            layer_names[key] = f"{node.name}_attention"
            probe = default_probe(geometry, weight)
            options = {k: v for k, v in node.kwargs.items() if k not in ("input", "weight", "bias")}
            with torch.no_grad():
                expected = node.target(probe, weight, bias, *node.args[3:], **options)
            layer, receipt = attention_from_kernel(node.name, geometry, weight, bias, mode, probe, expected)
            module.add_submodule(layer_names[key], layer)
            parts.append(receipt)
        with module.graph.inserting_after(node):
            call = module.graph.call_module(layer_names[key], (_argument(node, 0, "input"),))
            call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        converted.update(stored.values())
    module.graph.eliminate_dead_code()
    still_used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in converted - still_used:
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
    return parts, left


def _geometry(node: Node, weight: Tensor) -> ConvolutionGeometry:
    axes, groups, padding = AXES[node.target], _argument(node, 6, "groups", 1), _argument(node, 4, "padding", 0)
    return ConvolutionGeometry.from_torch(
        weight.shape[1] * groups,
        tuple(weight.shape[2:]),
        _each(_argument(node, 3, "stride", 1), axes),
        _each(_argument(node, 5, "dilation", 1), axes),
        padding if isinstance(padding, str) else _each(padding, axes),
        groups=groups,
    )


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    entries = (value,) if isinstance(value, int) else tuple(value)
    return entries * axes if len(entries) == 1 else entries


def _dynamic_shapes(program: ExportedProgram, args: Any, kwargs: Any) -> Any:
    """Dynamic shapes for torch.export: axes whose size is a symbol in the program's inputs stay dynamic."""
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
        raise InputError("convert_exported: dynamic shapes are supported only if all inputs are positional tensors")
    return tuple(flat)
