"""Checks of devices' claims, worked by hand: each bound from both sides, and what operators are told."""

from __future__ import annotations

import math

import pytest
from coordinator_fixture import a_plan
from msgspec.structs import replace

from coordinator.core.known_devices import introduce
from coordinator.core.moves import Announced, Steps
from coordinator.core.outliers import clips, out_of_line, outliers
from coordinator.core.plausibility import (
    bounded,
    learned,
    likely,
    makes_claim,
    overweights,
    plausible,
    unfit,
)
from coordinator.core.replies import announced
from coordinator.core.state import BUFFERS_OF, Assignment, Change, Claim, Device, Round, State
from edgefl import registry
from edgefl.models.spec import DeclaredSpec, ModelSpec
from edgefl.plan.job import Placement, RoundPolicy, Stage
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Figure, ObjectRef, Refusal
from edgefl.report.grid import measurement_cell
from edgefl.report.resources import total
from edgefl.roles import Upload

REF = ObjectRef("0" * 64, 10)
PLAN = a_plan()
FIRST = Attempt("r1", 1, 1, 1)


def figures(**values: float | None) -> dict[str, Figure]:
    return {name: Figure(value) for name, value in values.items()}


def refused(
    manifest: tuple[str, ...], samples: dict[str, int] | None = None, owned: int = 8, first: int = 8
) -> Refusal | None:
    device = Device(Hello("a", samples={"": owned}), first_claim=Claim({"": first}))
    state = State(PLAN, devices={"a": device}, open=Round(FIRST, 1, 0.0, 9.0))
    update = Update("a", FIRST, dict.fromkeys(manifest, REF), samples or {})
    return unfit(state, Assignment(Placement("a", PLAN.stages[0])), update)


def test_an_update_holds_the_parts_that_were_asked_for_and_no_others() -> None:
    asked = ("acc/stage1", "task")
    assert refused(asked) is None
    assert refused(("task",)) is None, "a device without samples of a modality leaves out its parts"
    assert refused(("acc/stage1",)) == Refusal("parts", detail="the update lacks parts it was asked to train: task")
    assert refused((*asked, "acc/stage2", "acc/embed")) == Refusal(
        "parts", detail="the update holds parts it was not asked to train: acc/embed, acc/stage2"
    )
    assert refused((*asked, "signature")) is None, "what is beside the model is looked at elsewhere"
    assert refused((*asked, "prototypes")) == Refusal(
        "parts", detail="the update holds parts it was not asked to train: prototypes"
    )


def test_at_most_five_parts_are_named_each_cut() -> None:
    names = [f"acc/stage{number}" + "x" * 90 for number in range(2, 9)]
    refusal = refused(("acc/stage1", "task", *names))
    assert refusal is not None
    listed = ", ".join(name[:80] for name in names[:5])
    assert refusal.detail == f"the update holds parts it was not asked to train: {listed} and 2 more"
    assert refused(("acc/stage1", "task", *names[:5])).detail.endswith(names[4][:80])


def test_no_more_samples_count_than_the_device_had_now_or_at_first() -> None:
    asked = ("acc/stage1", "task")
    assert refused(asked, {"task": 8}) is None
    assert refused(asked, {"task": 0}) is None
    assert refused(asked, {"task": 9}, owned=3, first=9) is None
    assert refused(asked, {"task": 9}, owned=9, first=3) is None
    text = "part task: 9 samples claimed, the device introduced itself with 8"
    assert refused(asked, {"acc/stage1": 8, "task": 9}) == Refusal("samples", 9.0, 8.0, "samples", text)
    assert refused(asked, {"task": -1}).needed == -1.0
    worst = refused(asked, {"acc/stage1": 9, "task": -10, "z": 9})
    assert (worst.needed, worst.allowed) == (-10.0, 8.0), "the worst is named"
    assert refused(asked, {"b" * 90: 9, "a" * 90: 9}).detail.startswith(f"part {'a' * 80}: 9")
    silent = State(PLAN, devices={"a": Device(Hello("a"), first_claim=Claim())})
    update = Update("a", FIRST, dict.fromkeys(asked, REF), {"task": 1})
    assert unfit(silent, Assignment(Placement("a", PLAN.stages[0])), update).allowed == 0.0


