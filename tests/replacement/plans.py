"""Plans made by hand, and P of every kind written out in float64 by the reference implementations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headwise.models import intercept
from headwise.operators.sparse.hashed import random_rotations
from headwise.replacement import Choice, Plan
from headwise.testing import references


def describe(model: nn.Module, batch: dict) -> dict[str, dict]:
    """Heads, width and causality of every site of a model, from one forward pass."""
    found: dict[str, dict] = {}

    def see(call) -> None:
        shape = call.q.shape
        found[call.site] = {"heads": shape[-3], "width": shape[-1], "causal": call.causal}

    with torch.no_grad(), intercept(model, see):
        model(**batch)
    return found


def plan_for(model: nn.Module, batch: dict, choices: Sequence[Choice], *, length: int = 40) -> Plan:
    """A plan with the same choices at every site, repeated to the number of heads."""
    sites = describe(model, batch)
    each = {name: [*choices] * (site["heads"] // len(choices)) for name, site in sites.items()}
    return Plan({"class": type(model).__name__, "sites": sites}, length, each)


# small enough that every kind does something on a dozen tokens
SMALL = [
    Choice("softmax"),
    Choice("uniform"),
    Choice("offset", {"by": -2}),
    Choice("toeplitz", {"reach": 3}),
    Choice("gaussian_window"),
    Choice("window", {"width": 4, "leading": 2}),
    Choice("window", {"width": 3}),
    Choice("nystrom", {"landmarks": 4}),
    Choice("projected", {"rank": 3}),
    Choice("efficient", {"sharpness": 1.5}),
    Choice("factored", {"rank": 3}),
    Choice("window_low_rank", {"width": 3, "rank": 2, "leading": 1}),
    Choice("near_far", {"block": 2, "rank": 2, "leading": 1}),
    Choice("hashed", {"rounds": 2, "chunk": 3}),
]
CAUSAL = [choice for choice in SMALL if choice.causal]
CACHED = [choice for choice in CAUSAL if choice.definition.cached]


def written_out(
    choice: Choice,
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float,
    own: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """P (b, m, n) in float64 of one head: q (b, m, k), k (b, n, k), key_mask (b, n), its learned tensors `own`."""
    q, k, own = q.double(), k.double(), {name: x.double() for name, x in (own or {}).items()}
    m, n, given, masks = q.shape[-2], k.shape[-2], choice.options, {"causal": causal, "key_mask": key_mask}
    usual = q * scale * math.sqrt(q.shape[-1])  # for twins that divide by the root themselves
    if choice.kind == "softmax":
        return references.softmax(q, k, scale=scale, **masks)
    if choice.kind == "uniform":
        return references.uniform(m, n, **masks)
    if choice.kind == "offset":
        return references.offset(m, n, given["by"], key_mask=key_mask)
    if choice.kind in ("toeplitz", "gaussian_window"):

        def logit(i: int, j: int) -> Tensor:
            offset = j - (i + n - m)
            if choice.kind == "gaussian_window":
                return -((offset - own["centre"]) ** 2) / (2 * own["log_width"].exp() ** 2)
            reach = int(given["reach"])
            return own["profile"][min(max(offset, -reach), reach) + reach]

        return references.normalised(references.matrix(m, n, logit), references.visible(m, n, **masks))
    if choice.kind == "window":
        leading = min(int(given["leading"]), n)
        return references.window(usual, k, int(given["width"]), leading=leading, **masks)
    if choice.kind == "nystrom":
        return references.nystrom(usual, k, min(int(given["landmarks"]), n), key_mask=key_mask)
    if choice.kind == "projected":
        return references.projected(usual, k, own["e"][:, :n], own["f"][:, :n], key_mask=key_mask)
    if choice.kind == "efficient":
        return references.efficient(q, k, scale=scale * given["sharpness"], **masks)
    if choice.kind == "factored":
        factor = scale * given["sharpness"] * math.sqrt(q.shape[-1])
        return references.factored(factor * q, factor * k, own["e"][:, :n], own["f"][:, :n], key_mask=key_mask)
    if choice.kind == "window_low_rank":
        e, f = own["e"][:, :n], own["f"][:, :n]
        leading = min(int(given["leading"]), n)
        return references.window_low_rank(
            q, k, int(given["width"]), e, f, own["bias"], leading=leading, scale=scale, key_mask=key_mask
        )
    if choice.kind == "near_far":
        a, b, c = own["a"], own["b"], own["c"]
        block, leading = int(given["block"]), min(int(given["leading"]), n - 1)
        return references.near_far(q, k, a, b, c, block=block, leading=leading, scale=scale, **masks)
    if choice.kind == "hashed":
        rounds, chunk = int(given["rounds"]), int(given["chunk"])
        rotations = random_rotations(q.shape[-1], n / chunk, rounds, generator=torch.Generator().manual_seed(0))
        # the hash is of q and k as they are; the scores have a scale
        root = math.sqrt(scale * math.sqrt(q.shape[-1]))
        return references.hashed(root * q, root * k, rotations, chunk=min(chunk, n), **masks)
    raise ValueError(choice.kind)
