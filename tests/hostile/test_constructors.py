"""Every public builder, layer and linear-algebra function, with arguments that nobody should pass.

Arguments are drawn by the name of the parameter: a fitting value most of the time, anything at all otherwise.  What is
built is then applied to an input drawn the same way.  Either it works, or it raises a HeadwiseError (or torch runs out
of memory); no other exception leaves headwise.  New public names are tried without a change here; a parameter whose
name is not known fails `test_every_parameter_has_a_fitting_value`.

HEADWISE_EXAMPLES sets the number of examples of each, see `counting`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise import linalg, operators
from headwise import nn as layers
from headwise.errors import HeadwiseError
from headwise.linalg import norms
from headwise.nn import ConvolutionGeometry, DropIn, MultiHead, Recurrent
from headwise.operators import AttentionOperator, projected, projected_blocks, shift, softmax, uniform, window
from headwise.operators.linear import projections
from headwise.operators.relative import encodings, quadratic
from headwise.testing.contract import normal
from tests.hostile.counting import count, hostile

N, K = 6, 4


def public(module: Any, names: list[str] | None = None) -> dict[str, Callable[..., Any]]:
    """The functions and the concrete classes with a checked constructor that a module exports."""
    functions = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    found = {
        name: getattr(module, name)
        for name in names or getattr(module, "__all__", functions)
        if not name.startswith("_")
    }
    return {f"{module.__name__}.{name}": x for name, x in found.items() if inspect.isfunction(x) or _is_layer(x)}


def _is_layer(x: Any) -> bool:
    return inspect.isclass(x) and not inspect.isabstract(x) and (issubclass(x, nn.Module) or x is ConvolutionGeometry)


BUILDERS = {
    **public(operators),
    **public(projections),
    **public(quadratic, ["bordered", "tables", "rotated", "log_width"]),
    **public(encodings),
}
# decorators of builders, not builders
del BUILDERS["headwise.operators.supports"], BUILDERS["headwise.operators.supported"]
LAYERS = public(layers)
LINALG = {**public(linalg), **public(norms)}
ALL = {**BUILDERS, **LAYERS, **LINALG}


def f32(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float32)


BOOLEAN = torch.arange(N) < 4
MATRIX = f32(N, N).softmax(-1)
GEOMETRY = ConvolutionGeometry.from_torch(3, (3, 3), (1, 1), (1, 1), (1, 1))
SPECTRUM = linalg.dense_spectrum(MATRIX)
PROJECTIONS = [
    projections.pooling(N, 2),
    projections.dense(f32(3, N)),
    projections.identity(N),
    projections.pooling(3, 2),
]
OPERATORS = [softmax(f32(N, K), f32(N, K, seed=1)), uniform(N, N), shift((N,), (1,)), uniform(3, N)]
SIZES = """
    m n r width stride block summaries landmarks iterations rounds chunk size heads queries depth rank length hidden hop
    channels in_channels groups key_width value_width out_width context_width steps
