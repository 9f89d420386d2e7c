"""No file runs code: every payload here creates a directory, `marker`, if anything executes it.

Where it matters, the same file is loaded with permission first and the marker appears, so the payload is live.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._export.serde.schema import SCHEMA_VERSION

import headwise
from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models import load_model
from headwise.models.gate import Trust, from_pretrained, load_program, load_tensors
from headwise.models.media.images import image_input
from headwise.replacement import Choice, load
from headwise.replacement.model_comparison import open_model
from tests.models.tiny_models import ALL
from tests.replacement.plans import plan_for

transformers = pytest.importorskip("transformers")
SOURCE = Path(headwise.__file__).parent
Members = dict[str, bytes]


class Payload:
    """Unpickling it creates a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# The gate is the only way in


ALLOWED = {
    "torch.load": {"models/gate.py", "models/program_archive.py", "testing/contract.py"},  # contract: its own buffer
    "torch.export.load": {"models/gate.py"},
    "from_pretrained": {"models/gate.py"},
    "import_module": {"models/gate.py", "__init__.py", "cli/main.py"},  # the last two: modules of headwise
    # the kernels that this process or an earlier one has compiled
    "torch.ops.load_library": {"operators/_kernels/native/kernel_library.py"},
    "pickle.load": set(),
    "pickle.loads": set(),
    "torch.jit.load": set(),
    "torch.hub.load": set(),
    "numpy.load": set(),
    "np.load": set(),
    "exec": set(),
    "eval": set(),
    "__import__": set(),
    "runpy.run_path": set(),
    "runpy.run_module": set(),
    "spec_from_file_location": set(),
}


METHODS = {"from_pretrained", "import_module", "spec_from_file_location"}
"""Also forbidden as methods of any object."""


