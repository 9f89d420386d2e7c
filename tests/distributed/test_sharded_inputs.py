"""Models of transformers that a slice of tokens does not suffice for are refused, on every rank; others equal one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.distributed import Slices
from headwise.errors import UnsupportedError
from headwise.replacement.install.sharded_attention import sequence_parallel_model
from tests.distributed.pool import Failed, Pool

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
GPT = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}
BART = {
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_position_embeddings": 64,
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Roberta": {**SIZES, "max_position_embeddings": 64},
    "OPT": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 24, "max_position_embeddings": 64},
    "Lfm2": {**SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "Falcon": {**SIZES, "alibi": False},
    "GPT2": GPT,
    "Bart": BART,
    "ViT": {**SIZES, "image_size": 8, "patch_size": 4},
    "Llama": {**SIZES, "num_key_value_heads": 2},
}


def model(family: str, task: str = "Model") -> Any:
    import transformers

    torch.manual_seed(0)
    config = {"vocab_size": 50, "pad_token_id": 1, **CONFIGS.get(family, SIZES)}
    net = getattr(transformers, family + task)(getattr(transformers, f"{family}Config")(**config)).eval()
    for weight in net.parameters():
        weight.data *= 3 if weight.dim() > 1 else 1  # as far from linear as trained ones
    return net


def run(net: nn.Module, given: dict[str, Tensor], held: Slices, offset: int | None = 0) -> float:
    """The largest difference of this rank's rows from those of one process, which numbers tokens itself."""
    rank = dist.get_rank()
    own: dict[str, Any] = {name: held.cut(x, rank, dim=1) for name, x in given.items()}
    if offset is not None:
        own["position_ids"] = held.positions(rank).unsqueeze(0) + offset
    with torch.no_grad():
        with sequence_parallel_model(net, zigzag=held.zigzag):
            found = net(**own)[0]
        expected = held.cut(net(**given)[0], rank, dim=1)
    if "attention_mask" in own:
        expected, found = (x * own["attention_mask"].unsqueeze(-1) for x in (expected, found))
    return float((found - expected).abs().amax())


def texts(n: int, *, hidden: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, n), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids}
    if hidden:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :hidden] = 0
    return given


def refused(what: str) -> None:
    held, rank, ids = Slices((9, 14)), dist.get_rank(), texts(5)["input_ids"]
    if what == "jump":
        positions = torch.tensor([[5, 6, 7, 0, 1] if rank else [0, 1, 2, 3, 4]])
        with sequence_parallel_model(net := model("Llama")):
            net(ids, position_ids=positions, use_cache=False)
    elif what == "names":
        own = {
            "position_ids": torch.arange(5).unsqueeze(0),
            **({"token_type_ids": torch.zeros_like(ids)} if rank else {}),
        }
        with sequence_parallel_model(net := model("Bert")):
            net(ids, **own)
    elif what == "image":
        with sequence_parallel_model(net := model("ViT")):
            net(torch.zeros(1, 3, 8, 8))
    elif what == "labels":
        with sequence_parallel_model(net := model("GPT2", "LMHeadModel")):
            net(ids, labels=ids)
    elif what == "nothing":
        run(model("Llama"), texts(23), Slices((0, 23)))
    elif what == "pooled":
        run(model("Bert", "ForSequenceClassification"), texts(23), held)
    elif what == "no positions":
        run(model("Llama"), texts(23), held, None)
    elif what == "padding":
        run(model("OPT"), texts(23, hidden=4), held)
    else:
        run(model(what), texts(23), held)


REFUSED = {
    "Roberta": r"RobertaModel does not number .* held.positions\(rank\) \+ 2",
    "Lfm2": "Lfm2Model mixes tokens outside",
    "Falcon": "FalconModel mixes tokens outside",
    "jump": r"position_ids that jump: .*\(on rank 1\)",
    "names": "rank [01] calls BertModel with input_ids, position_ids, token_type_ids",
    "image": "ViTModel was given pixel_values",
    "labels": "compute the loss from the logits",
    "nothing": "this rank has no tokens",
    "pooled": r"chooses or pools tokens.*\(BertModel\)",
    "no positions": r"LlamaModel was called without position_ids",
    "padding": "OPTModel does not number these tokens",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_slice_does_not_suffice_for_is_refused_on_every_rank(two: Pool, what: str) -> None:
    with pytest.raises(Failed, match=REFUSED[what]) as failed:
        two.run(refused, what)
    assert [error and error[0] for error in failed.value.errors] in (["UnsupportedError"] * 2, ["InputError"] * 2)
    assert not any("\n" in error[1] for error in failed.value.errors if error)


def test_a_model_that_numbers_tokens_by_itself_is_refused(two: Pool) -> None:
    with pytest.raises(Failed, match="BartModel takes no position_ids"):
        two.run(without_positions)


def without_positions() -> None:
    run(model("Bart"), texts(23), Slices((9, 14)), None)


def accepted() -> dict[str, float]:
    even, zigzag = Slices((9, 14)), Slices((9, 14), zigzag=True)
    return {
        "Roberta": run(model("Roberta"), texts(23), even, 2),
        "padded": run(model("Llama"), texts(23, hidden=4), even),
        "a rank without padding, zig-zag": run(model("Llama"), texts(23, hidden=4), zigzag),
        "zig-zag without a mask": run(model("Llama"), texts(23), zigzag),
        "a single token": run(model("GPT2"), texts(23), Slices((1, 22))),
        "head of a language model": run(model("Llama", "ForCausalLM"), texts(23), even),
        "start and end logits": run(model("Bert", "ForQuestionAnswering"), texts(23), even),
    }


def test_others_equal_one_process(two: Pool) -> None:
    for found in two.run(accepted):
        assert max(found.values()) < 1e-5, found


def hooks_left() -> list[int]:
    net = model("GPT2")
    net.train()
    with sequence_parallel_model(net):
        pass
    with pytest.raises(UnsupportedError), sequence_parallel_model(net):
        net(texts(5)["input_ids"])
    with sequence_parallel_model(net):
        with pytest.raises(UnsupportedError):
            net(texts(5)["input_ids"])
        net.eval()
        net(texts(5)["input_ids"], position_ids=torch.arange(5).unsqueeze(0) + 5 * dist.get_rank())  # still works
        with pytest.raises(UnsupportedError):  # still checked
            net(texts(5)["input_ids"])
        net.train()
    return [len(net._forward_pre_hooks), len(net._forward_hooks), not net.training]


def test_nothing_is_left_behind(two: Pool) -> None:
    assert two.run(hooks_left) == [[0, 0, False]] * 2
