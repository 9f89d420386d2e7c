"""A HeadCache gives the logits of the model without a cache, holds what its heads need, and can be cropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import UnsupportedError
from headwise.replacement import Choice, HeadCache
from headwise.replacement.install.head_cache import cache_bytes
from headwise.replacement.install.kept_keys import KeyRing, LayerPast, NewKeys, Reach
from headwise.replacement.install.mixed_heads import MixedHeads
from tests.replacement.install.test_transformers_models import causal_lm, ids, shaken
from tests.replacement.plans import CACHED, plan_for

transformers = pytest.importorskip("transformers")
SOFTMAX, EFFICIENT = Choice("softmax"), Choice("efficient", {"sharpness": 2})
WINDOW, WIDE = Choice("window", {"width": 4, "leading": 2}), Choice("window", {"width": 6, "leading": 1})
MIXED = {
    "window beside softmax": [SOFTMAX, SOFTMAX, WINDOW, WINDOW],
    "a key head shared by window and softmax": [SOFTMAX, WINDOW, WINDOW, WINDOW],
    "a key head shared by two windows": [WINDOW, WIDE, WIDE, WIDE],
    "sums beside a window": [EFFICIENT, EFFICIENT, WINDOW, WINDOW],
    "sums sharing a key head": [EFFICIENT, WINDOW, EFFICIENT, SOFTMAX],
    "window beside toeplitz": [WINDOW, WINDOW, Choice("toeplitz", {"reach": 3}), SOFTMAX],
}
KINDS = {str(choice): [choice] for choice in CACHED} | MIXED


def learned_positions() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None, bos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config).eval()


def sliding_layers() -> nn.Module:
    """Every second layer attends to the last 7 keys; its heads stay softmax."""
    config = transformers.Qwen2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention"] * 2,
        eos_token_id=None,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


FAMILIES = {"rotary, grouped": causal_lm, "learned positions": learned_positions, "sliding layers": sliding_layers}


def rewritten(model: nn.Module, choices: list[Choice], **changes) -> nn.Module:
    plan = plan_for(model, {"input_ids": ids(1, 5)}, choices, length=96)
    if model.config.model_type == "qwen2":
        full = {site: row if i % 2 == 0 else [SOFTMAX] * 4 for i, (site, row) in enumerate(plan.sites.items())}
        plan = replace(plan, sites=full)
    return shaken(headwise.rewrite(model, replace(plan, **changes))[0])


def in_steps(model: nn.Module, tokens: Tensor, keep: Tensor, steps: list[int], cache) -> Tensor:
    """The logits when `steps` tokens are given at a time."""
    at, done, parts = (keep.cumsum(-1) - 1).clamp(min=0), 0, []
    with torch.no_grad():
        for size in steps:
            now = slice(done, done + size)
            done += size
            batch = {"input_ids": tokens[:, now], "attention_mask": keep[:, :done], "position_ids": at[:, now]}
            parts.append(model(**batch, past_key_values=cache).logits)
    return torch.cat(parts, 1)


def without_cache(model: nn.Module, tokens: Tensor, keep: Tensor) -> Tensor:
    at = (keep.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=keep, position_ids=at, use_cache=False).logits


def padded(side: str, b: int, n: int) -> Tensor:
    keep = torch.ones(b, n, dtype=torch.long)
    if side == "left":
        keep[0, :5], keep[1, :2] = 0, 0
    if side == "inside":
        keep[0, 5:7] = 0
    return keep


STEPS = [[9] + [1] * 12, [3] + [1] * 7 + [8, 1, 2], [1, 1, 1, 20, 1]]


EVERY = [
    pytest.param(
        kind, family, marks=() if family.startswith("rotary") or kind.startswith("window b") else pytest.mark.slow
    )
    for kind in KINDS
    for family in FAMILIES
]


@pytest.mark.parametrize("kind, family", EVERY)
def test_a_cache_gives_the_logits_of_no_cache(kind: str, family: str) -> None:
    """A prompt, single tokens, and further prompts; padding before, inside, and none."""
    torch.manual_seed(0)
    model = rewritten(FAMILIES[family](), KINDS[kind])
    for steps in STEPS:
        for side in ("none", "left", "inside"):
            n = sum(steps)
            tokens, keep = ids(3, n), padded(side, 3, n)
            found, expected = in_steps(model, tokens, keep, steps, HeadCache(model)), without_cache(model, tokens, keep)
            real = keep.bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = rewritten(causal_lm().to(dtype), KINDS[kind])
    tokens, keep = ids(2, 21), padded("left", 2, 21)
    found, expected = (
        f.float()
        for f in (in_steps(model, tokens, keep, STEPS[1], HeadCache(model)), without_cache(model, tokens, keep))
    )
    error = 0.02 if dtype == torch.bfloat16 else 1e-6
    assert (found - expected).abs()[keep.bool()].max() <= error * expected.abs().max()


def test_it_holds_what_the_heads_need() -> None:
    """Two layers of two key heads of width 8 in float32: 2 x 2 x 8 x 4 bytes for every key and its value."""
    model = causal_lm()
    whole = HeadCache(rewritten(model, [SOFTMAX]))
    half = HeadCache(rewritten(model, [SOFTMAX, SOFTMAX, WINDOW, WINDOW]))
    none = HeadCache(rewritten(model, [WINDOW]))
    usual = transformers.DynamicCache(config=model.config)
    n, size = 90, 2 * 2 * 8 * 4
    tokens, keep = ids(1, n), torch.ones(1, n, dtype=torch.long)
    for cache, one in ((whole, [SOFTMAX]), (half, [SOFTMAX, SOFTMAX, WINDOW, WINDOW]), (none, [WINDOW])):
        in_steps(rewritten(model, one), tokens, keep, [n - 1, 1], cache)  # any model of the same shape
        assert cache.get_seq_length() == n
    in_steps(model, tokens, keep, [n], usual)
    room = n  # short caches have no room to spare
    assert cache_bytes(usual) == 2 * n * size
    assert whole.nbytes == 2 * room * size
    assert half.nbytes == (room + 6) * size
    assert none.nbytes == 2 * 6 * size
    assert repr(none) == "HeadCache(2 layers, 90 positions, 1,536 bytes)"


@pytest.mark.parametrize("kind", ["window beside softmax", "sums beside a window", "a key head shared by two windows"])
def test_generate(kind: str) -> None:
    """Greedy, by sampling and by beams, in batches of unequal length: the tokens without a cache."""
    torch.manual_seed(0)
    model = rewritten(causal_lm(), MIXED[kind])
    tokens, keep = ids(3, 11), padded("left", 3, 11)
    for options in ({}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            given = {"attention_mask": keep, "max_new_tokens": 9, "use_cache": use_cache, "do_sample": False}
            results.append(model.generate(tokens, return_dict_in_generate=True, **(given | options)))
        assert torch.equal(results[0].sequences, results[1].sequences)
        assert isinstance(results[0].past_key_values, HeadCache)


def test_a_conversation_continues() -> None:
    """The cache that generate returns takes a second prompt."""
    torch.manual_seed(0)
    model = rewritten(causal_lm(), MIXED["window beside softmax"])
    first = model.generate(ids(1, 12), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, ids(1, 9)], 1)
    found = model.generate(more, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, model.generate(more, max_new_tokens=6, do_sample=False, use_cache=False))


def test_drafts_are_taken_back() -> None:
    """Assisted decoding crops the cache by the tokens that were not accepted."""
    torch.manual_seed(0)
    model, draft = rewritten(causal_lm(), MIXED["window beside softmax"]), causal_lm()
    tokens = ids(1, 20)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, assistant_model=draft, **options), expected)
    assert torch.equal(draft.generate(tokens, assistant_model=model, **options), draft.generate(tokens, **options))


def test_crop() -> None:
    torch.manual_seed(0)
    model = rewritten(causal_lm(), [WINDOW, WINDOW, WIDE, WIDE])
    tokens, keep = ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    expected = without_cache(model, tokens, keep)

    def after(cache: HeadCache, crop: int, first: int) -> Tensor:
        other = torch.cat([tokens[:, : first - crop], ids(2, crop)], 1)
        in_steps(model, other, keep[:, :first], [5] + [1] * (first - 5), cache)
        cache.crop(-crop)
        assert cache.get_seq_length() == first - crop
        parts = [model(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits for i in range(first - crop, 30)]
        return torch.cat(parts, 1)

    recording = HeadCache(model)
    recording.activate_past_recording()
    with torch.no_grad():
        for cache, crop, first in (
            (HeadCache(model), 1, 20),  # a ring can always take back one token
            (HeadCache(model), 3, 6),  # not full yet
            (HeadCache(model, keep_all=True), 12, 20),
            (recording, 9, 25),
        ):
            found = after(cache, crop, first)
            torch.testing.assert_close(found, expected[:, first - crop :], rtol=1e-4, atol=1e-5)
        cache = HeadCache(model)
        in_steps(model, tokens, keep, [30], cache)
        with pytest.raises(
            UnsupportedError, match=r"crop: 2 tokens .* of 30 keys only the last 4 were kept; .* keep_all"
        ):
            cache.crop(-2)
        assert cache.get_seq_length() == 30
        sums = HeadCache(rewritten(causal_lm(), [EFFICIENT]))
        in_steps(model, tokens, keep, [30], sums)
        with pytest.raises(UnsupportedError, match=r"crop: efficient sharpness=2 keeps sums"):
            sums.crop(-1)


def test_batches_are_selected_and_repeated() -> None:
    torch.manual_seed(0)
    model = rewritten(causal_lm(), MIXED["sums beside a window"])
    tokens, keep = ids(3, 15), torch.ones(3, 15, dtype=torch.long)
    expected = without_cache(model, tokens, keep)[:, -1:]
    for change, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        cache = HeadCache(model)
        in_steps(model, tokens[:, :14], keep[:, :14], [14], cache)
        change(cache)
        with torch.no_grad():
            found = model(input_ids=tokens[rows, 14:], past_key_values=cache).logits
        torch.testing.assert_close(found, expected[rows], rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0


@pytest.mark.parametrize("side", ["none", "left"])
def test_exact_below_is_the_original_bit_for_bit(side: str) -> None:
    torch.manual_seed(0)
    model = causal_lm()
    sites = [f"model.layers.{i}.self_attn" for i in range(2)]
    new = rewritten(model, [WINDOW], exact_below={sites[0]: 16, sites[1]: 16})
    tokens, keep = ids(2, 24), padded(side, 2, 24)
    for n in (3, 15):
        assert torch.equal(
            without_cache(new, tokens[:, :n], keep[:, :n]), without_cache(model, tokens[:, :n], keep[:, :n])
        )
    assert not torch.equal(
        without_cache(new, tokens[:, :16], keep[:, :16]), without_cache(model, tokens[:, :16], keep[:, :16])
    )
    found, usual = HeadCache(new), transformers.DynamicCache(config=model.config)
    steps = [9] + [1] * 6
    same = [in_steps(m, tokens[:, :15], keep[:, :15], steps, c) for m, c in ((new, found), (model, usual))]
    assert torch.equal(*same)
    # from 16 keys on with windows; what was cached before is the original's
    plain = rewritten(model, [WINDOW])
    rest = {"input_ids": tokens[:, 15:], "attention_mask": keep}
    with torch.no_grad():
        both = [m(**rest, past_key_values=c).logits for m, c in ((new, found), (plain, usual))]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    assert found.nbytes < 0.5 * cache_bytes(usual)


def test_beyond_the_planned_length() -> None:
    torch.manual_seed(0)
    model = causal_lm()
    tokens, keep = ids(1, 100), torch.ones(1, 100, dtype=torch.long)
    new = rewritten(model, [WINDOW])  # planned for 96
    assert torch.equal(without_cache(new, tokens, keep), without_cache(model, tokens, keep))
    assert not torch.equal(
        without_cache(new, tokens[:, :96], keep[:, :96]), without_cache(model, tokens[:, :96], keep[:, :96])
    )
    with pytest.raises(UnsupportedError, match=r"planned for 96 keys .* keep_all=True"):
        in_steps(new, tokens, keep, [95, 1, 1], HeadCache(new))
    in_steps(new, tokens, keep, [95, 1, 1, 1, 2], HeadCache(new, keep_all=True))
    assert new.generate(tokens[:, :90], max_new_tokens=12, do_sample=False).shape == (1, 102)  # knows how far it goes
    refusing = rewritten(model, [WINDOW], beyond="refuse")
    for call in (
        lambda: without_cache(refusing, tokens, keep),
        lambda: refusing.generate(tokens[:, :90], max_new_tokens=12),
    ):
        with pytest.raises(UnsupportedError, match=r"planned for at most 96 keys, but there are 9?\d+, .* \"refuse\""):
            call()


def test_what_cannot_be_done_is_said() -> None:
    model = rewritten(causal_lm(), [WINDOW])
    cache = HeadCache(model)
    output = model(input_ids=ids(1, 9), past_key_values=cache)
    output.logits.sum().backward()  # a prompt has gradients
    with pytest.raises(UnsupportedError, match="gradients do not pass through"):
        model(input_ids=ids(1, 1), past_key_values=cache)
    cache = HeadCache(model)
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(UnsupportedError, match="did not reach the attention function"):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(UnsupportedError, match="cannot be offloaded"):
        cache.offload(0, only_non_sliding=False)
    odd = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    odd[..., 3, 1] = False
    with pytest.raises(UnsupportedError, match=r"neither padding nor causal"), torch.no_grad():
        model(input_ids=ids(1, 5), attention_mask=odd, past_key_values=HeadCache(model))


def test_long_rings_grow_ahead_and_short_ones_hold_what_they_need() -> None:
    keys = torch.randn(1, 2, 1300, 4)
    ring = KeyRing([Reach()], keys, keys)
    for n, room in ((40, 40), (41, 41), (1024, 1024), (1200, 1218), (1218, 1218), (1219, 1238)):
        ring.write(keys[:, :, ring.highest : n], keys[:, :, ring.highest : n], NewKeys(ring.highest, n, 1.0))
        assert ring.keys.shape[2] == ring.values.shape[2] == room
        assert torch.equal(ring.keys[:, :, :n], keys[:, :, :n])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_the_original_bit_for_bit_while_its_windows_reach_all_keys(family: str) -> None:
    """Windows of 12 keys: at 12 the same states as with a DynamicCache, and as many bytes; at 13 others."""
    model = FAMILIES[family]()
    new = rewritten(model, [SOFTMAX, SOFTMAX, Choice("window", {"width": 10, "leading": 2}), SOFTMAX])
    found, usual = HeadCache(new), transformers.DynamicCache(config=model.config)
    tokens = ids(1, 40)
    with torch.no_grad():
        for start, stop in ((0, 8), *((n, n + 1) for n in range(8, 14))):
            a, b = (
                each(tokens[:, start:stop], past_key_values=past).logits
                for each, past in ((new, found), (model, usual))
            )
            assert torch.equal(a, b) == (stop <= 12)
            if stop == 12 and family != "sliding layers":
                assert found.nbytes == cache_bytes(usual)
    assert (a - b).abs().max() > 1e-4


@pytest.mark.parametrize("short", [1, 1024])
def test_key_heads_in_any_order_against_written_out_attention(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key heads that keep the same are not neighbours; storage with room to spare, and copied for every token."""
    monkeypatch.setattr("headwise.replacement.install.kept_keys.SHORT", short)
    narrow, wide = Choice("window", {"width": 5, "leading": 1}), Choice("window", {"width": 90, "leading": 0})
    of_key_heads, n, shared = [narrow, SOFTMAX, wide, narrow, SOFTMAX], 140, 2
    heads = MixedHeads([choice for choice in of_key_heads for _ in range(shared)], 8, 256)
    past, generator = LayerPast(heads), torch.Generator().manual_seed(0)
    q = torch.randn(2, 10, n, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, n, 8, generator=generator, dtype=torch.float64)
    parts, done = [], 0
    with torch.no_grad():
        for size in [70, 1, 1, 30, *[1] * 38]:
            new = slice(done, done + size)
            call = NewKeys(done, done + size, 0.3)
            parts.append(past.attend(q[:, :, new], k[:, :, new], v[:, :, new], call, lambda k, v: q))
            done += size
    p, j = torch.arange(n)[:, None], torch.arange(n)
    for g, choice in enumerate(of_key_heads):
        width, leading = (choice.options.get(name, default) for name, default in (("width", n), ("leading", 0)))
        seen = (j <= p) & ((j > p - width) | (j < leading))
        for h in range(g * shared, (g + 1) * shared):
            scores = (0.3 * q[:, h] @ k[:, g].mT).masked_fill(~seen, -torch.inf)
            torch.testing.assert_close(torch.cat(parts, 2)[:, h], scores.softmax(-1) @ v[:, g])
    kept = 2 * 6 + 90 + 2 * n
    bytes_of = 2 * 2 * 8 * 8  # k and v, of two sequences, in float64
    held = sum(x.numel() * x.element_size() for x in past.tensors)
    assert kept * bytes_of <= held <= (kept + (0 if short > n else 2 * (n // 64))) * bytes_of


def test_a_short_cache_holds_no_more_than_that_of_transformers() -> None:
    model = causal_lm()
    new, tokens = rewritten(model, MIXED["window beside softmax"], exact_below={}), ids(1, 30)
    exact = transformers.DynamicCache(config=model.config)
    cache = HeadCache(new, keep_all=True)
    with torch.no_grad():
        for step in [tokens[:, :20], *tokens[:, 20:].split(1, 1)]:
            model(step, past_key_values=exact)
            new(step, past_key_values=cache)
            assert cache.nbytes == cache_bytes(exact)
