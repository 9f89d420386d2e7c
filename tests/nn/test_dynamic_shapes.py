"""Every builder under torch.export with a symbolic length, and under torch.compile(dynamic=True, fullgraph=True).

The table in docs/how-to/export-a-model.md is printed by `python -m tests.nn.test_dynamic_shapes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import UnsupportedError
from headwise.nn import LearnedBlocks, LearnedConvolution, LearnedProjection, MultiHead
from headwise.operators import (
    concatenation,
    dot_product,
    efficient,
    embedded_gaussian,
    factored,
    factored_blocks,
    fixed,
    fixed_steps,
    gaussian,
    hashed,
    near_far,
    nystrom,
    offset,
    projected,
    projected_blocks,
    similarity,
    softmax,
    strided,
    strided_steps,
    toeplitz_softmax,
    uniform,
    window,
    window_low_rank,
    window_low_rank_blocks,
)

WIDTH = 8
EXPORTED, AS_MASK = "yes", "yes, with its pattern as a mask: m × n scores"
BLOCKS = "no: its blocks are cut for one length"


def by_size(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, **masks: build(q.shape[-2], k.shape[-2], **masks)


def by_offset(q: Tensor, k: Tensor, **masks: Any) -> Any:
    m, n = q.shape[-2], k.shape[-2]
    return toeplitz_softmax(torch.arange(1 - n, m).to(q.dtype) / 10, m, n, **masks)


def sigmoid(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).sigmoid()


def near_and_slots(q: Tensor, k: Tensor, e: Any, f: Any = None, **masks: Any) -> Any:
    return window_low_rank(q, k, 5, e, f, **masks)


def near_and_earlier_slots(q: Tensor, k: Tensor, e: Any, f: Any = None, **masks: Any) -> Any:
    return window_low_rank_blocks(q, k, 5, e, f, **masks)


def features(q: Tensor, k: Tensor, **masks: Any) -> Any:
    a, b, c = (torch.ones(2, WIDTH), torch.ones(2, WIDTH), torch.zeros(2))
    return near_far(q, k, a.to(q), b.to(q), c.to(q), block=8, **masks)


def by_hash(q: Tensor, k: Tensor, **masks: Any) -> Any:
    rotations = torch.ones(4, WIDTH, 2).cumsum(0).cos().to(q)
    return hashed(q, k, rotations, chunk=8, **masks)


# name: (builder, export without causality, export with; None where there is no causal form)
BUILDERS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "softmax": (lambda: softmax, EXPORTED, EXPORTED),
    "gaussian": (lambda: gaussian, EXPORTED, EXPORTED),
    "embedded_gaussian": (lambda: embedded_gaussian, EXPORTED, EXPORTED),
    "window": (lambda: partial(window, width=5, leading=1), AS_MASK, AS_MASK),
    "strided": (lambda: partial(strided, stride=3), AS_MASK, AS_MASK),
    "fixed": (lambda: partial(fixed, block=4), AS_MASK, AS_MASK),
    "efficient": (lambda: efficient, EXPORTED, BLOCKS),
    "dot_product": (lambda: dot_product, EXPORTED, AS_MASK),
    "concatenation": (lambda: partial(concatenation, w=torch.ones(2 * WIDTH, dtype=torch.float64)), EXPORTED, BLOCKS),
    "uniform": (lambda: by_size(uniform), EXPORTED, EXPORTED),
    "offset": (lambda: by_size(partial(offset, by=-1)), EXPORTED, None),
    "projected (LearnedProjection)": (lambda: LearnedProjection(projected, 64, 4), EXPORTED, None),
    "projected, interpolated": (lambda: LearnedProjection(projected, 64, 4, fit="interpolate"), EXPORTED, None),
    "factored (LearnedProjection)": (lambda: LearnedProjection(factored, 64, 4), EXPORTED, None),
    "projected (LearnedConvolution)": (lambda: LearnedConvolution(projected, 4), BLOCKS, None),
    "strided_steps": (lambda: partial(strided_steps, stride=3), BLOCKS, BLOCKS),
    "fixed_steps": (lambda: partial(fixed_steps, block=4), BLOCKS, BLOCKS),
    "projected_blocks": (lambda: LearnedBlocks(projected_blocks, 8, 2), "", BLOCKS),
    "factored_blocks": (lambda: LearnedBlocks(factored_blocks, 8, 2), "", BLOCKS),
    "window_low_rank": (lambda: LearnedProjection(near_and_slots, 64, 4), AS_MASK, None),
    "window_low_rank_blocks": (lambda: LearnedBlocks(near_and_earlier_slots, 8, 2), "", BLOCKS),
    "near_far": (lambda: features, BLOCKS, BLOCKS),
    "hashed": (lambda: by_hash, "no: its chunks are cut for one length", "no: its chunks are cut for one length"),
    "nystrom": (lambda: partial(nystrom, landmarks=4), "no: its segments are cut for one length", None),
    "similarity": (
        lambda: partial(similarity, f=sigmoid),
        "no: its rows are divided for one length",
        "no: its rows are divided for one length",
    ),
    "toeplitz_softmax": (
        lambda: by_offset,
        "no: its transforms are of one length",
        "no: its transforms are of one length",
    ),
}
CASES = [
    (name, causal)
    for name, (_, plain, with_causality) in BUILDERS.items()
    for causal, result in ((False, plain), (True, with_causality))
    if result
]


class Layer(nn.Module):
    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.causal = MultiHead(4 * WIDTH, 4, build=BUILDERS[name][0]()), causal

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.layer(x, causal=self.causal, key_mask=keep)


def inputs(n: int) -> tuple[Tensor, Tensor]:
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[0, -3:] = False
    return torch.randn(2, n, 4 * WIDTH, dtype=torch.float64), keep


def same_at_other_lengths(program: Callable[..., Tensor], layer: nn.Module) -> None:
    with torch.no_grad():
        for n in (24, 33, 17):
            x = inputs(n)
            torch.testing.assert_close(program(*x), layer(*x), rtol=0, atol=1e-9)


def check_export(name: str, causal: bool) -> None:
    layer, n = Layer(name, causal).double().eval(), torch.export.Dim("n", min=10, max=60)
    _, plain, with_causality = BUILDERS[name]
    result = with_causality if causal else plain
    assert result is not None

    def export() -> Callable[..., Tensor]:
        return torch.export.export(layer, inputs(24), dynamic_shapes={"x": {1: n}, "keep": {1: n}}).module()

    if result.startswith("no"):
        with pytest.raises(UnsupportedError, match=f"{result[4:]}, so it cannot be exported with a symbolic length"):
            export()
    else:
        same_at_other_lengths(export(), layer)


@pytest.mark.parametrize("name, causal", [("softmax", True), ("hashed", True)])
def test_export_with_a_symbolic_length(name: str, causal: bool) -> None:
    check_export(name, causal)


@pytest.mark.slow
@pytest.mark.parametrize("name, causal", CASES)
def test_export_of_every_builder(name: str, causal: bool) -> None:
    check_export(name, causal)


@pytest.mark.slow
@pytest.mark.parametrize("name, causal", CASES)
def test_compile_for_all_lengths(name: str, causal: bool) -> None:
    torch._dynamo.reset()
    layer = Layer(name, causal).double().eval()
    same_at_other_lengths(torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True), layer)


@pytest.mark.slow
@pytest.mark.parametrize("name, causal", [("near_far", False), ("near_far", True), ("window_low_rank_blocks", True)])
def test_gradients_compiled_for_all_lengths(name: str, causal: bool) -> None:
    torch._dynamo.reset()
    layer = Layer(name, causal).double()
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (24, 33, 17):
        x, keep = inputs(n)
        leaves = [x.requires_grad_(), *layer.parameters()]
        fast, slow = (torch.autograd.grad(f(x, keep).square().sum(), leaves) for f in (compiled, layer))
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)


# ---- a replaced encoder ----


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4 * WIDTH, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


OPERATORS: dict[str, Callable[[], Any]] = {
    "window": lambda: partial(window, width=5),
    "efficient": lambda: efficient,
    "projected": lambda: LearnedProjection(projected, 64, 4),
}


def replaced_encoder(name: str) -> tuple[nn.Module, Any]:
    model = encoder()
    headwise.replace(model, OPERATORS[name]())
    n = torch.export.Dim("n", min=10, max=60)
    return model, {"src": {1: n}, "mask": None, "src_key_padding_mask": {1: n}}


def encoder_inputs(n: int) -> tuple[Tensor, None, Tensor]:
    x, keep = inputs(n)
    return x.float(), None, ~keep


@pytest.mark.parametrize(
    "name", ["window", *(pytest.param(x, marks=pytest.mark.slow) for x in ("efficient", "projected"))]
)
def test_a_replaced_encoder_is_exported(name: str) -> None:
    model, shapes = replaced_encoder(name)
    program = torch.export.export(model, encoder_inputs(24), dynamic_shapes=shapes).module()
    with torch.no_grad():
        for n in (17, 40):
            x = encoder_inputs(n)
            torch.testing.assert_close(program(*x), model(*x), rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("name", OPERATORS)
def test_a_replaced_encoder_in_onnxruntime(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, shapes = replaced_encoder(name)
    names = {"input_names": ["src", "src_key_padding_mask"], "output_names": ["out"]}
    file = tmp_path / "encoder.onnx"
    torch.onnx.export(model, encoder_inputs(24), str(file), dynamo=True, dynamic_shapes=shapes, **names)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for n in (24, 17, 40):
        x, _, hidden = encoder_inputs(n)
        (out,) = session.run(None, {"src": x.numpy(), "src_key_padding_mask": hidden.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(out), model(x, None, hidden), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_replaced_encoder_as_an_aotinductor_package(tmp_path: Path) -> None:
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    model, shapes = replaced_encoder("window")
    program = torch.export.export(model, encoder_inputs(24), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "encoder.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for n in (24, 17, 40):
            x = encoder_inputs(n)
            torch.testing.assert_close(compiled(*x), model(*x), rtol=0, atol=1e-5)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "export-a-model.md"
START, END = "<!-- symbolic lengths: python -m tests.nn.test_dynamic_shapes -->", "<!-- end of symbolic lengths -->"


def table() -> str:
    rows = [("operator", "export with a symbolic length", "the same, causal"), ("---",) * 3]
    rows += [(f"`{name}`" if name.isidentifier() else name, x or "–", y or "–") for name, (_, x, y) in BUILDERS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_documentation_has_every_builder() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip() == table()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(START)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
