"""Dordevic's solution (S4) on attention and convolution: parameters, cost of positional encodings, the equality."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.ledger.entry import Finding, Outcome, Source, at_most, draw, equal, matrix, rounding, shown
from headwise.nn.multihead import MultiHead
from headwise.operators.relative.shift import Border, shift
from headwise.theory.complexity import exponent
from headwise.theory.convolution import encoding_costs, sharp_heads_are_shifts

SOURCE = Source(
    "S4",
    "Dordevic",
    "Solved exercise (2023) on Cordonnier, Loukas & Jaggi 2020, Self-Attention and Convolutional Layers",
    "attention and convolution",
)


@SOURCE.claim(
    "S4.count",
    "a.1",
    "Parameters of a multi-head layer",
    r"N_hD_i(2D_{hid}+D_o)+N_hD_oD_{out}+D_{out}",
    Outcome.HOLDS,
    "Without query, key and value biases.",
)
def parameter_count() -> Finding:
    heads, d_in, hidden, d_o, d_out = 3, 10, 4, 5, 7
    layer = MultiHead(d_in, heads, key_width=hidden, value_width=d_o, out_width=d_out, bias=False, out_bias=True)
    formula = heads * d_in * (2 * hidden + d_o) + heads * d_o * d_out + d_out
    return Finding(at_most("difference from the formula", abs(sum(p.numel() for p in layer.parameters()) - formula), 0))


@SOURCE.claim(
    "S4.row",
    "a.2",
    "One output needs one query and all keys",
    r"O_q=\mathrm{softmax}(Z_qW_qW_k^\top Z^\top)ZW_v",
    Outcome.HOLDS,
    "Queries are independent of one another.",
)
def one_row() -> Finding:
    z, wq, wk, wv = draw(9, 6), draw(6, 3, seed=1), draw(6, 3, seed=2), draw(6, 4, seed=3)
    whole = torch.softmax(z @ wq @ wk.mT @ z.mT, -1) @ z @ wv
    row = torch.softmax(z[4] @ wq @ wk.mT @ z.mT, -1) @ z @ wv
    return Finding(equal("row q of attention from row q of the queries", whole[4], row))


@SOURCE.claim(
    "S4.quadratic",
    "b.1, d.2",
    "The quadratic encoding is a Gaussian about its centre, c = -||Delta||^2",
    r"v^\top r_\delta=-\alpha(\|\delta-\Delta\|^2-\|\Delta\|^2)",
    Outcome.HOLDS,
    "A head that depends on position only: its centre and its width.",
)
def quadratic_score() -> Finding:
    """v'r_delta = -alpha (||delta - Delta||^2 - ||Delta||^2)."""
    alpha, centre = 1.7, torch.tensor([2.0, -1.0], dtype=torch.float64)
    delta = draw(50, 2) * 3
    v = -alpha * torch.cat([torch.ones(1, dtype=torch.float64), -2 * centre])
    r = torch.cat([delta.square().sum(-1, keepdim=True), delta], -1)
    gaussian = -alpha * ((delta - centre).square().sum(-1) - centre.square().sum())
    return Finding(equal("quadratic encoding as a Gaussian about its centre", r @ v, gaussian, 1e-11))


@SOURCE.claim(
    "S4.misprint",
    "b.1",
    "v = -alpha (1, -2 Delta_1, -2 Delta_1)",
    r"v=-\alpha(1,-2\Delta_1,-2\Delta_1)^\top",
    Outcome.CORRECTED,
    "A misprint, right in the next line and in d.2: with Delta_1 twice the head is centred on the diagonal.",
    premise="none",
    truth="v = -alpha (1, -2 Delta_1, -2 Delta_2)",
)
def second_coordinate() -> Finding:
    alpha, centre, delta = 1.7, (2.0, -1.0), draw(50, 2) * 3
    r = torch.cat([delta.square().sum(-1, keepdim=True), delta], -1)
    expected = -alpha * (delta.square().sum(-1) - 2 * delta[:, 0] * centre[0] - 2 * delta[:, 1] * centre[1])

    def score(first: float, second: float) -> Tensor:
        return r @ torch.tensor([-alpha, 2 * alpha * first, 2 * alpha * second], dtype=torch.float64)

    return Finding(
        equal("v' r_delta with Delta_1 twice against the result of b.1", score(centre[0], centre[0]), expected, 1e-11),
        corrected=equal("with Delta_2 in its place", score(*centre), expected, 1e-11),
        example="Delta = (2, -1): as printed the centre is (2, 2)",
    )


