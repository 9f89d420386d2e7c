"""`headwise rewrite MODEL --plan PLAN -o DIR`: a whole model or nothing, and a receipt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from headwise.cli.main import main
from headwise.cli.rewrite_command import OPERATOR_OPTIONS
from headwise.errors import InputError
from headwise.models.fingerprint import weights_hash
from headwise.replacement import KINDS, Choice, Plan, load
from tests.models.tiny_models import ALL
from tests.replacement.plans import describe

transformers = pytest.importorskip("transformers")
SOME = [
    Choice("softmax"),
    Choice("window", {"width": 5, "leading": 1}),
    Choice("toeplitz", {"reach": 4}),
    Choice("uniform"),
]


def plan_of(model: nn.Module, batch: dict, *, length: int = 40, choices: list[Choice] = SOME) -> Plan:
    sites = describe(model.eval(), batch)
    about = {"class": type(model).__name__, "name": "tiny", "fingerprint": weights_hash(model), "sites": sites}
    each = {name: choices[: site["heads"]] for name, site in sites.items()}
    fitted = {
        (name, head, choice): {"profile": torch.randn(9)}
        for name, row in each.items()
        for head, choice in enumerate(row)
        if choice.kind == "toeplitz"
    }
    return Plan(about, length, each, fitted)


@pytest.fixture
def bert(tmp_path: Path) -> tuple[nn.Module, dict, Path, Path]:
    """A model, a batch, its directory and its plan's."""
    model, batch = ALL["bert"]()
    model.save_pretrained(tmp_path / "model")
    plan_of(model, batch).save(tmp_path / "plan")
    return model.eval(), batch, tmp_path / "model", tmp_path / "plan"


def test_a_model_and_a_receipt(
    bert, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    model, batch, source, plan = bert
    assert main(["rewrite", str(source), "--plan", str(plan / "plan.json"), "-o", str(tmp_path / "new")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "BertModel: 2 attention sites" in text
    assert "largest change of the output on a probe" in text
    assert "1 window width=5" in text
    new = load(tmp_path / "new")
    with torch.no_grad():
        change = (new(**batch)[0] - model(**batch)[0]).abs().max().item()
    assert 0 < change < 1
    assert (tmp_path / "new" / "plan.json").exists()


def test_json(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, source, plan = bert
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new"), "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert receipt["what"] == "BertModel"
    assert receipt["parameters_after"] - receipt["parameters_before"] == 2 * 9
    assert receipt["parts"][0]["largest_change"] is None
    assert receipt["cost_after"]["multiply_adds"] < receipt["cost_before"]["multiply_adds"]


def test_a_plan_for_the_body_serves_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model, batch = transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(99, (1, 12))}
    model.save_pretrained(tmp_path / "model")
    plan_of(model.model, batch).save(tmp_path / "plan")
    arguments = ["rewrite", str(tmp_path / "model"), "--plan", str(tmp_path / "plan"), "-o", str(tmp_path / "new")]
    assert main(arguments) == 0
    new = load(tmp_path / "new")
    assert type(new).__name__ == "HeadwiseLlamaForCausalLM"
    assert new.model.layers[0].self_attn.headwise.choices == tuple(SOME)
    assert new.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 15)
    assert "model.layers.0.self_attn" in " ".join(capsys.readouterr().out.split())


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_any_other_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = encoder().eval(), torch.randn(1, 12, 16)
    plan_of(model, {"src": x}, choices=SOME[1:]).save(tmp_path / "plan")
    source = f"python:{__name__}:encoder"
    assert main(["rewrite", source, "--plan", str(tmp_path / "plan"), "-o", str(tmp_path / "new")]) == 0
    assert "no probe was given" in " ".join(capsys.readouterr().out.split())
    new = load(tmp_path / "new", model=encoder())
    assert new(x).shape == x.shape
    assert not torch.allclose(new(x), model(x))


def edited(plan: Path, **changes) -> None:
    facts = json.loads((plan / "plan.json").read_text())
    facts.update(changes)
    (plan / "plan.json").write_text(json.dumps(facts))


SITE = "encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sites": {SITE: [{"kind": "wndow"}] * 4}}, "wndow"),
        ({"sites": {SITE: [{"kind": "window", "size": 3}] * 4}}, "size"),
        ({"sites": {SITE: [{"kind": "softmax"}] * 3}}, "3"),
        ({"length": 4096, "lengths": [40, 4096]}, "the plan is for a length of 4096, but BertModel has 512 positions"),
    ],
)
def test_edited_plans(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, message: str) -> None:
    _, _, source, plan = bert
    edited(plan, **changes)
    before = sorted(tmp_path.iterdir())
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headwise rewrite: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.iterdir()) == before  # nothing is written


