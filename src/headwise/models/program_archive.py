"""Check that a .pt2 archive of torch.export.save holds plain data, so that loading and running it runs no other code.

torch.export.load unpickles some members, evaluates symbolic sizes and guards as Python, imports modules that input
specifications name, resolves the target of a node to any function below torch, and writes names into generated source
code.  Here everything that is not known to be harmless raises InputError.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from headwise.errors import InputError

MODEL = "models/model.json"
INPUTS = "data/sample_inputs/model.pt"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
MEMBER = re.compile(
    r"models/model\.json|data/sample_inputs/model\.pt|data/weights/(model_weights_config\.json|weight_\d+)"
    r"|data/constants/(model_constants_config\.json|tensor_\d+)|extra/[\w./-]*"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)|\.format_version|\.storage_alignment",
    re.ASCII,
)
NAME = re.compile(r"[\w.-]*", re.ASCII)
KEY = re.compile(r"[\w ./-]*", re.ASCII)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
TARGET = re.compile(
    r"torch\.ops\.(aten|prims)\.\w+\.\w+|torch\._?sym_\w+|math\.(ceil|floor|trunc|sqrt)"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|lshift|rshift|getitem)",
    re.ASCII,
)
FILE_TARGETS = re.compile(r"torch\.ops\.aten\.(from_file|save)\b")
"""Operations that read or write files."""
FREE_TEXT = {"as_string", "as_strings", "metadata", "torch_version"}
"""Fields that are only ever compared, printed, or quoted in source code."""
SPEC_TYPES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
FUNCTION = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Max|Min|Abs|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|"
    "StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|floor|ceiling|FloorDiv|ModularIndexing|Where|PythonMod|"
    "CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|"
    "IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
)
"""What symbolic sizes call."""
OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.keyword, *OPERATORS)


def check_program(path: Path, content: bytes) -> None:
    """Raise InputError unless the archive `content` holds tensors, numbers and calls of torch operations, no more."""
    try:
        reader, members = _open(path, content)
        _check_members(path, reader, members)
        _check_value(path, "", json.loads(reader.get_record(MODEL)))
    except InputError:
        raise
    except Exception as error:  # whatever cannot be checked is not plain
        raise _refusal(path, f"it cannot be checked: {type(error).__name__}") from error


def _refusal(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} could run code when loaded: {why}; export the program again with torch.export.save (torch 2.8 or "
        "later), or pass --allow-pickle if you trust it"
    )


def _open(path: Path, content: bytes) -> tuple[Any, list[str]]:
    """A reader, and the members; zipfile and torch's own reader must see the same ones."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        entries = archive.infolist()
        reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    except (RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not an exported program: {str(error).splitlines()[0]}") from error
    root = entries[0].filename.partition("/")[0] + "/"
    members = [entry.filename.removeprefix(root) for entry in entries if entry.filename.startswith(root)]
    if len(members) != len(entries) or Counter(members) != Counter(reader.get_all_records()):
        raise _refusal(path, "its members are not those of one program")
    if max(Counter(members).values()) > 1:
        raise _refusal(path, "it holds two members of one name")
    if sum(entry.file_size for entry in entries) > len(content):
        raise InputError(f"{path} unpacks to more bytes than torch.export.save writes; it is not loaded")
    if (damaged := archive.testzip()) is not None:
        raise InputError(f"{path} is damaged: the checksum of {damaged} is wrong; export or copy it again")
    return reader, members


def _check_members(path: Path, reader: Any, members: list[str]) -> None:
    unknown = [name for name in members if MEMBER.fullmatch(name) is None]
    if unknown:
        raise _refusal(path, f"it holds {unknown[0]!r}")
    pickled = [INPUTS]
    for config in CONFIGS:
        for payload in json.loads(reader.get_record(config))["config"].values():
            member = f"{config.rpartition('/')[0]}/{payload['path_name']}"
            if MEMBER.fullmatch(member) is None:
                raise _refusal(path, f"it holds {member!r}")
            if payload["use_pickle"]:
                pickled.append(member)
    for member in pickled:
        record = reader.get_record(member)
        try:
            if record:
                torch.load(io.BytesIO(record), weights_only=True)
        except Exception as error:
            raise _refusal(path, f"{member} is a pickle of more than tensors and plain values") from error


def _check_value(path: Path, field: str, value: Any) -> None:
    """Every string of the program by the field it stands in; names are letters, digits and . - _ only."""
    if isinstance(value, dict):
        for key, x in value.items():
            if NAME.fullmatch(key) is None:
                raise _refusal(path, f"{key!r} is used as a name")
            if key not in FREE_TEXT:
                _check_value(path, key, x)
    elif isinstance(value, list):
        for x in value:
            _check_value(path, field, x)
    elif not isinstance(value, str):
        return
    elif field in ("target", "as_operator"):
        if TARGET.fullmatch(value) is None or FILE_TARGETS.match(value):
            raise _refusal(path, f"it calls {value!r}")
    elif field in ("in_spec", "out_spec"):
        if value and not _is_plain_spec(json.loads(value)):
            raise _refusal(path, f"{field} has types other than tuple, list and dict")
    elif field == "expr_str":
        if not _is_arithmetic(value):
            raise _refusal(path, f"{value!r} is used as a size")
    elif field == "guards_code":
        if not _is_arithmetic(value, guard=True):
            raise _refusal(path, f"{value!r} is used as a guard")
    elif NAME.fullmatch(value) is None:
        raise _refusal(path, f"{value!r} is used as a name")


def _is_plain_spec(spec: Any) -> bool:
    """A tree of tuples, lists and dicts; contexts hold keys or null."""
    if isinstance(spec, list):  # [version, tree]
        return len(spec) == 2 and isinstance(spec[0], int) and isinstance(spec[1], dict) and _is_plain_spec(spec[1])
    if not isinstance(spec, dict) or spec.get("type") not in SPEC_TYPES:
        return False
    context = json.loads(spec["context"]) if isinstance(spec.get("context"), str) else spec.get("context")
    keys = context if isinstance(context, list) else [context]
    if not all(key is None or isinstance(key, (int, str)) for key in keys):
        return False
    if not all(KEY.fullmatch(key) for key in keys if isinstance(key, str)):
        return False
    return all(isinstance(child, dict) and _is_plain_spec(child) for child in spec.get("children_spec", ()))


def _is_arithmetic(text: str, *, guard: bool = False) -> bool:
    """Numbers, symbols, operators and calls of FUNCTION; in guards also L['x'].size()[0] and the like."""
    return all(_is_harmless(node, guard) for node in ast.walk(ast.parse(text, mode="eval")))


def _is_harmless(node: ast.AST, guard: bool) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return FUNCTION.fullmatch(name) is not None
        case ast.Call(func=ast.Attribute()):
            return guard and not node.args and not node.keywords
        case ast.Attribute(attr=name):
            return guard and name in ("size", "stride", "storage_offset")
        case ast.Subscript():
            return guard
        case ast.Constant(value=str(text)):
            return IDENTIFIER.fullmatch(text) is not None
        case ast.Constant(value=value):
            return value is None or isinstance(value, (bool, int, float))
        case _:
            return isinstance(node, ARITHMETIC)