def test_the_first_update_of_own_code_is_its_devices_claim() -> None:
    """A hello says nothing of data that only the owner's code reads; what the first update claims binds the later."""
    stage = Stage(1, trained=("body", "head"))
    plan = replace(PLAN, model=ModelSpec(declared=DeclaredSpec(("body", "head"))), stages=(stage,))
    steps = Steps(State(plan, devices={"a": Device(Hello("a"))}, open=Round(FIRST, 1, 0.0, 9.0)), 1.0)
    assignment = Assignment(Placement("a", stage), status="accepted")

    def announce(body: int, head: int) -> Update | None:
        update = Update("a", FIRST, {"body": REF, "head": REF}, {"body": body, "head": head})
        announced(steps, Announced(1.0, update), assignment)
        return steps.state.open.assignments["a"].update

    assert unfit(steps.state, assignment, Update("a", FIRST, {"body": REF, "head": REF}, {"body": -1})).needed == -1.0
    assert announce(40, 30).samples == {"body": 40, "head": 30}
    assert steps.state.devices["a"].claim == Claim({"": 40})
    more = Update("a", FIRST, {"body": REF, "head": REF}, {"body": 41, "head": 30})
    assert unfit(steps.state, assignment, more).reason == "samples"
    introduce(steps, Hello("a", session="again"))
    assert unfit(steps.state, assignment, more).reason == "samples", "a restart makes no new claim"
    ours = replace(steps.state, plan=PLAN, devices={"a": Device(Hello("a"), first_claim=Claim())})
    assert not makes_claim(ours, "a"), "of EdgeFL's own training a device says it in its hello"


def test_what_the_recipe_does_not_exchange_is_not_asked_for() -> None:
    plan = replace(PLAN, slots=replace(PLAN.slots, exchange="nothing"))
    state = State(plan, devices={"a": Device(Hello("a"))})
    text = "the update holds parts it was not asked to train: task"
    refusal = unfit(state, Assignment(Placement("a", plan.stages[0])), Update("a", FIRST, {"task": REF}))
    assert refusal == Refusal("parts", detail=text)


def test_a_label_sets_classifier_may_be_left_out_but_not_everything() -> None:
    stage = Stage(1, trained=("acc/stage1", "task/a", "task/b"))
    samples = {"": 1000, "@a": 1000, "@b": 1}
    state = State(PLAN, devices={"a": Device(Hello("a", samples=samples), first_claim=Claim(samples))})

    def refused(*manifest: str, **claimed: int) -> Refusal | None:
        update = Update("a", FIRST, dict.fromkeys(manifest, REF), {f"task/{name}": n for name, n in claimed.items()})
        return unfit(state, Assignment(Placement("a", stage)), update)

    assert refused("acc/stage1", "task/a") is None
    assert refused().detail == "the update lacks parts it was asked to train: acc/stage1, task/a, task/b"
    assert refused("acc/stage1", "task/b", a=1000, b=1) is None
    assert refused("acc/stage1", "task/b", b=2).allowed == 1.0, "by its labels of the set, not by all of its samples"
    update = Update("a", FIRST, samples={"task/b": 900, "task/a": 900, "acc/stage1": 900})
    assert bounded(update, Claim(samples)).samples == {"task/b": 1, "task/a": 900, "acc/stage1": 900}