@SOURCE.claim(
    "S4.absolute-cost",
    "b.2",
    "Absolute encodings cost O(D_x^3) for each score",
    r"O(N^2D_x^3)",
    Outcome.CORRECTED,
    "Tokens are projected once, not once a pair: D_x^2 for each token.",
    premise="tokens are projected once, not once a pair",
    truth="O(N^2 D_x + N D_x^2)",
)
def cost_of_absolute_encoding() -> Finding:
    """The text's own count for one score, and that of a layer that projects tokens once, as functions of D_x."""
    widths = (64, 128, 256, 512)
    own = [4 * (2 * d * (2 * d - 1) + d - 1) for d in widths]
    printed = exponent(widths, own).value
    shared = exponent(widths, [encoding_costs((8, 8), d)["absolute"].multiply_adds for d in widths]).value
    return Finding(
        at_most("distance of the exponent in D_x of the text's count from 3", abs(printed - 3), 0.2),
        corrected=at_most("exponent in D_x of a layer that projects once", shared, 2.05),
        example=f"one score takes 4 (2 D (2D - 1) + D - 1) operations: {own[0]:,} at D = 64 and {own[-1]:,} at D = "
        f"512, {own[-1] / own[0]:.0f} times as many for 8 times the width: D^{printed:.2f}, not D^3. Tokens are "
        f"projected once, not once a pair, so the layer on an 8 x 8 grid grows like D^{shared:.2f}",
    )


@SOURCE.claim(
    "S4.relative-same",
    "b.2",
    "The scores of a general relative encoding cost the same as those of an absolute one",
    r"A^{relative}\sim A^{absolute}",
    Outcome.CORRECTED,
    "Of the same order in N and D_x, but not the same: every difference of positions is projected too.",
    premise="a head of width D_x on a square grid of N cells, with one vector for each difference of positions",
    truth="the same order, O(N^2 D_x + N D_x^2), at 2.2 to 3 times the operations",
)
def relative_costs_more() -> Finding:
    """Counted operations of general relative over absolute encodings, from 8 x 8 to 32 x 32 cells."""
    ratios = {}
    for side, d in ((8, 64), (16, 64), (32, 64), (32, 256)):
        costs = encoding_costs((side, side), d)
        ratios[side, d] = costs["relative"].multiply_adds / costs["absolute"].multiply_adds
    sides = (16, 32, 64, 128)
    counts = [encoding_costs((side, side), 64)["relative"].multiply_adds for side in sides]
    order = exponent([side * side for side in sides], counts).value
    return Finding(
        at_most("largest ratio of relative to absolute, multiply-adds", max(ratios.values()), 1.05),
        corrected=at_most("exponent in N of the relative encoding", order, 2.0),
        example=", ".join(f"{ratio:.2f} times on {side} x {side}, D = {d}" for (side, d), ratio in ratios.items()),
    )


@SOURCE.claim(
    "S4.relative-cost",
    "b.2",
    "The quadratic relative encoding is cheaper than the absolute one",
    r"O(N^2D_x+ND_x^2)",
    Outcome.HOLDS,
    "With its Kronecker structure, which the text does not use, it is cheaper still.",
)
def quadratic_is_cheaper() -> Finding:
    """The dense form of the text, N^2 scores of D_p products each, not the Kronecker form."""
    costs = {name: cost.multiply_adds for name, cost in encoding_costs((8, 8), 64).items()}
    dense = costs["quadratic"] / costs["absolute"]
    return Finding(
        at_most("dense quadratic relative encoding over absolute encoding, multiply-adds", dense, 1.0),
        example=", ".join(f"{name} {cost:,}" for name, cost in costs.items()),
    )


@SOURCE.claim(
    "S4.blocks",
    "c.1",
    "W^(h) = W_v^(h) W_out block",
    r"W^{(h)}=W_v^{(h)}W_{out}[(h-1)D_o+1:hD_o]",
    Outcome.HOLDS,
    "The effect of a head on the output is one matrix.",
)
def output_blocks() -> Finding:
    h, n, d, out = 3, 7, 4, 5
    p, z = torch.softmax(draw(h, n, n), -1), draw(n, 6, seed=1)
    wv, wo = draw(h, 6, d, seed=2), draw(h * d, out, seed=3)
    joined = torch.cat([p[i] @ z @ wv[i] for i in range(h)], -1) @ wo
    apart = sum(p[i] @ z @ (wv[i] @ wo[i * d : (i + 1) * d]) for i in range(h))
    return Finding(equal("concatenation and W_out = sum of heads with W_v W_out", joined, apart, 1e-11))


@SOURCE.claim(
    "S4.limit",
    "d.1",
    "Sharp quadratic attention is one-hot",
    r"\lim_{\alpha\to\infty}\mathrm{softmax}(A_q)_k=1",
    Outcome.HOLDS,
    "A sharp head is a shift.",
)
def one_hot_limit() -> Finding:
    alpha = 30.0
    off = sharp_heads_are_shifts(alpha, (7, 7), (1, -1)).measured
    return Finding(rounding(f"weight off the centre at alpha = {alpha:g}, the worst query", off, 1e-11))


