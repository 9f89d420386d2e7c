"""Any other PyTorch model: its calls of scaled_dot_product_attention are computed by MixedHeads while it runs.

torch.nn.TransformerEncoder, nn.MultiheadAttention and hand-written attention all end in that function; their modules
are not changed.  Several threads may run it at once, and other models beside it; torch.compile skips it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.intercept import intercept, is_checkpointed, nothing_seen, read_sdpa
from headwise.replacement.install.mixed_heads import MixedHeads, is_padding_or_causal
from headwise.replacement.plans import Plan


class RewrittenModel(nn.Module):
    """`model` with MixedHeads at the sites of a plan; called like `model`.

    The MixedHeads are submodules, so their learned tensors are parameters and part of the state dict.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        like = next(model.parameters(), torch.empty(0))
        self.sites = tuple(plan.sites)
        self.heads = nn.ModuleList(plan.mixed_heads(site).to(like.device, like.dtype) for site in self.sites)
        for site, heads in zip(self.sites, self.heads, strict=True):
            assert isinstance(heads, MixedHeads)
            heads.exact_below, heads.beyond = plan.exact_below.get(site, 0), plan.beyond
        self.heads.train(model.training)
        self.training = model.training  # not self.train, which would change the modes of parts of the model

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The output of the model with its heads replaced; raises if a planned site does not compute attention."""
        heads = dict(zip(self.sites, self.heads, strict=True))
        missed, has_gradients = set(self.sites), torch.is_grad_enabled()

        def answer(site: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
            missed.discard(site)
            mixed = heads.get(site)
            keys = call[1] if len(call) > 1 else options["key"]
            if not isinstance(mixed, MixedHeads) or mixed.replaced is None or mixed.runs_exact(keys.shape[-2]):
                return original(*call, **options)
            if has_gradients and is_checkpointed(FORWARD):
                raise UnsupportedError(
                    f"{site}: {type(self.model).__name__} uses torch.utils.checkpoint, which computes this part again "
                    "in the backward pass, with its own attention instead of the plan's; switch gradient checkpointing "
                    "off, or checkpoint the whole rewritten model"
                )
            return _attend(site, mixed, call, options)

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


def _attend(site: str, heads: MixedHeads, call: tuple, options: dict) -> Tensor:
    assert heads.replaced is not None
    head, choice = heads.replaced
    q, k, v, mask, scale = read_sdpa(*call, **options)
    if not is_padding_or_causal(mask):
        raise UnsupportedError(
            f"{site}: head {head} is {choice}, which does not support a mask (m = {mask.m}, n = {mask.n}) that is "
            "neither padding nor causal"
        )
    dropout = options.get("dropout_p", call[4] if len(call) > 4 else 0.0)
    if dropout:
        raise UnsupportedError(
            f"{site}: head {head} is {choice}, which does not support attention dropout of {dropout:g}; call "
            "model.eval(), or build the model without attention dropout"
        )
    out = heads(q, k, v, key_mask=mask.key_mask, causal=mask.causal, scale=scale)
    query = call[0] if call else options["query"]
    return out.reshape(*query.shape[:-1], out.shape[-1])


FORWARD = inspect.unwrap(RewrittenModel.forward).__code__
"""What torch.compiler.disable wraps."""