def test_an_upload_that_omits_leaves_out_parts_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = Upload(
        "picks",
        "a test's",
        send=lambda trained, generator: (trained.parts, {}),
        most=lambda part_bytes: sum(part_bytes.values()),
    )
    monkeypatch.setitem(registry._methods, "upload", {**registry.methods("upload"), "picks": picks})
    plan = replace(PLAN, slots=replace(PLAN.slots, upload={"picks": {}}))
    state = State(plan, devices={"a": Device(Hello("a", samples={"": 8}), first_claim=Claim({"": 8}))})

    def refused(*manifest: str, stage: Stage = plan.stages[0]) -> str:
        update = Update("a", FIRST, dict.fromkeys(manifest, REF), {"task": 8})
        refusal = unfit(state, Assignment(Placement("a", stage)), update)
        return refusal.detail if refusal is not None else ""

    assert refused("acc/stage1") == refused("task") == refused("acc/stage1", "task") == ""
    assert refused() == refused("signature") == "the update lacks parts it was asked to train: acc/stage1, task"
    assert refused("task", "acc/stage2") == "the update holds parts it was not asked to train: acc/stage2"
    closing = Stage(2, trained=("match/acc", "match/gyr"))
    assert refused(stage=closing) == "", "there it is as without: a device that fitted no network brings none"
    two = Stage(1, trained=("acc/stage1", "acc/stage2"))
    assert refused("acc/stage1", stage=two) == ""
    whole = State(PLAN, devices=state.devices)
    assert unfit(whole, Assignment(Placement("a", two)), Update("a", FIRST, {"acc/stage1": REF})) is not None


def test_samples_are_bounded_by_the_first_claim() -> None:
    update = Update("a", FIRST, samples={"task": 9, "acc/stage1": 3})
    assert bounded(update, Claim({"": 5})).samples == {"task": 5, "acc/stage1": 3}
    assert bounded(update, Claim({"": -5})).samples == {"task": 0, "acc/stage1": 0}
    assert bounded(update, Claim()).samples == {"task": 0, "acc/stage1": 0}


def test_more_than_half_of_a_part_that_three_trained_is_warned_of() -> None:
    def of(**shares: float) -> dict[str, dict[str, float]]:
        return {"devices": shares}

    assert overweights({"task": of(a=0.5, b=0.25, c=0.25)}) == []
    assert overweights({"task": of(a=0.6, b=0.4)}) == [], "of two one has more than half"
    assert overweights({"task": {}}) == []
    text = "it has 60.12 % of the weight of part task; round.largest_share caps it"
    assert overweights({"task": of(a=0.2, b=0.6012, c=0.1988)}) == [("b", text)]
    parts = {"task": of(a=0.2, b=0.6, c=0.2), "acc/embed": of(a=0.2, b=0.7, c=0.1), "x": of(a=0.8, b=0.1, c=0.1)}
    assert overweights(parts) == [
        ("a", "it has 80 % of the weight of part x; round.largest_share caps it"),
        ("b", "it has 70 % of the weight of part acc/embed and more than half of 1 more; round.largest_share caps it"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "predicted", "why"),
    [
        ("flops", 1000.0, 1.0, ""), ("flops", 1.001e12, 1e9, "1,001 GFLOP, 1.00 GFLOP predicted"),
        ("flops", 1.0, 1000.0, ""), ("flops", 5.0, None, ""),
        ("step_peak_bytes", 0.0, 2.0**20, "0 MiB, 1.00 MiB predicted"),
        ("energy_j", 1e9, 1.0, ""), ("energy_j", 0.0, 1.0, ""), ("energy_j", -1.0, 1.0, "-1.00 J"),
        ("temperature_c", -20.0, None, ""),
        ("process_peak_bytes", 2.0**20, None, ""),
        ("process_peak_bytes", 2.0**20 - 1, None, ", no trainer is below 1.00 MiB"),
        ("wall_s", 1e-5, None, ""), ("compute_s", 1e-6, None, ""),
    ],
)  # fmt: skip
def test_a_figure_is_implausible_beyond_its_bound(name: str, value: float, predicted: float | None, why: str) -> None:
    found, odd = plausible(figures(**{name: value}), figures(**{name: predicted}) if predicted is not None else {})
    if not why:
        assert (found[name].value, odd) == (value, [])
        return
    assert found[name].value is None
    assert found[name].reason.startswith("implausible: ")
    assert found[name].reason.endswith(why)
    assert odd == [f"{name.removesuffix('_bytes').replace('_j', ' j').replace('_', ' ')} {found[name].reason[13:]}"]