@SOURCE.claim(
    "S4.rate",
    "d.1",
    "The other weights vanish like e^(-alpha ||k - j||^2)",
    r"\sum_{j\ne k}e^{-\alpha\|k-j\|^2}\to0",
    Outcome.HOLDS,
    "At alpha = 18 a head is one-hot in float32, and the gradient of its centre vanishes: a sharp head does not move.",
)
def rate_of_the_limit() -> Finding:
    """The nearest neighbours have weight e^-alpha: the slope of -log(distance) over alpha is one."""
    alphas = (6.0, 10.0, 14.0)
    off = [sharp_heads_are_shifts(alpha, (7, 7), (1, -1)).measured for alpha in alphas]
    slope = math.log(off[0] / off[-1]) / (alphas[-1] - alphas[0])
    return Finding(
        at_most("distance of the slope of -log(distance) over alpha from 1", abs(slope - 1), 0.02),
        example="from one-hot: " + ", ".join(f"{x:.1e} at alpha = {a:g}" for a, x in zip(alphas, off, strict=True)),
    )


@SOURCE.claim(
    "S4.sign",
    "c.2, (8) to (9)",
    "Because the set of shifts is symmetric, q - f(h) may be written q + f(h)",
    r"\sum_hZ_{q-f(h)}W^{(h)}=\sum_hZ_{q+f(h)}W^{(h)}",
    Outcome.CORRECTED,
    "Fix the direction once: delta = k - q. Otherwise the kernel is reversed.",
    premise="the set of shifts is symmetric",
    truth="equal if W of the opposite shift is taken; the theorem stands, with another bijection f",
)
def sign_of_the_shift() -> Finding:
    """Steps (8) to (9): sum_h Z_(q - f(h)) W_h = sum_h Z_(q + f(h)) W_h, a 1-D image and the shifts -1, 0, 1."""
    z, w = matrix([[0.0, 0.0, 1.0, 0.0, 0.0]])[0], matrix([[1.0, 2.0, 3.0]])[0]

    def total(w: Tensor, sign: int) -> Tensor:
        return torch.stack([w @ z[[q + sign * f for f in (-1, 0, 1)]] for q in range(1, 4)])

    minus, plus = total(w, -1), total(w, 1)
    return Finding(
        equal("Z_(q - f(h)) W_h against Z_(q + f(h)) W_h, summed over heads", minus, plus),
        corrected=equal("the same with W_h of the opposite shift", total(w.flip(0), -1), plus),
        example=f"Z = (0, 0, 1, 0, 0), W = (1, 2, 3): with minus {shown(minus)}, with plus {shown(plus)}: the kernel "
        "is reversed",
    )


@SOURCE.claim(
    "S4.theorem",
    "c.2",
    "Multi-head attention expresses any convolution",
    r"\mathrm{MHSA}=\mathrm{conv}",
    Outcome.HOLDS,
    "A whole layer: softmax of quadratic scores, W_V, concatenation, W_out and a bias.",
)
def whole_theorem() -> Finding:
    """concat_h(softmax(A_h) Z W_V,h) W_out + b against torch's convolution, on a padded 6 x 7 image with 2 channels."""
    kernel, bias, image = draw(4, 2, 3, 3), draw(4, seed=1), draw(2, 6, 7, seed=2)
    return Finding(
        rounding("nine heads with softmax, W_V and W_out, and a 3x3 convolution", _layer_error(kernel, bias, image)),
        example="alpha = 50 on 8 x 9 padded keys, W_V of each head a random invertible matrix, W_out its inverse times "
        "the kernel's slice",
    )


