"""Every causal family of transformers that can be built tiny, with random weights, and audited.

python -m tests.ledger.model_audit.causal_families llama gpt2     these families, with every verdict that is no "kept"
python -m tests.ledger.model_audit.causal_families --write        all of them; writes docs/reference/audited-families.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.ledger.model_audit.audit_model import audit_model
from headwise.ledger.model_audit.cached_decoding import AFTER_PADDING, BY_CHUNK, BY_TOKEN
from headwise.ledger.model_audit.causality import GRADIENT, PERTURBATION
from headwise.ledger.model_audit.layer_reach import WINDOWS
from headwise.ledger.model_audit.promise import Standing
from headwise.ledger.model_audit.repeated_runs import DETERMINISTIC, LEFT, RIGHT
from tests.examination.families import LARGEST, NotBuiltError, _escaped, small

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "audited-families.md"
START, END = "<!-- families: start -->", "<!-- families: end -->"
SECONDS = 10
"""Processor time that one family may take."""


@dataclass(frozen=True)
class FamilyAudit:
    """What the audit of one family found; `why` if there is no tiny model of it."""

    family: str
    model: str = ""
    seconds: float = 0.0
    standings: dict[str, str] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float | None] = field(default_factory=dict)
    floor: float = 0.0
    why: str = ""

    @property
    def violated(self) -> set[str]:
        return {name for name, standing in self.standings.items() if standing == Standing.VIOLATED.value}


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "layers_block_type": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layers_block_type": None},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "xlm": {"emb_dim": 32, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8},
}
"""What the general recipe of `small` gets wrong for a family."""


ROBERTA = "positions skip padding within one call, but go on from the length of the cache, padding included"
EXPLAINED: dict[str, tuple[set[str], str]] = {
    "bamba": (
        {BY_TOKEN, BY_CHUNK, AFTER_PADDING},
        "without position_ids, positions begin at 0 again after every cached part; generate() gives position_ids",
    ),
    "camembert": ({AFTER_PADDING}, ROBERTA),
    "cpmant": (
        {PERTURBATION, RIGHT, BY_TOKEN},
        "a prompt is read in both directions by design, its length is taken from tokens that are not 0 and not from "
        "the mask, and with a cache all tokens are to be given again",
    ),
    "data2vec-text": ({AFTER_PADDING}, ROBERTA),
    "deepseek_v4": (
        {LEFT},
        "tokens are compressed in blocks that begin at the first one, padding or not",
    ),
    "falcon_mamba": ({BY_CHUNK}, "a cached part of more than one token starts from an empty state of its recurrence"),
    "git": ({AFTER_PADDING}, "with a cache and a mask, an image before the text is assumed, so the mask is shifted"),
    "mamba": ({BY_CHUNK}, "a cached part of more than one token starts from an empty state of its recurrence"),
    "moshi": (
        {WINDOWS, BY_TOKEN, BY_CHUNK, AFTER_PADDING},
        "its config declares a window, which its cache keeps to and its mask does not",
    ),
    "prophetnet": (
        {PERTURBATION, GRADIENT, RIGHT, BY_TOKEN},
        "its streams that predict read relative position embeddings of other positions (without these it is causal)",
    ),
    "reformer": (
        {DETERMINISTIC, PERTURBATION},
        "hash functions are drawn in every run; which keys a query meets depends on the buckets of later tokens, too",
    ),
    "roberta": ({AFTER_PADDING}, ROBERTA),
    "roberta-prelayernorm": ({AFTER_PADDING}, ROBERTA),
    "rwkv": (
        {LEFT, BY_TOKEN, BY_CHUNK},
        "its recurrence ignores the mask, and its cache broadcasts over the sequences of a batch",
    ),
    "xlm": ({LEFT}, "in causal use, padding is set to zero, and attended to as such, rather than masked"),
    "xlm-roberta": ({AFTER_PADDING}, ROBERTA),
    "xlm-roberta-xl": ({AFTER_PADDING}, ROBERTA),
    "xmod": ({AFTER_PADDING}, ROBERTA),
}
"""family -> (promises that it breaks, why), from its source or from that of a relative (RoBERTa, Mamba)."""


def causal_families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **fields,
        **{
            k: _merged(fields[k], v) if isinstance(v, Mapping) and isinstance(fields.get(k), dict) else v
            for k, v in changes.items()
        },
    }


def build_causal(family: str) -> nn.Module:
    """A tiny model of the family with its head for the next token, and random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        kind = CONFIG_MAPPING[family]
        fields = _merged(small(kind().to_dict()), OVERRIDES.get(family, {}))
        if fields.get("is_decoder") is False:
            fields["is_decoder"] = True
        config = kind(**fields)
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise NotBuiltError(f"{size / 1e6:.0f} million parameters after shrinking")
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except ValueError as error:
            if "does not support" not in str(error):
                raise
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.eval().float()
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # routers that begin with ties
                nn.init.normal_(weight, std=0.2)
        with torch.no_grad():
            model(input_ids=torch.randint(3, 89, (2, 24)))
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}") from error
    return model


