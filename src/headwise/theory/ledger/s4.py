"""S4, on attention and convolution: parameters, encodings and their cost, and the equality."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.nn.multihead import MultiHead
from headwise.nn.taps import Taps
from headwise.operators.shift import Border, shift
from headwise.theory.convolution import convolution_is_attention, encoding_costs, sharp_heads_are_shifts
from headwise.theory.ledger.entry import Entry, Finding, Outcome, rounding
from headwise.theory.verdict import Verdict


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parameter_count() -> Finding:
    heads, d_in, hidden, d_o, d_out = 3, 10, 4, 5, 7
    layer = MultiHead(d_in, heads, key_width=hidden, value_width=d_o, out_width=d_out, bias=False, out_bias=True)
    formula = heads * d_in * (2 * hidden + d_o) + heads * d_o * d_out + d_out
    return Finding(
        Verdict("difference from the formula", "", abs(sum(p.numel() for p in layer.parameters()) - formula), 0, {})
    )


def one_row() -> Finding:
    z, wq, wk, wv = _draw(9, 6), _draw(6, 3, seed=1), _draw(6, 3, seed=2), _draw(6, 4, seed=3)
    whole = torch.softmax(z @ wq @ wk.mT @ z.mT, -1) @ z @ wv
    row = torch.softmax(z[4] @ wq @ wk.mT @ z.mT, -1) @ z @ wv
    return Finding(rounding("row q of attention from row q of the queries", (whole[4] - row).abs().max().item()))


def quadratic_score() -> Finding:
    """v'r_delta = -alpha (||delta - Delta||^2 - ||Delta||^2)."""
    alpha, centre = 1.7, torch.tensor([2.0, -1.0], dtype=torch.float64)
    delta = _draw(50, 2) * 3
    v = -alpha * torch.cat([torch.ones(1, dtype=torch.float64), -2 * centre])
    r = torch.cat([delta.square().sum(-1, keepdim=True), delta], -1)
    error = r @ v + alpha * ((delta - centre).square().sum(-1) - centre.square().sum())
    return Finding(rounding("quadratic encoding as a Gaussian about its centre", error.abs().max().item(), 1e-11))


def cost_of_absolute_encoding() -> Finding:
    """Multiply-adds against width: the printed D^3 against D^2 once projections are shared."""
    side = (8, 8)
    costs = {d: encoding_costs(side, d)["absolute"].multiply_adds for d in (64, 512)}
    exponent = torch.tensor(costs[512] / costs[64]).log2().item() / 3
    return Finding(
        Verdict("distance of the fitted exponent in D_x from 3", "", abs(exponent - 3), 0.2, {}),
        corrected=Verdict("fitted exponent in D_x", "", exponent, 2.05, {}),
        example=f"width 64 to 512: the work grows like D^{exponent:.2f}",
    )


def quadratic_is_cheaper() -> Finding:
    found = encoding_costs((8, 8), 64)
    names = ", ".join(f"{name} {cost.multiply_adds:,}" for name, cost in found.items())
    dearest = found["absolute"].multiply_adds
    cheapest = min(cost.multiply_adds for name, cost in found.items() if name != "absolute")
    return Finding(
        Verdict("quadratic relative encoding over absolute encoding, multiply-adds", "", cheapest / dearest, 1.0, {}),
        example=names,
    )


def output_blocks() -> Finding:
    h, n, d, out = 3, 7, 4, 5
    p, z, wv, wo = (
        torch.softmax(_draw(h, n, n), -1),
        _draw(n, 6, seed=1),
        _draw(h, 6, d, seed=2),
        _draw(h * d, out, seed=3),
    )
    joined = torch.cat([p[i] @ z @ wv[i] for i in range(h)], -1) @ wo
    apart = sum(p[i] @ z @ (wv[i] @ wo[i * d : (i + 1) * d]) for i in range(h))
    return Finding(
        rounding("concatenation and W_out = sum of heads with W_v W_out", (joined - apart).abs().max().item(), 1e-11)
    )


def one_hot_limit() -> Finding:
    sharp = sharp_heads_are_shifts(12.0, (7, 7), (1, -1))
    soft = sharp_heads_are_shifts(4.0, (7, 7), (1, -1))
    rate = soft.measured / max(sharp.measured, 1e-300)
    return Finding(
        sharp,
        example=f"{soft.measured:.1e} from one-hot at alpha = 4, {sharp.measured:.1e} at 12: a factor {rate:.0f}",
    )