def test_a_plan_made_for_another_model(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, plan = bert
    other, _ = ALL["gpt2"]()
    same_class, _ = ALL["bert"]()
    for name, model in (("gpt2", other), ("bert2", same_class)):
        model.save_pretrained(tmp_path / name)
        assert main(["rewrite", str(tmp_path / name), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 2
        assert "the plan was made for" in capsys.readouterr().err
    assert not list(tmp_path.glob("*new*"))


def test_nothing_is_left_after_an_interruption(bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, source, plan = bert
    written = []

    def interrupted(self, directory, **options) -> None:
        (Path(directory) / "config.json").write_text("{}")
        written.append(directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
    before = sorted(tmp_path.iterdir())
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 130
    assert written
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_directory_is_kept(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, source, plan = bert
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("keep")
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "new" / "mine").read_text() == "keep"


def test_a_rewritten_model_is_neither_rewritten_again_nor_examined(
    bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, source, plan = bert
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 0
    assert main(["rewrite", str(tmp_path / "new"), "--plan", str(plan), "-o", str(tmp_path / "twice")]) == 2
    assert "was rewritten" in capsys.readouterr().err
    assert main(["examine", str(tmp_path / "new"), "-o", str(tmp_path / "report")]) == 2
    assert "works on the original model" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_plan_and_output_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewrite", "pool"]) == 2
    error = capsys.readouterr().err
    assert "the following arguments are required: -o/--out" in error


@pytest.fixture
def decoder(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A causal model with a tokenizer of words, saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(96)} | {"<unk>": 96}
    words |= {word: 97 + i for i, word in enumerate(("the", "whale"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path


def test_trials_at_the_planned_lengths(decoder, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = decoder
    plan = plan_of(model, {"input_ids": torch.arange(12).unsqueeze(0)}, choices=[Choice("window", {"width": 5})] * 4)
    replace(plan, length=40, lengths=(20, 40), measure="loss").save(path / "plan")
    command = ["rewrite", str(path / "model"), "--plan", str(path / "plan"), "-o", str(path / "new")]
    assert main([*command, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    kinds = {"prose", "languages", "records", "numbers", "markup", "code", "manual"}
    assert {(each["kind"], each["length"]) for each in trials} == {(kind, n) for kind in kinds for n in (20, 40)}
    assert all(each["cache_bytes"][1] < each["cache_bytes"][0] for each in trials)
    assert main([*command, "--force"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "drift of the loss per token with its 95 % interval" in text
    assert "at 40: drift" in text  # the plan's tolerance is 0
    assert main([*command, "--force", "--no-trial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == []


def test_stock(decoder, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = decoder
    plan = plan_of(model, {"input_ids": torch.arange(12).unsqueeze(0)}, choices=[Choice("window", {"width": 5})] * 4)
    plan.save(path / "plan")
    command = ["rewrite", str(path / "model"), "--plan", str(path / "plan"), "--stock", "--no-trial", "-o"]
    assert main([*command, str(path / "new")]) == 0
    assert "written as MinistralForCausalLM" in capsys.readouterr().out
    assert type(transformers.AutoModelForCausalLM.from_pretrained(path / "new")).__name__ == "MinistralForCausalLM"
    plan_of(model, {"input_ids": torch.arange(12).unsqueeze(0)}).save(path / "other")
    command[command.index(str(path / "plan"))] = str(path / "other")
    assert main([*command, str(path / "none")]) == 2
    assert "--stock needs one operator for all heads of a layer" in capsys.readouterr().err
    assert not (path / "none").exists()


# ---- one operator for all heads ----


def encoder_with_batches() -> tuple[nn.Module, list]:
    return encoder(), [torch.randn(1, 12, 16)]


def test_one_operator_for_all_heads(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch, source, _ = bert
    command = ["rewrite", str(source), "--all", "window", "--width", "5", "--leading", "1", "--json", "--no-trial"]
    assert main([*command, "-o", str(tmp_path / "new")]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert [part["notes"] for part in receipt["parts"]] == [["4 window width=5 leading=1"]] * 2
    new = load(tmp_path / "new")
    with torch.no_grad(), headwise.replace(model, "window", width=5, leading=1):
        torch.testing.assert_close(new(**batch)[0], model(**batch)[0])


def test_learned_tensors_of_all_heads_are_initial_and_saved(
    bert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, batch, source, _ = bert
    command = ["rewrite", str(source), "--all", "projected", "--rank", "4", "--length", "30", "--no-trial"]
    assert main([*command, "-o", str(tmp_path / "new")]) == 0
    assert "learned tensors have their initial values" in " ".join(capsys.readouterr().out.split())
    assert torch.isfinite(load(tmp_path / "new")(**batch)[0]).all()
    assert Plan.load(tmp_path / "new").length == 30


def test_all_heads_of_a_factory_with_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"python:{__name__}:encoder_with_batches"
    assert main(["rewrite", source, "--all", "efficient", "-o", str(tmp_path / "new")]) == 0
    new, x = load(tmp_path / "new", model=encoder()), torch.randn(2, 9, 16)
    assert not torch.allclose(new(x), encoder().eval()(x))
    capsys.readouterr()
    assert main(["rewrite", f"python:{__name__}:encoder", "--all", "efficient", "-o", str(tmp_path / "other")]) == 2
    assert (
        "an input is needed to find its attention; pass probe=, or return (model, batches)" in capsys.readouterr().err
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--all", "wndow"], "unknown operator 'wndow'"),
        (["--all", "gaussian"], "cannot be saved with a model; the operators that can are softmax, uniform"),
        (["--all", "toeplitz"], "toeplitz is fitted to recorded attention"),
        (["--all", "window", "--rank", "3"], "window: unknown option 'rank'; its options are width, leading"),
        (["--all", "window", "--width", "2.5"], "width must be a whole number, but is 2.5"),
        (["--all", "window", "--plan", "x"], "not allowed with argument"),
        (["--plan", "x", "--width", "3"], "--width is an option of the operator of --all"),
        (["--all", "window", "--tolerance", "0.1"], "--tolerance chooses a point of a plan's trade-off curve"),
        ([], "one of the arguments --plan --all is required"),
    ],
)
def test_wrong_options_of_all(bert, tmp_path: Path, capsys: pytest.CaptureFixture[str], options, message: str) -> None:
    assert main(["rewrite", str(bert[2]), *options, "-o", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_every_option_of_an_operator_is_one_of_the_command() -> None:
    named = {option for kind in KINDS.values() if kind.start is None for option in kind.options}
    assert set(OPERATOR_OPTIONS) == named


def test_a_choice_in_place_of_a_plan_and_nothing_else(bert) -> None:
    model, batch, _, _ = bert
    new, receipt = headwise.rewrite(model, Choice("window", {"width": 3}))
    assert [part.notes[0] for part in receipt.parts] == ["4 window width=3 leading=0"] * 2
    with torch.no_grad(), headwise.replace(model, "window", width=3):
        torch.testing.assert_close(new(**batch)[0], model(**batch)[0])
    with pytest.raises(InputError, match=r"plan must be a Plan, or a Choice for all heads, but is 'window'; for buil"):
        headwise.rewrite(model, "window")  # type: ignore[arg-type]


def test_a_rewritten_model_whose_weights_were_damaged_is_refused(bert, tmp_path: Path) -> None:
    _, _, source, plan = bert
    assert main(["rewrite", str(source), "--plan", str(plan), "-o", str(tmp_path / "new")]) == 0
    file = tmp_path / "new" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    for opened in (transformers.AutoModel.from_pretrained, load):
        with pytest.raises(InputError, match=r"model.safetensors has been changed since headwise wrote it"):
            opened(tmp_path / "new")
