"""Words of a bill that a reader has to be able to trust: shares of process memory, seconds, savings, what fits."""

from __future__ import annotations

import re

import msgspec
import pytest
from report_fixture import MIB, run_report
from test_plan_verdict import PROCESS, plan, price
from test_story import RUN, trained

from edgefl.cli import compare as compare_verb
from edgefl.cli import show
from edgefl.plan.job import RunPlan, Stage
from edgefl.pricing import end_to_end
from edgefl.records import Budget, Capabilities, Figure, Speed
from edgefl.report import (
    bills,
    budget_plots,
    compare_output,
    fleet_plots,
    plan_page,
    prediction_plot,
    price_tables,
    story,
    time_table,
    timeline,
    units,
)
from edgefl.report.charts import NARROW, WIDE, Chart
from edgefl.report.compare import compare
from edgefl.report.events import LiveState
from edgefl.report.writers import to_html
from edgefl.run_records import DeviceRow, EventRow, RunReport

replace = msgspec.structs.replace
#: 319 of 2,048 MiB of the process is 16 %; its step takes 13 of the 1,748 MiB that an idle trainer of 300 MiB leaves.
NANO = DeviceRow(
    "nano", "jetson-nano", Capabilities(trainer_base_bytes=300 * MIB), Budget(memory_bytes=2048 * MIB), {"": 8}
)


def with_process(device: DeviceRow = NANO, **more: Figure) -> RunReport:
    row = trained("nano", 13 * MIB, MIB, MIB, 3e9)
    row = replace(row, measured={**row.measured, "process_peak_bytes": Figure(319.0 * MIB, "measured"), **more})
    return replace(RUN, devices=(device,), assignments=(row,), end_to_end={})


def texts(chart: Chart | None, width: int = WIDE) -> list[str]:
    assert chart is not None
    return [row["text"] for row in chart.spec(width)["layer"][-1]["data"]["values"]]


def test_a_budget_of_the_process_is_told_as_a_share_of_the_process() -> None:
    report = with_process()
    for width in (WIDE, NARROW):
        assert texts(budget_plots.memory(report), width) == ["16 % of process memory (319 of 2,048 MiB)"]
    assert "the tightest, nano, used 16 % of its process memory budget" in story.headline(report)
    assert bills.device_bill(report).notes[0] == (
        "Budget: the budget of process memory minus the idle trainer (300 MiB on nano)."
    )
    (bill,) = bills.bills(report)
    assert "step memory 13.0 MiB · process memory 319 MiB of 2,048 MiB" in bill.facts
    both = replace(NANO, budget=Budget(memory_bytes=2048 * MIB, step_memory_bytes=26 * MIB))  # the tighter one counts
    assert texts(budget_plots.memory(with_process(both))) == ["50 % used"]
    assert "minus the idle trainer" not in " ".join(bills.device_bill(with_process(both)).notes)


def test_a_plan_s_picture_tells_it_so_too() -> None:
    found = replace(price(plan("alpha", 1)), trainer_base_bytes=8 * MIB)
    assert PROCESS.needed == 34 * MIB
    assert texts(plan_page.memory(found)) == ["13 % of process memory (34.0 of 256 MiB)"]


def test_the_sentence_says_who_trained_some_of_the_rounds_and_of_which_rounds_the_tightest_is() -> None:
    rounds = (*RUN.rounds, replace(RUN.rounds[0], stage=2))
    more = replace(RUN, rounds=rounds, assignments=(*RUN.assignments, replace(RUN.assignments[0], stage=2)))
    assert story.headline(more).startswith("2 of 2 devices trained, wrist in 1 of 2 rounds; test accuracy 99.2 %; of")
    assert "; of the rounds trained, the tightest, wrist, used" in story.headline(more)
    assert "of the rounds trained" not in story.headline(RUN)


def test_a_report_without_a_saving_says_why() -> None:
    assert story.no_saving(RUN) == ""
    bare = replace(RUN, end_to_end={}, stages=({"index": 1, "trained": ["a"]},), part_bytes={"a": 1, "b": 1})
    assert story.no_saving(bare).startswith("No saving is told: the price")
    whole = replace(bare, stages=({"index": 1, "trained": ["a", "b"]},))
    assert story.no_saving(whole) == "It trains end to end itself, so there is no saving against that."
    assert story.no_saving(whole) in to_html(whole, interactive=False)
    assert story.no_saving(RunReport(run="r")) == ""


