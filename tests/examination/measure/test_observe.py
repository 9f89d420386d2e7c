"""What is measured without forming P equals a brute-force float64 computation from `output_attentions`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import NonFiniteError
from headwise.examination import examine
from headwise.examination.measure.depth import collapse_curves
from headwise.examination.measure.observe import Measurement, observe
from headwise.models import attention, intercept
from headwise.theory.collapse import relative_residual
from tests.models.tiny_models import ALL, TRANSFORMERS, sharpen


def brute_force(p: Tensor, v: Tensor | None = None) -> dict[str, Tensor]:
    """Every number from the whole matrix, (h, m, n) float64, in the plainest way."""
    _h, m, n = p.shape
    log = torch.where(p > 0, p, torch.ones(())).log()
    entropy = -(p * log).sum(-1)
    i, j = torch.arange(m)[:, None], torch.arange(n)[None]
    offset = (j - i).double()
    mean = (p * offset).sum((-2, -1)) / m
    toeplitz = torch.zeros_like(p)
    energies = []
    for delta in range(-(m - 1), n):
        on = (j - i) == delta
        average = p[:, on].mean(-1)
        toeplitz[:, on] = average[:, None]
        energies.append(average.square() * on.sum())
    norm = torch.linalg.matrix_norm(p)
    values = torch.linalg.svdvals(p)
    share = values / values.sum(-1, keepdim=True)
    numbers = {
        "entropy": entropy.mean(-1),
        "entropy_min": entropy.amin(-1),
        "frobenius": norm,
        "row_maximum": p.amax(-1).mean(-1),
        "sink_mass": p.mean(-2).amax(-1),
        "diagonal_mass": p[:, (j - i) == 0].sum(-1) / m,
        "previous_mass": p[:, (j - i) == -1].sum(-1) / m,
        "next_mass": p[:, (j - i) == 1].sum(-1) / m,
        "mass_within_4": p[:, (j - i).abs() <= 4].sum(-1) / m,
        "mass_within_16": p[:, (j - i).abs() <= 16].sum(-1) / m,
        "offset_mean": mean,
        "offset_spread": ((p * offset.square()).sum((-2, -1)) / m - mean.square()).sqrt(),
        "toeplitz_error": torch.linalg.matrix_norm(p - toeplitz) / norm,
        "best_offset_error": (1 - torch.stack(energies).amax(0) / norm.square()).clamp(min=0).sqrt(),
        "effective_rank": torch.special.entr(share).sum(-1).exp(),
        "stable_rank": norm.square() / values[:, 0].square(),
        "sigma_1": values[:, 0],
        "sigma_ratio": values[:, 1] / values[:, 0],
        "energy_8": values[:, :8].square().sum(-1) / values.square().sum(-1),
    }
    if v is not None:
        left, s, right = torch.linalg.svd(p, full_matrices=False)
        for r in (8, 16):
            best = (left[..., :r] * s[..., None, :r]) @ right[..., :r, :]
            error = torch.linalg.matrix_norm((p - best) @ v) / torch.linalg.matrix_norm(p @ v)
            numbers[f"output_error_{r}"] = torch.zeros_like(error) if r >= min(m, n) else error
    return numbers


def attentions(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The model's own weights in float64, in the order of its calls."""
    double = nn.Module.double(copy.deepcopy(model))
    double.set_attn_implementation("eager")
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    with torch.no_grad():
        out = double(**inputs, output_attentions=True)
    if "attentions" in out:
        return [p[0] for p in out.attentions]
    decoder = [p for pair in zip(out.decoder_attentions, out.cross_attentions, strict=True) for p in pair]
    return [p[0] for p in (*out.encoder_attentions, *decoder)]


