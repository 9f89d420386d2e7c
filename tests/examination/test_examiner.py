"""Many batches: resumable, the same over several processes, and honest about how sure a kind is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.errors import HeadwiseError, InputError, NonFiniteError
from headwise.examination import Examination, examine, with_depth
from headwise.examination.examiner import load_measurements, save_measurements
from headwise.examination.measure.observe import observe
from tests.models.tiny_models import ALL, sharpen
from tests.models.tiny_tokenizer import tokenizer_of, words


def texts(count: int, n: int = 40) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(99, (1, n))} for _ in range(count)]


@pytest.fixture
def bert() -> torch.nn.Module:
    return sharpen(ALL["bert"]()[0])


def test_examine_is_a_function_of_the_package(bert: torch.nn.Module) -> None:
    found = headwise.examine(bert, texts(2))
    assert isinstance(found, Examination)
    assert len(found.records) == 8
    assert found.inputs["texts"] == 2


def test_json_has_a_schema_and_no_nan(bert: torch.nn.Module) -> None:
    found = examine(bert, texts(3), name="tiny", spectra_every=2)
    facts = json.loads(found.to_json(), parse_constant=lambda x: pytest.fail(f"{x} in the JSON"))
    assert facts["schema"] == 3
    assert facts["inputs"]["spectra_texts"] == 2
    record = facts["records"][5]
    assert (record["site"], record["head"]) == (1, 1)
    assert record["measures"]["entropy"]["texts"] == 3
    assert record["measures"]["effective_rank"]["texts"] == 2
    assert sum(record["kind_counts"].values()) == record["judged"] <= 3
    assert facts["model"]["parameters"] == sum(p.numel() for p in bert.parameters())


def test_means_over_texts_are_means(bert: torch.nn.Module) -> None:
    batches = texts(3)
    single = [observe(bert, batch)[0].numbers["entropy"] for batch in batches]
    found = examine(bert, batches)
    expected = torch.stack(single).mean(0)
    got = torch.tensor([r.measures["entropy"].mean for r in found.records], dtype=torch.float64)
    torch.testing.assert_close(got, expected)


def test_a_batch_of_two_is_two_texts(bert: torch.nn.Module) -> None:
    batches = texts(2)
    together = examine(bert, [{"input_ids": torch.cat([b["input_ids"] for b in batches])}])
    apart = examine(bert, batches, spectra_every=1)
    for a, b in zip(together.records, apart.records, strict=True):
        assert a.kind == b.kind
        for name in ("entropy", "effective_rank", "output_error_16"):
            assert a.measures[name].mean == pytest.approx(b.measures[name].mean, rel=1e-4)


def test_interrupted_work_is_not_repeated(bert: torch.nn.Module, tmp_path: Path) -> None:
    batches = texts(4)

    def stop_after_two(what: str, done: int, total: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(bert, batches, partial_results=tmp_path, progress=stop_after_two)
    kept = sorted(tmp_path.glob("batch-*.pt"))
    assert [path.name[:12] for path in kept] == ["batch-000000", "batch-000001"]
    stamps = [path.stat().st_mtime_ns for path in kept]
    resumed = examine(bert, batches, partial_results=tmp_path)
    assert [path.stat().st_mtime_ns for path in kept] == stamps
    assert resumed.to_json() == examine(bert, batches).to_json()
    with pytest.raises(InputError, match="another model, other inputs or other settings"):
        examine(bert, batches, partial_results=tmp_path, seed=1)
    with pytest.raises(InputError, match="another model, other inputs or other settings"):
        examine(bert, texts(4), partial_results=tmp_path)


def test_measurements_survive_a_file(bert: torch.nn.Module, tmp_path: Path) -> None:
    found = observe(bert, texts(1)[0])
    save_measurements(found, tmp_path / "x.pt", "run")
    stored = load_measurements(tmp_path / "x.pt", "run")
    assert stored is not None
    (again,) = stored
    assert again.sites == found[0].sites
    assert again.blocks == found[0].blocks
    torch.testing.assert_close(again.numbers, found[0].numbers)
    torch.testing.assert_close(again.leading, found[0].leading)
    assert not list(tmp_path.glob(".*"))


PROCESSES = """
import sys, torch, torch._dynamo, torch.distributed as dist  # _dynamo before the group, whose threads it would keep
from headwise.examination import examine
from tests.models.tiny_models import ALL, sharpen
torch.set_num_threads(1); torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
model = sharpen(ALL["bert"]()[0])
batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(5)]
found = examine(model, batches, spectra_every=2)
open(sys.argv[3] + sys.argv[1], "w").write(found.to_json())
"""


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sharpen(ALL["bert"]()[0])
    alone = json.loads(examine(model, texts(5), spectra_every=2).to_json())
    command = [sys.executable, "-c", PROCESSES]
    arguments = [str(tmp_path / "meet"), str(tmp_path / "out")]
    running = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    first, second = (json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2))
    assert first["records"] == second["records"]
    for a, b in zip(alone["records"], first["records"], strict=True):
        assert (a["kind"], a["kind_counts"]) == (b["kind"], b["kind_counts"])
        for name, x in a["measures"].items():
            assert b["measures"][name]["mean"] == pytest.approx(x["mean"], rel=1e-6, abs=1e-9), name


def test_texts_are_examined_like_the_batches_they_make(bert: torch.nn.Module) -> None:
    tokenizer, given = tokenizer_of(99), [words(20, 0), words(30, 1)]
    batches = [{"input_ids": torch.tensor([tokenizer(text)["input_ids"]])} for text in given]
    found, expected = examine(bert, texts=given, tokenizer=tokenizer), examine(bert, batches)
    for a, b in zip(found.records, expected.records, strict=True):
        assert {name: a.measures[name] for name in b.measures} == dict(b.measures)
        assert "delimiter_mass" in a.measures.keys() - b.measures.keys()  # of texts the tokens are known
    assert (found.inputs["shortest"], found.inputs["longest"]) == (22, 32)
    assert found.excerpt["tokens"] == ["[CLS]", *given[0].split(), "[SEP]"]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_padding_changes_no_measure(family: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = sharpen(ALL[family]()[0]), tokenizer_of(99)
    given = [words(12, 0), words(30, 1), words(7, 2)]
    apart = examine(model, texts=given, tokenizer=tokenizer, spectra_every=1)
    together = examine(model, texts=given, tokenizer=tokenizer, batch_size=3, spectra_every=1)
    assert together.inputs["texts"] == 3
    assert together.inputs["shortest"] == apart.inputs["shortest"] == 9
    assert together.excerpt["tokens"] == apart.excerpt["tokens"]
    for a, b in zip(apart.records, together.records, strict=True):
        for name, statistic in a.measures.items():
            if not name.endswith("_score"):  # on repeated tokens of the first text of a batch
                assert b.measures[name].mean == pytest.approx(statistic.mean, rel=1e-3, abs=1e-4, nan_ok=True), name
        assert b.measures["entropy"].texts == b.measures["effective_rank"].texts == 3


def test_texts_are_cut_to_the_length_or_to_the_positions(bert: torch.nn.Module) -> None:
    tokenizer = tokenizer_of(99)
    assert examine(bert, texts=[words(60, 0)], tokenizer=tokenizer, length=16).inputs["longest"] == 16
    gpt2 = ALL["gpt2"]()[0]  # 64 positions
    assert examine(gpt2, texts=[words(90, 0)], tokenizer=tokenizer).inputs["longest"] == 64
    with pytest.raises(InputError, match="GPT2Model has 64 positions, but length is 65; use at most 64"):
        examine(gpt2, texts=[words(90, 0)], tokenizer=tokenizer, length=65)


def test_an_excerpt_of_your_own_is_pictured_and_not_measured(bert: torch.nn.Module) -> None:
    tokenizer, given = tokenizer_of(99), [words(20, 0)]
    found = examine(bert, texts=given, tokenizer=tokenizer, excerpt="w7 w8 w7 w8")
    assert found.excerpt["tokens"] == ["[CLS]", "w7", "w8", "w7", "w8", "[SEP]"]
    assert found.excerpt["sites"][0]["keys"] == 6
    assert found.inputs["longest"] == 22
    assert found.records[0].measures == examine(bert, texts=given, tokenizer=tokenizer).records[0].measures
    batch = {"input_ids": torch.arange(9)[None]}
    assert examine(bert, texts(1), excerpt=batch).excerpt["sites"][0]["keys"] == 9
    assert examine(bert, texts(1), excerpt="w3 w4 w5", tokenizer=tokenizer).excerpt["sites"][0]["keys"] == 5
    with pytest.raises(InputError, match="an excerpt that is a text needs tokenizer="):
        examine(bert, texts(1), excerpt="w3 w4 w5")


def test_importance_and_lengths_are_one_keyword_each(bert: torch.nn.Module) -> None:
    given = {"texts": [words(30, 0), words(30, 1)], "tokenizer": tokenizer_of(99)}
    found = examine(bert, **given, importance=True, lengths=[8, 16])
    assert found.by_length["lengths"] == [8, 16, 32]
    assert found.by_length["kinds"]["8"] == [r.kind for r in examine(bert, **given, length=8).records]
    assert found.rows()[0]["kind_at_8"] == found.by_length["kinds"]["8"][0]
    importance = [record.measures["importance"] for record in found.records]
    assert all(x.texts == 2 and x.mean > 0 for x in importance)
    batches = texts(2)
    by_generator, by_list = (examine(bert, made, importance=True) for made in (iter(batches), batches))
    assert by_generator.to_json() == by_list.to_json()
    with pytest.raises(InputError, match=r"lengths cuts texts=.*; for batches call headwise.examination.with_lengths"):
        examine(bert, batches, lengths=[8])


def test_ablations_are_one_keyword(bert: torch.nn.Module) -> None:
    batches = texts(2)
    found = examine(bert, iter(batches), ablations=True)
    assert found.ablations["supported"]
    assert found.ablations == with_depth(examine(bert, batches), bert, batches[0]).ablations
    assert examine(bert, batches).ablations == {}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, "give either batches or texts=.*, but neither was given"),
        ({"batches": [torch.zeros(1, 3)], "texts": ["w3 w4"]}, "but both was given"),
        ({"texts": ["w3 w4 w5 w6"]}, "texts need a tokenizer: pass tokenizer=AutoTokenizer"),
        ({"texts": "w3 w4", "tokenizer": 1}, "texts is a str; give a list of strings"),
        ({"texts": [], "tokenizer": 1}, "texts is empty"),
        ({"texts": ["w3", 7], "tokenizer": 1}, r"texts\[1\] is a int; give strings"),
        ({"texts": ["w3 w4"], "tokenizer": 1}, "tokenizer is a int, which cannot be called"),
        ({"texts": ["w3 w4 w5"], "tokenizer": len}, r"the tokenizer cannot read texts\[0\]: TypeError"),
        ({"texts": ["w3"], "tokenizer": "ours"}, r"texts\[0\] has 3 tokens; attention needs at least 4"),
        ({"texts": ["w3 w4 w5"], "tokenizer": "larger"}, "made token 150, but BertModel has a vocabulary of 99"),
        ({"texts": ["w3 w4 w5"], "tokenizer": "ours", "batch_size": 0}, "batch_size is 0; it must be a whole number"),
        ({"batches": ["w3 w4"]}, r"batches holds strings; give texts as texts=\[…\], with tokenizer="),
        ({"batches": {"input_ids": torch.zeros(1, 3)}}, "batches is one dict; give a list of batches"),
        ({"batches": torch.zeros(1, 3)}, "batches is one Tensor; give a list of batches"),
        ({"batches": 7}, "batches is a int; give a list of batches"),
        ({"batches": [torch.zeros(1, 3)], "length": 7}, "tokenizer, length and batch_size are for texts"),
    ],
)
def test_wrong_arguments_are_named(bert: torch.nn.Module, arguments: dict[str, Any], expected: str) -> None:
    made = {"ours": lambda: tokenizer_of(99), "larger": lambda: tokenizer_of(151)}
    tokenizer = arguments.get("tokenizer")
    if isinstance(tokenizer, str):
        arguments = {**arguments, "tokenizer": made[tokenizer]()}
    if tokenizer == "larger":
        arguments["texts"] = ["w3 w4 w150"]
    with pytest.raises(InputError, match=expected):
        examine(bert, **arguments)


def test_a_model_by_name_must_be_loaded_first() -> None:
    with pytest.raises(InputError, match=r"model is the string 'minilm'; load it first: headwise.models.load_model"):
        examine("minilm", texts(1))
    with pytest.raises(InputError, match="model is a function; give a torch module"):
        examine(lambda x: x, texts(1))


def test_half_precision_and_a_batch_of_one(bert: torch.nn.Module) -> None:
    batches = texts(1)
    exact = examine(bert, batches)
    for dtype in (torch.float16, torch.bfloat16):
        half = examine(sharpen(ALL["bert"]()[0]).to(dtype), batches, ablations=True)
        assert half.model["dtype"] == str(dtype).removeprefix("torch.")
        json.dumps(half.to_dict(), allow_nan=False)
        assert len(half.records) == len(exact.records)


def test_bad_input_raises(bert: torch.nn.Module) -> None:
    with pytest.raises(InputError, match="no batches"):
        examine(bert, [])
    broken = sharpen(ALL["bert"]()[0])
    with torch.no_grad():
        broken.encoder.layer[1].output.dense.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"encoder.layer.1.output.dense.weight.*1 non-finite of"):
        examine(broken, texts(1))
    with pytest.raises(HeadwiseError, match="never called scaled_dot_product_attention"):
        examine(torch.nn.Linear(3, 3), [torch.zeros(2, 3)])


def test_training_modes_come_back(bert: torch.nn.Module) -> None:
    bert.train()
    bert.encoder.layer[1].eval()
    before = [module.training for module in bert.modules()]
    examine(bert, texts(1))
    assert [module.training for module in bert.modules()] == before