"""
MASKS = {
    "causal": [False, True],
    "key_mask": [None, BOOLEAN, BOOLEAN.expand(2, N), ~BOOLEAN & BOOLEAN],
    "pair_mask": [None, BOOLEAN.expand(N, N), torch.ones(N, N, dtype=torch.bool).tril()],
    "attn_bias": [None, f32(N, N), f32(N, N).masked_fill(~BOOLEAN, -math.inf)],
}
FITTING: dict[str, list[Any]] = {
    **MASKS,
    **{name: [1, 2, 3, 4, N, 8] for name in SIZES.split()},
    "q": [f32(2, N, K), f32(N, K), f32(2, 2, N, K)],
    "k": [f32(2, N, K, seed=1), f32(N, K, seed=1), f32(2, 1, N, K, seed=1)],
    "scale": [None, 0.5, 1, 2.0],
    "w": [f32(2 * K)],
    "theta": [None, f32(3, K), lambda x: x[..., :3]],
    "phi": [None, f32(3, K), lambda x: x[..., :3]],
    "leading": [0, 1, 2],
    "by": [-2, 0, 1, 10**9],
    "e": PROJECTIONS,
    "f": [None, *PROJECTIONS],
    "slot_bias": [None, f32(3)],
    "a": [f32(3, K), f32(N, K)],
    "b": [f32(3, K, seed=1)],
    "c": [f32(3, seed=2)],
    "rotations": [None, f32(2, K, 2)],
    "generator": [None, torch.Generator().manual_seed(0)],
    "scores": [[f32(2, 2), f32(3, 3)], [f32(N, N)]],
    "dtype": [None, torch.float32, torch.float16],
    "device": [None, torch.device("cpu")],
    "grid": [(2, 3), (N,), [2, 3], (1, 2, 3)],
    "offset": [(1, -1), (2,), (0, 0, 1)],
    "border": ["zeros", "circular", "replicate", "reflect"],
    "origin": [None, (0, 1), (1,)],
    "centres": [f32(2), f32(3, 2), f32(1), f32(9, 2)],
    "log_widths": [torch.zeros(2), torch.zeros(1), torch.zeros(9, 2)],
    "values": [[f32(3), f32(5)], [f32(11)]],
    "precision": [torch.eye(2)],
    "alpha": [1.0, 5, torch.tensor(2.0)],
    "padding": [((1, 1), (0, 1)), ((0, 0),), (1, 1), "same"],
    "weights": [f32(2 * N - 1), f32(3)],
    "logits": [f32(2 * N - 1), f32(3)],
    "operator": [*OPERATORS, projected, projected_blocks],
    "factor": [2.0, f32(N), 0],
    "factors": OPERATORS,
    "terms": OPERATORS,
    "matrix": [f32(3, N), f32(2, 3, N)],
    "weight": [f32(3), f32(4, 3, 3, 3)],
    "positions": [f32(5, 2), torch.arange(4).unsqueeze(-1)],
    "offsets": [f32(5, 2)],
    "encodings": [f32(11, K)],
    "index": [torch.zeros(N, N, dtype=torch.int64)],
    "content": [f32(K)],
    "place": [f32(K)],
    "build": [softmax, partial(window, width=3), [softmax, softmax]],
    "layer": [None, lambda: Recurrent(8), MultiHead(8, 2)],
    "bias": [True, False, None, f32(4)],
    "out_bias": [None, True, False],
    "shared": [True, False],
    "fit": ["slice", "interpolate"],
    "dropout": [0.0, 0.1],
    "norm_first": [True, False],
    "reversible": [False, True],
    "batch_first": [True, False],
    "pairs": [[(nn.Tanh(), nn.Tanh())]],
    "patch_size": [(2, 2), (3,)],
    "kernel_size": [(3, 3), (2,)],
    "dilation": [(1, 1), (1,)],
    "geometry": [GEOMETRY],
    "widths": [(3, 5), [1]],
    "key_padding_mask": [None, ~BOOLEAN.expand(2, N), f32(2, N)],
    "attn_mask": [None, f32(N, N), f32(4, N, N), ~torch.ones(N, N, dtype=torch.bool).tril()],
    "is_causal": [False, True],
    "apply": [lambda x: MATRIX.to(x) @ x],
    "adjoint": [lambda x: MATRIX.to(x).mT @ x],
    "shape": [(N, N), torch.Size((N, N))],
    "like": [MATRIX],
    "spectrum": [SPECTRUM],
    "tolerance": [0.5, 0],
    "p": [MATRIX],
    "x": [MATRIX, f32(2, N, 8)],
    "options": [{}],
    "accuracy": [0.0, 1e-2],
    "certificate": [0, 1, 3],
    "axes": [1, 2, 3],
    "normalise": ["sum", "n"],
    "pair_cost": [1, 4],
    "encoding": [layers.QuadraticEncoding, layers.SinusoidalEncoding, layers.AbsoluteEncoding],
    "share": [0.0, 0.5],
    "query_key": [(0.7, 0.7)],
    "value_out": [(0.4, 0.4)],
}
# parameters of one name that mean different things
SPECIAL: dict[tuple[str, str], list[Any]] = {
    ("window", "width"): [1, 3, 10**9],
    ("shift", "stride"): [None, (1, 1), (2,)],
    ("shift", "queries"): [None, (2, 3), (N,)],
    ("quadratic", "stride"): [None, (1, 1), (2,)],
    ("quadratic", "queries"): [None, (2, 3), (N,)],
    ("tables", "stride"): [None, (1, 1)],
    ("tables", "queries"): [None, (2, 3)],
    ("bordered", "stride"): [None, (1, 1)],
    ("bordered", "queries"): [None, (2, 3)],
    ("differences", "queries"): [None, (2, 3), (N,)],
    ("ConvolutionGeometry", "stride"): [(1, 1), (2,)],
    ("PatchEmbedding", "stride"): [None, (1, 1), (2,)],
    ("per_head", "heads"): [OPERATORS[:2], [uniform(N, N)]],
    ("positional", "scores"): [[f32(2, 2), f32(3, 3)], [f32(N, N)]],
    ("LearnedProjection", "operator"): [projected],
    ("LearnedBlocks", "operator"): [projected_blocks],
    ("LearnedConvolution", "operator"): [projected],
    ("MultiHead", "key_width"): [None, 4, (2, 3)],
    ("MultiHead", "value_width"): [None, 4, (2, 3)],
    ("MultiHead", "context_width"): [None, 8, (8, 4)],
    ("DropIn", "layer"): [MultiHead(8, 2)],
    ("stock_state_dict", "model"): [DropIn(MultiHead(8, 2)), MultiHead(8, 2)],
    ("singular_values", "block"): [2, 64],
    ("singular_vectors", "block"): [2, 64],
    ("eigenvalues", "block"): [2, 16],
    ("quadratic_vector", "alpha"): [f32(3)],
    ("similarity", "f"): [lambda q, k: (q.mean(-1, keepdim=True) - k.mean(-1).unsqueeze(-2)).square()],
    ("LearnedSimilarity", "f"): [nn.Identity()],
    ("low_rank", "operator"): OPERATORS,
    ("mimetic_", "layer"): [MultiHead(8, 2), MultiHead(8, 4)],
    ("impulse_", "layer"): [MultiHead(8, 2)],
    ("impulse_", "positions"): [f32(N, 8)],
    ("impulse_", "offsets"): [None, [(0, 1), (1, 0)]],
}

ANYTHING: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 10**12, -(10**12), 2**63, 10**400, 0.5, -1.0, math.nan, math.inf),
    *(
        "",
        "wide",
        b"x",
        [],
        (),
        {},
        [1, 2],
        (0, 0),
        (3, "a"),
        (10**12, 3),
        [None],
        object(),
        int,
        softmax,
        torch.float32,
    ),
    *(torch.tensor(1.0), torch.tensor([]), f32(4), f32(N, K), f32(3, N, 8), f32(1, 1), f32(0, N, K), f32(2, 0, K)),
    *(f32(2, N, 0), f32(2, 2, 2, 2, 2), torch.full((N, K), math.nan), torch.full((N, K), math.inf), 1e20 * f32(N, K)),
    *(torch.ones(N, K, dtype=torch.int64), torch.ones(N, K, dtype=torch.bool), torch.ones(N, K, dtype=torch.complex64)),
    *(f32(N, K).double(), f32(N, K).half(), torch.empty(N, K, device="meta"), torch.empty(2, N, 8, device="meta")),
    *(uniform(2, 3), PROJECTIONS[0], MultiHead(4, 1), SPECTRUM, GEOMETRY),
]


CALLABLES = {"build", "layer", "operator", "theta", "phi", "apply", "adjoint", "encoding", "f"}
"""Parameters that are called: what another callable raises is its own."""


def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(call).parameters)


def fitting(name: str, parameter: str) -> list[Any]:
    return SPECIAL.get((name.rsplit(".", 1)[-1], parameter), FITTING.get(parameter, []))


@st.composite
def calls(draw: st.DrawFn, name: str, call: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of one call: fitting ones, but on average one that is anything at all."""
    args, kwargs, positional = [], {}, True
    wild = draw(st.sampled_from([0.0, 0.15, 0.4]))

    def value(parameter: str) -> Any:
        good = fitting(name, parameter)
        if good and draw(st.floats(0, 1)) >= wild:
            return draw(st.sampled_from(good))
        value = draw(st.sampled_from(ANYTHING))
        return None if parameter in CALLABLES and callable(value) else value

    for parameter, kind in parameters(call).items():
        if kind.kind is kind.VAR_POSITIONAL:
            args += [value(parameter) for _ in range(draw(st.integers(0, 3)))]
        elif kind.kind is kind.VAR_KEYWORD:
            continue
        elif kind.default is not kind.empty and draw(st.booleans()):
            positional = False
        elif kind.kind is kind.KEYWORD_ONLY or not positional:
            kwargs[parameter] = value(parameter)
        else:
            args.append(value(parameter))
    return args, kwargs