def assert_equals_brute_force(found: Measurement, weights: list[Tensor], values: list[Tensor] | None = None) -> None:
    assert len(weights) == len(found.sites)
    assert [site.heads for site in found.sites] == [len(p) for p in weights]
    measured = {**found.numbers, **found.spectral}
    start = 0
    for index, p in enumerate(weights):
        stop = start + len(p)
        for name, expected in brute_force(p.double(), None if values is None else values[index]).items():
            actual = measured[name][start:stop]
            # masses and errors near zero are compared absolutely; an output error is the root of a share of a Gram
            # matrix in float64, which has half of the digits: 2e-6 and 6e-6 are both zero
            floor = 0.1 if name.startswith("output_error") else 1e-2
            scale = expected.abs().clamp(min=floor)
            worst = ((actual - expected).abs() / scale).max().item()
            assert worst < 1e-4, f"{found.sites[index].name}: {name} is {worst:.1e} from brute force"
        start = stop


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_numbers_equal_brute_force(family: str) -> None:
    model, batch = ALL[family]()
    model = sharpen(model)
    values: list[Tensor] = []
    with torch.no_grad(), intercept(model, lambda call: values.append(call.v[0].double())):
        model(**batch)
    (found,) = observe(model, batch)
    assert_equals_brute_force(found, attentions(model, batch), values)


def test_torch_encoder_equals_brute_force() -> None:
    model, batch = ALL["torch_encoder"]()
    model = sharpen(model)
    weights, x = [], batch["src"].double()
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        for layer in double.layers:
            weights.append(layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)[1][0])
            x = layer(x)
    (found,) = observe(model, batch)
    assert_equals_brute_force(found, weights)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_layers_equal_the_models_hidden_states(dtype: torch.dtype, rounding: float) -> None:
    model, batch = ALL["bert"]()
    model = model.eval().to(dtype)
    (found,) = observe(model, batch)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    expected = torch.stack([relative_residual(x[0]) for x in states])
    torch.testing.assert_close(found.layers["relative_residual"], expected, rtol=rounding, atol=0)
    x = torch.nn.functional.normalize(states[-1][0].double(), dim=-1)
    pairs = (x @ x.mT)[~torch.eye(len(x), dtype=torch.bool)].mean()
    torch.testing.assert_close(found.layers["mean_cosine"][-1], pairs, rtol=rounding, atol=0)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_contribution_is_the_norm_that_reaches_the_stream(family: str) -> None:
    """||P V W_O|| per head, computed from the model's own matrices."""
    model, batch = ALL[family]()
    model = sharpen(model)
    outputs: list[Tensor] = []

    def see(call) -> None:
        mask = call.mask.sdpa_arguments(call.q.dtype)
        outputs.append(attention(call.q, call.k, call.v, scale=call.scale, **mask)[0].double())

    with torch.no_grad(), intercept(model, see):
        model(**batch)
    (found,) = observe(model, batch)
    matrices = {
        "bert": lambda i: model.encoder.layer[i].attention.output.dense.weight.mT,
        "gpt2": lambda i: model.h[i].attn.c_proj.weight,
        "llama": lambda i: model.layers[i].self_attn.o_proj.weight.mT,
    }
    expected = []
    for layer, output in enumerate(outputs):
        h, _, d = output.shape
        blocks = matrices[family](layer).detach().double().reshape(h, d, -1)
        expected.append(torch.linalg.matrix_norm(output @ blocks))
    torch.testing.assert_close(found.numbers["contribution"], torch.cat(expected), rtol=1e-4, atol=1e-6)


