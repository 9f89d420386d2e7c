"""Plans of a small model: made, saved, loaded, edited, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from headwise.errors import InputError, UnsupportedError
from headwise.replacement import SOFTMAX, Choice, Plan, PlanPoint, rewrite
from headwise.replacement.planning import make_plan
from headwise.replacement.planning.allocation import DriftModel
from headwise.replacement.planning.prediction_bound import bound_over_lengths, prediction_bound
from tests.models.tiny_models import ALL

pytest.importorskip("transformers")

FEW = [
    Choice("uniform"),
    Choice("window", {"width": 9, "leading": 1}),
    Choice("near_far", {"block": 4, "rank": 1, "leading": 1}),
]
BRIEF = {"evaluations": 4, "objective": "multiply-adds"}


def batches(vocabulary: int = 99, count: int = 7, length: int = 40) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(vocabulary, (1, length), generator=generator)} for _ in range(count)]


def kinds(length: int = 40) -> dict[str, list[dict]]:
    given = batches(count=6, length=length)
    return {"a": given[:2], "b": given[2:4], "c": given[4:]}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = ALL["bert"]()[0].eval()
    for name, weight in model.named_parameters():  # at random, heads would hardly matter
        if name.endswith(("query.weight", "key.weight", "value.weight")):
            weight.data.mul_(20)
    return model


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> Plan:
    return headwise.plan(model, kinds(), tolerance=0.05, choices=FEW, **BRIEF)


def test_the_curve_is_monotone_and_contains_the_plan(plan: Plan) -> None:
    costs, bounds = [p.cost for p in plan.curve], [p.bound for p in plan.curve]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert plan.curve[0].cost == pytest.approx(1.0)
    assert plan.curve[0].bound == plan.curve[0].largest == 0.0
    assert len(plan.curve) > 2
    assert plan.point is not None
    assert plan.point.meets(0.05)
    assert plan.cost() == pytest.approx(plan.point.cost)


def test_the_bound_is_above_every_measured_drift(plan: Plan) -> None:
    for point in plan.curve[1:]:
        assert point.drift.keys() == {"a", "b", "c"}
        assert all(row.keys() == {40} for row in point.drift.values())
        assert 0 < point.largest <= point.bound


def test_less_confidence_is_a_smaller_bound_from_the_same_drifts(model: nn.Module, plan: Plan) -> None:
    less = headwise.plan(model, kinds(), tolerance=0.05, choices=FEW, confidence=0.8, **BRIEF)
    assert less.provenance["confidence"] == 0.8 < plan.provenance["confidence"]
    sites = [{name: list(row) for name, row in point.sites.items()} for point in plan.curve]
    same = [(x, more) for x in less.curve[1:] for y, more in zip(sites, plan.curve, strict=True) if x.sites == y]
    assert same
    for ours, more in same:
        assert ours.drift == more.drift
        assert ours.bound <= more.bound


@pytest.fixture
def chosen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drift is measured with the plan itself instead of plans that were chosen without a kind."""
    ladder = DriftModel.ladder
    monkeypatch.setattr(DriftModel, "ladder", lambda self, without=None: ladder(self))


@pytest.mark.usefixtures("chosen_by_all")
def test_the_measured_drift_is_that_of_the_rewritten_model(model: nn.Module) -> None:
    """Measured again from outside, on the text of each kind that did not choose: the second."""
    plan = headwise.plan(model, kinds(), tolerance=0.05, choices=FEW, **BRIEF)
    point = plan.curve[-1]
    assert point.cost < 0.9
    new, _ = rewrite(model, replace(plan, sites=point.sites, exact_below={}))
    for kind, given in kinds().items():
        with torch.no_grad():
            a, b = (m(**given[1])[0].double().mean(1) for m in (model, new))
        assert point.drift[kind][40] == pytest.approx(1 - torch.cosine_similarity(a, b).item(), rel=1e-3, abs=1e-7)


