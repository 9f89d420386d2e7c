"""The contract of attention operators: sixteen properties of P, each measured.

    linear      P(ax + by) = aPx + bPy                    broadcast   batch axes of v broadcast against those of P
    adjoint     <Pv, u> = <v, P^T u>                      strides     non-contiguous tensors give the same values
    dense       dense() = apply(I) = reference            vmap        over v, and over the tensors P is built from
    claims      every claim holds for dense()             compile     apply and adjoint under torch.compile(fullgraph)
    values      apply and adjoint equal the reference     trace       building and applying P under torch.compile
    gradients   and so do their gradients                 half        float32, bfloat16, float16 near the reference
    cost        multiply-adds agree with a count          copies      deep copies and saved files are the same P
    masked      values of masked keys may be NaN or inf   repeatable  applying P twice gives equal results

The reference is a function of the same tensors that returns P in float64 and shares no code with the operator.  Errors
are largest absolute differences relative to the largest expected entry (or to 1 if that is larger).
"""

from __future__ import annotations

import copy
import io
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headwise.operators.base import AttentionOperator
from headwise.operators.claims import DISTANCES
from headwise.operators.masks import share_between_heads
from headwise.testing.counting import count_multiply_adds

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Largest relative error allowed in each dtype: about 2^22 roundings of float64, 800 of float32, ten of the halves."""


class ContractError(AssertionError):
    """An operator violates a property; the message names the operator, the property, the error and the tolerance."""


@dataclass(frozen=True, eq=False)
class Case:
    """How to build one operator, and its reference.

    build      called with the inputs by name, returns the operator
    inputs     name -> shape of a standard normal tensor, or a tensor to use as it is; masks are called key_mask,
               pair_mask and attn_bias, and the tensor with one row for each key k, so that `masked` knows them
    reference  called with the same inputs in float64, returns P (*batch, m, n); None: the operator's own dense()
    tolerance  multiplies every tolerance, for an operator that is worse conditioned than a softmax
    skip       name of a check -> why it does not apply to this operator
    """

    name: str
    build: Callable[..., AttentionOperator]
    inputs: Mapping[str, Tensor | Sequence[int]] = field(default_factory=dict)
    reference: Callable[..., Tensor] | None = None
    tolerance: float = 1.0
    skip: Mapping[str, str] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype = torch.float64, *, draw: int = 0) -> dict[str, Tensor]:
        """The inputs, floating-point ones in `dtype`; the same for the same `draw` in every process."""
        return {name: self._tensor(name, given, dtype, draw) for name, given in self.inputs.items()}

    def _tensor(self, name: str, given: Tensor | Sequence[int], dtype: torch.dtype, draw: int) -> Tensor:
        if isinstance(given, Tensor):
            return given.to(dtype, copy=True) if given.dtype.is_floating_point else given
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
        return torch.randn(*given, generator=generator, dtype=torch.float64).to(dtype)

    def operator(self, dtype: torch.dtype = torch.float64) -> AttentionOperator:
        return self.build(**self.tensors(dtype))

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """P of these tensors by the reference; without one, the operator's own in float64."""
        double = {name: x.double() if x.dtype.is_floating_point else x for name, x in tensors.items()}
        if self.reference is not None:
            return self.reference(**double)
        return self.build(**double).dense(torch.empty(0, dtype=torch.float64))

    def widths(self) -> list[int]:
        """Value widths to test: 1, the key width (fused attention has a fast path there), and more than twice that."""
        floating = [x.shape[-1] for x in self.tensors().values() if x.dtype.is_floating_point and x.dim() > 1]
        return sorted({1, *floating[:1], 2 * max(floating[:1], default=2) + 1})

    def check(self, name: str) -> None:
        """Run one of CHECKS; any other exception becomes a ContractError that names the case and the check."""
        try:
            CHECKS[name](self)
        except ContractError:
            raise
        except Exception as error:
            raise ContractError(f"{self.name}: {name}: raised {type(error).__name__}: {error}") from error

    def agree(self, what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
        if actual.shape != expected.shape:
            raise ContractError(f"{self.name}: {what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        if not actual.isfinite().all():
            raise ContractError(f"{self.name}: {what}: {int((~actual.isfinite()).sum())} entries are not finite")
        actual, expected = actual.detach().double(), expected.detach().double()
        error = ((actual - expected).abs().amax() / expected.abs().amax().clamp(min=1.0)).item()
        if error > (allowed := TOLERANCE[dtype] * self.tolerance):
            raise ContractError(f"{self.name}: {what}: error {error:.1e}, tolerance {allowed:.1e} in {dtype}")


def assert_operator(
    build: Callable[..., AttentionOperator],
    inputs: Mapping[str, Tensor | Sequence[int]] | None = None,
    reference: Callable[..., Tensor] | None = None,
    *,
    tolerance: float = 1.0,
    skip: Mapping[str, str] | None = None,
) -> None:
    """Raise a ContractError (an AssertionError) at the first property in CHECKS that `build(**inputs)` violates.

    The arguments are the fields of `Case`.
    """
    name = getattr(build, "__name__", type(build).__name__)
    case = Case(name, build, inputs or {}, reference, tolerance, skip or {})
    if unknown := set(case.skip) - set(CHECKS):
        raise ContractError(f"{case.name}: skip names {sorted(unknown)}, but the checks are {sorted(CHECKS)}")
    for name in CHECKS:
        if name not in case.skip:
            case.check(name)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _sides(op: AttentionOperator, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """v (*batch, n, d) and u (*batch, m, d), inputs of apply and adjoint."""
    *batch, m, n = op.shape
    return normal(*batch, n, d, seed=1, dtype=dtype), normal(*batch, m, d, seed=2, dtype=dtype)


def _results(op: AttentionOperator, p: Tensor, v: Tensor, u: Tensor) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, input, result, expected result) of apply and adjoint, where P is the matrix p."""
    return [("apply", v, op(v), p @ v.to(p.dtype)), ("adjoint", u, op.adjoint(u), p.mT @ u.to(p.dtype))]


def check_linear(case: Case) -> None:
    op = case.operator()
    *batch, _, n = op.shape
    x, y = normal(*batch, n, 3, seed=1), normal(*batch, n, 3, seed=2)
    case.agree("linear", op(0.7 * x - 2.5 * y), 0.7 * op(x) - 2.5 * op(y))


def check_adjoint(case: Case) -> None:
    op = case.operator()
    for d in case.widths():
        v, u = _sides(op, d)
        left, right = (op(v) * u).sum((-2, -1)), (v * op.adjoint(u)).sum((-2, -1))
        case.agree(f"adjoint: <Pv, u> = <v, P^T u> at width {d}", right, left)


def check_dense(case: Case) -> None:
    op = case.operator()
    *batch, m, n = op.shape
    like = torch.empty(0, dtype=torch.float64)
    case.agree("dense = apply(I)", op.dense(like), op(torch.eye(n, dtype=like.dtype).expand(*batch, n, n)))
    expected = case.matrix(case.tensors()).expand(*batch, m, n)
    case.agree("dense = reference", op.dense(like), expected)


def check_claims(case: Case) -> None:
    op = case.operator()
    p = op.dense(torch.empty(0, dtype=torch.float64))
    for claim in op.claims:
        error, allowed = DISTANCES[claim](p).item(), TOLERANCE[torch.float64] * case.tolerance
        if not error <= allowed:
            raise ContractError(
                f"{case.name}: claims: declares {claim.name} ({claim.value}), but the error is {error:.1e}, "
                f"tolerance {allowed:.1e}"
            )


def check_values(case: Case) -> None:
    op, p = case.operator(), case.matrix(case.tensors())
    for d in case.widths():
        for what, _, actual, expected in _results(op, p, *_sides(op, d)):
            case.agree(f"values of {what} at width {d}", actual, expected)


def check_gradients(case: Case) -> None:
    """Gradients of <P v, pull> and <P^T u, pull> with respect to v, u and every floating tensor P is built from."""
    tensors = case.tensors()
    leaves = {name: x.requires_grad_() for name, x in tensors.items() if x.dtype.is_floating_point}
    op, p = case.build(**tensors), case.matrix(tensors)
    for d in case.widths():
        for what, x, actual, expected in _results(op, p, *(x.requires_grad_() for x in _sides(op, d))):
            pull = normal(*actual.shape, seed=3)
            _compare_gradients(case, f"{what} at width {d}", actual, expected, {**leaves, "x": x}, pull)


def _compare_gradients(
    case: Case, what: str, actual: Tensor, expected: Tensor, leaves: Mapping[str, Tensor], pull: Tensor
) -> None:
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    fast = torch.autograd.grad(actual, list(leaves.values()), pull, **options)
    slow = torch.autograd.grad(expected, list(leaves.values()), pull, **options)
    for name, a, b in zip(leaves, fast, slow, strict=True):
        case.agree(f"gradient of {what} with respect to {name}", a, b)


def check_cost(case: Case) -> None:
    """products <= multiply_adds <= products + sums, counted by `headwise.testing.counting`."""
    op = case.operator(torch.float32)
    for d in case.widths():
        v, u = _sides(op, d, torch.float32)
        for what, run, stated in (
            ("cost", partial(op, v), op.cost(d).multiply_adds),
            ("adjoint_cost", partial(op.adjoint, u), op.adjoint_cost(d).multiply_adds),
        ):
            count = count_multiply_adds(run)
            if not count.products <= stated <= count.products + count.sums:
                raise ContractError(
                    f"{case.name}: cost: {what}({d}) states {stated} multiply-adds, but matrix products need "
                    f"{count.products}, and sums at most {count.sums} more"
                )


def check_broadcast(case: Case) -> None:
    op, p = case.operator(), case.matrix(case.tensors())
    *batch, m, n = op.shape
    wider = [3 if size == 1 else size for size in batch]
    for shape in {(), (2, *batch), tuple(1 for _ in batch), tuple(wider), (2, *wider)}:
        v, u = normal(*shape, n, 3, seed=1), normal(*shape, m, 3, seed=2)
        for what, _, actual, expected in _results(op, p.expand(*batch, m, n), v, u):
            case.agree(f"broadcast: {what} with batch axes {shape}", actual, expected)


def check_strides(case: Case) -> None:
    """The same values in other memory layouts: a kernel that ignores strides reads wrong numbers, or NaN."""
    d = case.widths()[-2]  # the key width: at others, padding would hide the layout from a fused kernel
    for layout, lay in (("spread out", _spread), ("stored by columns", _by_columns), ("expanded", _expanded)):
        given = case.tensors() if layout == "expanded" else {name: lay(x) for name, x in case.tensors().items()}
        leaves = {name: x.requires_grad_() for name, x in given.items() if x.dtype.is_floating_point}
        op, p = case.build(**given), case.matrix(given)
        for what, x, actual, expected in _results(op, p, *(lay(x).requires_grad_() for x in _sides(op, d))):
            case.agree(f"strides: {what} with tensors {layout}", actual, expected)
            pull = lay(normal(*actual.shape, seed=3))
            _compare_gradients(case, f"{what} with tensors {layout}", actual, expected, {**leaves, "x": x}, pull)


def _spread(x: Tensor) -> Tensor:
    """A view with NaN between its entries."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0] if x.dtype.is_floating_point else x


def _by_columns(x: Tensor) -> Tensor:
    """A transposed contiguous tensor; unlike a spread view it keeps its strides when cloned."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def _expanded(x: Tensor) -> Tensor:
    """One number expanded to the whole tensor, like the gradient of a sum."""
    return x.flatten()[0].clone().expand(x.shape)


def check_vmap(case: Case) -> None:
    op, p = case.operator(), case.matrix(case.tensors())
    *batch, m, n = op.shape
    v, u = normal(2, *batch, n, 3, seed=1), normal(2, *batch, m, 3, seed=2)
    draws = [case.tensors(draw=0), case.tensors(draw=1)]
    floating = [name for name, x in draws[0].items() if x.dtype.is_floating_point]
    others = {name: x for name, x in draws[0].items() if name not in floating}
    stacked = [torch.stack([draw[name] for draw in draws]) for name in floating]
    with warnings.catch_warnings():
        # fused attention has no batching rule on CPU, so torch loops over it
        warnings.filterwarnings("ignore", "There is a performance drop")
        case.agree("vmap of apply over v", torch.func.vmap(op)(v), p @ v)
        case.agree("vmap of adjoint over u", torch.func.vmap(op.adjoint)(u), p.mT @ u)
        if floating:
            built = torch.func.vmap(lambda v, *xs: case.build(**others, **dict(zip(floating, xs, strict=True)))(v))
            expected = torch.stack([case.matrix(draw) @ x for draw, x in zip(draws, v, strict=True)])
            case.agree("vmap over the tensors P is built from", built(v, *stacked), expected)


def check_compile(case: Case, backend: str = "aot_eager") -> None:
    """`op` in one graph without breaks.  `aot_eager` needs no C++ compiler, unlike `inductor`."""
    op = case.operator()
    v, u = _sides(op, 3)
    run = torch.compile(lambda v, u: (op(v), op.adjoint(u)), fullgraph=True, backend=backend)
    with _fresh_compiler():
        applied, adjoint = run(v, u)
    case.agree(f"compile ({backend}) of apply", applied, op(v))
    case.agree(f"compile ({backend}) of adjoint", adjoint, op.adjoint(u))


def check_trace(case: Case, backend: str = "aot_eager") -> None:
    """The builder and `op` in one graph, as in a compiled layer."""
    op, tensors = case.operator(), case.tensors()
    v, _ = _sides(op, 3)
    run = torch.compile(lambda v, tensors: case.build(**tensors)(v), fullgraph=True, backend=backend)
    with _fresh_compiler():
        actual = run(v, tensors)
    case.agree(f"trace ({backend}) of building and applying", actual, op(v))


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # dynamo stops compiling a lambda after eight different operators
    with torch.no_grad():
        yield


def check_half(case: Case) -> None:
    """Each dtype against the reference for inputs rounded to that dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = case.tensors(dtype)
        op, p = case.build(**tensors), case.matrix(tensors)
        for d in case.widths():
            for what, _, actual, expected in _results(op, p, *_sides(op, d, dtype)):
                if actual.dtype != dtype:
                    raise ContractError(f"{case.name}: half: {what} of {dtype} returns {actual.dtype}")
                case.agree(f"half: {what} at width {d}", actual, expected, dtype)


def check_masked(case: Case) -> None:
    """Rows of v and of the input `k` at keys that no query attends to may hold NaN or infinity, in every dtype."""
    for dtype in TOLERANCE:
        tensors = case.tensors(dtype)
        op = case.build(**tensors)
        hidden = _hidden_keys(tensors, op.shape)
        if hidden is None:
            return
        v, u = _sides(op, case.widths()[-1], dtype)
        plain = {"v": v, **{name: tensors[name] for name in ("k",) if _has_rows(tensors, name, hidden)}}
        bad = {name: _poisoned(x, hidden) for name, x in plain.items()}
        expected, actual = (_results_and_gradients(case, {**tensors, "u": u, **x}) for x in (plain, bad))
        for what in expected:
            case.agree(f"masked: {what} with NaN and inf at masked keys", actual[what], expected[what], dtype)


def _hidden_keys(tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor | None:
    """Boolean (*batch, n), True at keys that the masks hide from every query; None if there are none."""
    visible = torch.ones(shape[-2:], dtype=torch.bool)
    if "key_mask" in tensors:
        visible = visible & share_between_heads(tensors["key_mask"], shape[:-2]).unsqueeze(-2)
    if "pair_mask" in tensors:
        visible = visible & tensors["pair_mask"]
    if "attn_bias" in tensors:
        visible = visible & (tensors["attn_bias"] > -math.inf)
    hidden = ~visible.any(-2)
    return hidden if bool(hidden.any()) else None


def _has_rows(tensors: Mapping[str, Tensor], name: str, hidden: Tensor) -> bool:
    """Whether a tensor has a row for each of the keys in `hidden`."""
    rows = tensors[name].shape[:-1] if name in tensors else torch.Size()
    return rows[-1:] == hidden.shape[-1:] and torch.broadcast_shapes(rows, hidden.shape) == rows


def _poisoned(x: Tensor, hidden: Tensor) -> Tensor:
    """x (*batch, n, d) with NaN, inf and -inf in the hidden rows, column by column."""
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype)[torch.arange(x.shape[-1]) % 3]
    return torch.where(hidden.unsqueeze(-1), bad, x)


def _results_and_gradients(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """P v, P^T u, dense P, and the gradients of the first two, by name; v and u are among the tensors."""
    tensors = {name: x.clone().requires_grad_() if x.dtype.is_floating_point else x for name, x in tensors.items()}
    op = case.build(**{name: x for name, x in tensors.items() if name not in ("v", "u")})
    results = {"apply": op(tensors["v"]), "adjoint": op.adjoint(tensors["u"])}
    gradients: dict[str, Tensor] = {}
    for what, result in results.items():
        floating = [name for name, x in tensors.items() if x.dtype.is_floating_point]
        pull, options = torch.ones_like(result), {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(result, [tensors[name] for name in floating], pull, retain_graph=True, **options)
        gradients |= {f"gradient of {what} with respect to {name}": x for name, x in zip(floating, found, strict=True)}
    return {**results, "dense": op.dense(), **gradients}


def check_copies(case: Case) -> None:
    op = case.operator()
    v, _ = _sides(op, 3)
    case.agree("copies: deepcopy", copy.deepcopy(op)(v), op(v))
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    case.agree("copies: torch.save and load", torch.load(file, weights_only=False)(v), op(v))
    if isinstance(case.build, torch.nn.Module):
        other = copy.deepcopy(case.build)
        with torch.no_grad():
            for x in other.parameters():
                x.zero_()
        other.load_state_dict(case.build.state_dict())
        case.agree("copies: state_dict of the builder", other(**case.tensors())(v), op(v))


def check_repeatable(case: Case) -> None:
    op = case.operator()
    v, u = _sides(op, 3)
    for what, first, second in (("apply", op(v), op(v)), ("adjoint", op.adjoint(u), op.adjoint(u))):
        if not torch.equal(first, second):
            raise ContractError(
                f"{case.name}: repeatable: two calls of {what} differ; draw random numbers when building P"
            )


CHECKS: dict[str, Callable[[Case], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
"""The checks by name, in the order in which they run: every function above whose name begins with check_."""