def audit_family(family: str) -> FamilyAudit:
    start = time.process_time()
    try:
        model = build_causal(family)
    except NotBuiltError as error:
        return FamilyAudit(family, why=str(error))
    audit = audit_model(model)
    verdicts = audit.promises
    return FamilyAudit(
        family,
        type(model).__name__,
        time.process_time() - start,
        {x.name: x.standing.value for x in verdicts},
        {x.name: f"{x.sentence} {x.where}".strip() for x in verdicts},
        {x.name: x.measured for x in verdicts},
        audit["deterministic"].floor or 0.0,
    )


@contextlib.contextmanager
def processor_time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise NotBuiltError(f"takes more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def audit_families(names: list[str]) -> list[FamilyAudit]:
    """In this process."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                with processor_time_limit(SECONDS):
                    found.append(audit_family(name))
            except NotBuiltError as error:
                found.append(FamilyAudit(name, why=str(error)))
    return found


def in_a_process(names: list[str]) -> list[FamilyAudit]:
    """The same in a process of its own, so that memory and imports of many families do not add up."""
    command = [sys.executable, "-m", "tests.ledger.model_audit.causal_families", "--json", *names]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PAGE.parents[2])
    return [FamilyAudit(**row) for row in json.loads(out.stdout.splitlines()[-1])]


def table(found: list[FamilyAudit]) -> str:
    """The Markdown of the page."""
    built = [x for x in found if not x.why]
    names = list(built[0].standings)
    standings = [standing.value for standing in Standing]
    counts = {name: Counter(x.standings.get(name) for x in built) for name in names}
    lines = [f"## Promises, over {len(built)} families", "", f"| promise | {' | '.join(standings)} |"]
    lines += ["|---" * (len(standings) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(str(counts[name][x] or '') for x in standings)} |" for name in names]
    broken = [x for x in built if x.violated]
    lines += [
        "",
        f"## Broken promises: {len(broken)} families",
        "",
        "| family | promise | measured | why |",
        "|---|---|---|---|",
    ]
    for x in broken:
        for index, name in enumerate(name for name in names if name in x.violated):
            size = x.measured[name]
            shown = "another shape" if size is None else f"{size:.2g}"
            family, why = (x.family, EXPLAINED.get(x.family, (set(), "?"))[1]) if index == 0 else ("", "")
            lines.append(f"| {family} | {name} | {shown} | {why} |")
    lines += ["", f"## Kept: {len(built) - len(broken)} families", ""]
    lines += ["| family | model | kept | not tried | rounding |", "|---|---|---|---|---|"]
    for x in built:
        if not x.violated:
            untried = ", ".join(name for name, standing in x.standings.items() if standing == "not tried")
            kept = sum(standing == "kept" for standing in x.standings.values())
            lines.append(f"| {x.family} | {x.model} | {kept} | {untried} | {x.floor:.0e} |")
    others = [x for x in found if x.why]
    lines += ["", f"## Not built: {len(others)} families", "", "| family | why |", "|---|---|"]
    lines += [f"| {x.family} | {_escaped(x.why)} |" for x in others]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.families or causal_families()
    if options.write:
        with ThreadPoolExecutor(options.jobs) as pool:
            parts = pool.map(in_a_process, [names[start::4] for start in range(4)])
            found = sorted((x for part in parts for x in part), key=lambda x: x.family)
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(START)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{START}\n{table(found)}\n{END}{after}", encoding="utf-8")
        return
    found = audit_families(names)
    if options.json:
        print(json.dumps([asdict(x) for x in found]))
        return
    for x in found:
        if x.why:
            print(f"{x.family:24s} not built: {x.why}")
            continue
        broken = ", ".join(sorted(x.violated)) or "nothing"
        print(f"{x.family:24s} {x.seconds:.1f} s, rounding {x.floor:.1e}, broken: {broken}", flush=True)
        for name, standing in x.standings.items():
            if standing in ("VIOLATED", "not tried"):
                print(f"    {name}: {x.measured[name]} {x.sentences[name]}")


if __name__ == "__main__":
    main()