def _layer_error(kernel: Tensor, bias: Tensor, image: Tensor, alpha: float = 50.0) -> float:
    """Largest difference between the layer of the theorem and the convolution, relative to the largest output."""
    channels, k = kernel.shape[1], kernel.shape[-1]
    padded = F.pad(image, (k // 2,) * 4)
    keys = torch.cartesian_prod(*(torch.arange(side) for side in padded.shape[1:])).double()
    queries = torch.cartesian_prod(*(torch.arange(side) + k // 2 for side in image.shape[1:])).double()
    z, heads, blocks = padded.flatten(1).mT, [], []
    for h, (i, j) in enumerate(itertools.product(range(k), repeat=2)):
        shift = torch.tensor([i - k // 2, j - k // 2], dtype=torch.float64)
        delta = keys - queries[:, None]
        # v' r_delta with r = (||delta||^2, delta) and v = -alpha (1, -2 shift)
        scores = -alpha * (delta.square().sum(-1) - 2 * delta @ shift)
        wv = draw(channels, channels, seed=10 + h)
        heads.append(torch.softmax(scores, -1) @ z @ wv)
        blocks.append(torch.linalg.solve(wv, kernel[:, :, i, j].mT))
    layer = torch.cat(heads, -1) @ torch.cat(blocks) + bias
    expected = F.conv2d(image[None], kernel, bias, padding=k // 2)[0].flatten(1).mT
    return ((layer - expected).abs().max() / expected.abs().max()).item()


def _by_shifts(
    x: Tensor, weight: Tensor, *, padding: int, dilation: int = 1, stride: int = 1, border: Border = "zeros"
) -> Tensor:
    """sum over taps of (shift by the tap) X W_tap: heads that attend to one pixel each."""
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
    x, weight = draw(2, 7, 8), draw(3, 2, 3, 3, seed=1)
    convolution = {name: value for name, value in options.items() if name != "border"}
    expected = F.conv2d(x[None], weight, **convolution)[0]
    return ((_by_shifts(x, weight, **options) - expected).abs().max() / expected.abs().max()).item()


@SOURCE.claim(
    "S4.padding",
    "e.1",
    "Padding by floor(K/2) zeros makes both equal everywhere",
    r"\lfloor K/2\rfloor",
    Outcome.HOLDS_WITH_PREMISE,
    "Without padded keys the border is replicated.",
    premise="the keys are padded, not only the output cropped; K is odd (S4.padding-odd)",
)
def equality() -> Finding:
    z = matrix([[1.0], [2.0]])
    zeros, nearest = (
        sum((shift((2,), (step,), border=border)(z) for step in (-1, 0, 1)), 0 * z)[:, 0]
        for border in ("zeros", "replicate")
    )
    return Finding(
        rounding("nine saturated heads and a 3x3 convolution, padded keys", _difference(padding=1)),
        without=rounding("the same with keys inside the image only", _difference(padding=1, border="replicate")),
        example=f"Z = (1, 2), kernel (1, 1, 1): padded, three heads give {shown(zeros)}, as the convolution does; "
        f"with keys inside the image only, heads attend to the nearest pixel and give {shown(nearest)}",
    )


@SOURCE.claim(
    "S4.padding-odd",
    "e.1",
    "Padding by floor(K/2) on each side keeps the size of the image",
    r"\lfloor K/2\rfloor",
    Outcome.HOLDS_WITH_PREMISE,
    "An even kernel needs K/2 zeros on one side and K/2 - 1 on the other, as torch's padding='same' does.",
    premise="K is odd",
)
def padding_of_odd_kernels() -> Finding:
    """The size of a convolution of an 8 x 8 image for odd and for even K."""

    def change(k: int) -> int:
        return abs(F.conv2d(draw(1, 1, 8, 8), draw(1, 1, k, k, seed=1), padding=k // 2).shape[-1] - 8)

    uneven = F.conv2d(F.pad(draw(1, 1, 8, 8), (1, 2, 1, 2)), draw(1, 1, 4, 4, seed=1)).shape
    return Finding(
        at_most("rows gained or lost, K = 1, 3, 5, 7", max(change(k) for k in (1, 3, 5, 7)), 0),
        without=at_most("the same with K = 2, 4", max(change(k) for k in (2, 4)), 0),
        example=f"K = 4 on 8 x 8: two zeros on each side give 9 x 9; one before and two after give "
        f"{uneven[-2]} x {uneven[-1]}",
    )


@SOURCE.claim(
    "S4.valid",
    "c.2",
    "Without padding they agree where no neighbour is missing",
    r"\mathrm{conv}_{valid}",
    Outcome.HOLDS,
    "Padding affects the border only.",
)
def no_padding() -> Finding:
    return Finding(rounding("without padding, on the pixels whose neighbours are all inside", _difference(padding=0)))


@SOURCE.claim(
    "S4.dilation",
    "e.2",
    "Multi-head attention also expresses dilated convolutions",
    r"\Delta\to d\Delta",
    Outcome.HOLDS,
    "A head may attend to any offset.",
)
def dilated() -> Finding:
    return Finding(rounding("heads at distance 2 and a convolution of dilation 2", _difference(padding=2, dilation=2)))


@SOURCE.claim(
    "S4.stride",
    "e.3",
    "Multi-head attention also expresses strided convolutions",
    r"q\to sq",
    Outcome.HOLDS,
    "Place the queries on the coarse grid; no pooling is needed.",
)
def strided() -> Finding:
    return Finding(
        rounding("queries on every second pixel and a convolution of stride 2", _difference(padding=1, stride=2))
    )
