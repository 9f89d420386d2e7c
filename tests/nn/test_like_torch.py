"""What PyTorch tests of nn.MultiheadAttention, tested of the two stand-ins: DropIn, and the module after `replace`.

Each behaviour is one function and one row of the table in docs/how-to/use-an-operator.md, which
`python -m tests.nn.test_like_torch` prints into it.  The module itself is the oracle; where it gives NaN (a query
without keys), rows are zero.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError, ShapeError, UnsupportedError
from headwise.nn import DropIn, stock_state_dict

B, M, N, E, H = 3, 4, 6, 12, 4


def replaced(module: nn.MultiheadAttention) -> nn.Module:
    module = copy.deepcopy(module)
    headwise.replace(module, "softmax")
    return module


MAKERS: dict[str, Callable[[nn.MultiheadAttention], nn.Module]] = {"DropIn": DropIn.from_torch, "replace": replaced}
Make = Callable[[nn.MultiheadAttention], nn.Module]


def stock(**options: Any) -> nn.MultiheadAttention:
    options = {"dtype": torch.float64, "batch_first": True, **options}
    module = nn.MultiheadAttention(E, H, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def operands(m: int = M, n: int = N, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = {"dtype": torch.float64, **options}
    return torch.randn(B, m, E, **options), torch.randn(B, n, E, **options), torch.randn(B, n, E, **options)


def agree(make: Make, module: nn.MultiheadAttention, *args: Tensor, **call: Any) -> None:
    """Outputs, weights averaged and by head, no weights, and gradients."""
    ours = make(module)
    assert not ours.training
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        leaves = [[x.clone().requires_grad_() for x in args] for _ in range(2)]
        (out, weights), (expected, theirs) = (
            each(*x, **call, **options) for each, x in zip((ours, module), leaves, strict=True)
        )
        torch.testing.assert_close(out, expected)
        assert (weights is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(weights, theirs)
        pull = torch.randn_like(out)
        for x, y in zip(
            *(torch.autograd.grad(y, x, pull) for y, x in ((out, leaves[0]), (expected, leaves[1]))), strict=True
        ):
            torch.testing.assert_close(x, y)


def refuse(make: Make, module: nn.MultiheadAttention, *args: Tensor, error: type = ShapeError, **call: Any) -> None:
    """torch raises, and so do we, with an error of ours."""
    with pytest.raises((RuntimeError, AssertionError)):
        module(*args, **call)
    with pytest.raises(error):
        make(module)(*args, **call)


ROWS: dict[str, tuple[Callable[[Make], None], str]] = {}


def row(behaviour: str, result: str = "as torch") -> Callable[[Callable[[Make], None]], Callable[[Make], None]]:
    def add(test: Callable[[Make], None]) -> Callable[[Make], None]:
        ROWS[behaviour] = test, result
        return test

    return add


@row("self-attention and cross-attention, batch first or not, values and gradients")
def _axes(make: Make) -> None:
    for batch_first in (True, False):
        x, keys, values = operands()
        module = stock(batch_first=batch_first)
        if not batch_first:
            x, keys, values = (y.transpose(0, 1) for y in (x, keys, values))
        agree(make, module, x, keys, values)
        agree(make, module, x, x, x)


@row("one sequence without a batch axis")
def _unbatched(make: Make) -> None:
    x, keys, values = (y[0] for y in operands())
    hidden = torch.rand(H, M, N) < 0.3
    hidden[..., 0] = False
    agree(make, stock(), x, keys, values)
    agree(make, stock(), x, keys, values, key_padding_mask=torch.arange(N) > 3)
    agree(make, stock(), x, keys, values, attn_mask=hidden)
    agree(make, stock(batch_first=False), x, keys, values, attn_mask=hidden[0])


@row("`bias=False`, `kdim`, `vdim`: no packed weight, no biases")
def _projections(make: Make) -> None:
    x, keys, values = operands()
    agree(make, stock(bias=False), x, keys, values)
    agree(make, stock(kdim=5, vdim=7), x, keys[..., :5], values[..., :7])
    agree(make, stock(kdim=5, vdim=5, bias=False), x, keys[..., :5], values[..., :5])


@row("`key_padding_mask`, boolean or additive")
def _padding(make: Make) -> None:
    hidden = torch.arange(N) >= torch.tensor([[6], [3], [4]])
    for mask in (hidden, torch.zeros(B, N).double().masked_fill(hidden, -math.inf), torch.randn(B, N).double()):
        agree(make, stock(), *operands(), key_padding_mask=mask)


@row("`attn_mask` (m, n) or (b h, m, n), boolean or additive; a mask for each head is not that of another")
def _pairs(make: Make) -> None:
    hidden = torch.rand(B * H, M, N) < 0.3
    hidden[..., 0] = False
    added = torch.randn(B * H, M, N).double()
    for mask in (hidden, hidden[0], added, added[0], added.masked_fill(hidden, -math.inf)):
        agree(make, stock(), *operands(), attn_mask=mask)
    x, keys, values = operands()
    ours = make(stock())
    whole, _ = ours(x, keys, values, attn_mask=hidden)
    for i in range(B):  # sequence by sequence with its own masks
        one, _ = ours(x[i : i + 1], keys[i : i + 1], values[i : i + 1], attn_mask=hidden[i * H : (i + 1) * H])
        torch.testing.assert_close(one[0], whole[i])


@row("both masks at once, boolean, additive, or one of each (for which torch warns)")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def _both(make: Make) -> None:
    hidden, keys = torch.rand(M, N) < 0.3, torch.rand(B, N) < 0.3
    hidden[:, 0] = keys[:, 0] = False
    agree(make, stock(), *operands(), attn_mask=hidden, key_padding_mask=keys)
    added = torch.zeros(B, N).double().masked_fill(keys, -math.inf)
    agree(make, stock(), *operands(), attn_mask=torch.randn(M, N).double(), key_padding_mask=added)


@row("`is_causal` as a hint about `attn_mask`; without the mask, an error")
def _causal(make: Make) -> None:
    x, _, _ = operands()
    future = nn.Transformer.generate_square_subsequent_mask(M, dtype=torch.float64)
    agree(make, stock(), x, x, x, attn_mask=future, is_causal=True)
    agree(make, stock(), x, x, x, attn_mask=future.isinf(), is_causal=True)
    refuse(make, stock(), x, x, x, is_causal=True, error=HeadwiseError)


@row("`add_bias_kv`, `add_zero_attn`", "`UnsupportedError`: a key without a token; append a row to the context")
def _added_keys(make: Make) -> None:
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(UnsupportedError, match="append a key without a token"):
            make(stock(**{option: True}))


@row("`dropout` in training: the same entries of P for the same seed; none in `eval`")
def _dropout(make: Make) -> None:
    x, keys, values = operands()
    module = stock(dropout=0.4)
    agree(make, module, x, keys, values)
    ours = make(module.train())
    outputs = []
    for each in (ours, module):
        torch.manual_seed(3)
        outputs.append(each(x, keys, values, average_attn_weights=False))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert (outputs[0][1] == 0).any()
    rows = outputs[0][1].sum(-1)
    assert (rows - 1).abs().max() > 0.1
    again, _ = ours.eval()(x, keys, values)
    torch.testing.assert_close(again, module.eval()(x, keys, values)[0])


@row("every wrong shape that torch refuses: axes, widths, lengths and batches of operands and masks")
def _shapes(make: Make) -> None:
    module, (x, keys, values) = stock(), operands(4, 4)
    square = torch.zeros(4, 4, dtype=torch.bool)
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = [
        ((x, keys[0], values), {}),
        ((x, keys, values[0]), {}),
        ((x[0], keys, values[0]), {}),
        ((x[0], keys[0], values), {}),
        ((x[None], keys, values), {}),
        ((x[..., 0], keys, values), {}),
        ((x[..., :6], keys, values), {}),
        ((x, keys[..., :6], values), {}),
        ((x, keys, values[..., :6]), {}),
        ((x, keys, values[:, :3]), {}),
        ((x, keys[:2], values), {}),
        ((x[:2], keys, values), {}),
        ((x, keys, values), {"key_padding_mask": square[0]}),
        ((x, keys, values), {"key_padding_mask": square}),  # (n, n), but there are three sequences
        ((x, keys, values), {"key_padding_mask": square[:3, :3]}),
        ((x[0], keys[0], values[0]), {"key_padding_mask": square}),
        ((x, keys, values), {"attn_mask": square[0]}),
        ((x, keys, values), {"attn_mask": square[:3]}),
        ((x, keys, values), {"attn_mask": square[:, :3]}),
        ((x, keys, values), {"attn_mask": square[:1]}),  # no broadcasting, as in torch
        ((x, keys, values), {"attn_mask": square.expand(B, 4, 4)}),
        ((x, keys, values), {"attn_mask": square.expand(1, 1, 4, 4)}),
        ((x[0], keys[0], values[0]), {"attn_mask": square.expand(H + 1, 4, 4)}),
    ]
    for batch_first in (True, False):
        module = stock(batch_first=batch_first)
        for args, masks in wrong:
            args = args if batch_first else tuple(y.transpose(0, 1) if y.dim() == 3 else y for y in args)
            refuse(make, module, *args, **masks)
    refuse(make, module, x, keys, values, attn_mask=square.long(), error=HeadwiseError)


@row("half precision, single and double")
def _dtypes(make: Make) -> None:
    for dtype, close in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float32, 1e-4)):
        module = stock(dtype=dtype)
        x, keys, values = operands(dtype=dtype)
        out, weights = make(module)(x, keys, values)
        expected, theirs = module(x, keys, values)
        assert out.dtype == weights.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=close, atol=close)
        torch.testing.assert_close(weights, theirs, rtol=close, atol=close)


@row("a query without any key", "a row of zeros, where torch gives NaN or zeros by its code path")
def _empty_rows(make: Make) -> None:
    x, keys, values = operands()
    x.requires_grad_()
    hidden = torch.zeros(M, N, dtype=torch.bool)
    hidden[1] = True
    for mask in (hidden, torch.zeros(M, N).double().masked_fill(hidden, -math.inf)):
        ours = make(stock())
        out, weights = ours(x, keys, values, attn_mask=mask)
        torch.testing.assert_close(out[:, 1], ours.out_proj.bias.expand(B, E))
        assert (weights[:, 1] == 0).all()
        assert torch.autograd.grad(out.sum() + weights.square().sum(), x)[0].isfinite().all()


@row("nested tensors", "`UnsupportedError`: pass a padded tensor with `key_padding_mask`")
def _nested(make: Make) -> None:
    ragged = torch.nested.nested_tensor([torch.randn(4, E), torch.randn(6, E)], dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="pass a padded one with key_padding_mask"):
        make(stock())(ragged, ragged, ragged)


@row("the fused paths of `nn.TransformerEncoder` and its layers, in `eval` without gradients", "are not taken")
def _fused(make: Make) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, hidden = torch.randn(B, N, E).double(), torch.arange(N) >= torch.tensor([[6], [3], [4]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=hidden)
        for part in encoder.layers:
            part.self_attn = make(part.self_attn)
        called: list[Any] = []
        for part in encoder.layers:
            inner = part.self_attn
            inner.forward = lambda *args, f=inner.forward, **kwargs: (called.append(args), f(*args, **kwargs))[1]
        if make is replaced:  # by hand, outside of `replace`, the encoder itself cannot know
            encoder.use_nested_tensor = False
        out = encoder(x, src_key_padding_mask=hidden)
    assert len(called) == 2
    torch.testing.assert_close(out[~hidden], expected[~hidden])


@row("state dicts of the module load into the stand-in, and back")
def _state_dicts(make: Make) -> None:
    for options in ({}, {"bias": False}, {"kdim": 5, "vdim": 7}):
        source, target = stock(**options), stock(**options)
        ours = make(target)
        ours.load_state_dict(source.state_dict())
        x, keys, values = operands()
        args = x, keys[..., : source.kdim], values[..., : source.vdim]
        torch.testing.assert_close(ours(*args)[0], source(*args)[0])
        third = stock(**options)
        third.load_state_dict(stock_state_dict(ours))
        torch.testing.assert_close(third(*args)[0], source(*args)[0])
        ours.load_state_dict(ours.state_dict())


@row("autocast")
def _autocast(make: Make) -> None:
    module = stock(dtype=torch.float32)
    x, keys, values = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = make(module)(x, keys, values)[0], module(x, keys, values)[0]
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)


@row("`static_k`, `static_v`", "arguments of the functional form only, which is not replaced")
def _static(make: Make) -> None:
    x, keys, values = operands()
    for name in ("static_k", "static_v"):
        with pytest.raises(TypeError, match=name):
            make(stock())(x, keys, values, **{name: keys})
        with pytest.raises(TypeError, match=name):
            stock()(x, keys, values, **{name: keys})
    assert "static_k" in F.multi_head_attention_forward.__code__.co_varnames


@pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:The PyTorch API of nested", "ignore:enable_nested")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("behaviour", ROWS)
def test_like_torch(behaviour: str, maker: str) -> None:
    torch.manual_seed(0)
    ROWS[behaviour][0](MAKERS[maker])


def test_batch_first_is_that_of_the_source() -> None:
    for batch_first in (True, False):
        module = stock(batch_first=batch_first)
        assert DropIn.from_torch(module).batch_first == batch_first
        assert DropIn(headwise.MultiHead.from_torch(module)).batch_first == batch_first
    assert DropIn(headwise.MultiHead(E, H)).batch_first
    assert DropIn(headwise.MultiHead.from_torch(stock(batch_first=False)), batch_first=True).batch_first


def test_a_mix_of_mask_types_is_accepted() -> None:
    hidden, added = torch.rand(B, N) < 0.3, torch.randn(M, N).double()
    hidden[:, 0] = False
    module = stock()
    x, keys, values = operands()
    with pytest.warns(UserWarning, match="mismatched"):
        expected, _ = module(x, keys, values, key_padding_mask=hidden, attn_mask=added)
    torch.testing.assert_close(
        DropIn.from_torch(module)(x, keys, values, key_padding_mask=hidden, attn_mask=added)[0], expected
    )


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-an-operator.md"
START, END = "<!-- like torch: python -m tests.nn.test_like_torch -->", "<!-- end of like torch -->"


def table() -> str:
    rows = [("what", "here"), ("---", "---"), *((behaviour, result) for behaviour, (_, result) in ROWS.items())]
    return "\n".join(f"| {left} | {right} |" for left, right in rows)


def test_the_documentation_has_every_behaviour() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip() == table()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(START)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
