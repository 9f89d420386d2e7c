"""Every check can fail: with one expression of it changed, it returns another outcome than the recorded one.

Each row names a claim, an expression in the module of its check, and a replacement.  The module is executed with that
expression replaced.  Expressions are matched token by token, so that formatting does not matter.
"""

from __future__ import annotations

import inspect
import io
import tokenize
from functools import partial

import pytest

from headwise.ledger import CLAIMS, select

BROKEN = {
    "S0.shift": ("torch.softmax(a + c, -1)", "torch.softmax(a * c, -1)"),
    "S0.paths": ("total + groups.bias - groups.output", "total - groups.output"),
    "S0.paths-skip": ("bias=0.5, skip=True", "bias=0.5, skip=False"),
    "S0.bound": ("constant: float = 4.0", "constant: float = 0.4"),
    "S0.bound-heads": ("(constant * heads * beta", "(0.1 * beta"),
    "S0.residual": ("norm(residual(x)).item(), x.mean(0)", "norm(x).item(), x.mean(0)"),
    "S0.low-rank": ("w = w - w.mean()", "w = 1 + 0.01 * w"),
    "S0.rank": ("(2**8, 2**16)", "(2**8, 2**32)"),
    "S0.question-1": ("rest = matrix([[1.0], [-1.0]])", "rest = matrix([[-1.0], [-1.0]])"),  # R of one sign
    "S0.question-2": ("sides = composite_norm(a + b)", "sides = 0.9 * composite_norm(a + b)"),
    "S0.question-3": ("log_bound(4, **known)", "log_bound(3, **known)"),
    "S0.question-4": ("matrix([[1.0], [-1.0]]), 100", "matrix([[1.0], [-1.0]]), 1"),
    "S1.count": ("value_width=36 // heads", "value_width=36"),
    "S1.bias": ("torch.cat([w, b[None]])", "torch.cat([w, 0 * b[None]])"),
    "S1.first-order": ("- size * (gradient * move)", "- 0 * (gradient * move)"),
    "S1.sign": ("_attention_loss(s + gradient", "_attention_loss(s - gradient"),
    "S1.convex": ("(f(z) + f(y)) / 2", "min(f(z), f(y))"),
    "S1.gradient": ("formula = -2 *", "formula = 2 *"),
    "S1.closed-form": ("inverse @ x.mT @ b @ x @ inverse", "inverse @ x.mT @ b @ x"),
    "S1.pseudo-inverse": (
        "matrix([[1.0, 1.0]]), matrix([[3.0]])",
        "matrix([[1.0, 1.0], [1.0, 0.0]]), draw(2, 2)",
    ),
    "S1.truncation": ("x, b, rank = matrix([[10.0,", "x, b, rank = matrix([[1.0,"),
    "S2.scaling": ("(k / math.sqrt(n)).mT", "(k / n).mT"),
    "S2.jl": ("x @ sketch(k, 300", "0 * x @ sketch(k, 300"),
    "S2.lemma-1": ("(sketch(k, n, g) @ x).norm() > (1", "(2 * sketch(k, n, g) @ x).norm() > (1"),
    "S2.lemma-2": ("sketched(g).abs() > epsilon", "(0 * sketched(g)).abs() > epsilon"),
    "S2.low-rank": (
        "sketched(efficient(draw(512, 16), draw(512, 16, seed=1)).dense())",
        "sketched(draw(512, 1) @ (draw(512, 1, seed=2) - draw(512, 1, seed=2).mean()).mT)",  # P = u w'
    ),
    "S2.rank": ("sketch(k, n, generator(2))", "sketch(k + 1, n, generator(2))"),
    "S2.normaliser": ("a.exp() / a.exp().sum(0)", "a.exp() / a.exp().sum(1, keepdim=True)"),
    "S2.order": ("d * k * d, 2 * n * d * k", "100 * d * k * d, 2 * n * d * k"),
    "S2.independent": ("make(256)", "make(16)"),
    "S2.delta": ("tiny, one = projected(2.0**-n)", "tiny, one = whole"),
    "S2.product-norm": ("torch.tensor([0.0, 1.0])", "torch.tensor([1.0, 0.0])"),
    "S2.sketch-size": ("constant * math.log(n) * (", "constant * math.log(n) / ("),
    "S2.sketch-size-d": ("constant * math.log(n) * (", "constant * math.log(n) / ("),
    "S2.independent-of-n": ("w = w - w.mean()", "w = 1 + 0 * w"),
    "S2.figure-1": (
        "efficient(draw(n, 8), draw(n, 8, seed=1)).dense())) for",
        "efficient(draw(n, 16), draw(n, 16, seed=1)).dense())) for",
    ),
    "S2.table-projected": (".multiply_adds for size", ".multiply_adds ** 2 for size"),
    "S2.quadratic-space": ('memory_growth("softmax")', "formed_memory_growth()"),
    "S2.linear-space": ("memory_growth(name) for name", "formed_memory_growth() for name"),
    "S3.matrix": (") / f.sum()", ")"),
    "S3.equivariant": ("layer(y + draw(1, 9, 8, seed=5))", "layer(y)"),
    "S3.invariant": (
        "pooling = LearnedQuery(8, 3, 2).double()",
        "pooling = MultiHead(8, 2).double()",
    ),
    "S3.softmax": ("permuted = pi.mT @ torch.softmax(m, -1) @ pi", "permuted = torch.softmax(m, -1)"),
    "S3.proof": ("printed = torch.softmax((x @ wv)", "printed = torch.softmax((x @ wq)"),
    "S3.pointwise": ("nn.Conv2d(3, 4, 1)", "nn.Conv2d(3, 4, 3, padding=1)"),
    "S3.convolution": ("_flat(nn.Conv2d(3, 3, 3, padding=1))", "_flat(nn.Conv2d(3, 3, 1))"),
    "S3.translation": ("nn.Conv2d(3, 3, 3, padding=1).double()", "nn.Conv2d(3, 3, 1).double()"),
    "S3.outputs": ("pooling(torch.randn(1, n, 8))", "torch.randn(1, n, 8)"),
    "S3.grids": (".mT.unflatten(-1, (3, 4))", ".mT.flip(-1).unflatten(-1, (3, 4))"),
    "S3.normaliser": ("[-1.0, 0.0]]", "[-0.5, 0.0]]"),
    "S4.count": ("heads * d_o * d_out + d_out", "heads * d_o * d_out"),
    "S4.row": ("z[4] @ wq", "z[3] @ wq"),
    "S4.quadratic": (".square().sum(-1) - centre.square().sum())", ".square().sum(-1))"),
    "S4.absolute-cost": ("2 * d * (2 * d - 1)", "2 * d * d * (2 * d - 1)"),
    "S4.relative-cost": ('if name != "absolute"', 'if name == "relative"'),
    "S4.blocks": ("wo[i * d : (i + 1) * d]", "wo[:d]"),
    "S4.limit": ("alpha = 30.0", "alpha = 4.0"),
    "S4.rate": ("(alphas[-1] - alphas[0])", "alphas[-1]"),
    "S4.sign": ("q + sign * f for", "q + f for"),
    "S4.theorem": (
        "draw(4, 2, 3, 3), draw(4, seed=1)",
        "torch.nan * draw(4, 2, 3, 3), draw(4, seed=1)",
    ),
    "S4.padding": ('_difference(padding=1, border="replicate")', "_difference(padding=1)"),
    "S4.valid": ("weight[:, :, i, j]", "weight[:, :, j, i]"),
    "S4.dilation": ("weight[:, :, i, j]", "weight[:, :, j, i]"),
    "S4.stride": ("weight[:, :, i, j]", "weight[:, :, j, i]"),
    **{
        entry.id: ("claimed_growth(name)", "claimed_growth(name) - 0.3")
        for entry in CLAIMS
        if ".table-" in entry.id and entry.id != "S2.table-projected"
    },
    **{
        entry.id: ("STEPS[claimed](n)", 'STEPS["O(1)"](n)')
        if entry.id.endswith(("recurrent", "hashed"))
        else ('growth(name, "depth")', 'growth("hashed", "depth")')
        for entry in CLAIMS
        if ".steps-" in entry.id
    },
}


