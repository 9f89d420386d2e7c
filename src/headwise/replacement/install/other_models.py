"""Any other PyTorch model: its calls of scaled_dot_product_attention are answered by Heads, while it runs.

torch.nn.TransformerEncoder, nn.MultiheadAttention and attention written by hand all end in that one function; no module
of theirs is changed.  One such model runs at a time in a process, and torch.compile leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.intercept import intercept, nothing_seen
from headwise.models.sdpa_masks import read_call
from headwise.replacement.install.mixed_heads import Heads
from headwise.replacement.rewrite import Plan, site_heads


class Rewritten(nn.Module):
    """`model` with Heads at the sites of a plan; called like `model`.

    The Heads are submodules, so their learned tensors are parameters and part of the state dict.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        like = next(model.parameters(), torch.empty(0))
        self.sites = tuple(plan.sites)
        self.heads = nn.ModuleList(site_heads(plan, site).to(like.device, like.dtype) for site in self.sites)
        self.train(model.training)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the model computes with its heads replaced; a site that was not reached is an error."""
        missed = set(self.sites)

        def answer(site: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
            missed.discard(site)
            if site not in self.sites:
                return original(*call, **options)
            return _answer(site, self._at(site), original, call, options)

        with intercept(self.model, answer=answer):
            out = self.model(*args, **kwargs)
        if len(missed) == len(self.sites):
            raise nothing_seen(self.model)
        if missed:
            raise UnsupportedError(
                f"{type(self.model).__name__} did not compute attention at {', '.join(sorted(missed))}, where the plan "
                "replaces heads; plan again for this model and input"
            )
        return out

    def _at(self, site: str) -> Heads:
        heads = self.heads[self.sites.index(site)]
        assert isinstance(heads, Heads)
        return heads


def _answer(site: str, heads: Heads, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
    if heads.exact:
        return original(*call, **options)
    head, choice = next((i, c) for i, c in enumerate(heads.choices) if c.kind != "exact")
    q, k, v, seen, scale = read_call(*call, **options)
    if seen.full is not None:
        raise UnsupportedError(
            f"{site}: head {head} is {choice}, which cannot take a mask of shape {tuple(seen.full.shape)} that is "
            "neither padding nor causal"
        )
    dropout = options.get("dropout_p", call[4] if len(call) > 4 else 0.0)
    if dropout:
        raise UnsupportedError(
            f"{site}: head {head} is {choice}, which cannot take attention dropout of {dropout:g}; call model.eval() "
            "or make its attention without dropout"
        )
    out = heads(q, k, v, keep=seen.keep, causal=seen.causal, scale=scale)
    query = call[0] if call else options["query"]
    return out.reshape(*query.shape[:-1], out.shape[-1])