@pytest.mark.parametrize(
    ("told", "predicted", "elapsed", "doubtful"),
    [
        ({"flops": 10.0}, 1.0, None, {}), ({"flops": 0.1}, 1.0, None, {}),
        ({"flops": 11.0}, 1.0, None, {"flops": "1.00e-09 GFLOP predicted"}),
        ({"step_peak_bytes": 2.0**20 * 900}, 2.0**20, None, {"step_peak_bytes": "1.00 MiB predicted"}),
        ({"step_peak_bytes": 2.0**20 / 900}, 2.0**20, None, {"step_peak_bytes": "1.00 MiB predicted"}),
        ({"process_peak_bytes": 2.0**50}, 1.0, None, {}),
        ({"wall_s": 12.0}, None, 10.0, {}),  # 1.1 x 10 + 1
        ({"step_peak_bytes": 2.0**24 + 10 * 2.0**18}, 2.0**18, None, {}),  # a small model beside its libraries
        ({"step_peak_bytes": 2.0**24 + 10 * 2.0**18 + 1}, 2.0**18, None, {"step_peak_bytes": "0.250 MiB predicted"}),
        ({"wall_s": 12.1}, None, 10.0, {"wall_s": "10.0 s from offer to update by the coordinator's clock"}),
        ({"wall_s": 1e6}, None, None, {}),
        ({"compute_s": 13.0}, None, 10.0, {"compute_s": "10.0 s from offer to update by the coordinator's clock"}),
        ({"wall_s": 1e-4, "compute_s": 9.0}, None, 10.0, {"wall_s": "9.00 s of computing within it"}),
        ({"energy_j": 0.0}, None, 10.0, {"energy_j": "no round takes none"}),
        ({"energy_j": 24_000.0}, None, 10.0, {}),  # 12 s x 2 kW
        ({"energy_j": 24_001.0}, None, 10.0, {"energy_j": "more than 2000 W for 10.0 s"}),
        ({"energy_j": 1e9, "wall_s": 10.0}, None, None, {"energy_j": "more than 2000 W for 10.0 s"}),
        ({"temperature_c": 1e9}, None, None, {"temperature_c": "no processor computes outside -60 to 150 °C"}),
        ({"temperature_c": 105.0}, None, None, {}),
    ],
)  # fmt: skip
def test_a_figure_is_doubtful_beyond_a_tenfold_or_the_coordinators_clock(
    told: dict[str, float], predicted: float | None, elapsed: float | None, doubtful: dict[str, str]
) -> None:
    plan = figures(**dict.fromkeys(told, predicted)) if predicted is not None else {}
    given = {name: Figure(value, "measured", "kernel") for name, value in told.items()}
    found, odd = plausible(given, plan, elapsed)
    assert odd == []
    assert {name: one.value for name, one in found.items()} == told, "it stays"
    marked = {name: one.source for name, one in found.items() if one.kind == "doubtful"}
    assert marked == {name: f"measured kernel: {why}" for name, why in doubtful.items()}


def test_a_doubtful_figure_teaches_nothing_and_marks_its_total() -> None:
    odd = Figure(50.0, "doubtful", "measured kernel: 1.00 FLOP predicted")
    placement = Placement("a", PLAN.stages[0], predicted=figures(flops=1.0))
    assert learned({}, placement, {"flops": odd}) == {}
    both = total("flops", [Figure(2.0, "counted", "hooks"), odd])
    assert (both.value, both.kind) == (52.0, "doubtful")
    cell = measurement_cell(Figure(5e10, "doubtful", "measured kernel: 1.00 GFLOP predicted"), "FLOP")
    assert cell.text == "50.0 ?"
    assert cell.why == "doubtful · measured kernel: 1.00 GFLOP predicted"