def test_the_bound_is_of_single_texts_at_every_length() -> None:
    """Drifts differ at 20 only; in the other case d has texts of 80, which no other kind has."""
    drifts = {"a": {20: [0.01, 0.02], 40: [0.03, 0.03]}, "b": {20: [0.02, 0.04], 40: [0.03, 0.031]}, "c": {40: [0.029]}}
    apart = prediction_bound({kind: rows[20] for kind, rows in drifts.items() if 20 in rows})
    assert bound_over_lengths(drifts) == apart > prediction_bound({kind: rows[40] for kind, rows in drifts.items()})
    alone = {"a": {20: [0.03], 40: [0.03]}, "b": {20: [0.03], 40: [0.03]}, "d": {80: [0.05]}}
    assert bound_over_lengths(alone) == prediction_bound({"a": [0.03] * 2, "b": [0.03] * 2, "d": [0.05]}) > 0.05


def test_one_text_in_four_chooses(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    record = make_plan.sensitivities

    def sensitivities(model: nn.Module, batch: dict, *rest):
        seen.append(batch["input_ids"])
        return record(model, batch, *rest)

    monkeypatch.setattr(make_plan, "sensitivities", sensitivities)
    given = {"a": batches(count=6), "b": batches(count=2)}
    found = headwise.plan(model, given, tolerance=0.05, choices=FEW, **BRIEF)
    expected = [given["a"][0], given["a"][4], given["b"][0]]
    assert all(torch.equal(ids, batch["input_ids"]) for ids, batch in zip(seen, expected, strict=True))
    assert found.provenance["confidence"] == 0.99


def test_the_bound_is_of_plans_chosen_without_a_kind(
    plan: Plan, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If these were the cheapest plans of all, no point could promise less than the drift of the cheapest one."""
    monkeypatch.setattr(make_plan, "_at_cost", lambda ladder, cost: ladder[-1])
    found = headwise.plan(model, kinds(), tolerance=0.05, choices=FEW, **BRIEF)
    bounds = [point.bound for point in found.curve[1:]]
    assert bounds
    assert min(bounds) > 1.1 * plan.curve[1].bound


@pytest.mark.parametrize("heads", [[True] * 4, [True, True, True, False], [False] * 4])
def test_learned_kinds_that_do_not_beat_their_ablation_are_not_chosen(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, heads: list[bool]
) -> None:
    """Nor anything that costs more than the window that is left of them."""
    monkeypatch.setattr(make_plan, "beats_ablation", lambda *args: torch.tensor(heads))
    learned = Choice("projected", {"rank": 2})
    found = headwise.plan(model, kinds(), tolerance=2.0, choices=[learned], **BRIEF)
    assert found.curve[-1].sites[SITE] == [learned if beats else SOFTMAX for beats in heads]
    mixtures = Choice("window_low_rank", {"width": 9, "rank": 2, "leading": 1})
    found = headwise.plan(model, kinds(), tolerance=2.0, choices=[mixtures], **BRIEF)
    assert set(found.curve[-1].sites[SITE]) == {Choice("window", {"width": 9, "leading": 1})}


def test_where_the_search_looks_next() -> None:
    bounds = [0.0, *(0.01 * 1.1**i for i in range(60))]
    exact, good, bad = (PlanPoint({}, 1.0, bound=bound) for bound in (0.0, 0.04, 0.06))
    first = make_plan._next({0: exact}, bounds, 0.05)
    assert first == max(i for i, bound in enumerate(bounds) if bound <= 0.05)
    assert make_plan._next({0: exact, 10: good, 30: bad}, bounds, 0.05) in range(14, 27)
    around = make_plan._next({0: exact, 16: good, 17: bad}, bounds, 0.05)
    assert around is not None
    assert bounds[around] == pytest.approx(0.025, rel=0.1)
    assert make_plan._next({0: exact}, bounds[:1], 0.05) is None


def test_texts_of_several_lengths_are_measured_at_each(model: nn.Module) -> None:
    given = {kind: [*kinds(20)[kind], *kinds(40)[kind]] for kind in "abc"}
    found = headwise.plan(model, given, tolerance=0.05, choices=FEW[1:2], **BRIEF)
    assert found.lengths == (20, 40)
    assert all(row.keys() == {20, 40} for row in found.curve[-1].drift.values())


def test_another_tolerance_is_another_point(plan: Plan) -> None:
    assert plan.at(0.0).cost() == pytest.approx(1.0)
    assert plan.at(2.0).cost() <= plan.cost()


def test_saved_and_read_again(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    again = Plan.load(tmp_path / "plan.json")
    assert again.sites == plan.sites
    assert [p.sites for p in again.curve] == [p.sites for p in plan.curve]
    assert again.fitted.keys() == plan.fitted.keys()
    assert all(torch.equal(again.fitted[at][name], x) for at, own in plan.fitted.items() for name, x in own.items())


def edited(plan: Plan, directory: Path, change) -> Path:
    plan.save(directory)
    file = directory / "plan.json"
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))
    return file


def test_an_edited_choice_finds_its_tensors(plan: Plan, tmp_path: Path, model: nn.Module) -> None:
    site = next(iter(plan.sites))

    def change(facts: dict) -> None:
        facts["sites"][site][0] = {"kind": "near_far", "block": 4, "rank": 1, "leading": 1}

    again = Plan.load(edited(plan, tmp_path, change))
    new, _ = rewrite(model, again)
    found = new.get_submodule(site).headwise.head_parameters(0)
    assert torch.equal(found["a"], plan.fitted[site, 0, again.sites[site][0]]["a"])


SITE = "encoder.layer.0.attention.self"


def put(*path_and_value):
    """Set the value at a path of the plan."""
    *path, last, value = path_and_value

    def change(facts: dict) -> None:
        for name in path:
            facts = facts[name]
        facts[last] = value

    return change


def drop(*path):
    *path, last = path

    def change(facts: dict) -> None:
        for name in path:
            facts = facts[name]
        del facts[last]

    return change


INVALID = [
    (put("sites", SITE, 0, {"kind": "magic"}), f"sites/{SITE}/0: unknown kind of operator 'magic'"),
    (put("sites", SITE, 0, {"kind": 7}), f"sites/{SITE}/0/kind must be a string, but is 7"),
    (put("sites", SITE, 0, {}), f"sites/{SITE}/0/kind is missing"),
    (put("sites", SITE, 0, "window"), f'sites/{SITE}/0 must be an object with named fields, but is "window"'),
    (put("sites", SITE, 0, None), f"sites/{SITE}/0 must be an object with named fields, but is null"),
    (put("sites", SITE, {}), f"sites/{SITE} must be a list"),
    (put("sites", []), "sites must be an object with named fields, but is a list of 0"),
    (put("sites", {}), "lists no attention sites"),
    (drop("sites"), "sites is missing"),
    (drop("sites", SITE, 3), "has 4 heads, but the plan has 3 choices"),
    (put("sites", "nowhere", []), "sites/nowhere: the model has no site 'nowhere'"),
    (put("sites", SITE, 0, {"kind": "window", "width": 10**12}), f"sites/{SITE}/0: window: width must be at most"),
    (put("sites", SITE, 0, {"kind": "window", "width": -1}), "window: width must be at least 1, but is -1"),
    (put("sites", SITE, 0, {"kind": "window", "width": 1.5}), "window: width must be a whole number"),
    (put("sites", SITE, 0, {"kind": "window", "width": "9"}), "window: width must be a number, but is '9'"),
    (put("sites", SITE, 0, {"kind": "window", "widht": 9}), "window: unknown option 'widht'"),
    (put("sites", SITE, 0, {"kind": "projected", "rank": 10**9}), "projected: rank must be at most"),
    (put("sites", SITE, 0, {"kind": "toeplitz", "reach": 10**9}), "toeplitz: reach must be at most"),
    (put("sites", SITE, 0, {"kind": "near_far", "rank": 10**9}), "near_far: rank must be at most"),
    (put("sites", SITE, 0, {"kind": "near_far", "block": 2, "rank": 5}), "whose tensor 'a' was not fitted"),
    (put("length", 0), "length must be between 1 and"),
    (put("length", 10**12), "length must be between 1 and"),
    (put("length", True), "length must be a whole number, but is true"),
    (put("length", "40"), 'length must be a whole number, but is "40"'),
    (put("schema", 99), "schema 99 is not 3"),
    (drop("schema"), "schema is missing"),
    (put("model", "bert"), 'model must be an object with named fields, but is "bert"'),
    (drop("model"), "model is missing"),
    (drop("model", "fingerprint"), "model/fingerprint is missing"),
    (put("model", "fingerprint", 3), "model/fingerprint must be a string, but is 3"),
    (put("model", "class", None), "model/class must be a string, but is null"),
    (put("model", "sites", SITE, "heads", "4"), f'model/sites/{SITE}/heads must be a whole number, but is "4"'),
    (put("model", "sites", SITE, "width", 10**9), f"model/sites/{SITE}/width must be between 1 and 65536"),
    (drop("model", "sites", SITE, "causal"), f"model/sites/{SITE}/causal is missing"),
    (put("tolerance", -0.1), "tolerance must be at least 0, but is -0.1"),
    (put("tolerance", 5), "tolerance is 5, but a drift of cosines, 1 - cos, is at most 2"),
    (put("tolerance", None), "tolerance must be a number, but is null"),
    (put("tolerance", float("nan")), "JSON has no NaN"),
    (put("measure", "sine"), 'measure must be "cosine" or "loss", but is "sine"'),
    (put("choices", 0, {"kind": "magic"}), "choices/0: unknown kind"),
    (put("choices", []), "but there are 0 choices"),
    (put("curve", 0, "sites", SITE, 0, 99), f"curve/0/sites/{SITE}/0 is 99, but there are"),
    (put("curve", 0, "sites", SITE, 0, -1), f"curve/0/sites/{SITE}/0 must be at least 0, but is -1"),
    (put("curve", 0, "sites", "nowhere", [0]), "curve/0/sites/nowhere: the model has no site"),
    (put("curve", 0, "sites", SITE, [0]), f"curve/0/sites/{SITE}: {SITE} has 4 heads, but the plan has 1"),
    (put("curve", 0, "cost", None), "curve/0/cost must be a number, but is null"),
    (put("curve", 0, "bound", -1), "curve/0/bound must be at least 0"),
    (put("curve", 0, "drift", {"a": {"forty": 0.1}}), "curve/0/drift must be by kind and length"),
    (put("curve", 0, "drift", {"a": {"40": None}}), "curve/0/drift/a/40 must be a number, but is null"),
    (put("lengths", [50, 40]), "lengths must ascend to the length 40 of the plan, but are (50, 40)"),
    (put("lengths", [20]), "lengths must ascend to the length 40 of the plan, but are (20,)"),
    (put("beyond", "guess"), 'beyond must be "exact" or "refuse", but is "guess"'),
    (put("exact_below", {"nowhere": 3}), "exact_below: the model has no site 'nowhere'"),
    (put("exact_below", {SITE: -1}), f"exact_below/{SITE} must be between 0 and"),
    (put("curve", 0, "speed", 3), "curve/0/speed is not a field"),
    (drop("curve", 0, "predicted"), "curve/0/predicted is missing"),
    (put("curve", {}), "curve must be a list"),
    (put("timing", []), "timing must be an object"),
    (put("skipped", {"x": 3}), "skipped/x must be a string, but is 3"),
    (put("tolerence", 0.1), "tolerence is not a field; there are schema, model, length"),
]


@pytest.mark.parametrize(("change", "said"), INVALID, ids=[said[:50] for _, said in INVALID])
def test_invalid_edited_plans(plan: Plan, tmp_path: Path, change, said: str) -> None:
    with pytest.raises(InputError) as caught:
        Plan.load(edited(plan, tmp_path, change))
    assert said in str(caught.value)
    assert str(tmp_path / "plan.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"3", b"[" * 100_000, b"\x89PNG", b'{"schema": 3}', b"{"])
def test_files_that_are_no_plans(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(InputError, match=r"no such file; name a plan\.json that `headwise plan` wrote"):
        Plan.load(tmp_path)


def test_a_tolerance_for_cosines_is_at_most_two(plan: Plan, model: nn.Module) -> None:
    for tolerance in (2.1, 5.0):
        with pytest.raises(InputError, match="is at most 2"):
            plan.at(tolerance)
        with pytest.raises(InputError, match="is at most 2"):
            headwise.plan(model, batches(), tolerance=tolerance, choices=FEW, **BRIEF)
    assert replace(plan, measure="loss").at(5.0).sites == plan.at(2.0).sites  # losses may differ by any number


def test_a_plan_learns_no_more_than_fits(plan: Plan, tmp_path: Path) -> None:
    """A file of a few kilobytes must not make the program allocate a terabyte."""

    def change(facts: dict) -> None:
        facts["length"], facts["lengths"] = 1 << 24, [1 << 24]
        facts["sites"][SITE][0] = {"kind": "projected", "rank": 1 << 20}

    with pytest.raises(InputError, match="would learn more than"):
        Plan.load(edited(plan, tmp_path, change))


def test_another_model_is_refused(plan: Plan, model: nn.Module) -> None:
    plan.check(model)
    torch.manual_seed(1)
    with pytest.raises(InputError, match="plan again for this model"):
        plan.check(ALL["bert"]()[0])


def test_too_few_texts_and_wrong_lengths(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"at least 4 batches.* got 3"):
        headwise.plan(model, batches(count=3), tolerance=0.1)
    with pytest.raises(InputError, match=r"b: a plan needs two batches, .* got 1"):
        headwise.plan(model, {**kinds(), "b": batches(count=1)}, tolerance=0.1)
    with pytest.raises(InputError, match="at least two kinds of text, but got a"):
        headwise.plan(model, {"a": batches()}, tolerance=0.1)
    with pytest.raises(InputError, match=r"measured at \[99\], but the texts have \[40\] tokens"):
        headwise.plan(model, batches(), tolerance=0.1, lengths=[99])
    with pytest.raises(InputError, match="objective must be one of seconds, prefill"):
        headwise.plan(model, batches(), tolerance=0.1, objective="money")
    with pytest.raises(InputError, match="tolerance"):
        headwise.plan(model, batches(), tolerance=float("nan"))
    with pytest.raises(InputError, match=r"confidence must be between 0.5 and 0.999, but is 1\.0"):
        headwise.plan(model, batches(), tolerance=0.1, confidence=1.0)


def test_an_interrupted_run_resumes(model: nn.Module, plan: Plan, tmp_path: Path) -> None:
    """After sensitivities and a measured plan; nothing is computed twice."""
    shares = []

    def interrupt(what: str, done: int, total: int | None) -> None:
        assert total is not None
        shares.append(done / total)
        if done / total > 0.9:
            raise KeyboardInterrupt

    options = {"tolerance": 0.05, "choices": FEW, "partial_results": tmp_path, **BRIEF}
    with pytest.raises(KeyboardInterrupt):
        headwise.plan(model, kinds(), progress=interrupt, **options)
    assert shares == sorted(shares)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("part-*.pt")}
    assert len(files) > 6
    again = headwise.plan(model, kinds(), **options)
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert [(p.sites, p.drift, p.bound) for p in again.curve] == [(p.sites, p.drift, p.bound) for p in plan.curve]


def test_partial_results_of_another_run_are_refused(model: nn.Module, tmp_path: Path) -> None:
    options = {"tolerance": 0.05, "choices": FEW, "partial_results": tmp_path / "work", **BRIEF}
    headwise.plan(model, batches(), **options)
    with pytest.raises(InputError, match="other inputs"):
        headwise.plan(model, batches(count=8), **options)
    with pytest.raises(InputError, match="other settings"):
        headwise.plan(model, batches(), seed=1, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        headwise.plan(model, batches(), **{**options, "partial_results": tmp_path / "file" / "work"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half = ALL["bert"]()[0].eval().to(dtype)
    choices = [*FEW, Choice("toeplitz", {"reach": 4}), Choice("gaussian_window"), Choice("projected", {"rank": 4})]
    found = headwise.plan(half, batches(), tolerance=0.5, choices=choices, **BRIEF)
    assert all(torch.isfinite(x).all() for own in found.fitted.values() for x in own.values())
    assert found.point is not None
    assert found.point.cost < 1
    new, _ = rewrite(half, found)
    with torch.no_grad():
        out = new(**batches()[0])[0]
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


@pytest.mark.usefixtures("chosen_by_all")
def test_a_decoder_gets_causal_operators_and_is_compared_by_loss() -> None:
    torch.manual_seed(0)
    decoder = ALL["gpt2"]()[0].eval()
    found = headwise.plan(decoder, kinds(), tolerance=0.05, choices=FEW, **BRIEF)
    assert found.measure == "loss"
    assert found.lengths == (10, 20, 40)
    point = found.curve[-1]
    new, _ = rewrite(decoder, replace(found, sites=point.sites, exact_below={}))
    weight = decoder.get_input_embeddings().weight
    for kind, given in kinds().items():
        ids = given[1]["input_ids"]
        with torch.no_grad():
            p, q = ((m(ids)[0] @ weight.T).double().log_softmax(-1)[0, :-1] for m in (decoder, new))
        divergence = (p.exp() * (p - q)).sum(-1)
        losses = (p - q).gather(-1, ids[0, 1:, None])[:, 0]
        for n in (10, 20, 40):  # the beginning of a text is a text
            expected = max(0.0, divergence[:n].mean().item(), losses[:n].mean().item())
            assert point.drift[kind][n] == pytest.approx(expected, rel=0.02, abs=1e-6)
    with pytest.raises(UnsupportedError, match="GPT2Model is causal, but nystrom"):
        headwise.plan(decoder, batches(), tolerance=0.05, choices=[Choice("nystrom", {"landmarks": 4})], **BRIEF)


def test_a_drift_that_rounds_below_zero_can_be_read_again(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = torch.full((2, 1, 40), -3e-8, dtype=torch.float64)
    monkeypatch.setattr("headwise.replacement.planning.drift.PooledStates.drift", lambda *args: below)
    made = headwise.plan(model, kinds(), tolerance=0.1, evaluations=1)
    made.save(tmp_path)
    assert {x for point in Plan.load(tmp_path).curve for row in point.drift.values() for x in row.values()} == {0.0}


def test_the_examination_page_gets_a_view_of_the_plan(plan: Plan, model: nn.Module, tmp_path: Path) -> None:
    from headwise.examination import add_plan, examine, write_report

    write_report(examine(model, batches()[:1]), tmp_path)
    before = (tmp_path / "report.json").read_text()
    page = add_plan(tmp_path, plan.to_dict()).read_text()
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["plan"]["sites"] == plan.to_dict()["sites"]
    assert (tmp_path / "report.json").read_text() == before
    other = {**plan.to_dict(), "model": {**plan.model, "class": "GPT2Model"}}
    with pytest.raises(InputError, match="examined a BertModel, but the plan is for a GPT2Model"):
        add_plan(tmp_path, other)


def test_a_plan_is_shown_in_a_line_and_printed_with_its_curve(plan: Plan, model: nn.Module) -> None:
    assert repr(plan).startswith(f"Plan(BertModel: {sum(map(len, plan.sites.values()))} heads, ")
    assert f"tolerance {plan.tolerance:g} at lengths {', '.join(map(str, plan.lengths))})" in repr(plan)
    first, *points = str(plan).splitlines()
    assert first == repr(plan)
    assert len(points) == len(plan.curve)
    assert [line for line in points if line.startswith("*")] == [f"* {plan.point!r}"]
    assert f"bound {plan.curve[-1].bound:.2g}" in points[-1]
    assert eval(repr(Choice("window", {"width": 65})), {"Choice": Choice}) == Choice("window", {"width": 65})
    new, receipt = rewrite(model, plan)
    with pytest.raises(InputError, match="headwise replaced the attention of"):
        headwise.examine(new, batches()[:1])
    assert repr(receipt).startswith("Receipt(BertModel: ")
