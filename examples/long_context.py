"""One sequence on several processes: layers of headwise.nn, and a rewritten model of transformers.

    torchrun --nproc-per-node 2 examples/long_context.py [--tokens 512]

Each process holds a slice of the sequence.  The result of every process is compared with the same rows computed by one
process alone, which is only possible because the sequence is short; the largest difference is printed.
On two machines: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 …
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch._dynamo  # before the process group is made: imported later, it keeps the group's threads beyond its end
import torch.distributed as dist
from torch import Tensor

from headwise.distributed import Slices, sequence_parallel
from headwise.nn import Encoder, GridAttention, MultiHead
from headwise.operators import efficient, softmax, window


def multihead(n: int, rank: int, size: int) -> float:
    """Causal softmax on zig-zag slices, which give every process the same work; with gradients."""
    held = Slices.even(n, size, zigzag=True)
    torch.manual_seed(0)
    layer, x = MultiHead(64, 4), torch.randn(1, n, 64)
    whole = x.clone().requires_grad_()
    layer(whole, causal=True).square().mean().backward()
    expected = [layer.query.weight.grad.clone(), held.cut(whole.grad, rank)]  # type: ignore[union-attr, arg-type]

    layer.zero_grad()
    layer.build = sequence_parallel(softmax, zigzag=True)
    part = held.cut(x, rank).requires_grad_()
    (layer(part, causal=True).square().sum() / (n * 64)).backward()  # the parts of the mean add up over the ranks
    gradient = layer.query.weight.grad
    assert gradient is not None
    assert part.grad is not None
    dist.all_reduce(gradient)
    return max(_relative(a, b) for a, b in zip([gradient, part.grad], expected, strict=True))


def encoder(n: int, rank: int, size: int) -> float:
    """A window, then linear attention; slices of unequal lengths."""
    held = Slices(tuple(n // size + (size - 1 - 2 * r) for r in range(size)))
    builds = [partial(window, width=17), efficient]
    torch.manual_seed(1)
    whole, x = Encoder(64, 4, 2, build=builds), torch.randn(1, n, 64)
    sharded = Encoder(64, 4, 2, build=[sequence_parallel(build) for build in builds])
    sharded.load_state_dict(whole.state_dict())
    with torch.no_grad():
        return _relative(sharded(held.cut(x, rank)), held.cut(whole(x), rank))


def grid(n: int, rank: int, size: int) -> float:
    """An image whose rows are dealt out: row-major order makes slices of rows contiguous slices of cells."""
    torch.manual_seed(2)
    side = max(size, 8)
    layer, image = GridAttention(32, 4), torch.randn(1, 32, side, side)
    held = Slices.even(side, size)
    with torch.no_grad():
        expected = held.cut(layer(image), rank)
        layer.attend.build = sequence_parallel(softmax)
        return _relative(layer(held.cut(image, rank)), expected)


def rewritten_model(n: int, rank: int, size: int) -> float:
    """A small Llama with windows and softmax in place of its heads, positions by position_ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headwise.models import intercept
    from headwise.replacement import Choice, Plan, rewrite
    from headwise.replacement.install.sharded_attention import sequence_parallel_model

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * n,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(256, (1, n))
    sites: dict[str, dict] = {}
    with torch.no_grad(), intercept(model, lambda call: sites.update({call.site: _site(call)})):
        model(ids)
    narrow = Choice("window", {"width": 17, "leading": 1})
    heads = [narrow, narrow, Choice("window", {"width": 33}), Choice("softmax")]
    plan = Plan({"class": type(model).__name__, "sites": sites}, n, dict.fromkeys(sites, heads))
    model, _ = rewrite(model, plan)
    held = Slices.even(n, size)
    with torch.no_grad():
        expected = held.cut(model(ids).logits, rank)
        with sequence_parallel_model(model):
            positions = held.positions(rank).unsqueeze(0)
            found = model(held.cut(ids, rank, dim=1), position_ids=positions, use_cache=False).logits
    return _relative(found, expected)


def _site(call) -> dict:
    return {"heads": call.q.shape[-3], "width": call.q.shape[-1], "causal": call.causal}


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().amax() / y.abs().amax())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    n = parser.parse_args().tokens
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for part in (multihead, encoder, grid, rewritten_model):
        worst = torch.tensor(part(n, rank, size))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{part.__name__:16} {size} processes equal one to {worst:.1e}")
    dist.barrier()  # no connection is closed while another rank still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