def test_figures_without_a_value_stay_and_infinite_ones_go() -> None:
    found, odd = plausible(figures(flops=None, wall_s=math.inf, loss=math.nan), {})
    assert found["flops"] == Figure(None)
    assert found["wall_s"] == Figure(None, reason="implausible: inf s")
    assert odd == ["wall inf s", "loss nan "]


def test_a_metric_beyond_what_a_loss_can_be_is_left_out() -> None:
    assert likely({"a": 1e9, "b": -1e9, "c": 1.1e9, "d": math.nan, "e": 0.0}) == {"a": 1e9, "b": -1e9, "e": 0.0}


def test_factors_by_hand() -> None:
    """Twice what was predicted: half of the way to 2, as an exponent. The factor in the prediction is taken out."""
    placement = Placement("a", PLAN.stages[0], predicted=figures(flops=10.0, energy_j=10.0, compute_s=10.0))
    assert learned({"other": 3.0}, placement, figures(flops=20.0)) == {"other": 3.0, "flops": pytest.approx(2**0.5)}
    with_factor = replace(placement, factors={"flops": 2.0})
    assert learned({"flops": 4.0}, with_factor, figures(flops=5.0)) == {"flops": 2.0}
    filled = learned({}, placement, figures(flops=30.0, filling_flops=10.0, energy_j=20.0, compute_s=20.0))
    assert filled == {"flops": pytest.approx(2**0.5), "compute_s": pytest.approx(2**0.5)}
    assert learned({}, placement, figures(flops=10.0, filling_flops=10.0)) == {}
    assert learned({}, placement, figures(flops=10.0, filling_flops=9.5))["flops"] == 0.5, (
        "a twentieth counts as a quarter"
    )
    assert learned({}, placement, figures(flops=400.0))["flops"] == 2.0, "forty times counts as four"


# --- out of line with the others


def test_a_change_may_be_b_times_the_median_of_the_others() -> None:
    def of(*norms: float, base: float = 0.0) -> dict[str, dict[str, Change]]:
        return {f"d{index}": {"task": Change(norm, base)} for index, norm in enumerate(norms)}

    assert out_of_line(of(2.0, 4.0, 40.0), 10.0) == {}, "10 times 4, the upper median of 2 and 4"
    found = out_of_line(of(2.0, 4.0, 42.0), 10.0)
    text = "its change is 10.5 times the median of the others' (round.largest_change: 10)"
    assert found == {"d2": Refusal("change", 10.5, 10.0, detail=text)}
    assert out_of_line(of(6.0, 1.0, 1e-6), 10.0) == {}, "one that hardly moved makes none of two others far"
    assert out_of_line(of(0.0, 0.0, 5.0, base=5.0), 10.0) == {}, "as far as the part is long"
    assert list(out_of_line(of(0.0, 0.0, 5.1, base=5.0), 10.0)) == ["d2"]
    assert out_of_line(of(0.0, 0.0, 1.0), 10.0) == {}
    assert list(out_of_line(of(0.0, 0.0, 1.1), 10.0)) == ["d2"]
    assert out_of_line(of(1.0, 2.0, 3.0, 20.0), 10.0) == {}, "an odd number of others: median(1, 2, 3) = 2"
    assert list(out_of_line(of(1.0, 2.0, 3.0, 21.0), 10.0)) == ["d3"]
    assert out_of_line(of(2.0, 4.0, 31.0), 0.0) == {}, "0: none is left out"
    assert list(out_of_line(of(8.0, 8.0, 9.0), 0.5)) == ["d0", "d1", "d2"]


