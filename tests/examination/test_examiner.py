"""Many batches: resumable, the same over several processes, and honest about how sure a kind is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise.errors import HeadwiseError, InputError, NonFiniteError
from headwise.examination import Examination, examine
from headwise.examination.examiner import load_measurements, save_measurements
from headwise.examination.measure.observe import observe
from tests.models.tiny_models import ALL, sharpen


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

    def stop_after_two(done: int) -> None:
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
import sys, torch, torch.distributed as dist
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
