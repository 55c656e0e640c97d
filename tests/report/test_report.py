"""Reports: numbers as people read them, and tables that say why a number is missing."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from report_fixture import NO_ENERGY, run_report
from rich.console import Console

from edgefl.cli.show import runs_table
from edgefl.records import ORACLE, Budget, Capabilities, Figure, Refusal, Speed, kind_of_machine
from edgefl.report import bills, compare_lines, decisions, model_plots, quality, resources, rounds, units
from edgefl.report.events import LiveState
from edgefl.report.grid import Cell, Column, Grid, letters, measurement_cell, print_grid, split, table
from edgefl.report.writers import print_report, without_secrets
from edgefl.run_records import AssignmentRow, DeviceRow, EventRow, RunReport


@pytest.fixture(scope="module")
def report() -> RunReport:
    return run_report()


def column(grid: Grid, name: str, group: str = "") -> list[Cell]:
    index = [(c.name, c.group) for c in grid.columns].index((name, group))
    return [row[index] for row in grid.rows]


def shown(grid: Grid, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_grid(grid, console)
    return console.export_text()


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (0.9996, "1.00"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (5e-5, "5.00e-05"),
        (-3.2, "-3.20"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert units.number(value) == text


def test_units_are_binary_for_bytes_and_decimal_for_operations() -> None:
    assert units.mib(3 * 2**20) == "3.00 MiB"
    assert units.gflop(2.5e9) == "2.50 GFLOP"
    assert units.quantity(40, "samples") == "40 samples"
    assert units.mib(None) == "—"


def test_durations_and_spans_read_like_words() -> None:
    assert [units.seconds(s) for s in (0.42, 59.9, 125, 11_220)] == ["0.420 s", "59.9 s", "2 min 05 s", "3 h 07 min"]
    assert units.spans([3, 1, 2, 5, 5]) == "1–3, 5"
    assert units.spans([]) == ""


def test_urls_lose_their_credentials() -> None:
    assert units.public_url("see mqtt://fleet:s3cret@host:1883 now") == "see mqtt://host:1883 now"
    masked = without_secrets(
        {"broker": {"url": "mqtts://a:b@c", "password": "x"}, "list": [1, "mqtt://u@h"], "at": object}
    )
    assert masked["broker"] == {"url": "mqtts://c", "password": "***"}
    assert masked["list"] == [1, "mqtt://h"]


# Totals


def test_peaks_take_the_largest_and_amounts_add_up() -> None:
    figures = [Figure(2.0), Figure(5.0)]
    assert resources.total("step_peak_bytes", figures).value == 5.0
    assert resources.total("flops", figures).value == 7.0


def test_a_missing_round_makes_the_total_a_lower_bound_that_says_so() -> None:
    summed = resources.total("energy_j", [Figure(3.0), Figure(reason="no sensor")])
    assert summed.value == 3.0
    assert summed.reason == "without 1 of 2 rounds: no sensor"
    assert measurement_cell(summed, "J").text == "≥ 3.00"


def test_nothing_measured_stays_nothing() -> None:
    unknown = resources.total("energy_j", [Figure(reason="no sensor"), Figure(reason="no sensor")])
    assert unknown.value is None
    assert unknown.reason == "no sensor"
    assert resources.measured("flops", []).reason == "no round was trained"


def test_predictions_are_summed_over_the_rounds_that_were_trained() -> None:
    trained = AssignmentRow(predicted={"flops": Figure(10.0)}, measured={"flops": Figure(11.0)})
    refused = AssignmentRow(predicted={"flops": Figure(90.0)}, status="refused")
    assert resources.predicted("flops", [trained, refused]).value == 10.0
    assert resources.predicted("flops", [refused]).value == 90.0
    assert resources.predicted("flops", []).value is None


def test_the_tighter_of_two_memory_budgets_limits_the_step() -> None:
    has = Capabilities(trainer_base_bytes=200)
    assert (
        resources.step_limit(DeviceRow(capabilities=has, budget=Budget(memory_bytes=250, step_memory_bytes=90))) == 50
    )
    assert (
        resources.step_limit(DeviceRow(budget=Budget(memory_bytes=250))) is None
    )  # the idle trainer's size is unknown


# Tables


def test_the_bill_shows_predicted_next_to_measured_with_the_ratio(report: RunReport) -> None:
    grid = bills.device_bill(report)
    nano = [row[0].text for row in grid.rows].index("nano")
    group = "step memory"
    assert column(grid, "predicted", group)[nano].text == "13.7"
    assert column(grid, "measured", group)[nano].text == "17.7"
    ratio = column(grid, "ratio", group)[nano]
    assert (ratio.text, ratio.tone) == ("1.29×", "warn")
    assert column(grid, "budget", group)[nano].text == "24.0"


def test_a_missing_figure_is_a_dash_with_its_reason_as_tip_and_footnote(report: RunReport) -> None:
    grid = bills.device_bill(report)
    energy = column(grid, "used", "energy")
    assert (energy[0].text, energy[0].tip) == ("—", NO_ENERGY)
    assert grid.footnotes[letters_index(grid.mark(energy[0]))] == NO_ENERGY
    assert energy[2].text.startswith("≥ ")


def test_seconds_and_joules_stand_next_to_the_plan_s_where_a_profile_tells_them(report: RunReport) -> None:
    def planned(row: AssignmentRow) -> AssignmentRow:
        known = {"compute_s": Figure(2.0, "predicted"), "energy_j": Figure(30.0, "predicted")} if row.measured else {}
        return msgspec.structs.replace(row, predicted={**row.predicted, **(known if row.device == "nano" else {})})

    told = msgspec.structs.replace(report, assignments=tuple(map(planned, report.assignments)))
    grid = bills.device_bill(told)
    for group in ("time in training steps", "energy"):
        cells = {row[0].text: cell for row, cell in zip(grid.rows, column(grid, "predicted", group), strict=True)}
        assert float(cells["nano"].text) > 0
        assert all(cell.text == "—" and cell.why for device, cell in cells.items() if device != "nano")
    assert len(grid.columns) == len(grid.rows[0])
    labels = {bill.device: [row[0].text for row in bill.grid.rows] for bill in bills.bills(told)}
    assert {"time in training steps: predicted", "energy: predicted"} <= set(labels["nano"])
    assert not {"time in training steps: predicted", "energy: predicted"} & set(labels["orin-nano"])


def test_seconds_of_another_kind_of_machine_s_profile_have_no_ratio(report: RunReport) -> None:
    known = {"compute_s": Figure(0.01, "predicted")}

    def ratio(machine: str) -> str:
        has = msgspec.structs.replace(nano.capabilities, speed=Speed(1e9, machine=machine))
        devices = tuple(
            msgspec.structs.replace(row, capabilities=has) if row.device == "nano" else row for row in report.devices
        )
        rows = tuple(msgspec.structs.replace(row, predicted={**row.predicted, **known}) for row in report.assignments)
        grid = bills.device_bill(msgspec.structs.replace(report, devices=devices, assignments=rows))
        place = [row[0].text for row in grid.rows].index("nano")
        return column(grid, "ratio", "time in training steps")[place].text

    nano = next(row for row in report.devices if row.device == "nano")
    assert ratio("aarch64, 64 cores, a GPU of another kind") == ""
    assert ratio("") == ""  # the profile does not say what it was measured on
    assert ratio(kind_of_machine(nano.capabilities)).endswith("×")


def test_the_page_s_three_bills_leave_no_column_of_the_bill_out(report: RunReport) -> None:
    def told(row: AssignmentRow) -> AssignmentRow:
        names = ("prototypes_up_bytes", "prototypes_down_bytes", "signature_up_bytes", "layer_down_bytes")
        more = {name: Figure(1000.0, "counted", "test") for name in names} if row.measured else {}
        return msgspec.structs.replace(row, measured={**row.measured, **more})

    whole = bills.device_bill(msgspec.structs.replace(report, assignments=tuple(map(told, report.assignments))))
    assert ("of the payload", "signature sent") in {(column.group, column.name) for column in whole.columns}
    for bill in bills.bills(msgspec.structs.replace(report, assignments=tuple(map(told, report.assignments)))):
        assert bill.device == "tiny" or "of the payload: signature sent" in [row[0].text for row in bill.grid.rows]


def letters_index(mark: str) -> int:
    return [letters(index) for index in range(60)].index(mark)


def test_every_dash_has_a_reason(report: RunReport) -> None:
    grids = (
        bills.device_bill(report),
        bills.stage_bill(report),
        bills.stage_totals(report),
        rounds.rounds(report),
    )
    cells = [cell for grid in grids for row in grid.rows for cell in row]
    assert any(cell.text == "—" for cell in cells)
    assert all(cell.why for cell in cells if cell.text == "—")


def test_refusals_carry_both_numbers_and_what_came_of_them(report: RunReport) -> None:
    grid = decisions.refusals(report)
    by_row = [tuple(cell.text for cell in row) for row in grid.rows]
    assert (
        "tiny",
        "2",
        "1–2",
        "plan",
        "step memory over budget",
        "4.93 MiB",
        "4.75 MiB",
        "not asked in this stage",
    ) in by_row
    ceiling = next(row for row in by_row if row[0] == "nano")
    assert ceiling[3:7] == ("device", "memory ceiling hit while training", "26.4 MiB", "24.0 MiB")
    assert ceiling[7] == "planned again, trained with micro-batch 8"
    lost = next(row for row in by_row if row[4] == "lost contact")
    assert lost[5:7] == ("", "")


def test_a_boards_power_mode_stands_beside_its_gpu(report: RunReport) -> None:
    assert "power mode" not in [column.name for column in rounds.devices(report).columns]  # no board tells one
    first, *rest = report.devices
    capabilities = msgspec.structs.replace(first.capabilities, power_mode="MODE_30W")
    devices = (msgspec.structs.replace(first, capabilities=capabilities), *rest)
    cells = column(rounds.devices(msgspec.structs.replace(report, devices=devices)), "power mode", "has")
    assert [cell.text for cell in cells] == ["MODE_30W", *[""] * len(rest)]


def test_a_device_that_waits_for_a_new_plan_is_no_decision_of_the_coordinator() -> None:
    """Its row in the ledger still holds what it declined the offer for; the event says who decided."""
    refusal = Refusal("step_memory", 2e6, 1e6, "bytes")
    declined = EventRow(kind="declined", stage=1, round=1, device="a", data=msgspec.to_builtins(refusal))
    row = AssignmentRow(stage=1, round=1, device="a", status="replanning", refusal=refusal)
    rows = decisions.refusals(RunReport(events=(declined,), assignments=(row,))).rows
    assert [(cells[0].text, cells[3].text) for cells in rows] == [("a", "device")]


def test_a_refusal_known_only_from_events_is_not_forgotten() -> None:
    data = {"reason": "flops", "needed": 3e9, "allowed": 2e9, "unit": "FLOP"}
    planned = EventRow(kind="stage_planned", stage=1, data={"placements": [{"device": "a", "ok": False, **data}]})
    declined = EventRow(kind="declined", stage=1, round=2, device="b", data=data)
    rows = decisions.refusals(RunReport(events=(planned, declined, declined))).rows
    assert [(row[0].text, row[2].text, row[3].text, row[5].text) for row in rows] == [
        ("a", "", "plan", "3.00 GFLOP"),
        ("b", "2", "device", "3.00 GFLOP"),
    ]


def test_evaluation_sets_the_masks_side_by_side(report: RunReport) -> None:
    grid = quality.evaluation(report)
    assert [row[0].text for row in grid.rows] == ["acc + gyro", "acc alone", "gyro alone"]
    assert [cell.text for cell in grid.rows[2][1:5]] == ["", "45.8", "76.7", "+30.8"]


def test_a_modality_alone_is_explained_where_there_are_several(report: RunReport) -> None:
    assert "Alone: " in quality.evaluation(report).notes[0]
    only = tuple(row for row in report.evaluations if row.available == ("acc",))
    single = msgspec.structs.replace(report, evaluations=only)
    assert quality.evaluation(single).notes[0] == "One global model on the test set."


def test_a_prototype_mask_names_its_matcher_where_it_is_on_record(report: RunReport) -> None:
    assert "matched" not in " ".join(quality.evaluation(report).notes)  # rows of an older ledger
    assert [row[1].text for row in quality.classification(report).rows].count("prototype") == 2
    named = tuple(
        msgspec.structs.replace(row, matcher="classifier") if row.missing == "prototype" else row
        for row in report.evaluations
    )
    later = msgspec.structs.replace(report, evaluations=named)
    assert "Prototype mask: classes matched by classifier." in quality.evaluation(later).notes
    shown_masks = [row[1].text for row in quality.classification(later).rows]
    assert sorted(set(shown_masks)) == ["none", "prototype by classifier", "zero"]


def test_the_oracle_is_an_upper_bound_and_no_mask(report: RunReport) -> None:
    """It is shown apart: no gain, no curve, no line of a comparison, and no other figure moves by it."""
    told = tuple(
        msgspec.structs.replace(row, missing=ORACLE, value=row.value + 0.1)
        for row in report.evaluations
        if row.missing == "prototype"
    )
    with_it = msgspec.structs.replace(report, evaluations=(*report.evaluations, *told))
    grid = quality.evaluation(with_it)
    assert [one.name for one in grid.columns].count("bound") == 1
    assert [cell.text for cell in grid.rows[2][1:6]] == ["", "45.8", "76.7", "+30.8", "86.7"]
    assert "true class" in " ".join(grid.notes)
    assert "oracle (upper bound)" in [row[1].text for row in quality.classification(with_it).rows]
    curves = [chart.spec() for run in (with_it, report) if (chart := model_plots.accuracy(run))]
    assert curves[0] == curves[1]
    assert list(compare_lines.scores([with_it])) == list(compare_lines.scores([report]))


def test_a_reconstruction_has_a_column_and_a_gain_of_its_own(report: RunReport) -> None:
    mended = [msgspec.structs.replace(row, missing="reconstruction") for row in report.evaluations]
    alone = [row for row, old in zip(mended, report.evaluations, strict=True) if old.missing == "prototype"]
    only = tuple(row for row in report.evaluations if row.missing != "prototype") + tuple(alone)
    grid = quality.evaluation(msgspec.structs.replace(report, evaluations=only))
    assert [column.name for column in grid.columns[3:5]] == ["reconstruction mask", "gain"]
    assert [cell.text for cell in grid.rows[2][1:5]] == ["", "45.8", "76.7", "+30.8"]
    lower = tuple(msgspec.structs.replace(row, value=row.value - 0.1) for row in alone)
    both = msgspec.structs.replace(report, evaluations=(*report.evaluations, *lower))
    grid = quality.evaluation(both)
    assert [column.name for column in grid.columns[3:7]] == [
        "prototype mask",
        "reconstruction mask",
        "prototype gain",
        "reconstruction gain",
    ]
    assert [cell.text for cell in grid.rows[2][1:7]] == ["", "45.8", "76.7", "66.7", "+30.8", "+20.8"]
    assert [row[1].text for row in quality.classification(both).rows].count("reconstruction") == 2


def test_a_metric_that_is_no_share_is_not_made_a_percentage() -> None:
    from edgefl.run_records import EvaluationRow

    run = RunReport(evaluations=(EvaluationRow(1, 1, ("a", "b"), "none", "loss", 2.5, 10),))
    grid = quality.evaluation(run)
    assert grid.rows[0][1].text == "2.50"
    assert "%" not in [column.unit for column in grid.columns]


def test_a_column_gets_words_whole_numbers_cells_or_nothing_of_a_row() -> None:
    columns: list[Column[int]] = [
        Column("n", lambda row: 1000 * row, key=True),
        Column("words", lambda row: "even" if row % 2 == 0 else None),
        Column("half", lambda row: Cell(str(row / 2), why="a half")),
    ]
    grid = table("x", columns, [1, 2])
    assert [[cell.text for cell in row] for row in grid.rows] == [["1,000", "", "0.5"], ["2,000", "even", "1.0"]]
    assert grid.footnotes == ("a half",)
    assert grid.mark(grid.rows[1][2]) == "a"
    assert grid.groups() == [("", [0]), ("", [1]), ("", [2])]


def test_footnote_letters_go_on_after_z() -> None:
    assert [letters(index) for index in (0, 25, 26, 27, 701, 702)] == ["a", "z", "aa", "ab", "zz", "aaa"]


# Terminal


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_table_is_wider_than_the_terminal_and_no_cell_is_lost(report: RunReport, width: int) -> None:
    grids = [bills.device_bill(report), bills.stage_bill(report), rounds.rounds(report)]
    for grid in grids:
        text = shown(grid, width)
        assert max(len(text_line) for text_line in text.splitlines()) <= width
        assert "…" not in text
        for row in grid.rows:
            for cell, col in zip(row, grid.columns, strict=True):
                assert col.text or cell.text in text


def test_a_wide_table_is_cut_between_groups_and_repeats_its_keys(report: RunReport) -> None:
    grid = bills.device_bill(report)
    parts = split(grid, 90)
    assert len(parts) > 1
    assert all(part[:1] == [0] for part in parts)
    assert sorted({index for part in parts for index in part}) == list(range(len(grid.columns)))


def test_by_default_the_terminal_has_one_table_of_costs_within_80_columns_and_no_notes(report: RunReport) -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    print_report(report, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    titles = [title for title, before in zip(lines[1:], lines, strict=False) if title and not before]
    assert titles == ["Test accuracy, after stage 6, round 2", "What each device spent"]
    assert re.fullmatch(r"nano +11 / 12 +24\.0 +13\.7 +17\.7 +97\.3 +8\.73 +9\.54", lines[-3])


def test_the_terminal_report_names_reasons_and_footnotes(report: RunReport) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_report(report, console, verbose=True)
    text = console.export_text()
    assert f"a  {NO_ENERGY}" in text
    assert text.count("Step memory is what training adds") == 1
    assert "In every round: select all · weight samples · combine mean · optimise plain." in text


def test_a_run_without_rows_shows_what_is_not_there_yet() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    print_report(RunReport(run="x"), console, verbose=True)
    assert "No round has started yet." in console.export_text()
    assert "There is no run in runs" in shown(runs_table([], "runs", 0.0), 80)


def test_a_plan_tells_what_earlier_rounds_have_taught() -> None:
    placement = {"device": "a", "step_peak_bytes": 2**20, "flops": 1e9, "checkpoint": True, "micro_batch": 4}
    placement |= {"lean": "adafactor", "factors": {"step_peak_bytes": 1.25, "flops": 1.001, "energy_j": 2.0}}
    event = EventRow(kind="stage_planned", stage=2, data={"placements": [placement]})
    told = LiveState().apply(event)
    assert "(corrected by its earlier rounds: memory × 1.25)" in told
    assert told.endswith("micro-batch 4, blocks computed anew, adafactor")
    placement["factors"] = {}
    assert "corrected" not in LiveState().apply(event)


def test_nothing_in_a_table_is_an_order_to_the_terminal() -> None:
    hostile = "\x1b]0;title\x07\u202e"
    columns = [Column[str](f"id{hostile}", lambda row: Cell(row, why=row), group=hostile, text=True)]
    text = shown(table(f"Samples {hostile}", columns, [hostile], [hostile], ""), 120)
    assert text.count("]0;title") == 6  # title, group, heading, cell, footnote, note
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