def called(tree: ast.AST) -> Iterator[str]:
    """The dotted name of every function that is called, also of one imported by its name."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            origins.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            text = ast.unparse(node.func)
            yield origins.get(text, text)


def test_only_the_gate_calls_what_can_run_code() -> None:
    found: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in SOURCE.rglob("*.py"):
        for call in called(ast.parse(path.read_text(encoding="utf-8"))):
            for name in ALLOWED:
                method = name in METHODS and call.rpartition(".")[2] == name
                if (call == name or method) and not call.startswith(("gate.", "headwise.models.gate.")):
                    found[name].add(path.relative_to(SOURCE).as_posix())
    assert {name: files - ALLOWED[name] for name, files in found.items() if files - ALLOWED[name]} == {}
    assert found["torch.load"], "the scan sees nothing"


# Exported programs


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.conv(x).relu()}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "small.pt2"
    exported = torch.export.export(
        Small().eval(), (torch.randn(2, 2, 9),), dynamic_shapes={"x": {0: torch.export.Dim("b", min=2, max=8)}}
    )
    torch.export.save(exported, path)
    return path


def edited(program: Path, edit: Callable[[Members], None], path: Path) -> Path:
    """A copy of the archive with its members changed."""
    with zipfile.ZipFile(program) as archive:
        root = archive.namelist()[0].partition("/")[0]
        members = {name.removeprefix(f"{root}/"): archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name[1:] if name.startswith("/") else f"{root}/{name}", content)
    return path


def in_json(member: str, change: Callable[[str], str]) -> Callable[[Members], None]:
    def edit(members: Members) -> None:
        members[member] = change(members[member].decode()).encode()

    return edit


def pickled_inputs(members: Members, marker: Path) -> None:
    members["data/sample_inputs/model.pt"] = saved(((Payload(marker),), {}))


def opaque_constant(members: Members, marker: Path) -> None:
    config = {
        "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
    }
    members["data/constants/model_constants_config.json"] = json.dumps(config).encode()
    members["data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def pickled_weight(members: Members, marker: Path) -> None:
    config = json.loads(members["data/weights/model_weights_config.json"])
    entry = config["config"]["conv.bias"]
    entry["use_pickle"] = True
    members[f"data/weights/{entry['path_name']}"] = saved(Payload(marker))
    members["data/weights/model_weights_config.json"] = json.dumps(config).encode()


def weights_of_earlier_versions(members: Members, marker: Path) -> None:
    members["data/weights/model.pt"] = saved({"conv.bias": Payload(marker)})


def program_of_earlier_versions(members: Members, marker: Path) -> None:
    for name in ("state_dict", "constants", "example_inputs"):
        members[f"/serialized_{name}.pt"] = saved({"x": Payload(marker)})
    members["/serialized_exported_program.json"] = members["models/model.json"]
    members["/version"] = "{}.{}".format(*SCHEMA_VERSION).encode()
    members["data/weights/weight_0"] = bytes(4)  # too short: torch then looks for the earlier format


def size_expression(members: Members, marker: Path) -> None:
    text = f"__import__('os').mkdir('{marker}')"
    replaced = re.sub(r'"expr_str": "[^"]*"', f'"expr_str": "{text}"', members["models/model.json"].decode())
    members["models/model.json"] = replaced.encode()


def guard(members: Members, marker: Path) -> None:
    model = json.loads(members["models/model.json"])
    model["guards_code"] = [f"__import__('os').mkdir('{marker}') is None"]
    members["models/model.json"] = json.dumps(model).encode()


def call_target(members: Members, marker: Path) -> None:
    model = json.loads(members["models/model.json"])
    node = next(n for n in model["graph_module"]["graph"]["nodes"] if "relu" in n["target"])
    node["target"] = "torch.os.mkdir"
    node["inputs"] = [{"name": "", "arg": {"as_string": str(marker)}, "kind": 1}]
    members["models/model.json"] = json.dumps(model).encode()


def name_in_source_code(members: Members, marker: Path) -> None:
    name = f"self.__dict__[__import__('os').mkdir('{marker}')]"
    members["models/model.json"] = members["models/model.json"].decode().replace('"relu"', f'"{name}"').encode()


def imported_module(members: Members, marker: Path) -> None:
    (marker.parent / "evil_module.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nfactory = list\n")
    model = json.loads(members["models/model.json"])
    signature = model["graph_module"]["module_call_graph"][0]["signature"]
    context = {"default_factory_module": "evil_module", "default_factory_name": "factory", "dict_context": ["y"]}
    spec = json.loads(signature["out_spec"])
    spec[1].update(type="collections.defaultdict", context=context)
    signature["out_spec"] = json.dumps(spec)
    members["models/model.json"] = json.dumps(model).encode()


LIVE = [
    pickled_inputs,
    opaque_constant,
    pickled_weight,
    weights_of_earlier_versions,
    program_of_earlier_versions,
    size_expression,
    guard,
    imported_module,
]
NOT_LIVE = [call_target, name_in_source_code]
"""torch 2.13 happens to stop these later on."""


@pytest.mark.parametrize("attack", LIVE, ids=lambda f: f.__name__)
def test_a_program_that_runs_code_needs_permission(
    attack: Callable, program: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = edited(program, lambda members: attack(members, marker), marker.parent / "hostile.pt2")
    monkeypatch.syspath_prepend(marker.parent)
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    out = marker.parent / "out.pt2"
    assert main(["convert", str(path), "-o", str(out)]) == 2
    assert not marker.exists()
    assert not out.exists()
    message = capsys.readouterr().err
    assert "could run code when loaded" in message
    assert "--allow-pickle" in message
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_program(path, Trust(allow_pickle=True)).module()(torch.randn(2, 2, 9))
    assert marker.exists(), "the payload is not live"


@pytest.mark.parametrize("attack", NOT_LIVE, ids=lambda f: f.__name__)
def test_a_program_of_unknown_names_needs_permission(attack: Callable, program: Path, marker: Path) -> None:
    path = edited(program, lambda members: attack(members, marker), marker.parent / "hostile.pt2")
    with pytest.raises(InputError, match="could run code when loaded"):
        load_program(path, Trust())
    assert not marker.exists()


@pytest.mark.parametrize(
    "member",
    ["data/aotinductor/model/x.so", "data/constants/custom_obj_0", "models/other.json", "executorch/x"],
)
def test_members_of_other_kinds_are_refused(member: str, program: Path, tmp_path: Path) -> None:
    path = edited(program, lambda members: members.update({member: b"{}"}), tmp_path / "hostile.pt2")
    with pytest.raises(InputError, match=f"it holds '{member}'"):
        load_program(path, Trust())


def test_a_program_that_is_plain_data_is_loaded(program: Path, tmp_path: Path) -> None:
    x = torch.randn(3, 2, 9)
    expected = torch.export.load(program).module()(x)["y"]
    assert torch.equal(load_program(program, Trust()).module()(x)["y"], expected)
    out = tmp_path / "out.pt2"
    assert main(["convert", str(program), "-o", str(out), "--json"]) == 0
    torch.testing.assert_close(load_program(out, Trust()).module()(x)["y"], expected)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"\x89PNG\r\n\x1a\n" + bytes(50), b"{}"])
def test_files_that_are_no_programs(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt2").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.pt2"):
        load_program(tmp_path / "x.pt2", Trust())


def test_a_flipped_bit_in_the_weights_of_a_program_is_noticed(program: Path, tmp_path: Path) -> None:
    content = bytearray(program.read_bytes())
    with zipfile.ZipFile(program) as archive:
        weights = next(x for x in archive.infolist() if "/data/weights/weight_" in x.filename)
        data = archive.read(weights)
    content[content.index(data) + len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged: the checksum of .*weight_0 is wrong"):
        load_program(damaged, Trust())


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_programs(keep: float, program: Path, tmp_path: Path) -> None:
    content = program.read_bytes()
    (tmp_path / "x.pt2").write_bytes(content[: int(keep * len(content))])
    for trust in (Trust(), Trust(allow_pickle=True)):
        with pytest.raises(InputError, match=r"x\.pt2"):
            load_program(tmp_path / "x.pt2", trust)


# Tensors


def test_tensors_are_not_unpickled(marker: Path, capsys: pytest.CaptureFixture) -> None:
    path = marker.parent / "x.pt"
    for content in (saved({"q": Payload(marker)}), pickle.dumps(Payload(marker))):
        path.write_bytes(content)
        assert main(["bench", "fidelity", "--tensors", str(path)]) == 2
        assert not marker.exists()
        assert "not loaded" in capsys.readouterr().err


def test_a_file_that_unpacks_to_more_than_it_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"q": torch.zeros(1000)}))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content + bytes(10**6 if name.endswith("data/0") else 0))
    with pytest.raises(InputError, match=r"x\.pt unpacks to 1\d+ bytes"):
        load_tensors(tmp_path / "x.pt")


# Models


def bert(directory: Path, **options: Any) -> Path:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(directory, **options)
    return directory


def rewritten(directory: Path) -> Path:
    model, batch = ALL["bert"]()
    new, _ = headwise.rewrite(model.eval(), plan_for(model, batch, [Choice("toeplitz", {"reach": 2})]))
    new.save_pretrained(directory)
    return directory


def as_pickle(directory: Path, name: str = "pytorch_model.bin") -> None:
    from safetensors.torch import load_file

    torch.save(load_file(directory / "model.safetensors"), directory / name)
    (directory / "model.safetensors").unlink()


def write_index(directory: Path, file: str) -> None:
    from safetensors.torch import load_file

    names = load_file(directory / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


OPENERS = {
    "load_model": (bert, lambda path: load_model(str(path))),
    "load": (rewritten, load),
    "open_model": (rewritten, open_model),
    "from_pretrained": (
        rewritten,
        lambda path: type(headwise.rewrite(*_rewritable())[0]).from_pretrained(path),
    ),
}


def _rewritable() -> tuple[nn.Module, Any]:
    model, batch = ALL["bert"]()
    return model.eval(), plan_for(model, batch, [Choice("softmax")])


each_opener = pytest.mark.parametrize("make, opener", OPENERS.values(), ids=OPENERS)


@each_opener
def test_pickled_weights_are_refused(make: Callable, opener: Callable, tmp_path: Path) -> None:
    directory = make(tmp_path / "model")
    as_pickle(directory)
    with pytest.raises(InputError, match=r"as a pickle \(pytorch_model.bin\)"):
        opener(directory)


@each_opener
def test_an_index_that_names_a_pickle_is_refused(make: Callable, opener: Callable, tmp_path: Path) -> None:
    directory = make(tmp_path / "model")
    write_index(directory, "pytorch_model.bin")
    as_pickle(directory)
    with pytest.raises(InputError, match=r"index.json names pytorch_model.bin, which is not safetensors"):
        opener(directory)


@each_opener
@pytest.mark.parametrize("form", ["../outside.safetensors", "absolute", "link", "index link"])
def test_weights_outside_of_the_directory_are_refused(
    form: str, make: Callable, opener: Callable, tmp_path: Path
) -> None:
    directory, outside = make(tmp_path / "model"), tmp_path / "outside.safetensors"
    write_index(directory, {"absolute": str(outside), "index link": "a.safetensors"}.get(form, form))
    (directory / "model.safetensors").rename(outside)
    if form == "link":
        (directory / "model.safetensors").symlink_to(outside)
    if form == "index link":
        (directory / "a.safetensors").symlink_to(outside)
    with pytest.raises(InputError, match=r"outside of .*model; it is not loaded"):
        opener(directory)


def test_links_inside_the_hub_cache_are_followed(tmp_path: Path) -> None:
    made, cache = bert(tmp_path / "made"), tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(made.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert load_model(str(snapshot)).name == "0123abc"
    (tmp_path / "link").symlink_to(snapshot)
    assert load_model(str(tmp_path / "link")).name == "0123abc"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "[" * 10**5]
)
def test_a_malformed_index(text: str, tmp_path: Path) -> None:
    directory = bert(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        load_model(str(directory))


def test_weights_named_by_the_config(tmp_path: Path) -> None:
    directory = bert(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    for name, message in (("x.bin", "must name safetensors"), ("../x.safetensors", "outside of")):
        (directory / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
        with pytest.raises(InputError, match=message):
            load_model(str(directory))


def test_attention_that_would_be_downloaded_is_refused(tmp_path: Path) -> None:
    directory = bert(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attn_implementation": "someone/kernel"}))
    with pytest.raises(InputError, match="'someone/kernel', code that would be downloaded"):
        load_model(str(directory))


# Code that comes with a model


CODE = """
import os
from transformers import {base}
os.mkdir({marker!r})
class Custom({base}):
    model_type = "custom"
