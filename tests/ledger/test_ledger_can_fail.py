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
from headwise.ledger.entry import Outcome

BROKEN = {
    "S0.shift": ("torch.softmax(a + c, -1)", "torch.softmax(a * c, -1)"),
    "S0.paths": ("total + groups.bias - groups.output", "total - groups.output"),
    "S0.paths-skip": ("bias=0.5, skip=True", "bias=0.5, skip=False"),
    "S0.stacking": ("left, right = attention[layer][h] @ left", "left, right = left @ attention[layer][h]"),
    "S0.exponential": ("scaled(1 / math.sqrt(d), True)", "scaled(1 / d, True)"),
    "S0.svd": ("torch.softmax(q @ key.mT, -1) @ r.mT", "q @ (key.mT @ r.mT)"),
    "S0.lower": ("s @ rest - p @ rest) / (wide.expm1()", "s @ rest - p @ rest) / (0.5 * wide.expm1()"),
    "S0.bound": ("(12, 24, 4)), constant=4.0", "(12, 24, 4)), constant=0.4"),
    "S0.bound-heads": ("broken = two_wide_heads(width)", "broken = two_wide_heads(100)"),
    "S0.residual": ("norm(residual(x)).item(), x.mean(0)", "norm(x).item(), x.mean(0)"),
    "S0.low-rank": ("w = w - w.mean()\n    k =", "w = 1 + 0.01 * w\n    k ="),
    "S0.rank": ("lengths = (2**6, 2**12)", "lengths = (2**6, 2**7)"),
    "S0.question-1": ("rest = matrix([[1.0], [-1.0]])", "rest = matrix([[-1.0], [-1.0]])"),  # R of one sign
    "S0.question-2": ("sides = composite_norm(a + b)", "sides = 0.9 * composite_norm(a + b)"),
    "S0.question-3": ("published_log_bound(4, **known)", "published_log_bound(3, **known)"),
    "S0.question-4": ("matrix([[1.0], [-1.0]]), 100", "matrix([[1.0], [-1.0]]), 1"),
    "S1.count": ("value_width=36 // heads", "value_width=36"),
    "S1.bias": ("torch.cat([w, b[None]])", "torch.cat([w, 0 * b[None]])"),
    "S1.first-order": ("- size * (gradient * move)", "- 0 * (gradient * move)"),
    "S1.sign": ("_attention_loss(s + gradient", "_attention_loss(s - gradient"),
    "S1.least-squares": ("angle(draw(4, 2), draw(4, 4, seed=1))", "angle(draw(4, 5), draw(4, 4, seed=1))"),
    "S1.scale": ("wide_q * math.sqrt(6 / 4)", "wide_q * math.sqrt(6)"),
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
    "S2.union": ("u.norm() / 20", "u.norm() * 20"),
    "S2.lipschitz": ("(delta * x).exp() @ r", "1.01 * (delta * x @ r).exp()"),
    "S2.gamma": ("largest(torch.arange(d))", "largest(chosen)"),
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
    "S2.sketch-size": ("epsilon * p[:rows].norm(dim=-1)", "epsilon * 0.1 * p[:rows].norm(dim=-1)"),
    "S2.sketch-size-d": ("epsilon * p[:rows].norm(dim=-1)", "epsilon * 0.1 * p[:rows].norm(dim=-1)"),
    "S2.independent-of-n": ("w = w - w.mean()\n        root", "w = 1 + 0 * w\n        root"),
    "S2.figure-1": (
        "efficient(draw(n, 8), draw(n, 8, seed=1)).dense())) for",
        "efficient(draw(n, 16), draw(n, 16, seed=1)).dense())) for",
    ),
    "S2.table-projected": (".multiply_adds for size", ".multiply_adds ** 2 for size"),
    "S2.reformer": ("begins(4), begins(8)", "begins(4), begins(4)"),
    "S2.quadratic-space": ('memory_growth("softmax")', "formed_memory_growth()"),
    "S2.linear-space": ("memory_growth(name) for name", "formed_memory_growth() for name"),
    "S3.matrix": (") / f.sum()", ")"),
    "S3.general": (
        "output = (weights[:, None] * values).sum(0) / weights.sum()",
        "output = (weights[:, None] * values).sum(0)",
    ),
    "S3.heads": ("@ torch.cat(heads)", "@ torch.cat(heads[::-1])"),
    "S3.learned-query": ("scale=1.0)", "scale=0.5)"),
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
    "S4.misprint": ("score(centre[0], centre[0])", "score(*centre)"),
    "S4.absolute-cost": ("2 * d * (2 * d - 1)", "2 * d * d * (2 * d - 1)"),
    "S4.relative-same": ('costs["relative"].multiply_adds / costs', 'costs["absolute"].multiply_adds / costs'),
    "S4.relative-cost": ('costs["quadratic"] / costs', 'costs["relative"] / costs'),
    "S4.blocks": ("wo[i * d : (i + 1) * d]", "wo[:d]"),
    "S4.limit": ("alpha = 30.0", "alpha = 4.0"),
    "S4.rate": ("(alphas[-1] - alphas[0])", "alphas[-1]"),
    "S4.sign": ("q + sign * f for", "q + f for"),
    "S4.theorem": ("torch.linalg.solve(wv, kernel[:, :, i, j].mT)", "kernel[:, :, i, j].mT"),
    "S4.padding": ('_difference(padding=1, border="replicate")', "_difference(padding=1)"),
    "S4.padding-odd": ("for k in (1, 3, 5, 7)", "for k in (1, 2, 5, 7)"),
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
        if entry.id.endswith("recurrent")
        else ("chain_growth(name)", "chain_growth(RECURRENT)")
        for entry in CLAIMS
        if ".steps-" in entry.id
    },
}


