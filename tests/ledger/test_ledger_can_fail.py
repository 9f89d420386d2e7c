"""No verdict is asserted: with the interesting line of its check broken, every entry comes out differently.

Each row names an entry, a piece of the source of its check, and what to put in its place.  The module is run again with
that piece replaced, and the entry's outcome must not be the recorded one.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from headwise.ledger import LEDGER, select

S0, QUESTIONS, TABLES = "rank_collapse", "rank_collapse_questions", "complexity_tables"
BROKEN = {
    "S0.shift": (S0, "torch.softmax(a + c, -1)", "torch.softmax(a * c, -1)"),
    "S0.paths": (S0, "total + groups.bias - groups.output", "total - groups.output"),
    "S0.paths-skip": (S0, "bias=0.5, skip=True", "bias=0.5, skip=False"),
    "S0.bound": (S0, "constant: float = 4.0", "constant: float = 0.4"),
    "S0.bound-heads": (S0, "(constant * heads * beta", "(0.1 * beta"),
    "S0.residual": (S0, "norm(residual(x)).item(), x.mean(0)", "norm(x).item(), x.mean(0)"),
    "S0.low-rank": (S0, "w = w - w.mean()", "w = 1 + 0.01 * w"),
    "S0.rank": (S0, "(2**8, 2**16)", "(2**8, 2**32)"),
    "S0.question-1": (QUESTIONS, "rest = matrix([[1.0], [-1.0]])", "rest = matrix([[-1.0], [-1.0]])"),  # R of one sign
    "S0.question-2": (QUESTIONS, "sides = composite_norm(a + b)", "sides = 0.9 * composite_norm(a + b)"),
    "S0.question-3": (QUESTIONS, "log_bound(4, **known)", "log_bound(3, **known)"),
    "S0.question-4": (QUESTIONS, "matrix([[1.0], [-1.0]]), 100", "matrix([[1.0], [-1.0]]), 1"),
    "S1.count": ("growing_networks", "value_width=36 // heads", "value_width=36"),
    "S1.bias": ("growing_networks", "torch.cat([w, b[None]])", "torch.cat([w, 0 * b[None]])"),
    "S1.first-order": ("growing_networks", "- size * (gradient * move)", "- 0 * (gradient * move)"),
    "S1.sign": ("growing_networks", "_attention_loss(s + gradient", "_attention_loss(s - gradient"),
    "S1.convex": ("growing_networks", "(f(z) + f(y)) / 2", "min(f(z), f(y))"),
    "S1.gradient": ("growing_networks", "formula = -2 *", "formula = 2 *"),
    "S1.closed-form": ("growing_networks", "inverse @ x.mT @ b @ x @ inverse", "inverse @ x.mT @ b @ x"),
    "S1.pseudo-inverse": (
        "growing_networks",
        "matrix([[1.0, 1.0]]), matrix([[3.0]])",
        "matrix([[1.0, 1.0], [1.0, 0.0]]), draw(2, 2)",
    ),
    "S1.truncation": ("growing_networks", "x, b, rank = matrix([[10.0,", "x, b, rank = matrix([[1.0,"),
    "S2.scaling": ("linear_attention", "(k / math.sqrt(n)).mT", "(k / n).mT"),
    "S2.jl": ("linear_attention", "x @ sketch(k, 300", "0 * x @ sketch(k, 300"),
    "S2.lemma-1": ("linear_attention", "(sketch(k, n, g) @ x).norm() > (1", "(2 * sketch(k, n, g) @ x).norm() > (1"),
    "S2.lemma-2": ("linear_attention", "sketched(g).abs() > epsilon", "(0 * sketched(g)).abs() > epsilon"),
    "S2.low-rank": (
        "linear_attention",
        "sketched(efficient(draw(512, 16), draw(512, 16, seed=1)).dense())",
        "sketched(draw(512, 1) @ (draw(512, 1, seed=2) - draw(512, 1, seed=2).mean()).mT)",  # P = u w'
    ),
    "S2.rank": ("linear_attention", "sketch(k, n, generator(2))", "sketch(k + 1, n, generator(2))"),
    "S2.normaliser": ("linear_attention", "a.exp() / a.exp().sum(0)", "a.exp() / a.exp().sum(1, keepdim=True)"),
    "S2.order": ("linear_attention", "d * k * d, 2 * n * d * k", "100 * d * k * d, 2 * n * d * k"),
    "S2.independent": ("linear_attention", "make(256)", "make(16)"),
    "S2.delta": ("linear_attention", "tiny, one = projected(2.0**-n)", "tiny, one = whole"),
    "S2.product-norm": ("linear_attention", "torch.tensor([0.0, 1.0])", "torch.tensor([1.0, 0.0])"),
    "S2.sketch-size": ("linear_attention", "constant * math.log(n) * (", "constant * math.log(n) / ("),
    "S2.sketch-size-d": ("linear_attention", "constant * math.log(n) * (", "constant * math.log(n) / ("),
    "S2.independent-of-n": ("linear_attention", "w = w - w.mean()", "w = 1 + 0 * w"),
    "S2.figure-1": (
        "linear_attention",
        "efficient(draw(n, 8), draw(n, 8, seed=1)).dense())) for",
        "efficient(draw(n, 16), draw(n, 16, seed=1)).dense())) for",
    ),
    "S2.table-projected": (TABLES, ".multiply_adds for size", ".multiply_adds ** 2 for size"),
    "S2.quadratic-space": (TABLES, 'memory_growth("softmax")', "formed_memory_growth()"),
    "S2.linear-space": (TABLES, 'memory_growth(name) for name in ("e', 'formed_memory_growth() for name in ("e'),
    "S3.matrix": ("mathematical_view", ") / f.sum()", ")"),
    "S3.equivariant": ("mathematical_view", "layer(y + draw(1, 9, 8, seed=5))", "layer(y)"),
    "S3.invariant": (
        "mathematical_view",
        "pooling = LearnedQuery(8, 3, 2).double()",
        "pooling = MultiHead(8, 2).double()",
    ),
    "S3.softmax": ("mathematical_view", "- pi.mT @ torch.softmax(m, -1) @ pi", "- torch.softmax(m, -1)"),
    "S3.proof": ("mathematical_view", "printed = torch.softmax((x @ wv)", "printed = torch.softmax((x @ wq)"),
    "S3.pointwise": ("mathematical_view", "nn.Conv2d(3, 4, 1)", "nn.Conv2d(3, 4, 3, padding=1)"),
    "S3.convolution": ("mathematical_view", "_flat(nn.Conv2d(3, 3, 3, padding=1))", "_flat(nn.Conv2d(3, 3, 1))"),
    "S3.translation": ("mathematical_view", "nn.Conv2d(3, 3, 3, padding=1).double()", "nn.Conv2d(3, 3, 1).double()"),
    "S3.outputs": ("mathematical_view", "pooling(torch.randn(1, n, 8))", "torch.randn(1, n, 8)"),
    "S3.grids": ("mathematical_view", ".mT.unflatten(-1, (3, 4))", ".mT.flip(-1).unflatten(-1, (3, 4))"),
    "S3.normaliser": ("mathematical_view", "[-1.0, 0.0]]", "[-0.5, 0.0]]"),
    "S4.count": ("attention_as_convolution", "heads * d_o * d_out + d_out", "heads * d_o * d_out"),
    "S4.row": ("attention_as_convolution", "z[4] @ wq", "z[3] @ wq"),
    "S4.quadratic": ("attention_as_convolution", ".square().sum(-1) - centre.square().sum())", ".square().sum(-1))"),
    "S4.absolute-cost": ("attention_as_convolution", "2 * d * (2 * d - 1)", "2 * d * d * (2 * d - 1)"),
    "S4.relative-cost": ("attention_as_convolution", 'if name != "absolute"', 'if name == "relative"'),
    "S4.blocks": ("attention_as_convolution", "wo[i * d : (i + 1) * d]", "wo[:d]"),
    "S4.limit": ("attention_as_convolution", "alpha = 30.0", "alpha = 4.0"),
    "S4.rate": ("attention_as_convolution", "(alphas[-1] - alphas[0])", "alphas[-1]"),
    "S4.sign": ("attention_as_convolution", "z[q + sign * f]", "z[q + f]"),
    "S4.theorem": (
        "attention_as_convolution",
        "draw(4, 2, 3, 3), draw(4, seed=1)",
        "torch.nan * draw(4, 2, 3, 3), draw(4, seed=1)",
    ),
    "S4.padding": ("attention_as_convolution", '_difference(padding=1, border="replicate")', "_difference(padding=1)"),
    "S4.valid": ("attention_as_convolution", "weight[:, :, i, j]", "weight[:, :, j, i]"),
    "S4.dilation": ("attention_as_convolution", "weight[:, :, i, j]", "weight[:, :, j, i]"),
    "S4.stride": ("attention_as_convolution", "weight[:, :, i, j]", "weight[:, :, j, i]"),
    **{
        entry.id: (TABLES, "claimed_growth(name)", "claimed_growth(name) - 0.3")
        for entry in LEDGER
        if ".table-" in entry.id and entry.id != "S2.table-projected"
    },
    **{
        entry.id: (TABLES, "STEPS[claimed](n)", 'STEPS["O(1)"](n)')
        if entry.id.endswith(("recurrent", "hashed"))
        else (TABLES, 'growth(name, "depth")', 'growth("hashed", "depth")')
        for entry in LEDGER
        if ".steps-" in entry.id
    },
}


def test_every_entry_has_a_row() -> None:
    assert set(BROKEN) == {entry.id for entry in LEDGER}


SLOW = {"S0.bound", "S0.bound-heads", "S0.table-recurrent", "S2.table-recurrent", "S2.sketch-size"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BROKEN]
)
def test_broken_checks_give_another_outcome(name: str) -> None:
    home, old, new = BROKEN[name]
    module = importlib.import_module(f"headwise.ledger.{home}")
    source = inspect.getsource(module)
    assert old in source, f"{name}: {old!r} is no longer in {home}.py"
    namespace: dict = {"__name__": module.__name__}
    exec(compile(source.replace(old, new, 1), f"{home}.py, broken", "exec"), namespace)
    entries = [entry for key in ("ENTRIES", "S0_ENTRIES", "S2_ENTRIES") for entry in namespace.get(key, ())]
    (broken,) = (entry for entry in entries if entry.id == name)
    (whole,) = select(claim=name)
    assert broken.check().outcome is not whole.expected