"""
CONFIGS = {
    "config": ("config.json", "AutoConfig", "PretrainedConfig"),
    "model": ("config.json", "AutoModel", "BertModel"),
    "tokenizer": ("tokenizer_config.json", "AutoTokenizer", "PreTrainedTokenizer"),
    "image processor": ("preprocessor_config.json", "AutoImageProcessor", "BaseImageProcessor"),
    "feature extractor": ("preprocessor_config.json", "AutoFeatureExtractor", "SequenceFeatureExtractor"),
}


def plant(directory: Path, part: str, marker: Path) -> None:
    """Custom code for one part of the model in `directory`."""
    file, auto_class, base = CONFIGS[part]
    (directory / "custom.py").write_text(CODE.format(base=base, marker=str(marker)))
    path = directory / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    named = ["custom.Custom", None] if part == "tokenizer" else "custom.Custom"
    settings["auto_map"] = {auto_class: named}
    if part in ("config", "model"):
        settings["model_type"] = "custom"
    if part == "model":
        settings["auto_map"]["AutoConfig"] = "custom.Custom"
    if part == "image processor":
        settings["size"] = {"height": 24, "width": 24}
    if part == "tokenizer":
        settings["tokenizer_class"] = "CustomTokenizer"
        (directory / "vocab.txt").write_text("a\n")
    path.write_text(json.dumps(settings))


RUNS = {
    "config": ["examine", "{}", "-o", "{out}"],
    "model": ["plan", "{}", "-o", "{out}"],
    "tokenizer": ["examine", "{}", "-o", "{out}"],
    "feature extractor": ["examine", "{}", "--audio", "{audio}", "-o", "{out}"],
}


def prepared(part: str, directory: Path) -> dict[str, str]:
    """A model that takes what `part` prepares, and files to give it."""
    import wave

    images, audio = directory.parent / "images", directory.parent / "a.wav"
    images.mkdir()
    from PIL import Image

    Image.new("RGB", (24, 24)).save(images / "a.png")
    with wave.open(str(audio), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(bytes(32000))
    name = {"image processor": "vit", "feature extractor": "whisper"}.get(part, "bert")
    ALL[name]()[0].save_pretrained(directory)
    return {"images": str(images), "audio": str(audio), "out": str(directory.parent / "out")}


@pytest.mark.parametrize("part", CONFIGS)
def test_custom_code_is_refused_without_asking(
    part: str, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    directory = marker.parent / "model"
    files = prepared(part, directory)
    plant(directory, part, marker)
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    if part == "image processor":  # transformers' own processor for this model is used instead
        assert image_input(load_model(str(directory)), Path(files["images"]), limit=1).batches
        assert not marker.exists()
    else:
        assert main([word.format(str(directory), **files) for word in RUNS[part]]) == 2
        assert not marker.exists()
        message = capsys.readouterr().err
        # for this type of model transformers has a tokenizer of its own, which finds none of its files
        assert ("cannot load" if part == "tokenizer" else "comes with its own code, which") in message
    monkeypatch.setenv("HF_MODULES_CACHE", str(marker.parent / "modules"))
    with suppress(Exception):
        auto_class = getattr(transformers, CONFIGS[part][1])
        from_pretrained(auto_class, directory, Trust(trust_remote_code=True))
    assert marker.exists(), "the payload is not live"


def test_custom_code_in_a_rewritten_directory(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = rewritten(marker.parent / "model")
    plant(directory, "config", marker)
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    for opener in (load, open_model):
        with pytest.raises(InputError, match="comes with its own code"):
            opener(directory)
    assert not marker.exists()


@pytest.mark.slow
def test_the_command_does_not_read_an_answer(marker: Path) -> None:
    directory = bert(marker.parent / "model")
    plant(directory, "model", marker)
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "examine", str(directory), "-o", str(marker.parent / "out")],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "comes with its own code" in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "AutoModel", "AutoTokenizer", "os", "HeadwiseBertModel", 7])
def test_only_models_are_built_from_the_config(name: Any, tmp_path: Path) -> None:
    directory = rewritten(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    if name == "HeadwiseBertModel":
        assert type(load(directory)).__name__ == name
        return
    with pytest.raises(InputError, match=f"holds a {name}, which this version of transformers does not have"):
        load(directory)