def test_every_claim_has_a_row() -> None:
    assert set(BROKEN) == {entry.id for entry in CLAIMS}


FALSE_INSTEAD = {
    "S0.stacking": ("right @ w", "w.mT @ right"),
    "S0.exponential": ("scaled(1 / math.sqrt(d), True)", "scaled(1 / math.sqrt(d), False)"),
    "S0.bound-heads": ("(layer_constant(n, d) if", "(layer_constant(n, d) / 4 if"),
    "S0.low-rank": ("abs(mean - expected) / error", "abs(mean - expected / 2) / error"),
    "S0.rank": ("abs(ratio - logs), 0.4)", "abs(ratio - 1), 0.4)"),  # free of n
    "S0.question-1": ("(wide.expm1() * (s @ rest.abs()))).max().log()", "(2 * wide * (s @ rest.abs()))).max().log()"),
    "S0.lower": ("s @ rest - p @ rest) / (wide.expm1()", "s @ rest - p @ rest) / (wide"),
    "S0.question-2": ("spectral_norm(x) / composite_norm(x)", "composite_norm(x) / spectral_norm(x)"),
    "S1.sign": ("_attention_loss(s - gradient", "_attention_loss(gradient - s"),
    "S1.scale": ("printed / 2 - change", "printed / 4 - change"),
    "S1.pseudo-inverse": ("right = torch.linalg.pinv(x)", "right = x.mT"),
    "S1.truncation": ("back @ cut(root @ z @ root) @ back", "back @ cut(root @ z) @ back"),
    "S2.lemma-2": ("epsilon * x.norm() * y.norm()", "epsilon**3 * x.norm() * y.norm()"),
    "S2.union": ("epsilon * u.norm() * w.norm()", "epsilon**3 * u.norm() * w.norm()"),
    "S2.low-rank": None,  # the check of S0.low-rank
    "S2.normaliser": ("draw(4, 9, seed=1), -1)", "draw(4, 9, seed=1), 0)"),
    "S2.independent": ("max(pooled, hashed), 1.5", "max(pooled, hashed, full), 1.5"),
    "S2.product-norm": ("- (x.norm() * y.norm()).item()", "- (x.norm() * y.norm()).item() / 2"),
    "S2.sketch-size": ("* w.norm()).any()", "* (p[:rows] @ w).norm() / n).any()"),  # relative to the output
    "S2.sketch-size-d": ("* w.norm()).any()", "* (p[:rows] @ w).norm() / n).any()"),
    "S2.independent-of-n": ("/ (p.norm() * w.norm())", "/ (p @ w).norm()"),
    "S3.proof": (
        'equal("the theorem, with W_q where the proof has W_v", moved, stays[order])',
        'equal("", moved, stays)',
    ),
    "S4.misprint": ("score(*centre), expected", "score(centre[1], centre[0]), expected"),
    "S4.absolute-cost": ("shared, 2.05", "shared, 1.05"),
    "S4.relative-same": ("order, 2.0)", "order, 1.5)"),
    "S4.sign": ("total(w.flip(0), -1)", "total(w, -1)"),
}
"""The statement that is given as true, changed into one that is false: it must be refuted."""


@pytest.mark.parametrize("name", [name for name, change in FALSE_INSTEAD.items() if change is not None])
def test_a_false_statement_in_its_place_is_refuted(name: str) -> None:
    assert broken_outcome(name, FALSE_INSTEAD[name]) is Outcome.REFUTED


def test_every_corrected_claim_has_a_premise_and_a_false_statement() -> None:
    corrected = {entry.id for entry in CLAIMS if entry.expected is Outcome.CORRECTED}
    assert set(FALSE_INSTEAD) == corrected
    assert all(entry.truth and entry.premise for entry in CLAIMS if entry.id in corrected)


SLOW = {"S0.bound", "S0.bound-heads", "S0.table-recurrent", "S2.table-recurrent", "S2.sketch-size"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BROKEN]
)
def test_broken_checks_give_another_outcome(name: str) -> None:
    assert broken_outcome(name, BROKEN[name]) is not select(claim=name)[0].expected


def broken_outcome(name: str, change: tuple[str, str]) -> Outcome:
    """The outcome of a claim's check in a module in which one expression is replaced."""
    check = inspect.unwrap(select(claim=name)[0].check)
    function, arguments = (check.func, check.args) if isinstance(check, partial) else (check, ())
    module = inspect.getmodule(function)
    namespace: dict = {"__name__": module.__name__}
    exec(compile(replace_once(inspect.getsource(module), *change), f"{name}, broken", "exec"), namespace)
    return namespace[function.__name__](*arguments).outcome


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