def _by_shifts(
    x: Tensor, weight: Tensor, *, padding: int, dilation: int = 1, stride: int = 1, border: Border = "zeros"
) -> Tensor:
    """sum over taps of (shift by the tap) X W_tap: heads that look at one pixel each."""
    _, height, width = x.shape
    k = weight.shape[-1]
    sizes = tuple((side + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for side in (height, width))
    total = torch.zeros(weight.shape[0], sizes[0] * sizes[1], dtype=x.dtype)
    for i in range(k):
        for j in range(k):
            offset = (i * dilation - padding, j * dilation - padding)
            p = shift((height, width), offset, border=border, stride=(stride, stride), queries=sizes)
            total += weight[:, :, i, j] @ p(x.flatten(1).mT).mT
    return total.unflatten(-1, sizes)


def _difference(**options) -> float:
    x, weight = _draw(2, 7, 8), _draw(3, 2, 3, 3, seed=1)
    convolution = {name: value for name, value in options.items() if name != "border"}
    expected = F.conv2d(x[None], weight, **convolution)[0]
    return ((_by_shifts(x, weight, **options) - expected).abs().max() / expected.abs().max()).item()


def equality() -> Finding:
    return Finding(
        rounding("nine saturated heads and a 3x3 convolution, padded keys", _difference(padding=1)),
        without=rounding("the same with keys inside the image only", _difference(padding=1, border="replicate")),
        example="a head that cannot look outside looks at the nearest pixel, not at a zero: the border differs",
    )


def no_padding() -> Finding:
    return Finding(rounding("without padding, on the pixels whose neighbours are all inside", _difference(padding=0)))


def dilated() -> Finding:
    return Finding(rounding("heads at distance 2 and a convolution of dilation 2", _difference(padding=2, dilation=2)))


def strided() -> Finding:
    return Finding(
        rounding("queries on every second pixel and a convolution of stride 2", _difference(padding=1, stride=2))
    )


def whole_theorem() -> Finding:
    taps = Taps(
        channels=2, kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=((1, 1), (1, 1)), border="zeros", groups=1
    )
    return Finding(convolution_is_attention(taps, _draw(4, 2, 3, 3), _draw(4, seed=1), _draw(1, 2, 6, 7, seed=2)))


ENTRIES = (
    Entry(
        "S4.count",
        "a.1",
        "Parameters of a multi-head layer",
        r"N_hD_i(2D_{hid}+D_o)+N_hD_oD_{out}+D_{out}",
        Outcome.HOLDS,
        "Without query, key and value biases.",
        parameter_count,
    ),
    Entry(
        "S4.row",
        "a.2",
        "One output needs one query and all keys",
        r"O_q=\mathrm{softmax}(Z_qW_qW_k^\top Z^\top)ZW_v",
        Outcome.HOLDS,
        "Queries are independent of one another.",
        one_row,
    ),
    Entry(
        "S4.quadratic",
        "b.1, d.2",
        "The quadratic encoding is a Gaussian about its centre, c = -||Delta||^2",
        r"v^\top r_\delta=-\alpha(\|\delta-\Delta\|^2-\|\Delta\|^2)",
        Outcome.HOLDS,
        "A head of position only: where it looks and how widely.",
        quadratic_score,
    ),
    Entry(
        "S4.absolute-cost",
        "b.2",
        "Absolute encodings cost O(D_x^3) for each score",
        r"O(N^2D_x^3)",
        Outcome.CORRECTED,
        "Projections are shared between pairs: D_x^2 once per token.",
        cost_of_absolute_encoding,
        truth="O(N^2 D_x + N D_x^2)",
    ),
    Entry(
        "S4.relative-cost",
        "b.2",
        "The quadratic relative encoding is cheaper than the absolute one",
        r"O(N^2D_x+ND_x^2)",
        Outcome.HOLDS,
        "And with its Kronecker structure cheaper still.",
        quadratic_is_cheaper,
    ),
    Entry(
        "S4.blocks",
        "c.1",
        "W^(h) = W_v^(h) W_out block",
        r"W^{(h)}=W_v^{(h)}W_{out}[(h-1)D_o+1:hD_o]",
        Outcome.HOLDS,
        "A head's effect on the output is one matrix.",
        output_blocks,
    ),
    Entry(
        "S4.limit",
        "d.1",
        "Sharp quadratic attention is one-hot",
        r"\lim_{\alpha\to\infty}\mathrm{softmax}(A_q)_k=1",
        Outcome.HOLDS,
        "The distance falls like e^-alpha, and the gradient of the centre with it.",
        one_hot_limit,
    ),
    Entry(
        "S4.theorem",
        "c.2",
        "Multi-head attention expresses any convolution",
        r"\mathrm{MHSA}=\mathrm{conv}",
        Outcome.HOLDS,
        "As a module, with bias.",
        whole_theorem,
    ),
    Entry(
        "S4.padding",
        "e.1",
        "Padding by floor(K/2) zeros makes both equal everywhere",
        r"\lfloor K/2\rfloor",
        Outcome.HOLDS_WITH_PREMISE,
        "Without padded keys the border is replicated.",
        equality,
        premise="the keys are padded, not only the output cropped",
    ),
    Entry(
        "S4.valid",
        "c.2",
        "Without padding they agree where no neighbour is missing",
        r"\mathrm{conv}_{valid}",
        Outcome.HOLDS,
        "Borders are all that padding is about.",
        no_padding,
    ),
    Entry(
        "S4.dilation",
        "e.2",
        "Dilated convolutions too",
        r"\Delta\to d\Delta",
        Outcome.HOLDS,
        "Heads may look anywhere.",
        dilated,
    ),
    Entry(
        "S4.stride",
        "e.3",
        "Strided convolutions too",
        r"q\to sq",
        Outcome.HOLDS,
        "Put the queries on the coarse grid; no pooling is needed.",
        strided,
    ),
)