def test_one_that_trained_a_part_alone_may_move_it_b_times_its_length() -> None:
    assert out_of_line({"a": {"task": Change(20.0, 2.0)}}, 10.0) == {}
    found = out_of_line({"a": {"task": Change(21.0, 2.0)}}, 10.0)
    text = "part task: its change has the norm 21, the part itself 2, and no other device trained it"
    assert found == {"a": Refusal("change", 21.0, 20.0, detail=f"{text} (round.largest_change: 10)")}
    assert out_of_line({"a": {"task": Change(10.0, 0.0)}}, 10.0) == {}
    two = {"a": {"task": Change(99.0, 1.0), "acc/embed": Change(999.0, 1.0)}}
    assert out_of_line(two, 10.0)["a"].needed == 99.0, "the first part that is out of line is told"


def test_late_updates_are_compared_with_those_of_the_round() -> None:
    def part(name: str, norm: float, status: str = "done") -> Assignment:
        update = Update(name, FIRST)
        return Assignment(Placement(name), status, update, changes={"task": Change(norm, 0.0)})  # type: ignore[arg-type]

    policy = RoundPolicy(largest_change=10.0)
    opened = Round(FIRST, 1, 0.0, 9.0, {"c": part("c", 2.0), "a": part("a", 2.0), "b": part("b", 500.0, "rejected")})
    devices = {name: Device(Hello(name, "s")) for name in "abcd"}
    state = State(a_plan(policy=policy), open=opened, buffered={"key": part("d", 99.0)}, devices=devices)
    [(device, assignment, refusal)] = outliers(state)
    assert (device, assignment, refusal.needed, refusal.allowed) == ("d", state.buffered["key"], 49.5, 10.0)


def test_a_device_with_more_samples_makes_more_steps() -> None:
    """Of 50 in place of 10 samples up to five times as far; a distance is of all parts that can be compared."""
    changes = {name: {"task": Change(norm)} for name, norm in (("a", 2.0), ("b", 2.0), ("c", 99.0))}
    assert list(out_of_line(changes, 10.0, {"a": 10, "b": 10, "c": 10})) == ["c"]
    assert out_of_line(changes, 10.0, {"a": 10, "b": 10, "c": 50}) == {}
    assert out_of_line(changes, 10.0, {"a": 10, "b": 10**9, "c": 50}) == {}, "a claim takes nothing from another"
    two = {name: {**own, "fusion": Change(100.0)} for name, own in changes.items()}
    assert out_of_line(two, 10.0) == {}, "sqrt((99² + 100²) / (2² + 100²)) = 1.4"


def test_factors_of_a_clip_by_hand() -> None:
    """The distance of c is sqrt((8² + 6²) / (1² + 1²)) = 7.07, so 3 / 7.07; of e's buffers alone 10 x 1 / 40."""
    policy = RoundPolicy(clip_change=3.0, largest_change=10.0)
    usual = {"task": Change(1.0), "fusion": Change(1.0), BUFFERS_OF + "task": Change(1.0)}
    found = clips({"a": usual, "b": usual, "c": {**usual, "task": Change(8.0), "fusion": Change(6.0)}}, policy)
    assert found == {"c": pytest.approx(dict.fromkeys(usual, 3 / 50**0.5))}
    found = clips({"a": usual, "b": usual, "e": {**usual, BUFFERS_OF + "task": Change(40.0)}}, policy)
    assert found == {"e": {BUFFERS_OF + "task": 0.25}}
    assert clips({"a": usual, "b": {**usual, "task": Change(99.0)}}, policy) == {}, "two tell nothing of each other"
    assert clips({"a": usual, "b": usual, "c": usual}, policy) == {}
    assert clips({"a": usual, "b": usual, "c": {"task": Change(9.0)}}, RoundPolicy(clip_change=0.0)) == {}