INPUTS: list[Any] = [f32(2, N, 8), f32(N, 8), f32(N, K), f32(1, 3, 6, 5), f32(2, 1, 16), f32(2, 8, 3, 2), *ANYTHING]


def survives(run: Callable[[], Any]) -> Any:
    """The result, or None if a HeadwiseError was raised or memory ran out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except HeadwiseError:
        return None
    except (MemoryError, RuntimeError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
    return None


@pytest.mark.parametrize("name", ALL)
@hostile(8)
@given(data=st.data())
def test_any_arguments(name: str, data: st.DataObject) -> None:
    call = ALL[name]
    args, kwargs = data.draw(calls(name, call))
    count("constructors and functions")
    built = survives(lambda: call(*args, **kwargs))
    if isinstance(built, AttentionOperator) or getattr(type(built), "forward", nn.Module.forward) != nn.Module.forward:
        x, masks = data.draw(inputs(built))
        survives(lambda: built(*x, **masks))


@st.composite
def inputs(draw: st.DrawFn, built: AttentionOperator | nn.Module) -> tuple[list[Any], dict[str, Any]]:
    """What an operator or a layer is applied to, and masks if it takes any."""
    run = built.forward if isinstance(built, nn.Module) else built.__call__
    required = [p for p in parameters(run).values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    x = draw(st.sampled_from(INPUTS))
    masks = {kind: draw(st.sampled_from([*MASKS[kind], *ANYTHING])) for kind in MASKS if kind in parameters(run)}
    return [draw(st.sampled_from([x, x, x, *ANYTHING])) for _ in required], masks


def test_every_parameter_has_a_fitting_value() -> None:
    missing = {
        f"{name}({parameter})"
        for name, call in ALL.items()
        for parameter, kind in parameters(call).items()
        if not fitting(name, parameter)
    }
    assert not missing, f"add a fitting value for {sorted(missing)}"
