"""Ji & Xie (S3), a mathematical view of attention: the general form, symmetry, and convolutions under permutations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.ledger.entry import Finding, Outcome, Source, at_most, draw, equal, generator, matrix, rounding
from headwise.nn import GridAttention, LearnedQuery, MultiHead
from headwise.operators import dot_product, softmax
from headwise.theory.groups import permutations, translations
from headwise.theory.symmetry import Symmetry, SymmetryReport, check_equivariance, check_invariance
from headwise.theory.verdict import Verdict

SOURCE = Source(
    "S3", "Shuiwang Ji & Yaochen Xie", "A Mathematical View of Attention Models in Deep Learning", "a mathematical view"
)


@SOURCE.claim(
    "S3.matrix",
    "eq. (2)",
    "With the embedded Gaussian, attention is one matrix expression",
    r"O=W_vV\,\mathrm{softmax}((W_kK)^\top W_qQ)",
    Outcome.HOLDS,
    "Attention is a linear operator on the values, defined by queries and keys.",
)
def matrix_form() -> Finding:
    """Eq. (1) with f = exp(q.k), one sum after the other, against eq. (2), transposed: tokens as rows."""
    q, k, v = draw(4, 3), draw(6, 3, seed=1), draw(6, 5, seed=2)
    wq, wk, wv = draw(3, 3, seed=3), draw(3, 3, seed=4), draw(5, 2, seed=5)
    whole = torch.softmax((q @ wq) @ (k @ wk).mT, -1) @ (v @ wv)
    errors = []
    for j in range(4):
        f = torch.stack([((q[j] @ wq) @ (k[i] @ wk)).exp() for i in range(6)])
        one = sum((f[i] * (v[i] @ wv) for i in range(6)), torch.zeros(2, dtype=v.dtype)) / f.sum()
        errors.append((one - whole[j]).abs().max().item())
    return Finding(rounding("sums over keys = one matrix product", max(errors)))


@SOURCE.claim(
    "S3.general",
    "eq. (1)",
    "For any positive f, o_j = (1/C) sum f(q_j, k_i) g(v_i) with C = sum f is an average of the g(v_i)",
    r"o_j=\tfrac1C\sum_if(q_j,k_i)g(v_i)",
    Outcome.HOLDS,
    "Rows of weights are stochastic whatever the similarity is: softmax is one choice among many.",
)
def general_form() -> Finding:
    """Five similarities, by loops over queries and keys: every output lies between the smallest and largest value."""
    q, k, values = draw(5, 4), draw(7, 4, seed=1), draw(7, 3, seed=2) @ draw(3, 3, seed=3)
    similarities = {
        "embedded Gaussian": lambda a, b: (a @ draw(4, 4, seed=4) @ b).exp(),
        "Gaussian": lambda a, b: (a @ b).exp(),
        "inverse distance": lambda a, b: 1 / (1 + (a - b).square().sum()),
        "squared product": lambda a, b: (a @ b).square(),
        "rectified concatenation": lambda a, b: torch.relu(torch.cat([a, b]) @ draw(8, seed=5)) + 1e-3,
    }
    outside = []
    for f in similarities.values():
        for j in range(5):
            weights = torch.stack([f(q[j], k[i]) for i in range(7)])
            output = (weights[:, None] * values).sum(0) / weights.sum()
            outside.append(torch.maximum(output - values.amax(0), values.amin(0) - output).max().item())
    return Finding(
        at_most("largest distance of an output from the range of the values", max(outside), 1e-12),
        example=f"{', '.join(similarities)}: 5 queries and 7 keys each",
    )


@SOURCE.claim(
    "S3.heads",
    "eqs. (5), (6)",
    "M heads, concatenated and projected, are one layer",
    r"O=W_o[H_1;\dots;H_M]",
    Outcome.HOLDS,
    "What `MultiHead` computes.",
)
def heads_by_hand() -> Finding:
    layer, x = MultiHead(8, 2, bias=False, out_bias=False).double().eval(), draw(1, 6, 8)
    wq, wk, wv = (linear.weight.detach().unflatten(0, (2, 4)) for linear in (layer.query, layer.key, layer.value))
    heads = []
    for h in range(2):
        scores = (wk[h] @ x[0].mT).mT @ (wq[h] @ x[0].mT) / 2  # keys down, queries across; 1/sqrt(4)
        heads.append(wv[h] @ x[0].mT @ torch.softmax(scores, 0))
    by_hand = layer.out.weight.detach() @ torch.cat(heads)
    with torch.no_grad():
        return Finding(equal("eqs. (5) and (6), tokens as columns, against MultiHead", by_hand.mT, layer(x)[0]))


@SOURCE.claim(
    "S3.learned-query",
    "eq. (4)",
    "With learned queries the output is W_v X softmax((W_k X)' Q)",
    r"O=W_vX\,\mathrm{softmax}((W_kX)^\top Q)",
    Outcome.HOLDS,
    "The queries are parameters; W_q is absorbed.",
)
def learned_query_by_hand() -> Finding:
    x, q, wk, wv = draw(5, 9), draw(4, 3, seed=1), draw(4, 5, seed=2), draw(6, 5, seed=3)  # tokens as columns
    whole = wv @ x @ torch.softmax((wk @ x).mT @ q, 0)
    rows = softmax(q.mT, (wk @ x).mT, scale=1.0)((wv @ x).mT)
    return Finding(equal("eq. (4), tokens as columns, against the operator with tokens as rows", whole.mT, rows))


_GRADES = tuple(Symmetry)


def _grade(claim: str, report: SymmetryReport) -> Verdict:
    """At most rounding; 0 exact, 1 rounding, 2 border only, 3 approximate, 4 broken."""
    return at_most(claim, _GRADES.index(report.verdict), _GRADES.index(Symmetry.ROUNDING))


@SOURCE.claim(
    "S3.equivariant",
    "Theorem, first half",
    "Self-attention is permutation equivariant",
    r"A(\Pi X)=\Pi A(X)",
    Outcome.HOLDS_WITH_PREMISE,
    "Token order must be given by a positional encoding.",
    premise="no positional encoding",
)
def equivariance() -> Finding:
    layer, x = MultiHead(8, 2).double().eval(), draw(1, 9, 8)
    placed = lambda y: layer(y + draw(1, 9, 8, seed=5))  # noqa: E731
    return Finding(
        _grade("A(X) under permutations of its tokens", check_equivariance(layer, permutations(), x)),
        without=_grade("the same with an encoding of positions added", check_equivariance(placed, permutations(), x)),
        example="a different vector added at each position, as by a positional encoding, breaks the symmetry",
    )


@SOURCE.claim(
    "S3.invariant",
    "Theorem, second half",
    "Attention with learned queries is permutation invariant",
    r"A_Q(\Pi X)=A_Q(X)",
    Outcome.HOLDS,
    "It pools sets of tokens.",
)
def invariance() -> Finding:
    pooling = LearnedQuery(8, 3, 2).double().eval()
    return Finding(
        _grade("A_Q(X) under permutations of its tokens", check_invariance(pooling, permutations(), draw(1, 9, 8)))
    )


@SOURCE.claim(
    "S3.softmax",
    "Proof",
    "softmax(P'MP) = P' softmax(M) P",
    r"\mathrm{softmax}(\Pi^\top M\Pi)=\Pi^\top\mathrm{softmax}(M)\Pi",
    Outcome.HOLDS,
    "The identity that the proof uses.",
)
def softmax_of_a_permuted_matrix() -> Finding:
    m, order = draw(7, 7), torch.randperm(7, generator=generator(1))
    pi = torch.eye(7, dtype=torch.float64)[order]
    permuted = pi.mT @ torch.softmax(m, -1) @ pi
    return Finding(equal("softmax(P'MP) = P' softmax(M) P", torch.softmax(pi.mT @ m @ pi, -1), permuted))


@SOURCE.claim(
    "S3.proof",
    "Proof, eq. (7)",
    "The proof's operator is the one defined",
    r"\mathrm{softmax}((W_kX)^\top W_vX)",
    Outcome.CORRECTED,
    "A misprint: W_v stands for W_q.",
    premise="no positional encoding",
    truth="W_q in place of W_v; the theorem stands",
)
def proof_as_printed() -> Finding:
    """The proof writes W_v where W_q is meant: compare with the definition it starts from."""
    x, wq, wk, wv = matrix([[0.0], [1.0]]), matrix([[0.0]]), matrix([[1.0]]), matrix([[1.0]])
    meant = torch.softmax((x @ wq) @ (x @ wk).mT, -1) @ x @ wv
    printed = torch.softmax((x @ wv) @ (x @ wk).mT, -1) @ x @ wv
    y, uq, uk, uv = draw(6, 5), draw(5, 5, seed=1), draw(5, 5, seed=2), draw(5, 5, seed=3)
    order = torch.randperm(6, generator=generator(1))
    stays, moved = (torch.softmax((z @ uq) @ (z @ uk).mT, -1) @ z @ uv for z in (y, y[order]))
    return Finding(
        equal("the operator in the proof is the one defined", printed, meant),
        corrected=equal("the theorem, with W_q where the proof has W_v", moved, stays[order]),
        example=f"two tokens 0 and 1, W_q = 0, W_k = W_v = 1: as defined both outputs are {meant[0].item():g} and "
        f"{meant[1].item():g}, as printed {printed[0].item():g} and {printed[1].item():.3f}. A misprint: the "
        "argument does not depend on which matrix it is",
    )


@SOURCE.claim(
    "S3.pointwise",
    "Convolutions",
    "A 1x1 convolution is permutation equivariant",
    r"\mathrm{conv}_{1\times1}(\Pi X)=\Pi\,\mathrm{conv}_{1\times1}(X)",
    Outcome.HOLDS,
    "It is a linear map of each pixel.",
)
def one_by_one_convolution() -> Finding:
    report = check_equivariance(_flat(nn.Conv2d(3, 4, 1)), permutations(), draw(1, 20, 3))
    return Finding(_grade("1x1 convolution under permutations of pixels", report))


@SOURCE.claim(
    "S3.convolution",
    "Convolutions",
    "A larger convolution is neither equivariant nor invariant under permutations",
    r"\mathrm{conv}_{3\times3}(\Pi X)\neq\Pi\,\mathrm{conv}_{3\times3}(X)",
    Outcome.HOLDS,
    "Its result depends on the order of neighbours.",
)
def larger_convolution() -> Finding:
    """The claim is `neither`: both symmetries must be broken."""
    conv, x = _flat(nn.Conv2d(3, 3, 3, padding=1)), draw(1, 20, 3)
    grades = (check_equivariance(conv, permutations(), x).verdict, check_invariance(conv, permutations(), x).verdict)
    return Finding(at_most("4 minus the better of both grades", 4 - min(_GRADES.index(g) for g in grades), 0))


@SOURCE.claim(
    "S3.translation",
    "Convolutions",
    "Convolutions are equivariant to translations",
    r"\mathrm{conv}(TX)=T\,\mathrm{conv}(X)",
    Outcome.HOLDS_WITH_PREMISE,
    "With zero padding a network can detect the border.",
    premise="away from the border, or with circular padding",
)
def translation() -> Finding:
    x = draw(1, 3, 9, 9)
    circular = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular").double().eval()
    zeros = nn.Conv2d(3, 3, 3, padding=1).double().eval()
    wrapped, padded = (check_equivariance(conv, translations(), x, axes=(-2, -1)) for conv in (circular, zeros))
    return Finding(
        _grade("3x3 convolution, circular borders, under translations", wrapped),
        without=_grade("the same with zero padding", padded),
        example="with zero padding the border breaks it, and only the border",
    )


@SOURCE.claim(
    "S3.outputs",
    "Learnable query",
    "The number of outputs is the number of queries",
    r"O\in\mathbb R^{q\times n}",
    Outcome.HOLDS,
    "A learned query pools any length to a fixed one.",
)
def outputs_are_queries() -> Finding:
    pooling = LearnedQuery(8, 3, 2)
    away = max(abs(pooling(torch.randn(1, n, 8)).shape[-2] - 3) for n in (4, 9, 17))
    return Finding(at_most("largest distance of the number of outputs from the number of queries", away, 0))


@SOURCE.claim(
    "S3.grids",
    "Higher order data",
    "Attention on grids is attention on the unfolded grid, with the shape of the queries",
    r"O\in\mathbb R^{h\times w\times q}",
    Outcome.HOLDS,
    "The output may be larger or smaller than the keys' grid.",
)
def grids() -> Finding:
    """Unfold, attend, fold: a 2-D layer against the same weights on the list of its pixels."""
    grid = GridAttention(6, 2).double().eval()
    x, context = draw(1, 6, 3, 4), draw(1, 6, 5, 2, seed=1)
    with torch.no_grad():
        folded = grid(x, context)
        flat = grid.attend(x.flatten(2).mT, context.flatten(2).mT).mT.unflatten(-1, (3, 4))
    return Finding(equal("attention over a grid = attention over its pixels, in the queries' shape", folded, flat))


@SOURCE.claim(
    "S3.normaliser",
    "eq. (1)",
    "Dividing by C = sum f normalises",
    r"\tfrac1C\sum_if(q,k_i)=1",
    Outcome.HOLDS_WITH_PREMISE,
    "For dot products use C = n: the sum of f may be zero.",
    premise="f > 0",
)
def normaliser() -> Finding:
    """C = sum f: rows sum to one for positive f; for dot products C may be zero."""
    q, k = draw(5, 4), draw(6, 4, seed=1)
    rows = softmax(q, k).dense().sum(-1)
    q2, k2 = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    total = (q2 @ k2.mT).sum().abs().item()
    chosen = dot_product(q2, k2).dense()
    return Finding(
        equal("rows of P sum to one, f = exp", rows, 1.0),
        without=at_most("1 / |sum f| for f = q.k, k_2 = -k_1", 1 / total if total else float("inf"), 1e6),
        example=f"q = (1, 0), k = (1, 0), (-1, 0): sum of q.k is 0; with C = n the row is {chosen.tolist()[0]}",
    )


def _flat(conv: nn.Module):
    """A convolution on (b, pixels, channels), pixels of a 4 x 5 grid in one list."""
    conv = conv.double().eval()

    def act(x: Tensor) -> Tensor:
        return conv(x.mT.unflatten(-1, (4, 5)).to(next(conv.parameters()).dtype)).flatten(2).mT

    return act