class Projected(nn.Module):
    """Attention whose output projection is a module, a function of its weight, or applied behind a gate."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.attn_qkv, self.out, self.mlp = form, nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn_qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        merged = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.form == "function":
            projected = nn.functional.linear(merged, self.out.weight, self.out.bias)
        else:
            projected = self.out(merged.sigmoid() * merged if self.form == "gate" else merged)
        return self.mlp(x + projected)


@pytest.mark.parametrize("form", ["module", "function", "gate"])
def test_contribution_is_measured_of_the_projection_or_not_at_all(form: str) -> None:
    model = Projected(form)
    (found,) = observe(model, torch.randn(2, 20, 32))[:1]
    assert ("contribution" in found.numbers) == (form == "module")


def test_what_is_not_finite_is_named() -> None:
    model, batch = ALL["bert"]()
    weight = model.encoder.layer[1].attention.self.value.weight
    with torch.no_grad():
        weight[17] = torch.nan  # heads are eight rows each
    with pytest.raises(NonFiniteError, match=r"encoder\.layer\.1\.attention\.self: the output of head 2 on text 0"):
        observe(model.eval(), batch)


def test_padding_changes_nothing() -> None:
    """A padded text measures like the shorter one on its own."""
    model, batch = ALL["bert"]()
    model = sharpen(model)
    ids = batch["input_ids"]
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    padded = observe(model, {"input_ids": ids.repeat(2, 1), "attention_mask": mask})
    (alone,) = observe(model, {"input_ids": ids[:, :25]})
    assert padded[1].lengths == alone.lengths
    for name in ("entropy", "frobenius", "toeplitz_error", "sink_mass", "output_norm"):
        torch.testing.assert_close(padded[1].numbers[name], alone.numbers[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        padded[1].spectral["effective_rank"], alone.spectral["effective_rank"], rtol=1e-4, atol=0
    )


def test_padding_is_in_no_layer_and_in_no_cross_attention() -> None:
    """A padded pair of texts measures like the shorter pair on its own, in the encoder and in the decoder."""
    from transformers import BartConfig, BartModel

    config = BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    )
    model = sharpen(BartModel(config))
    ids, others = torch.randint(3, 99, (2, 40)), torch.randint(3, 99, (2, 30))
    keep, others_keep = torch.ones(2, 40).long(), torch.ones(2, 30).long()
    keep[1, 25:] = others_keep[1, 18:] = 0
    names = ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")
    padded = observe(model, dict(zip(names, (ids, others, keep, others_keep), strict=True)))
    (alone,) = observe(model, {"input_ids": ids[1:, :25], "decoder_input_ids": others[1:, :18]})
    assert padded[1].lengths == alone.lengths == [(25, 25)] * 2 + [(18, 18), (18, 25)] * 2
    for part in ("numbers", "spectral", "layers"):
        for name, x in getattr(alone, part).items():
            torch.testing.assert_close(
                getattr(padded[1], part)[name], x, rtol=2e-4, atol=1e-5, equal_nan=True, msg=name
            )


def test_queries_that_see_nothing_are_not_measured() -> None:
    """Only earlier keys are visible, so that the first query has none; the others keep their offsets.

    Nobody sees the last key, which therefore counts as padding, with its query.
    """
    from tests.examination.measure.test_spectra import OneCall

    q, k, v = (torch.randn(1, 3, 30, 8) for _ in range(3))
    earlier = torch.ones(30, 30, dtype=torch.bool).tril(-1)
    earlier[17] = False
    (found,) = observe(OneCall(), [q, k, v, earlier])
    alive = earlier.any(-1) & (torch.arange(30) < 29)
    s = (q[0].double() @ k[0].double().mT / 8**0.5).masked_fill(~earlier, -torch.inf)
    p = torch.softmax(s[:, alive], -1)
    places = torch.arange(30)[alive]
    assert found.lengths == [(27, 29)]
    expected = {
        "entropy": torch.special.entr(p).sum(-1).mean(-1),
        "previous_mass": p[:, torch.arange(27), places - 1].mean(-1),
        "offset_mean": (p * (torch.arange(30) - places[:, None])).sum(-1).mean(-1),
        "frobenius": torch.linalg.matrix_norm(p),
        "output_norm": torch.linalg.matrix_norm(p @ v[0].double()),
        "sink_mass": p.mean(-2).amax(-1),
    }
    for name, x in expected.items():
        torch.testing.assert_close(found.numbers[name], x, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("texts", [1, 3, 20])
def test_sequence_first_measures_like_batch_first(texts: int) -> None:
    """torch's default layout is (sequence, batch, width); with 20 texts of 20 tokens the sizes do not tell."""

    def encoder(batch_first: bool) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first)
        return sharpen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    x = torch.randn(texts, 20, 32)
    hidden = torch.arange(20) >= 15
    hidden = hidden.expand(texts, 20) & (torch.arange(texts) == 1)[:, None]
    plain = examine(encoder(True), [{"src": x, "src_key_padding_mask": hidden}])
    other = examine(encoder(False), [{"src": x.transpose(0, 1), "src_key_padding_mask": hidden}])
    assert plain.inputs["texts"] == other.inputs["texts"] == texts
    for name, values in plain.layers.items():
        assert other.layers[name] == (values if name == "names" else pytest.approx(values, rel=1e-5))
    for one, two in zip(plain.records, other.records, strict=True):
        for name, value in one.measures.items():
            assert two.measures[name].mean == pytest.approx(value.mean, rel=1e-4, abs=1e-6), name
    assert [site["queries"] for site in other.excerpt["sites"]] == [20, 20]
    assert other.excerpt["sites"][0]["maps"] == plain.excerpt["sites"][0]["maps"]
    for model, batch_first in ((encoder(True), True), (encoder(False), False)):
        curves = collapse_curves(model, {"src": x if batch_first else x.transpose(0, 1)})["curves"]
        expected = collapse_curves(encoder(True), {"src": x[:1]})["curves"]
        for name, curve in expected.items():
            assert curves[name] == pytest.approx(curve, rel=1e-9)