def test_every_claim_has_a_row() -> None:
    assert set(BROKEN) == {entry.id for entry in CLAIMS}


SLOW = {"S0.bound", "S0.bound-heads", "S0.table-recurrent", "S2.table-recurrent", "S2.sketch-size"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BROKEN]
)
def test_broken_checks_give_another_outcome(name: str) -> None:
    (entry,) = select(claim=name)
    check = inspect.unwrap(entry.check)
    function, arguments = (check.func, check.args) if isinstance(check, partial) else (check, ())
    module = inspect.getmodule(function)
    namespace: dict = {"__name__": module.__name__}
    exec(compile(replace_once(inspect.getsource(module), *BROKEN[name]), f"{name}, broken", "exec"), namespace)
    assert namespace[function.__name__](*arguments).outcome is not entry.expected


def replace_once(source: str, old: str, new: str) -> str:
    tokens, pattern = _tokens(source), [token.string for token in _tokens(old)]
    strings = [token.string for token in tokens]
    starts = [i for i in range(len(tokens)) if strings[i : i + len(pattern)] == pattern]
    assert len(starts) == 1, f"{old!r} occurs {len(starts)} times"
    first, last = tokens[starts[0]], tokens[starts[0] + len(pattern) - 1]
    lines = source.splitlines(keepends=True)
    begin, end = (sum(map(len, lines[: row - 1])) + column for row, column in (first.start, last.end))
    return source[:begin] + new + source[end:]


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in layout:
                tokens.append(token)
    except tokenize.TokenError:  # an expression may end within a bracket
        pass
    return tokens
