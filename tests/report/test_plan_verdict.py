"""The verdict on a plan, and its tables with equal rows once, on plans made by hand."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from edgefl.budget.fit import DevicePlan, RunPrice, StagePrice, limits
from edgefl.budget.fit import verdict as first_refusal
from edgefl.plan.job import Candidate, Hyper, Placement, Stage
from edgefl.records import GPU, Budget, Capabilities, Cost, Figure, Refusal
from edgefl.report.folding import fold
from edgefl.report.grid import Column, print_grids, table
from edgefl.report.price_tables import price_grids
from edgefl.report.verdict import remedy, verdict

MIB = 2**20
PROCESS = Refusal("memory", 34.0 * MIB, 256.0 * MIB, "B", "trainer process")
SHORT = Refusal("step_memory", 412.0 * MIB, 256.0 * MIB, "B", "memory above the idle trainer")


def plan(device: str, stage: int, *, refusal: Refusal | None = None, step: int = 10, **more: object) -> DevicePlan:
    trained = (f"acc/stage{stage}", *(["acc/embed"] if stage == 1 else []))
    cost = Cost(step_peak_bytes=step * MIB, flops=1e9, payload_down_bytes=MIB, payload_up_bytes=MIB)
    placement = Placement(device, Stage(stage, stage, 2, trained=trained), Hyper(), cost, refusal=refusal)
    used = () if refusal else (PROCESS,)
    return DevicePlan(device, "some", placement, **{"limits": used, **more})


def price(*devices: DevicePlan) -> RunPrice:
    schedules = tuple(
        StagePrice(name, 1, 2, step_peak_bytes=size * MIB, batch_size=16, payload_up_bytes=1)
        for name, size in (("end_to_end", 400), ("progressive", 200), ("layerwise", 100), ("heads", 10))
    )
    return RunPrice("own", "lw-fedmml", devices=devices, schedules=schedules, schedule="end_to_end", batch_size=16)


def test_all_fit_and_the_tightest_is_named_with_both_numbers() -> None:
    near = msgspec.structs.replace(SHORT, needed=64.0 * MIB)  # a quarter
    plans = [plan("alpha", 1), plan("beta", 1), plan("beta", 2, limits=(PROCESS, near)), plan("gamma", 1)]
    assert verdict(price(*plans)) == (
        "All 3 devices fit every stage; the tightest is beta, at 25 % of its step memory (64.0 MiB of 256 MiB, "
        "stage 2)."
    )
    assert verdict(price(plan("alpha", 1))).startswith("alpha fits every stage; the tightest is alpha, at 13 % of its")
    unlimited = price(plan("alpha", 1, limits=()))
    assert verdict(unlimited) == "alpha fits every stage; none has a budget that could be short."


def test_who_does_not_fit_is_named_with_the_first_stage_both_numbers_and_a_way_out() -> None:
    fits, short = plan("alpha", 1), plan("beta", 3, refusal=SHORT)
    text = verdict(price(fits, plan("beta", 1), plan("beta", 2), short, plan("beta", 4, refusal=SHORT)))
    assert text == (
        "1 of 2 devices fit every stage; beta fits stages 1–2 only: stage 3 needs 412 MiB of step memory, allowed "
        "256 MiB. The schedule progressive needs about 200 MiB: --set slots.schedule=progressive."
    )
    many = [plan(f"d{i}", 1, refusal=SHORT) for i in range(5)]
    text = verdict(price(*many))
    assert text.startswith("No device fits every stage; d0 fits no stage: stage 1 needs")
    assert "; 2 more in the table." in text


def test_the_way_out_is_the_largest_schedule_below_the_limit_or_words() -> None:
    def way(refusal: Refusal, base: int = 0) -> str:
        return remedy(msgspec.structs.replace(price(), trainer_base_bytes=base * MIB), refusal)

    allowed = msgspec.structs.replace
    assert "slots.schedule=heads" in way(allowed(SHORT, allowed=50.0 * MIB))
    assert way(allowed(SHORT, allowed=5.0 * MIB)).startswith("Choose smaller encoders")
    process = Refusal("memory", 500.0 * MIB, 250.0 * MIB, "B", "")
    assert "slots.schedule=layerwise" in way(process, base=100)  # 200 + 100 are too many
    assert "slots.schedule=progressive" in way(allowed(process, where=GPU), base=100)  # the process is not on the card
    assert "training.batch_size" in way(Refusal("data", 16.0, 4.0, "samples"))
    assert way(Refusal("method", detail="not installed")) == "Install on the device what the coordinator has"
    assert way(Refusal("busy")) == ""


def test_the_way_out_counts_what_a_processor_needs_besides_tensors() -> None:
    stages = [msgspec.structs.replace(stage, libraries_bytes=60 * MIB) for stage in price().schedules]
    besides = msgspec.structs.replace(price(), schedules=tuple(stages))
    assert remedy(besides, SHORT) == "The schedule layerwise needs about 160 MiB: --set slots.schedule=layerwise"
    on_card = msgspec.structs.replace(SHORT, where=GPU)
    assert "progressive needs about 200 MiB" in remedy(besides, on_card)


def test_a_device_that_fits_by_training_less_is_named() -> None:
    assert verdict(price(plan("alpha", 1), plan("wrist", 1, left_out=4))).endswith(
        "; wrist trains fewer encoder stages than the schedule asks for."
    )


def test_devices_that_fit_in_pieces_only_are_named() -> None:
    whole, small = plan("alpha", 1), plan("nano", 1)
    placement = msgspec.structs.replace(small.placement, hyper=Hyper(micro_batch=4))
    both = price(whole, msgspec.structs.replace(small, placement=placement))
    assert verdict(both).startswith("All 2 devices fit every stage, nano in smaller steps; the tightest is")
    short = plan("tiny", 1, refusal=SHORT)
    both = price(*both.devices, short)
    assert verdict(both).startswith("2 of 3 devices fit every stage, nano in smaller steps; tiny fits no stage")


def test_every_limit_is_told_and_the_first_that_is_too_small_refuses() -> None:
    budget = Budget(step_memory_bytes=100, payload_bytes=30, flops=5.0)
    device = Candidate(capabilities=Capabilities(trainer_base_bytes=1000), budget=budget)
    cost = Cost(step_peak_bytes=60, flops=7.0, payload_down_bytes=20, payload_up_bytes=20)
    told = [(limit.reason, limit.needed, limit.allowed) for limit in limits(cost, device)]
    assert told == [("step_memory", 60.0, 100.0), ("flops", 7.0, 5.0), ("payload", 40.0, 30.0)]
    refusal = first_refusal(cost, device)
    assert refusal is not None
    assert refusal.reason == "flops"


def test_the_totals_say_which_schedule_is_cheapest_and_what_it_trains() -> None:
    found = price(plan("alpha", 1))
    flops = {"end_to_end": 400.0, "progressive": 200.0, "layerwise": 100.0, "heads": 10.0}
    counted = tuple(msgspec.structs.replace(row, flops_per_round=flops[row.schedule]) for row in found.schedules)
    found = msgspec.structs.replace(found, schedules=counted)
    note = price_grids(found)[1].notes[-1]
    assert note.startswith("The fewest FLOPs are those of heads, 40.0 times fewer than end_to_end (whole, frozen")
    assert "--set slots.schedule=heads" in note
    cheapest = msgspec.structs.replace(found, schedule="heads")
    assert price_grids(cheapest)[1].notes[-1] == "Of these heads, as this run is, takes the fewest FLOPs."


def test_a_stages_figures_add_up_to_what_its_rounds_are_predicted_to_take() -> None:
    cost = Cost(
        flops=1e9, payload_down_bytes=2 * MIB, payload_up_bytes=MIB, whole_up_bytes=3 * MIB, signature_bytes=MIB,
        joining_down_bytes=9 * MIB, entering_down_bytes=5 * MIB, prototypes_down_bytes=MIB,
    )  # fmt: skip
    first = {"flops": Figure(1.5e9, "predicted")}
    one, two = (
        Placement("alpha", Stage(stage, stage, 3, trained=("acc/stage1",)), Hyper(), cost, predicted_first=figures)
        for stage, figures in ((1, {}), (2, first))
    )
    grid = price_grids(price(DevicePlan("alpha", "some", one), DevicePlan("alpha", "some", two)))[0]
    columns = [column.label for column in grid.columns]
    shown = [columns.index(f"a stage: {name}") for name in ("FLOPs", "down", "up")]
    # 3 x 1; (9 - 1) + 2 x 2: no prototypes yet; 2 x 1 + 3 + 1. Then 2 x 1 + 1.5; 5 + 2 x 2; 2 x 1 + 3.
    assert [[row[at].text for at in shown] for row in grid.rows] == [["3.00", "12.0", "6.00"], ["3.50", "9.00", "5.00"]]


def test_rows_that_differ_in_a_stage_or_a_device_alone_are_one() -> None:
    rows = [(device, stage, "7" if stage == 1 else "8") for device in "abcde" for stage in (1, 2, 3, 5)]
    columns = [Column(name, lambda row, i=i: str(row[i])) for i, name in enumerate(("device", "stage", "needs"))]
    folded = fold(table("t", columns, [*rows, ("z", 1, "9")]), "stage", "device")
    assert [[cell.text for cell in row] for row in folded.rows] == [
        ["a and 4 more", "1", "7"],
        ["a and 4 more", "2–3, 5", "8"],
        ["z", "1", "9"],
    ]
    assert folded.rows[0][0].tip == "a, b, c, d, e"


def test_three_devices_of_six_stages_fit_on_one_screen() -> None:
    plans = [plan(f"device-{n}", stage, step=10 * n) for n in (1, 2, 3) for stage in range(1, 7)]
    console = Console(record=True, width=80, file=io.StringIO())
    print_grids(price_grids(price(*plans), details=False), console)
    lines = console.export_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert sum("2–6" in line for line in lines) == 3
    same = price_grids(price(*(plan(f"device-{n}", stage) for n in (1, 2, 3) for stage in range(1, 7))))
    assert [row[0].text for row in same[0].rows] == ["device-1, device-2, device-3"] * 2