def test_a_block_that_is_used_again_has_a_state_for_each_use() -> None:
    model, batch = ALL["albert"]()
    (found,) = observe(sharpen(model), batch)
    block = "encoder.albert_layer_groups.0"
    assert found.blocks == ["encoder.albert_layer_groups in", block, *(f"{block}@{i}" for i in (2, 3, 4))]
    assert [site.block for site in found.sites] == found.blocks[1:]
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    expected = torch.stack([relative_residual(x[0]) for x in states])
    torch.testing.assert_close(found.layers["relative_residual"], expected, rtol=1e-5, atol=0, check_dtype=False)


def test_blocks_of_rows_do_not_change_the_result() -> None:
    model, batch = ALL["llama"]()
    model = sharpen(model)
    (whole,), (pieces,) = observe(model, batch), observe(model, batch, entries=500)
    for name, x in whole.numbers.items():
        torch.testing.assert_close(pieces.numbers[name], x, rtol=1e-5, atol=1e-6, msg=name)


class Masked(nn.Module):
    """Two heads of width four with a mask (…, m, n) of its own; `windows` cuts each sequence before it attends."""

    def __init__(self, mask: Tensor, windows: int = 1) -> None:
        super().__init__()
        self.project, self.num_heads, self.windows = nn.Linear(8, 24), 2, windows
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.windows, -1)).flatten(0, 1)
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def test_windows_of_one_sequence_may_differ_in_length() -> None:
    """The last two keys of the second window are padding, so it has four tokens and the first one six."""
    torch.manual_seed(0)
    visible = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    visible[1, ..., 4:] = False
    model, x = Masked(visible, windows=2).eval(), torch.randn(1, 12, 8)
    (found,) = observe(model, x)
    assert found.lengths == [(6, 6)]
    with torch.no_grad():
        model_of_all = Masked(torch.ones(1, 1, dtype=torch.bool)).eval()
        model_of_all.load_state_dict({**model.state_dict(), "mask": torch.ones(1, 1, dtype=torch.bool)})
        parts = [observe(model_of_all, part)[0] for part in (x[:, :6], x[:, 6:10])]
    for name in ("entropy", "sink_mass", "output_norm"):
        expected = torch.stack([part.numbers[name] for part in parts]).mean(0)
        torch.testing.assert_close(found.numbers[name], expected, msg=name)
    assert found.leading is not None
    assert found.leading.shape == (2, 6)
    leading = [part.leading for part in parts if part.leading is not None]
    torch.testing.assert_close(found.leading[:, :4], (leading[0][:, :4] + leading[1]) / 2)
    torch.testing.assert_close(found.leading[:, 4:], leading[0][:, 4:] / 2)


def test_a_head_that_sees_nothing_has_numbers() -> None:
    """The mask hides every key from the second head."""
    visible = torch.tensor([True, False]).reshape(1, 2, 1, 1).expand(1, 2, 6, 6)
    (found,) = observe(Masked(visible).eval(), torch.randn(1, 6, 8))
    assert found.spectral["sigma_1"][1] == found.spectral["sigma_ratio"][1] == found.numbers["row_maximum"][1] == 0
    assert found.spectral["sigma_1"][0] >= 1 - 1e-6
