"""Fewer query/key dimensions: the solver against brute force, whole models against dense ones, caches and files."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import InputError, NonFiniteError, UnsupportedError
from headwise.growth import Grower, shrink
from headwise.growth.shrinking import allocate, gather, narrow_copy, narrowed_to, outputs
from headwise.growth.site_statistics import SiteStatistics, best_pairs, subspace
from headwise.models.run import in_double
from headwise.models.widths.rotary import rotated_pairs
from headwise.models.widths.widened_attention import NAME, WidenedCall
from headwise.operators.masks import Mask
from tests.growth.test_transformers_growth import FAMILIES, batch, made, output

transformers = pytest.importorskip("transformers")
F64 = torch.float64


def covariance(k: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * k, k, generator=draws, dtype=F64) * torch.logspace(0, -2, k, dtype=F64)
    turned = torch.linalg.qr(torch.randn(k, k, generator=draws, dtype=F64))[0]
    return turned @ x.mT @ x @ turned.mT


def missed(c_q: Tensor, c_k: Tensor, a_q: Tensor, a_k: Tensor) -> Tensor:
    """sum_h tr(E^T C_q,h E C_k), E = 1 - A_q A_k^T"""
    e = torch.eye(len(c_k), dtype=F64) - a_q @ a_k.mT
    return torch.einsum("hab,hac,hcd,bd->", e, c_q, e, c_k)


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # inside LBFGS
@pytest.mark.parametrize("g", [1, 3])
def test_the_subspace_is_the_best_of_many_starts(g: int) -> None:
    k, r = 4, 2
    c_q, c_k = torch.stack([covariance(k, i) for i in range(g)]), covariance(k, 9)
    found = float(missed(c_q, c_k, *subspace(c_q, c_k, r)))
    best = float("inf")
    for seed in range(4):
        draws = torch.Generator().manual_seed(seed)
        a_q, a_k = (torch.randn(*s, generator=draws, dtype=F64).requires_grad_() for s in ((g, k, r), (k, r)))
        optimizer = torch.optim.LBFGS([a_q, a_k], max_iter=500, line_search_fn="strong_wolfe")

        def closure(a_q: Tensor = a_q, a_k: Tensor = a_k, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = missed(c_q, c_k, a_q, a_k)
            value.backward()
            return value

        optimizer.step(closure)
        best = min(best, float(missed(c_q, c_k, a_q, a_k).detach()))
    assert found <= best * (1 + 1e-9)
    assert found >= 0.99 * best  # which the search nearly reaches


def test_pairs_that_matter_are_kept_and_scaled_for_those_that_go() -> None:
    draws = torch.Generator().manual_seed(0)
    parts = torch.randn(400, 6, generator=draws, dtype=F64) * torch.tensor([3, 0.1, 2, 0.2, 0.3, 1], dtype=F64)
    parts[:, 1] += 0.5 * parts[:, 0]  # what goes with pair 1 is partly in pair 0
    between = parts.mT @ parts

    def least(kept: tuple[int, ...]) -> tuple[float, Tensor]:
        target = parts.sum(1)
        w = torch.linalg.lstsq(parts[:, kept], target.unsqueeze(1)).solution.squeeze(1)
        return float((target - parts[:, kept] @ w).square().sum()), w

    kept, scale, lost = best_pairs(between, 3)
    best = min(itertools.combinations(range(6), 3), key=lambda c: least(c)[0])
    assert tuple(kept) == best == (0, 2, 5)
    torch.testing.assert_close(scale, least(best)[1], rtol=1e-3, atol=1e-3)
    assert lost == pytest.approx(least(best)[0], rel=1e-6)
    assert float(scale[0]) > 1.3  # pair 0 speaks for pair 1 too


def rotary_call(rotary: str) -> tuple[Tensor, Tensor]:
    """Queries and keys of one vector at 200 positions, 8 dimensions."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 1, 8, generator=draws, dtype=F64).expand(1, 2, 200, 8)
    if rotary == "none":
        return x, x
    width = 4 if rotary == "partial" else 8
    a = list(range(0, width, 2)) if rotary == "neighbours" else list(range(width // 2))
    b = [i + 1 for i in a] if rotary == "neighbours" else [i + width // 2 for i in a]
    angle = torch.arange(200, dtype=F64)[:, None] * 10000 ** (-torch.arange(len(a), dtype=F64) / len(a))
    y = x.clone()
    y[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
    y[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return y, y


def test_rotated_pairs_are_seen_in_what_a_module_computes() -> None:
    assert rotated_pairs("none", *rotary_call("none")) == []
    assert rotated_pairs("halves", *rotary_call("halves")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rotated_pairs("neighbours", *rotary_call("neighbours")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    pairs = rotated_pairs("partial", *rotary_call("partial"))
    assert pairs[:2] == [(0, 2), (1, 3)]
    y = rotary_call("none")[0] * torch.linspace(1, 2, 200, dtype=F64)[:, None]
    with pytest.raises(UnsupportedError, match=r"odd: its queries or keys change with the position"):
        rotated_pairs("odd", y, y)


def test_widths_are_taken_where_they_cost_least() -> None:
    curves = {"a": {8: 0.0, 4: 0.1, 2: 5.0}, "b": {8: 0.0, 4: 1.0, 2: 1.1}, "c": {8: 0.0, 4: 0.2, 2: 0.3}}
    one = dict.fromkeys(curves, 1)
    assert allocate(curves, 1.0, one) == {"a": 8, "b": 8, "c": 8}
    assert allocate(curves, 0.75, one) == {"a": 4, "b": 8, "c": 2}  # a first, then all of c: 0.3 for 6 numbers
    message = r"keep = 0.1 is less than the narrowest widths that are tried, 6 of 24 .*; keep at least 0.25$"
    with pytest.raises(InputError, match=message):
        allocate(curves, 0.1, one)
    assert allocate(curves, 0.25, one) == dict.fromkeys(curves, 2)


def batches(name: str) -> list[dict[str, Tensor]]:
    return [batch(name, b) for b in (2, 3, 4, 1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_dimensions_kept_is_the_same_model_and_half_of_them_is_half_of_the_cache(name: str) -> None:
    model = made(name).eval()
    held = batch(name, 5)
    before = output(model, held)
    same, report = shrink(model, batches(name), keep=1.0)
    torch.testing.assert_close(output(same, held), before)
    assert report.drift == pytest.approx(0, abs=1e-6)
    new, report = shrink(model, batches(name), keep=0.5)
    assert 0.5 <= report.key_cache_saved < 0.9
    assert report.key_numbers[0] == report.value_numbers
    assert report.cache_saved == pytest.approx(report.key_cache_saved / 2)
    assert not torch.equal(output(new, held), before)
    torch.testing.assert_close(output(model, held), before, rtol=0, atol=0)  # the original is not touched
    assert not hasattr(model.get_submodule(next(iter(report.widths))), NAME)


def test_scores_of_a_narrowed_llama_depend_on_distances_alone_and_are_those_of_the_kept_pairs() -> None:
    model = in_double(made("llama")).eval()
    new = narrow_copy(model, batch("llama", 2))
    statistics = gather(new, [batch("llama", 2), batch("llama", 3)])
    site = "model.layers.1.self_attn"
    x = statistics[site]
    assert x.pairs == [(0, 3), (1, 4), (2, 5)]
    ids = batch("llama", 2)
    with narrowed_to(new, statistics, {site: 4}):
        shifted = [new(**ids, position_ids=torch.arange(9)[None] + shift).logits for shift in (0, 1000)]
        torch.testing.assert_close(*shifted, rtol=0, atol=1e-8)
        # in the stock model: the same pairs, zero in the weights of the others, scaled in the queries
        query_map, key_map = x.maps(4)
        stock = in_double(model)
        module = stock.get_submodule(site)
        both = torch.einsum("gka,gla->gkl", query_map.unflatten(0, (2, 2))[:, 0], key_map)
        assert torch.equal(both, torch.diag_embed(both.diagonal(dim1=-2, dim2=-1)))
        for h in range(4):
            module.q_proj.weight.data[6 * h : 6 * h + 6] *= both[h // 2].diagonal()[:, None]
        torch.testing.assert_close(new(**ids).logits, stock(**ids).logits, rtol=0, atol=1e-10)


def one_row(pairs: list[tuple[int, int]]) -> tuple[SiteStatistics, Tensor, Tensor, Tensor]:
    """Statistics of one query of 8 dimensions over 9 keys, for which what a map loses is exact; q, k and P."""
    draws = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 1, n, 8, generator=draws, dtype=F64).float().double() for n in (1, 9))
    call = WidenedCall(q, k, q, k, q, k, k, Mask(1, 9), 0.3)
    x = SiteStatistics(call, pairs)
    x.add(call)
    return x, q[0, 0], k[0, 0], (0.3 * q[0, 0] @ k[0, 0].mT).softmax(-1)


@pytest.mark.parametrize("pairs", [[], [(0, 2), (1, 3)], [(0, 4), (1, 5), (2, 6)]])
@pytest.mark.parametrize("width", [3, 4, 6])
def test_the_width_is_split_where_the_change_of_attention_is_least(pairs: list[tuple[int, int]], width: int) -> None:
    x, q, k, p = one_row(pairs)

    def variance(change: Tensor) -> float:
        return float((p * (change - (p * change).sum()).square()).sum())

    def lost(query_map: Tensor, key_map: Tensor, among: list[int]) -> float:
        rest = torch.eye(8, dtype=F64) - query_map @ key_map.mT
        return variance((q[:, among] @ rest[among][:, among] @ k[:, among].mT)[0])

    turning = [i for pair in pairs for i in pair]
    best = math.inf
    for r in range(min(len(x.fixed), width) + 1):
        for kept in itertools.combinations(pairs, (width - r) // 2):
            if r + 2 * len(kept) == width and (kept or not pairs):
                parts = torch.stack([q[0, list(c)] @ k[:, list(c)].mT for c in kept], -1) if kept else k[:, :0]
                target = (q[0, turning] @ k[:, turning].mT) if turning else torch.zeros(9, dtype=F64)
                centred = (parts - p @ parts, target - (p[0] * target).sum())
                root = p[0].sqrt()
                w = torch.linalg.lstsq(root[:, None] * centred[0], (root * centred[1])[:, None]).solution[:, 0]
                # one query reads one direction of the keys: one dimension that does not turn can carry all of it
                fixed = 0.0 if r else variance((q[:, x.fixed] @ k[:, x.fixed].mT)[0])
                best = min(best, variance(target - parts @ w) + fixed)
    query_map, key_map = (maps[0] for maps in x.maps(width))
    assert query_map.shape == key_map.shape == (8, width)
    found = lost(query_map, key_map, x.fixed) + lost(query_map, key_map, turning)
    assert found == pytest.approx(best, rel=1e-3, abs=1e-6)
    both = query_map @ key_map.mT
    assert both[x.fixed][:, turning].count_nonzero() == both[turning][:, x.fixed].count_nonzero() == 0


@pytest.mark.parametrize("name", ["GPTNeoX", "Phi"])
def test_dimensions_that_do_not_turn_are_narrowed_beside_those_that_do(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(vocab_size=40, rotary_pct=0.5, partial_rotary_factor=0.5, **sizes)
    model = in_double(getattr(transformers, f"{name}ForCausalLM")(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    texts = [batch("llama", b) for b in (2, 3, 4, 1)]
    new, report = shrink(model, texts, keep=0.5)
    assert report.key_cache_saved >= 0.5
    assert all(before == 16 for before, _ in report.widths.values())
    ids = batch("llama", 2)

    def moved(model: Any) -> float:
        """By a shift of all positions; transformers computes these angles in single precision."""
        near, far = (model(**ids, position_ids=torch.arange(9)[None] + shift).logits for shift in (0, 1000))
        return float((near - far).abs().max().detach())

    assert moved(new) < 3 * moved(model) < 1e-3
    wide, _ = shrink(model, texts, keep=1.0)
    torch.testing.assert_close(wide(**ids).logits, model(**ids).logits)
    with pytest.raises(InputError, match=r"keep at least 0\.25"):
        shrink(model, texts, keep=0.2)
    new.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F64)
    torch.testing.assert_close(again(**ids).logits, new(**ids).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_narrowed_model_decodes_from_a_narrower_cache_and_is_saved(name: str, tmp_path: Path) -> None:
    new, report = shrink(made(name).eval(), batches(name), keep=0.5)
    ids = batch(name, 2, "left")
    ids.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(new.generate(**ids, **options), new.generate(**ids, **options, use_cache=False))
    if name == "llama":
        cache = new(**ids, use_cache=True).past_key_values
        assert [layer.keys.shape[-1] for layer in cache.layers] == [after for _, after in report.widths.values()]
    new.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path)
    assert torch.equal(output(again, batch(name, 2)), output(new, batch(name, 2)))


def test_a_model_in_which_one_layer_keeps_its_width_is_saved(tmp_path: Path) -> None:
    new, report = shrink(made("llama").eval(), batches("llama"), keep=0.9)
    assert sorted(before - after for before, after in report.widths.values()) == [0, 2]
    new.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again, batch("llama", 2)), output(new, batch("llama", 2)))


def test_padding_is_no_part_of_the_drift() -> None:
    model = made("llama").eval()
    short = {"input_ids": torch.randint(2, 20, (1, 6), generator=torch.Generator().manual_seed(0))}
    mask = torch.tensor([[1] * 6 + [0] * 5])
    padded = {"input_ids": torch.nn.functional.pad(short["input_ids"], (0, 5), value=1), "attention_mask": mask}
    expected, found = (outputs(model, [batch])[0].values for batch in (short, padded))
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


def test_a_layer_that_a_model_uses_twice_is_narrowed_once() -> None:
    """ALBERT: the positions are seen in the first call, whose inputs are kept."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=40, embedding_size=8, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=32, num_hidden_groups=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = in_double(transformers.AlbertModel(config)).eval()
    held = batch("bert", 5)
    same, report = shrink(model, batches("bert"), keep=1.0)
    torch.testing.assert_close(same(**held)[0], model(**held)[0])
    new, report = shrink(model, batches("bert"), keep=0.5)
    assert list(report.widths.values()) == [(6, 3)]
    assert 0 < report.drift < 0.2
    assert not torch.equal(new(**held)[0], model(**held)[0])


def test_capped_scores_are_refused_and_the_model_stays_as_it_was() -> None:
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=32,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match="Gemma2Attention: softcap changes the softmax, so its heads keep"):
        shrink(model, batches("llama"), keep=0.5)
    with pytest.raises(UnsupportedError, match="Gemma2Attention: softcap changes the softmax"):
        Grower(model, torch.optim.SGD(model.parameters(), 1e-3))
    assert model.config._attn_implementation == before


def test_what_cannot_be_narrowed_says_why() -> None:
    model = made("llama").eval()
    with pytest.raises(InputError, match="keep must be above 0 and at most 1, but is 0"):
        shrink(model, batches("llama"), keep=0)
    with pytest.raises(InputError, match="keep must be above 0 and at most 1, but is 'half'"):
        shrink(model, batches("llama"), keep="half")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batches must be a list of batches, but is a dict"):
        shrink(model, batches("llama")[0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"does not run on the batch words \(1, 4\) float32: ValueError: You must"):
        shrink(model, [{"words": torch.zeros(1, 4)}] * 2)
    with pytest.raises(InputError, match="is on the meta device and has no values"):
        shrink(copy.deepcopy(model).to("meta"), batches("llama"))
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        next(damaged.parameters())[0] = float("nan")  # of a token that is not in the batches
    with pytest.raises(NonFiniteError, match=r"weight 'model.embed_tokens.weight' has \d+ non-finite of"):
        shrink(damaged, batches("llama"))
    with pytest.raises(InputError, match="half of the batches choose and half measure, but there are 1"):
        shrink(model, batches("llama")[:1])
    asked: list[Any] = []
    with pytest.raises(InputError, match=r"keep = 0.01 is less than .* keep at least 0\.\d+$"):
        shrink(model, batches("llama"), keep=0.01, progress=lambda *step: asked.append(step))
    assert not asked  # nothing was measured for it
    with pytest.raises(InputError, match=r"is given 1 tokens, .* give at least 4"):
        shrink(model, [{"input_ids": torch.ones(1, 1, dtype=torch.long)}] * 2)
    with pytest.raises(UnsupportedError, match="Linear is no model of transformers"):
        shrink(torch.nn.Linear(2, 2), [torch.zeros(1, 2)] * 2)
    grower = Grower(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UnsupportedError, match=r"is a module of transformers; use headwise.shrink"):
        grower.shrink(1, [("model.layers.0.self_attn", 0)])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
def test_half_of_the_drift_of_plain_svd_on_minilm(share: float) -> None:
    from benchmarks.shrink import plain

    from headwise.growth.shrinking import mean_drift
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model("minilm")
    texts = text_input(loaded, None, length=64, texts=6).batches
    new = narrow_copy(loaded.model, texts[0])
    statistics = gather(new, texts[0::2])
    widths = {site: int(x.width * share) for site, x in statistics.items()}
    before = outputs(loaded.model, texts[1::2])
    drifts = []
    for what in (statistics, {site: plain(new.get_submodule(site), x) for site, x in statistics.items()}):
        with narrowed_to(new, what, widths):
            drifts.append(mean_drift(before, outputs(new, texts[1::2])))
    assert drifts[0] <= drifts[1] / 2
