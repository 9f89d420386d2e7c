"""A tokenizer for the tiny models: words as tokens, w5 is token 5."""

from __future__ import annotations

from typing import Any

import torch


def tokenizer_of(vocabulary: int) -> Any:
    """[CLS] before and [SEP] after; no padding token, as in GPT-2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]")


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(3, 99, (count,), generator=generator))
