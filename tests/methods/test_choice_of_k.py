"""ProtoMix's k, chosen on hold-outs: what devices count, what is taken, what it does to a run and to its bundles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share, state_of
from training_fixture import dataset, job, model_spec, parts_of, stages_of, with_hyper

from edgefl.aggregation.history import load
from edgefl.api.export_run import export_run
from edgefl.api.run_inputs import PlanOptions, assumptions
from edgefl.errors import ConfigError
from edgefl.export.bundle_format import read_manifest
from edgefl.export.runtime import load_bundle
from edgefl.models.parts import load_part
from edgefl.models.spec import PROTOTYPES
from edgefl.models.staged import build
from edgefl.plan.choice_of_k import (
    JUDGED,
    RIGHT,
    Counts,
    candidates,
    counts_of,
    doubt,
    in_words,
    most_judged,
    recorded,
    summed,
    without_counts,
)
from edgefl.plan.job import Hyper, Slots
from edgefl.pricing.round_price import Pricer
from edgefl.protocol.tensors import decode_part
from edgefl.prototypes.mask import Matcher
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.records import EvaluationRow
from edgefl.report.quality import evaluation
from edgefl.training.batches import split
from edgefl.training.evaluate import Criteria, evaluate, judge, load_test_set
from edgefl.training.fill import matcher_of
from edgefl.training.local_round import LocalState, train_round

CHOSEN = {"class_mean": {"k": 0.0}}
SMALL = ["training.batch_size=6", "training.holdout=null"]
#: At this temperature more classes are more even mixtures, so that k shows.
OPTION = "slots.prototypes={class_mean: {k: 0, temperature: 1}}"


def figures(rows: Iterable[EvaluationRow]) -> dict[tuple[object, ...], float]:
    return {(row.available, row.missing, row.metric): row.value for row in rows}


def metrics(judged: float, **right: float) -> dict[str, float]:
    return {JUDGED: judged, **{f"{RIGHT}{name.removeprefix('k')}": value for name, value in right.items()}}


# What is counted and what is taken


def test_every_k_below_the_classes_is_compared_and_all_of_them() -> None:
    assert candidates(CHOSEN, 6) == (1, 2, 3, 5, 6)
    assert candidates(CHOSEN, 5) == (1, 2, 3, 5)
    assert candidates(CHOSEN, 200) == (1, 2, 3, 5, 10, 20, 50, 100, 200)
    for fixed in ({"class_mean": {}}, {"class_mean": {"k": 2.0}}, {"none": {}}, {"adaptive": {}}):
        assert candidates(fixed, 6) == ()


def test_the_most_right_answers_decide_and_of_equal_ones_the_smallest_k() -> None:
    # k = 1: 4 + 5, k = 2: 6 + 4, k = 3: 3 + 7 of 8 + 10; 2 and 3 are equal.
    told = [counts_of(metrics(8.0, k3=3.0, k2=6.0, k1=4.0)), counts_of(metrics(10.0, k1=5.0, k2=4.0, k3=7.0))]
    whole = summed(told)
    assert whole == Counts(18, {1: 9, 2: 10, 3: 10})
    assert whole.best == 2
    assert Counts(3, {5: 2, 1: 2}).best == 1
    assert in_words(recorded(whole, ["a", "b"])) == "k = 2 of 1, 2, 3: right on 10 of 18 held-out samples"
    assert summed([]) is None
    assert summed([Counts(0, {1: 0, 2: 0})]) is None
    assert counts_of({"loss": 1.0}) is None


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (metrics(8.0, k1=8.0, k2=0.0, k3=5.0), ""),
        ({}, ""),
        ({"received_accuracy": 0.5}, ""),
        (metrics(9.0, k1=1.0, k2=1.0, k3=1.0), "9 held-out samples judged, it has 8 at most"),
        (metrics(4.0, k1=5.0, k2=1.0, k3=1.0), "right on 5 of 4 held-out samples"),
        (metrics(4.0, k1=-1.0, k2=1.0, k3=1.0), "they are not all whole numbers from 0 up"),
        (metrics(4.0, k1=1.5, k2=1.0, k3=1.0), "they are not all whole numbers from 0 up"),
        (metrics(4.0, k1=1.0, k2=1.0), "3 counts, asked for were 4, of k = 1, 2, 3"),
        (metrics(4.0, k1=1.0, k2=1.0, k7=1.0), "4 counts, asked for were 4, of k = 1, 2, 3"),
        (metrics(4.0, k1=1.0, k2=1.0, kx=1.0), "4 counts, asked for were 4, of k = 1, 2, 3"),
    ],
)
def test_counts_that_cannot_be_are_told_apart(told: dict[str, float], why: str) -> None:
    assert doubt(told, (1, 2, 3), 8) == why


def test_counts_that_nobody_asked_for_are_none() -> None:
    told = metrics(4.0, k1=1.0)
    assert doubt(told, (), 8) == "2 counts, asked for were 0"
    assert without_counts({**told, "received_accuracy": 0.5}) == {"received_accuracy": 0.5}


def test_a_device_judges_at_most_its_hold_out_with_each_modality() -> None:
    # A quarter of 40 is 10; b has but 4 samples in all. Of 8 one batch of 6 stays, so that 2 are apart.
    hyper = Hyper(batch_size=6, holdout=0.25)
    assert most_judged(hyper, {"": 40, "a": 40, "b": 4}, "ab") == 14
    assert most_judged(hyper, {"": 8, "a": 8, "b": 8}, "ab") == 4
    assert most_judged(hyper, {}, "ab") == 0


# On a device


def received(holdout: float = 0.5, **slots):
    """A job, its parts with prototypes that lie apart, and samples some of which lack a modality or a label."""
    made = job(model_spec(), stages_of(model_spec())[-1], missing={"prototype": {"by": "match"}}, **slots)
    rng = np.random.default_rng(1)
    tables = {m: ClassMeans((20 * rng.normal(size=(3, 6))).astype(np.float32), np.ones(3, np.float32)) for m in "ab"}
    parts = {**parts_of(made), PROTOTYPES: to_tensors(tables)}
    labels = [0, 1, 2, -1] * 9
    return with_hyper(made, holdout=holdout), parts, dataset(36, {"a": [0, 5, 7], "b": [2, 9]}, labels=labels)


def test_right_answers_are_those_of_an_evaluation_with_each_k() -> None:
    made, parts, data = received(prototypes=CHOSEN)
    model = build(made.model, made.stage.present)
    for name in made.stage.present:
        load_part(model, name, parts[name])
    tables, names = from_tensors(parts[PROTOTYPES]), ["a", "b"]
    even = Matcher(temperature=1.0)
    criteria = Criteria(frozenset({"classification"}), matcher=even, candidates=(1, 2, 3))
    found = judge(model, data, made.stage.depth, tables, names, criteria)
    plain = judge(model, data, made.stage.depth, tables, names, replace(criteria, candidates=()))
    assert {k: v for k, v in found.items() if "with_k" not in k} == plain
    for k in (1, 2, 3):
        matcher = replace(even, k=k)
        rows = evaluate(made.model, made.stage, parts, data, Criteria(prototypes=True, matcher=matcher))
        alone = [r for r in rows if r.metric == "accuracy" and r.missing == "prototype" and len(r.available) == 1]
        assert len(alone) == 2
        assert found[f"right_with_k_{k}"] == pytest.approx(sum(row.value * row.samples for row in alone))
        assert found["judged_with_k"] == sum(row.samples for row in alone)
    assert found["judged_with_k"] == 50  # of 27 labelled ones 0 and 5 lack a, 2 and 9 lack b
    assert len({found[f"right_with_k_{k}"] for k in (1, 2, 3)}) > 1, "so that the comparison shows something"


def test_a_device_counts_before_it_trains_and_only_where_it_is_asked_to() -> None:
    for prototypes, asked in ((CHOSEN, {JUDGED, f"{RIGHT}1", f"{RIGHT}2", f"{RIGHT}3"}), ({"class_mean": {}}, set())):
        made, parts, data = received(prototypes=prototypes)
        own, holdout = split(made, data, "")
        told = train_round(made, own, parts, LocalState(holdout)).metrics
        assert {name for name in told if "with_k" in name} == asked
        if asked:
            first = {name: parts[name] for name in parts if name != PROTOTYPES}
            assert not any("with_k" in name for name in train_round(made, own, first, LocalState(holdout)).metrics)
            assert doubt(told, (1, 2, 3), most_judged(made.hyper, data.samples(), "ab")) == ""


def test_the_price_of_a_round_holds_what_the_counts_cost() -> None:
    counts = dict.fromkeys(("", "a", "b"), 36)
    price, ran = {}, {}
    for name, prototypes in (("fixed", {"class_mean": {}}), ("chosen", CHOSEN)):
        made, parts, _ = received(prototypes=prototypes)
        data = dataset(36)
        own, holdout = split(made, data, "")
        price[name] = Pricer()(made, counts)[1]
        ran[name] = train_round(made, own, parts, LocalState(holdout)).flops
    assert price["chosen"] > price["fixed"]
    assert price["chosen"] - price["fixed"] == pytest.approx(ran["chosen"] - ran["fixed"])


def test_a_device_matches_by_the_k_that_came_with_its_job() -> None:
    slots = Slots(prototypes=CHOSEN)
    assert matcher_of(slots, {}).k == 3, "before any is chosen"
    assert matcher_of(slots, {}, 1).k == 1
    assert matcher_of(Slots(prototypes={"class_mean": {"k": 2.0}}), {}).k == 2


# In a run


def test_a_k_to_choose_gets_a_hold_out_and_is_refused_without(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "lw-prototypes", "ab", 2, [*SMALL, OPTION]).hypers[0].holdout == 0.2
    assert plan_of(tmp_path, "lw-prototypes", "ab", 2, SMALL).hypers[0].holdout == 0.0
    with pytest.raises(ConfigError, match=r"training\.holdout.*prototypes: class_mean goes by what devices measure"):
        plan_of(tmp_path, "lw-prototypes", "ab", 2, [OPTION, "training.holdout=0"])
    plan_of(tmp_path, "lw-prototypes", "ab", 2, [OPTION])
    told = assumptions(str(tmp_path / "run.yaml"), ["training.holdout=null", OPTION], PlanOptions())
    assert "not trained on, by which prototypes: class_mean goes" in " ".join(told)


@pytest.mark.parametrize("match", ["classifier", "prior"])
def test_networks_that_come_after_the_last_hold_out_take_no_choice(tmp_path: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=f"k: 0 is chosen .* match: {match} are trained in the closing round"):
        plan_of(tmp_path, "pmcmfl", "ab", 2, [f"slots.prototypes={{class_mean: {{k: 0, match: {match}}}}}"])


@pytest.mark.slow
def test_a_run_takes_the_fleets_k_evaluates_by_it_and_exports_it(ram_path: Path) -> None:
    settings = [*SMALL, OPTION, "training.rounds=[0, 3]"]
    plan = plan_of(ram_path, "lw-prototypes", "ab", 3, settings)
    report = run_fleet(ram_path, plan, {f"d{i}": share(48, {"a": 0.8, "b": 0.8}, seed=i) for i in range(3)})
    assert report.status == "done"
    choices = [row.record.get("choice_of_k") for row in report.rounds]
    assert choices[0] is None, "there is nothing to mix in the first round"
    for number, choice in enumerate(choices[1:], start=2):
        told = [counts_of(row.metrics) for row in report.assignments if row.round == number]
        whole = summed([one for one in told if one is not None])
        assert whole is not None
        assert choice == recorded(whole, ["d0", "d1", "d2"])
    last = choices[-1]
    store, state = state_of(ram_path)
    assert load(store, state).k == last["k"]
    assert last["k"] != Matcher().k, "so that what follows shows the choice"

    events = [event.data for event in report.events if event.kind == "k_chosen"]
    assert events == choices[1:]
    assert any(in_words(last) in note for note in evaluation(report).notes)
    assert not [event for event in report.events if event.kind == "warning"]

    parts = {name: decode_part(store.read(state[name].id)) for name in (*plan.stages[-1].present, PROTOTYPES)}
    test = load_test_set(plan.test, plan.model)

    def by_hand(k: int) -> dict[tuple[object, ...], float]:
        criteria = Criteria(prototypes=True, matcher=Matcher(k=k, temperature=1.0))
        return figures(evaluate(plan.model, plan.stages[-1], parts, test, criteria))

    final = figures([row for row in report.evaluations if (row.stage, row.round) == (2, 3)])
    assert final == pytest.approx(by_hand(last["k"]))
    assert final != pytest.approx(by_hand(Matcher().k))

    done = export_run(ram_path / "run")
    for m in "ab":
        manifest = read_manifest(done.directory / m)
        assert (manifest.metric, manifest.top_k) == ("cosine", last["k"])
        answers = load_bundle(done.directory / m).predict({m: test.modalities[m]}, mask="prototype")
        (matched,) = answers.matched.values()
        assert matched.rows.shape == (len(test), last["k"])
        accuracy = float((answers.classes == test.labels).mean())
        assert accuracy == pytest.approx(final[(m,), "prototype", "accuracy"])
