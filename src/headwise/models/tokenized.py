"""Batches from texts and a tokenizer, for `headwise.examine(model, texts=[…], tokenizer=tokenizer)`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.gate import one_line
from headwise.models.inputs import Inputs, max_positions, special_tokens

LEAST_TOKENS = 4
"""A shorter text has too few tokens for its attention to say anything."""


def tokenized(
    model: nn.Module, texts: Sequence[str], tokenizer: Any, *, length: int | None = None, batch_size: int = 1
) -> Inputs:
    """Each text with its special tokens, cut to `length`; shorter ones of a batch are padded after their end.

    tokenizer   of transformers, or anything that is called and converts ids to tokens as they do
    length      default: the number of positions of the model; texts are never lengthened
    batch_size  texts in one batch; padding is masked out, and one text a batch (the default) needs none.  An encoder
                with a decoder gets one: its cross-attention does not show which queries are padding
    """
    _check(texts, tokenizer, batch_size)
    positions = max_positions(model)
    if length is not None and positions is not None and length > positions:
        raise InputError(
            f"{type(model).__name__} has {positions} positions, but length is {length}; use at most {positions}"
        )
    rows = [_row(tokenizer, text, index, length or positions) for index, text in enumerate(texts)]
    _check_vocabulary(model, rows)
    pad = next((x for x in (_id(tokenizer, "pad"), _id(tokenizer, "eos")) if x is not None), 0)
    if _has_decoder(model):
        batch_size = 1
    parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return Inputs(
        [_batch(model, part, pad) for part in parts],
        lambda batch: [_names(tokenizer, ids) for ids in batch["input_ids"]],
        {"kind": "text", "length": max(len(row["input_ids"]) for row in rows)},
    )


def shortened(batch: Mapping[str, Tensor], length: int, tokenizer: Any = None) -> dict[str, Tensor]:
    """A batch of texts without padding, cut to `length` tokens; special tokens at the end of a text stay at its end."""
    last = 0 if tokenizer is None else len(special_tokens(tokenizer)[1])
    return {name: torch.cat([x[:, : length - last], x[:, x.shape[1] - last :]], dim=1) for name, x in batch.items()}


def _check(texts: Any, tokenizer: Any, batch_size: int) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InputError(f"texts is a {type(texts).__name__}; give a list of strings, also if there is only one")
    if not texts:
        raise InputError("texts is empty; give at least one text")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"texts[{index}] is a {type(text).__name__}; give strings, or tensors as batches")
    if tokenizer is None:
        raise InputError("texts need a tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(…) of the same model")
    if not callable(tokenizer):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__}, which cannot be called; give a tokenizer of transformers, "
            "such as PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")


def _row(tokenizer: Any, text: str, index: int, length: int | None) -> dict[str, list[int]]:
    """Fields of one text, without padding: input_ids, and token_type_ids if the tokenizer makes some."""
    cut = {} if length is None else {"truncation": True, "max_length": length}
    try:
        encoded = tokenizer(text, **cut)
        row = {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
        tokens = len(row["input_ids"])
    except Exception as error:
        raise InputError(f"the tokenizer cannot read texts[{index}]: {one_line(error)}") from error
    if tokens < LEAST_TOKENS:
        raise InputError(f"texts[{index}] has {tokens} tokens; attention needs at least {LEAST_TOKENS} to say anything")
    return row


def _check_vocabulary(model: nn.Module, rows: list[dict[str, list[int]]]) -> None:
    size, largest = getattr(getattr(model, "config", None), "vocab_size", None), max(max(x["input_ids"]) for x in rows)
    if isinstance(size, int) and largest >= size:
        raise InputError(
            f"the tokenizer made token {largest}, but {type(model).__name__} has a vocabulary of {size}; use the "
            "tokenizer that belongs to the model"
        )


def _batch(model: nn.Module, rows: list[dict[str, list[int]]], pad: int) -> dict[str, Tensor]:
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    widest = max(len(row["input_ids"]) for row in rows)
    is_padded = any(len(row["input_ids"]) < widest for row in rows)
    taken = inspect.signature(model.forward).parameters
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())

    def column(name: str, fill: int) -> Tensor:
        return torch.tensor([row[name] + [fill] * (widest - len(row[name])) for row in rows], device=device)

    batch = {"input_ids": column("input_ids", pad)}
    if "token_type_ids" in rows[0] and "token_type_ids" in taken:
        batch["token_type_ids"] = column("token_type_ids", 0)
    if is_padded and "attention_mask" not in taken and not takes_anything:
        raise InputError(
            f"{type(model).__name__} takes no attention_mask, so texts of different lengths cannot share a batch; use "
            "batch_size=1"
        )
    lengths = torch.tensor([len(row["input_ids"]) for row in rows], device=device)
    masks = {"attention_mask": (torch.arange(widest, device=device) < lengths[:, None]).long()} if is_padded else {}
    if _has_decoder(model):
        batch["decoder_input_ids"] = batch["input_ids"]
    return {**batch, **masks}


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _id(tokenizer: Any, name: str) -> int | None:
    value = getattr(tokenizer, f"{name}_token_id", None)
    return value if isinstance(value, int) else None


def _names(tokenizer: Any, ids: Tensor) -> list[str]:
    """A string for every position, padding included."""
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return [str(token) for token in (ids.tolist() if convert is None else convert(ids.tolist()))]