def test_a_run_whose_last_stage_alone_trains_everything_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReachedError(Exception):
        """The model is to be built, so prices are to be made."""

    def built(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr(end_to_end, "build", built)
    names = ("acc/embed", "acc/stage1", "acc/stage2", "acc/norm", "head/acc", "fusion", "task")
    monkeypatch.setattr(end_to_end, "Choice", lambda *_: WholeSchedule(names))
    growing = (Stage(1, 1, 2, names[:2], names[:2]), Stage(2, 2, 2, names, names))
    with pytest.raises(ReachedError):
        end_to_end.price_end_to_end(RunPlan(stages=growing), [])
    assert end_to_end.price_end_to_end(RunPlan(stages=(replace(growing[0], rounds=0), growing[1])), []) == {}


class WholeSchedule:
    """A schedule of one stage with all parts."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def bind(self, _: object) -> WholeSchedule:
        return self

    def __call__(self, *_: object) -> tuple[Stage, ...]:
        return (Stage(1, 2, 4, self.names, self.names),)


def test_predicted_seconds_say_of_what_and_of_whose_machine_they_are() -> None:
    fast = replace(NANO, capabilities=Capabilities(trainer_base_bytes=1, speed=Speed(flops=1e9, machine="a nano")))
    report = with_process(fast, compute_s=Figure(32.3, "measured"))
    row = replace(report.assignments[0], predicted={"compute_s": Figure(0.3, "predicted")})
    grid = bills.device_bill(replace(report, assignments=(row,)))
    assert "time in training steps: predicted" in [column.label for column in grid.columns]
    (note,) = [note for note in grid.notes if note.startswith("Predicted seconds")]
    assert "nano on a real jetson-nano, which is another machine" in note
    assert "corrected by the device's earlier rounds, at most fourfold" in note
    assert grid.notes[0] == note, "next to the seconds it explains: they differ a hundredfold from those measured"
    assert not [note for note in bills.device_bill(report).notes if "Predicted seconds" in note]


def test_bytes_sent_again_have_a_column_where_there_are_any() -> None:
    def labels(report: RunReport) -> list[str]:
        return [column.label for column in bills.device_bill(report).columns]

    again = with_process(resent_down_bytes=Figure(2.0 * MIB, "counted"), resent_up_bytes=Figure(0.0, "counted"))
    assert "payload once more: received" in labels(again)
    assert "payload once more: sent" not in labels(again)
    assert "and those sent once more" in " ".join(bills.NOTES)


def test_counted_figures_are_not_called_measured() -> None:
    drawn = [budget_plots.against_end_to_end(RUN), prediction_plot.prediction(run_report())]
    for chart in drawn:
        assert chart is not None
        assert "measured ÷" not in str(chart.spec())
        assert "counted" in chart.caption
    assert "measured or counted over predicted" in " ".join(bills.NOTES)


def test_the_timeline_tells_seconds_in_rounds_from_those_between() -> None:
    chart = fleet_plots.over_time(run_report())
    assert chart is not None
    inside = sum((row.ended_at or 0) - row.started_at for row in run_report().rounds)
    assert f"{inside:.1f} s in rounds" in chart.caption.replace("1 min 29 s", "88.8 s")
    assert "depend on the machine" in chart.caption
    assert "labelOverlap" in str(chart.spec(NARROW))


def test_each_devices_seconds_are_a_table_that_adds_up_to_the_timeline() -> None:
    report = run_report()
    grid = time_table.seconds_of_devices(report)
    columns = [column.name for column in grid.columns]
    assert columns[:5] == ["device", "trains", "fetches, prepares", "sends", "waits"]
    spans = timeline.spans(report)
    assert [row[0].text for row in grid.rows] == list(dict.fromkeys(span.device for span in spans))
    for row in grid.rows:
        for activity, cell in zip(columns[1:], row[1:], strict=True):
            held = sum(s.end - s.start for s in spans if (s.device, s.activity) == (row[0].text, activity))
            assert cell.text == units.number(held)
    assert "Where each device" in to_html(report, interactive=False)


def test_backticks_are_code_on_a_page_and_not_in_what_a_device_names_itself() -> None:
    page = to_html(run_report(), interactive=False)
    assert "<code>edgefl-agent profile</code>" in page
    assert not re.search(r">[^<]*`[^<]*<", page)


def test_an_axis_of_shares_ends_at_a_hundred_and_equal_points_are_seen() -> None:
    chart = compare_output.picture(compare([run_report(), run_report()]))
    assert chart is not None
    for width in (WIDE, NARROW):
        points = chart.spec(width)["vconcat"][0]["layer"][1]
        assert points["encoding"]["x"]["scale"]["domain"][1] <= 100.0
        sizes = points["encoding"]["size"]["scale"]["range"]
        assert sizes == sorted(set(sizes), reverse=True)  # one around the other
        assert points["mark"]["filled"] is False


def test_who_joins_is_told_with_every_limit() -> None:
    told = LiveState().apply(
        EventRow(0.0, "device_joined", device="a", data={"budget": {"flops": 5e9, "energy_j": 3.0}})
    )
    assert told is not None
    assert told.endswith("budget: FLOPs 5.00 GFLOP, energy 3.00 J")


def test_run_ids_in_help_have_the_form_that_runs_get() -> None:
    for verb in (show.report_command, compare_verb.command):
        ids = re.findall(r"(?:report|compare) (\S+)", (verb.__doc__ or "").partition("Example")[2])
        assert ids
        assert all(re.fullmatch(r"latest|demo-20\d+(-\d{6})?", one) for one in ids), ids


def test_schedules_say_how_many_devices_they_fit_and_price_step_memory_with_libraries() -> None:
    found = price(plan("alpha", 1), plan("beta", 1))
    stages = [replace(one, libraries_bytes=4 * MIB) for one in found.schedules]
    stages[0] = replace(stages[0], exceeds=("beta",))
    grid = price_tables.price_grids(replace(found, schedules=tuple(stages)), details=False)[1]
    at = [column.name for column in grid.columns].index("fit whole")
    rows = {row[0].text: [cell.text for cell in row] for row in grid.rows}
    assert (rows["end_to_end"][at], rows["layerwise"][at]) == ("1 of 2", "2 of 2")
    assert rows["end_to_end"][at + 1] == "404"  # 400 of tensors and 4 of libraries
    assert rows["layerwise"][at + 1 : at + 3] == ["104", "3.9"]  # 404 / 104
