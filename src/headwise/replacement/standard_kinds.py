"""The kinds that come with headwise, in the order in which `plan` tries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.operators._kernels import limits
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.near_far import near_far, near_far_pattern
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projections import Dense
from headwise.operators.linear.window_low_rank import window_low_rank
from headwise.operators.relative.offset import offset
from headwise.operators.relative.toeplitz import toeplitz_softmax
from headwise.operators.softmax import softmax
from headwise.operators.sparse.fixed import fixed
from headwise.operators.sparse.hashed import hashed, random_rotations
from headwise.operators.sparse.strided import strided
from headwise.operators.sparse.window import window, window_pattern
from headwise.operators.uniform import uniform
from headwise.replacement.kinds import (
    AttentionSample,
    Choice,
    HeadInputs,
    Kind,
    KindOption,
    Options,
    Tensors,
    register_kind,
)

LEADING = (0, 4, 16)
"""First keys that candidates attend to: heads with nothing to attend to use them, and break without them."""

LARGEST = 1 << 20
"""Bound of everything that is counted in tokens or features."""

LEADING_OPTION, RANK, SHARPNESS = KindOption(0, 0, LARGEST), KindOption(64, 1, LARGEST), KindOption(1.0, 1e-6, 1e6)


# ---- functions of the offset j - i ----


def _toeplitz(x: HeadInputs, logits: Callable[[Tensor], Tensor], device: torch.device) -> AttentionOperator:
    """softmax of logits(j - i): a function of the offsets (m + n - 1,), the last query at the last key.

    The learned tensors are on `device`; q and k may be without values, on meta, to see what is built.
    """
    by_offset = logits(torch.arange(-(x.n - 1), x.m, device=device)).to(x.q.dtype)
    return toeplitz_softmax(by_offset.unsqueeze(0), x.m, x.n, **x.masks)


def _profile(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    reach, profile = options["reach"], tensors["profile"]
    return _toeplitz(
        x, lambda offset: profile.index_select(-1, offset.clamp(-reach, reach) + reach), device=profile.device
    )


def _gaussian_window(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    centre, precision = (y.unsqueeze(-1) for y in (tensors["centre"], (-2 * tensors["log_width"]).exp()))
    return _toeplitz(x, lambda offset: -(offset.to(centre.dtype) - centre).square() * precision / 2, centre.device)


def mean_profile(samples: Sequence[AttentionSample], reach: int) -> Tensor:
    """Mean of P_(i, i+o) over i for o = -reach..reach, (h, 2 reach + 1); the two ends average all larger offsets."""
    q = samples[0].inputs.q
    heads = q.shape[1]
    total, count = q.new_zeros(heads, 2 * reach + 1), q.new_zeros(2 * reach + 1)
    for x in (sample.inputs for sample in samples):
        keys = repeat_heads(x.k, x.q, "mean_profile")
        block = max(1, limits.SCORE_ENTRIES // (len(x.q) * heads * x.n))
        for start in range(0, x.n, block):
            stop = min(x.n, start + block)
            place = (torch.arange(x.n) - torch.arange(start, stop)[:, None]).clamp(-reach, reach) + reach
            visible = x.mask.rows(start, stop).expand(len(x.q), 1, -1, -1)
            scores = (x.scale * x.q[:, :, start:stop] @ keys.mT).masked_fill(~visible, -1e30)
            p = scores.softmax(-1).masked_fill(~visible, 0)
            total.index_add_(1, place.flatten(), p.sum(0).flatten(1))
            count.index_add_(0, place.flatten(), visible.sum((0, 1)).flatten().to(count))
    return total / count.clamp(min=1)


def _start_profile(options: Options, samples: Sequence[AttentionSample], generator: torch.Generator) -> Tensors:
    """The logarithm of the mean weight at each offset."""
    return {"profile": mean_profile(samples, options["reach"]).clamp(min=1e-9).log().float()}


def _start_gaussian_window(options: Options, samples: Sequence[AttentionSample], generator: torch.Generator) -> Tensors:
    """Mean and spread of the offsets that a head attends to; the spread is bounded below."""
    reach = min(64, samples[0].inputs.n - 1)
    weights = mean_profile(samples, reach)[:, 1:-1]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    offsets = torch.arange(-reach + 1, reach, dtype=weights.dtype)
    centre = (weights * offsets).sum(-1)
    variance = (weights * (offsets - centre.unsqueeze(-1)).square()).sum(-1).clamp(min=0.05)
    return {"centre": centre.float(), "log_width": variance.log().float() / 2}


# ---- neighbours, with and without a summary of the other keys ----


def _window(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    width, leading = options["width"], min(options["leading"], x.n)
    if x.padding_before is None or not leading:
        return window(x.q, x.k, width, leading=leading, scale=x.scale, **x.masks)
    # new queries against a cache that begins with padding: the leading keys differ from sequence to sequence
    i, j = torch.arange(x.n - x.m, x.n, device=x.q.device)[:, None], torch.arange(x.n, device=x.q.device)
    pairs = (j <= i) & ((j > i - width) | (j < (x.padding_before + leading).unsqueeze(-1)))  # (b, m, n)
    return softmax(x.q, x.k, scale=x.scale, key_mask=x.mask.key_mask, pair_mask=pairs.unsqueeze(1))


def _windows(length: int, causal: bool) -> list[Options]:
    """Widths 2^i up to half the length: a window on one side has as many keys as half of one on both sides."""
    widths = [1 << i for i in range(4, 20) if (1 << i) <= length // 2][-7:]
    return [{"width": w if causal else w + 1, "leading": leading} for w in widths for leading in LEADING]


def _fixed(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    block = min(options["block"], x.n)
    return fixed(x.q, x.k, block, min(options["summaries"], block), scale=x.scale, **x.masks)


def _near_far(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    a, b, c = (tensors[name].to(x.q.dtype) for name in ("a", "b", "c"))
    block, leading = _near_far_sizes(x, options)
    return near_far(x.q, x.k, a, b, c, block=block, leading=leading, scale=x.scale, **x.masks)


def _near_far_sizes(x: HeadInputs, options: Options) -> tuple[int, int]:
    return min(options["block"], x.n), min(options["leading"], x.n - 1)


def _near_far_pattern(x: HeadInputs, options: Options) -> KeyPattern:
    return near_far_pattern(*_near_far_sizes(x, options), options["rank"], x.mask.causal)


def _initial_near_far(options: Options, length: int, width: int) -> Tensors:
    rank = options["rank"]
    # far keys weigh as if their scores were zero
    return {"a": torch.zeros(rank, width), "b": torch.zeros(rank, width), "c": torch.zeros(rank) - math.log(rank)}


def _start_near_far(options: Options, samples: Sequence[AttentionSample], generator: torch.Generator) -> Tensors:
    """Features u drawn from recorded queries: with b = u and a = u / 2, u weighs most for queries near u,

    exp(s (q . u - |u|^2 / 2)) exp(s u . k) / e
    """
    rank, rows = options["rank"], []
    for x in (sample.inputs for sample in samples):
        real = torch.ones(len(x.q), x.n, dtype=torch.bool) if x.mask.key_mask is None else x.mask.key_mask[:, 0]
        rows.append(x.q.transpose(0, 1)[:, real.expand(len(x.q), -1)])
    queries = torch.cat(rows, dim=1)  # (h, rows, k)
    if rank == 1:
        u = queries.mean(1, keepdim=True)
        return {"a": u / 2, "b": u, "c": u.new_full(u.shape[:2], -1.0)}
    u = queries[:, torch.randint(queries.shape[1], (rank,), generator=generator)]
    return {"a": u / 2, "b": u, "c": -samples[0].inputs.scale * u.square().sum(-1) / 2 - 1}


# ---- all keys at linear cost ----


@torch.library.custom_op("headwise::hash_rotations", mutates_args=())
def _rotations(q: Tensor, buckets: float, rounds: int) -> Tensor:
    """The same rotations in every call; torch.compile cannot trace a generator, so this is an operator of its own."""
    return random_rotations(q.shape[-1], buckets, rounds, generator=torch.Generator().manual_seed(0)).to(q)


@_rotations.register_fake
def _(q: Tensor, buckets: float, rounds: int) -> Tensor:
    return random_rotations(q.shape[-1], buckets, rounds).to(q)


def _hashed(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    rounds, chunk, heads = options["rounds"], options["chunk"], x.q.shape[1]
    rotations = _rotations(x.q.detach(), x.n / chunk, rounds)
    k = x.k if x.k.shape[1] == heads else x.k.repeat_interleave(heads // x.k.shape[1], 1)
    return hashed(x.q, k, rotations, rounds=rounds, chunk=chunk, scale=x.scale, **x.masks)


# ---- learned projections of the keys: e and f have a column per position ----


def _projections(kind: str, x: HeadInputs, tensors: Tensors) -> tuple[Dense, Dense]:
    """The columns of e and f for n keys."""
    longest = tensors["e"].shape[-1]
    if x.n > longest:
        raise UnsupportedError(
            f"{kind}: its projection was fitted for at most {longest} keys, but there are {x.n}; "
            "shorten the input, or plan again with a greater length"
        )
    e, f = (Dense(tensors[name][..., : x.n].to(x.q.dtype)) for name in ("e", "f"))
    return e, f


def _projected(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    return projected(x.q, x.k, *_projections("projected", x, tensors), scale=x.scale, **x.masks)


def _factored(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    e, f = _projections("factored", x, tensors)
    return factored(x.q, x.k, e, f, scale=options["sharpness"] * x.scale, **x.masks)


def _window_low_rank(x: HeadInputs, options: Options, tensors: Tensors) -> AttentionOperator:
    e, f = _projections("window_low_rank", x, tensors)
    leading, bias = min(options["leading"], x.n), tensors["bias"].to(x.q.dtype)
    return window_low_rank(x.q, x.k, options["width"], e, f, bias, leading=leading, scale=x.scale, **x.masks)


def _initial_projections(options: Options, length: int, width: int) -> Tensors:
    """Means of `rank` segments of nearly equal length: e and f (rank, length)"""
    rank = min(options["rank"], length)
    segment = (torch.arange(length) * rank).div(length, rounding_mode="floor")
    e = torch.nn.functional.one_hot(segment, rank).T.float()
    e = e / e.sum(-1, keepdim=True).clamp(min=1)
    return {"e": e, "f": e.clone()}


def _initial_window_low_rank(options: Options, length: int, width: int) -> Tensors:
    tensors = _initial_projections(options, length, width)
    # the mean of length / rank keys weighs as much as these keys
    return {**tensors, "bias": tensors["e"].gt(0).sum(-1).float().log()}


PROJECTION_STEPS = {"e": 0.001, "f": 0.001}


def _none(length: int, causal: bool) -> list[Options]:
    """Only for `choices` and plans by hand: `plan` would never choose it on the models measured, or it is learned.

    Learned tensors are of the texts they were fitted to, so that a bound for other kinds does not hold for them;
    features of rotated queries and keys (near_far) also depend on where a text stands.
    """
    return []


STANDARD_KINDS = {
    "softmax": Kind(
        "softmax over all keys, unchanged",
        lambda x, options, tensors: softmax(x.q, x.k, scale=x.scale, **x.masks),
        causal=True,
        cached=True,
        cross_attention=True,
        pattern=lambda x, options: KeyPattern(),
    ),
    "uniform": Kind(
        "the mean of the values",
        lambda x, options, tensors: uniform(x.m, x.n, **x.masks),
        causal=True,
        cached=True,
        cross_attention=True,
        features=lambda x, scale, options: torch.zeros_like(x[..., :1]),
        reads_scores=False,
        candidates=_none,
    ),
    "offset": Kind(
        "the key `by` positions later, or the outermost one at the ends",
        lambda x, options, tensors: offset(x.m, x.n, options["by"], key_mask=x.mask.key_mask, device=x.q.device),
        {"by": KindOption(0, -LARGEST, LARGEST)},
        causal=lambda options: options["by"] <= 0,
        cached=True,
        reads_scores=False,
        candidates=_none,
    ),
    "toeplitz": Kind(
        "softmax of a learned profile over offsets -reach..reach, constant beyond",
        _profile,
        {"reach": KindOption(128, 0, LARGEST)},
        lambda options, length, width: {"profile": torch.zeros(2 * options["reach"] + 1)},
        _start_profile,
        {"profile": 0.05},
        causal=True,
        cached=True,
        reads_scores=False,
        candidates=_none,
    ),
    "gaussian_window": Kind(
        "softmax of -(offset - centre)^2 / (2 width^2), centre and width learned",
        _gaussian_window,
        initial=lambda options, length, width: {"centre": torch.zeros(()), "log_width": torch.zeros(())},
        start=_start_gaussian_window,
        causal=True,
        cached=True,
        reads_scores=False,
        candidates=_none,
    ),
    "window": Kind(
        "softmax over `width` neighbours and the `leading` first keys",
        _window,
        {"width": KindOption(65, 1, LARGEST), "leading": LEADING_OPTION},
        candidates=_windows,
        causal=True,
        cached=True,
        from_first_key=True,
        pattern=lambda x, options: window_pattern(options["width"], min(options["leading"], x.n), x.mask.causal),
    ),
    "near_far": Kind(
        "softmax over neighbouring blocks and the `leading` first keys, `rank` learned features for all other keys",
        _near_far,
        {"block": KindOption(16, 1, LARGEST), "rank": KindOption(4, 1, 4096), "leading": LEADING_OPTION},
        _initial_near_far,
        _start_near_far,
        {"a": 0.1, "b": 0.1, "c": 0.1},
        candidates=_none,
        causal=True,
        from_first_key=True,
        by_products=False,
        ablation=lambda o: Choice("window", {"width": 2 * o["block"] + 1, "leading": o["leading"]}),
        pattern=_near_far_pattern,
    ),
    "efficient": Kind(
        "softmax over the features of q times softmax over the keys of k",
        lambda x, options, tensors: efficient(x.q, x.k, scale=options["sharpness"] * x.scale, **x.masks),
        {"sharpness": SHARPNESS},
        causal=True,
        cached=True,
        cross_attention=True,
        features=lambda x, scale, options: x * (options["sharpness"] * scale),
        by_products=False,
        candidates=_none,
    ),
    "strided": Kind(
        "softmax over keys at most `stride` away, and over every `stride`-th one",
        lambda x, options, tensors: strided(x.q, x.k, min(options["stride"], x.n), scale=x.scale, **x.masks),
        {"stride": KindOption(32, 1, LARGEST)},
        causal=True,
        candidates=_none,
    ),
    "fixed": Kind(
        "softmax over the query's own block and the last `summaries` keys of every block",
        _fixed,
        {"block": KindOption(32, 1, LARGEST), "summaries": KindOption(1, 1, LARGEST)},
        causal=True,
        from_first_key=True,
        candidates=_none,
    ),
    "hashed": Kind(
        "softmax over keys near the query in the order of a locality-sensitive hash",
        _hashed,
        {"rounds": KindOption(4, 1, 64), "chunk": KindOption(64, 1, LARGEST)},
        causal=True,
        by_products=False,
        candidates=_none,
    ),
    "nystrom": Kind(
        "Nyström approximation through the means of `landmarks` segments",
        lambda x, options, tensors: nystrom(x.q, x.k, min(options["landmarks"], x.m, x.n), scale=x.scale, **x.masks),
        {"landmarks": RANK},
        cross_attention=True,
        from_first_key=True,
        candidates=_none,
    ),
    "projected": Kind(
        "softmax over `rank` learned mixtures of the keys",
        _projected,
        {"rank": RANK},
        _initial_projections,
        step_sizes=PROJECTION_STEPS,
        cross_attention=True,
        from_first_key=True,
        candidates=_none,
    ),
    "factored": Kind(
        "`efficient` over `rank` learned mixtures of the keys",
        _factored,
        {"rank": RANK, "sharpness": SHARPNESS},
        _initial_projections,
        by_products=False,
        step_sizes=PROJECTION_STEPS,
        cross_attention=True,
        from_first_key=True,
        candidates=_none,
    ),
    "window_low_rank": Kind(
        "softmax over `width` neighbours, the `leading` first keys and `rank` learned mixtures of all keys",
        _window_low_rank,
        {"width": KindOption(33, 1, LARGEST), "rank": KindOption(16, 1, LARGEST), "leading": LEADING_OPTION},
        _initial_window_low_rank,
        step_sizes={**PROJECTION_STEPS, "bias": 0.1},
        from_first_key=True,
        ablation=lambda o: Choice("window", {"width": o["width"], "leading": o["leading"]}),
        candidates=_none,
    ),
}
for name, kind in STANDARD_KINDS.items():
    register_kind(name, kind)

SOFTMAX = Choice("softmax")
