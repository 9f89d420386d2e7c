"""One text examined by several processes gives the numbers of one process; models that cannot be shared are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headwise.errors import HeadwiseError, InputError
from headwise.examination import Examination, examine
from tests.distributed.pool import Pool

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}


def model(kind: str, **more: object) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **{**SIZES, **more})
    return getattr(transformers, f"{kind}Model")(config).eval()


def text(n: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 50, (1, n), generator=torch.Generator().manual_seed(n))}


def same(one: Examination, other: Examination) -> None:
    assert [record.kind for record in one.records] == [record.kind for record in other.records]
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert mine.measures.keys() == theirs.measures.keys()
        for name, value in theirs.measures.items():
            assert mine.measures[name].mean == pytest.approx(value.mean, rel=1e-5, abs=1e-7, nan_ok=True), name
        torch.testing.assert_close(torch.tensor(mine.profile), torch.tensor(theirs.profile), rtol=1e-5, atol=1e-7)
    for name in ("relative_residual", "difference", "mean_cosine", "norm"):
        assert one.layers[name] == pytest.approx(other.layers[name], rel=1e-5)
    torch.testing.assert_close(torch.tensor(one.redundancy), torch.tensor(other.redundancy), rtol=1e-4, atol=1e-5)


def alone(net: nn.Module, batch: dict[str, torch.Tensor]) -> Examination:
    """What one process measures, while a group is open."""
    is_open, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        return examine(net, [batch], spectra_every=1, excerpt={"input_ids": batch["input_ids"][:, :16]})
    finally:
        dist.is_initialized = is_open


def shared(net: nn.Module, batch: dict[str, torch.Tensor]) -> Examination:
    return examine(net, [batch], spectra_every=1, sequence_parallel=True)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(HeadwiseError) as error:
        call()
    return str(error.value)


def one_process() -> None:
    """What every process of the tests below runs."""
    for net, n in [
        (model("Llama", num_key_value_heads=2), 45),
        (model("Bert"), 40),
        (model("Llama").to(torch.bfloat16), 30),
    ]:
        rough = next(net.parameters()).dtype == torch.bfloat16
        found, expected = shared(net, text(n)), alone(net, text(n))
        if rough:  # its outputs are rounded elsewhere
            difference = [abs(x - y) for x, y in zip(found.layers["norm"], expected.layers["norm"], strict=True)]
            assert max(difference) < 2e-2 * max(expected.layers["norm"])
        else:
            same(found, expected)
    assert "counts positions in its own way" in refusal(lambda: shared(model("Roberta"), text(40)))
    assert "a mask or a bias" in refusal(
        lambda: shared(model("Mistral", sliding_window=4, num_key_value_heads=2), text(40))
    )
    assert "takes no position_ids" in refusal(lambda: shared(nn.Linear(1, 1), text(40)))
    padded = {**text(40), "attention_mask": torch.ones(1, 40, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)}
    assert "has padding" in refusal(lambda: shared(model("Llama"), padded))
    few = 2 * dist.get_world_size() - 1  # transformers does not say that the attention of a single token is causal
    assert "need 2 tokens each" in refusal(lambda: shared(model("Llama"), text(few)))
    batch = {"input_ids": text(40)["input_ids"].reshape(2, 20)}
    assert "one text at a time" in refusal(lambda: shared(model("Llama"), batch))
    if dist.get_world_size() > 2:
        assert "heads for" in refusal(lambda: shared(model("Llama", num_attention_heads=2), text(40)))


def test_two_processes_have_the_numbers_of_one(two: Pool) -> None:
    two.run(one_process)


@pytest.mark.slow
def test_four_processes_have_the_numbers_of_one(four: Pool) -> None:
    four.run(one_process)


def examined_apart() -> list[str]:
    """Sentences of this rank where its weights, texts or settings are others than those of rank 0."""
    rank = dist.get_rank()
    net = model("Llama")
    assert "text 1: a text of 1 tokens" in refusal(lambda: examine(net, [text(9), text(1)], sequence_parallel=True))
    own = model("Llama")
    own.layers[0].mlp.up_proj.weight.data += rank
    return [
        refusal(lambda: examine(own, [text(9), text(8)])),
        refusal(lambda: examine(net, [text(9), text(8 + rank)])),
        refusal(lambda: examine(net, [text(9)] * (2 + rank), sequence_parallel=True)),
        refusal(lambda: examine(net, [text(9)], sequence_parallel=rank > 0)),
        refusal(lambda: examine(net, [text(9)], seed=rank)),
    ]


def test_processes_that_examine_different_things_end_with_a_sentence(two: Pool) -> None:
    for found in two.run(examined_apart):
        names = ["weights", *["batches and settings"] * 2, "sequence_parallel", "batches and settings"]
        for name, sentence in zip(names, found, strict=True):
            assert sentence.startswith(f"all processes must have the same {name}, but rank 1 has "), sentence


def test_a_text_of_one_token_among_others() -> None:
    """Whether its attention is causal cannot be seen; it was taken for another model."""
    found = examine(model("Llama"), [text(1), text(9)], spectra_every=0)
    assert [site["causal"] for site in found.sites] == [True, True]
    assert examine(model("Llama"), [text(9), text(1)], spectra_every=0).sites == found.sites


def test_several_processes_are_needed() -> None:
    with pytest.raises(InputError, match="not initialised"):
        shared(model("Llama"), text(8))
    with pytest.raises(InputError, match="whole text"):
        examine(model("Llama"), [text(8)], sequence_parallel=True, ablations=True)
