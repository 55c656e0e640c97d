"""A run as it goes on, and errors as words."""

from __future__ import annotations

import io
import re

import pytest
from report_fixture import MIB, SIZES, START, devices, evaluations, predicted
from rich.console import Console

from edgefl.console import guarded
from edgefl.errors import BudgetError, ConfigError, Problem
from edgefl.report.events import KINDS, LiveState
from edgefl.report.live import LiveView, sparkline
from edgefl.run_records import EventRow


def live_events() -> list[EventRow]:
    """What the same run tells while it goes on, up to the first stage's end."""
    first = predicted("tiny", 2)["step_peak_bytes"].value
    placements = [
        {
            "device": name,
            "ok": name != "tiny",
            "micro_batch": 0,
            "depth": 1,
            "step_peak_bytes": 11.6 * MIB,
            "flops": 7e9,
        }
        for name in SIZES
    ]
    placements[-1] |= {"reason": "step_memory", "needed": first, "allowed": 3.0 * MIB, "unit": "B"}
    update = {
        "loss": 1.21,
        "samples": 60,
        "payload_up_bytes": 800_000,
        "payload_down_bytes": 1_100_000,
        "step_peak_bytes": 10.7 * MIB,
        "flops": 7.3e9,
        "seconds": 3.1,
    }
    scores = [
        {
            "available": list(row.available),
            "missing": row.missing,
            "metric": row.metric,
            "value": row.value,
            "samples": row.samples,
        }
        for row in evaluations(1, 0)
    ]
    started = {
        "name": "basic-motions",
        "recipe": "layerwise",
        "stages": 6,
        "rounds_total": 12,
        "broker": "mqtt://fleet:s3cret@127.0.0.1:41883",
        "parts": 22,
        "bytes": 3_400_000,
    }
    return [
        EventRow(START, "run_started", data=started),
        *(
            EventRow(
                START + 1 + index,
                "device_joined",
                device=row.device,
                data={"profile": row.profile, "samples": row.samples, "budget": {"step_memory_bytes": 24 * MIB}},
            )
            for index, row in enumerate(devices())
        ),
        EventRow(START + 6, "stage_planned", 1, data={"placements": placements}),
        EventRow(START + 6.2, "round_started", 1, 1, data={"participants": ["orin-nano", "nano", "gpu-box"]}),
        EventRow(START + 7, "progress", 1, 1, "orin-nano", {"epoch": 1, "step": 2, "steps": 8, "loss": 1.34}),
        EventRow(
            START + 7.5,
            "declined",
            1,
            1,
            "nano",
            {"reason": "ceiling", "needed": 26.4 * MIB, "allowed": 24.0 * MIB, "unit": "B"},
        ),
        EventRow(START + 7.6, "replanned", 1, 1, "nano", {"micro_batch": 8, "reason": "ceiling"}),
        EventRow(START + 8, "progress", 1, 1, "gpu-box", {"epoch": 1, "step": 4, "steps": 8, "loss": 1.28}),
        EventRow(START + 9, "update", 1, 1, "orin-nano", update),
        EventRow(START + 9.3, "update", 1, 1, "gpu-box", update),
        EventRow(START + 9.8, "device_left", device="nano"),
        EventRow(
            START + 10,
            "round_closed",
            1,
            1,
            data={
                "participants": ["orin-nano", "gpu-box"],
                "late": [],
                "lost": ["nano"],
                "loss": 1.21,
                "seconds": 3.8,
                "payload_bytes": 3_800_000,
            },
        ),
        EventRow(START + 11, "evaluated", 1, 1, data={"values": scores}),
        EventRow(START + 11.1, "stage_finished", 1),
        EventRow(START + 12, "warning", data={"text": "one sample of nano has no label and was skipped"}),
        EventRow(START + 131, "run_finished", data={"status": "done", "seconds": 131, "state": "runs/x"}),
    ]


# Live


def live_text(*, verbose: bool = True, **options: object) -> str:
    console = Console(file=io.StringIO(), width=110, **options)  # type: ignore[arg-type]  # a test's own options
    with LiveView(console, verbose=verbose) as view:
        for event in live_events():
            view.feed(event)
    return console.file.getvalue()  # type: ignore[attr-defined]  # the file is the StringIO above


def test_without_a_terminal_each_event_is_a_plain_line() -> None:
    text = live_text()
    assert "\x1b" not in text
    assert "7.5 s  nano declined: memory ceiling hit while training: needs 26.4 MiB, allowed 24.0 MiB" in text
    assert "tiny: refused, step memory over budget: needs 4.93 MiB, allowed 3.00 MiB" in text
    assert "acc alone: 24.2 % zero mask, 31.7 % prototype mask" in text
    assert "s3cret" not in text
    assert "1.34" not in text  # progress moves a bar, it is no line


def test_by_default_a_round_is_one_line_and_what_went_wrong_has_its_own() -> None:
    lines = [line.rstrip() for line in live_text(verbose=False).splitlines()]
    assert lines == [
        "    0.0 s  basic-motions started: recipe layerwise, 6 stages, 12 rounds",
        "    1.0 s  orin-nano (jetson-orin-nano-8gb) joined: 60 samples",
        "    2.0 s  nano (jetson-nano-4gb) joined: 44 samples",
        "    3.0 s  gpu-box joined: 96 samples",
        "    4.0 s  tiny (single-stage-box) joined: 20 samples",
        "    6.0 s  stage 1: tiny refused, step memory over budget: needs 4.93 MiB, allowed 3.00 MiB",
        "    7.5 s  nano declined: memory ceiling hit while training: needs 26.4 MiB, allowed 24.0 MiB",
        "    7.6 s  nano planned again with micro-batch 8 (memory ceiling hit while training)",
        "    9.8 s  nano left",
        "   10.0 s  stage 1 round 1: 2 devices · loss 1.21 · 3.62 MiB · accuracy 36.0 % · lost: nano",
        "   12.0 s  warning: one sample of nano has no label and was skipped",
        "  131.0 s  run done after 2 min 11 s · runs/x",
    ]


def test_brief_lines_count_devices_beyond_the_first_eight_and_print_an_unevaluated_round() -> None:
    console = Console(file=io.StringIO(), width=80)
    joined = [EventRow(1.0, "device_joined", device=f"d{n}", data={"samples": {"": 5, "acc": 5}}) for n in range(20)]
    closed = EventRow(3.0, "round_closed", 1, 1, data={"participants": 7, "loss": 0.5, "payload_bytes": 2**20})
    later = EventRow(4.0, "evaluated", 1, 2, data={"values": [{"available": ["acc"], "metric": "r2", "value": 0.5}]})
    with LiveView(console) as view:
        for event in (*joined, EventRow(2.0, "stage_planned", 1), closed, EventRow(3.1, "heard"), later):
            view.feed(event)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the file is the StringIO above
    assert lines[7].split()[-1] == "samples"
    assert [line[11:] for line in lines[8:]] == [
        "and 12 more devices joined",
        "stage 1 round 1: 7 devices · loss 0.500 · 1.00 MiB",
        "stage 1 round 2: R² 0.500",
    ]


def test_on_a_terminal_the_display_shows_devices_and_what_they_spent() -> None:
    text = live_text(force_terminal=True)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.split("run finished")[-1])
    assert "1 of 12 rounds done" in last
    assert re.search(r"orin-nano +waiting +━+ +1\.21 +11\.6 / 10\.7 +0\.763 / 1\.05", last)
    assert "tiny refused: step memory over budget: needs 4.93 MiB, allowed 3.00 MiB" in last


@pytest.mark.parametrize("verbose", [False, True])
def test_the_view_survives_events_of_another_version(verbose: bool) -> None:
    console = Console(file=io.StringIO(), width=100)
    with LiveView(console, verbose=verbose) as view:
        view.feed(EventRow(kind="a_new_kind", data={"x": [1]}))
        for kind in ("round_closed", "update", "progress", "stage_planned", "evaluated", "declined", "run_failed"):
            view.feed(EventRow(kind=kind, device="d"))
    assert LiveState().apply(EventRow(kind="a_new_kind")) is None


#: Events that would show a device at work, or as waiting for it.
AT_WORK = [
    EventRow(10.0, "stage_planned", 2, data={"placements": [{"device": "a", "ok": True, "step_peak_bytes": MIB}]}),
    EventRow(10.0, "stage_planned", 2, data={"placements": [{"device": "a", "ok": False, "reason": "labels"}]}),
    EventRow(10.0, "round_started", 2, 1, data={"participants": ["b"]}),
    EventRow(10.0, "progress", 2, 1, "a", {"step": 1, "steps": 2}),
    EventRow(10.0, "update", 2, 1, "a", {"loss": 1.0}),
    EventRow(10.0, "rejected", 2, 1, "a", {"reason": "change"}),
    EventRow(10.0, "readmitted", 2, 1, "a"),
    EventRow(10.0, "replanned", 2, 1, "a"),
    EventRow(10.0, "device_left", 2, 1, "a"),
    EventRow(10.0, "device_joined", 2, 1, "a"),
    EventRow(10.0, "run_started", data={"resumed": True}),
]


@pytest.mark.parametrize("event", AT_WORK, ids=lambda event: event.kind)
def test_a_device_that_is_left_out_stays_so_until_it_is_taken_in(event: EventRow) -> None:
    state = LiveState()
    for one in (EventRow(1.0, "device_joined", device="a"), EventRow(2.0, "left_out", device="a", data={"by": "web"})):
        state.apply(one)
    state.apply(event)
    assert (state.devices["a"].doing, state.devices["a"].why) == ("left out", "by an operator, on the live page")
    state.apply(EventRow(11.0, "taken_in", device="a", data={"by": "web", "online": True}))
    assert (state.devices["a"].word, state.devices["a"].why) == ("waiting", "")
    state.apply(EventRow(12.0, "left_out", device="a", data={"by": "web"}))
    state.apply(EventRow(13.0, "taken_in", device="a", data={"by": "web", "online": False}))
    assert state.devices["a"].word == "away"


@pytest.mark.parametrize(("kind", "doing"), [("device_left", "lost"), ("quarantined", "quarantined")])
def test_a_plan_that_fits_does_not_bring_a_device_back(kind: str, doing: str) -> None:
    state = LiveState()
    state.apply(EventRow(1.0, "device_joined", device="a"))
    state.apply(EventRow(2.0, kind, device="a"))
    state.apply(AT_WORK[0])
    assert state.devices["a"].doing == doing


def test_the_line_of_a_plan_says_who_is_left_out() -> None:
    placements = [{"device": "left", "ok": True, "left_out": "web"}, {"device": "right", "ok": True}]
    text = LiveState().apply(EventRow(1.0, "stage_planned", 2, data={"placements": placements}))
    assert text is not None
    assert text.split("\n")[1] == "  left: left out"
    assert text.split("\n")[2].startswith("  right: trains")


def test_a_pause_names_the_run_that_its_command_resumes() -> None:
    text = LiveState().apply(EventRow(1.0, "paused", data={"by": "web", "run": "x9"}))
    assert text == "the run is paused (web): no round opens until `edgefl runs resume x9`"


def test_a_run_that_goes_on_says_where_and_counts_its_time_from_its_first_begin() -> None:
    state = LiveState()
    state.apply(EventRow(995.0, "page", data={"url": "http://x"}))
    data = {"name": "n", "parts": 20, "bytes": MIB, "began_at": 400.0, "resumed": True}
    text = state.apply(EventRow(1000.0, "run_started", 2, 3, data=data))
    assert text is not None
    assert text.startswith("run goes on at stage 2 round 3: n")
    assert "model of 20 parts" in text
    state.apply(EventRow(1009.6, "warning"))
    assert state.elapsed_s == pytest.approx(609.6)
    assert state.apply(EventRow(1010.4, "run_stopped", data={"by": "web", "seconds": 609.7})) == (
        "run stopped (web) after 10 min 10 s"
    )
    assert state.elapsed_s == 609.7
    done = state.apply(EventRow(1.0, "run_started", data={"resumed": True}))
    assert done is not None
    assert done.startswith("run goes on: ")


def test_sparklines_run_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


# Errors as words


def test_errors_become_two_lines_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, guarded():
        raise BudgetError("nano needs 30 MiB, may use 24 MiB", remedy="Lower the batch size.")
    assert ended.value.code == 13
    assert capsys.readouterr().err == "error: nano needs 30 MiB, may use 24 MiB\nwhat to do: Lower the batch size.\n"


def test_all_problems_of_a_file_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), guarded():
        raise ConfigError("run.yaml", [Problem("a.b", "is missing", 3), Problem("c", "is unknown")])
    told = capsys.readouterr().err
    assert "run.yaml: 2 problems" in told
    assert "line 3, a.b: is missing" in told


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), 19, "pip install 'edgefl-toolkit[train]'"),
        (ModuleNotFoundError("No module named 'edgefl.x'", name="edgefl.x"), 1, "edgefl.x"),
    ],
)
def test_no_error_shows_a_traceback(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, guarded():
        raise error
    told = capsys.readouterr().err
    assert ended.value.code == code
    assert words in told
    assert "Traceback" not in told


def test_debug_shows_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), guarded(debug=True):
        raise BudgetError("no")
    assert "Traceback" in capsys.readouterr().err


def test_exits_pass_through() -> None:
    with pytest.raises(SystemExit) as ended, guarded():
        raise SystemExit(7)
    assert ended.value.code == 7


def test_the_bound_that_takes_labels_is_no_mask_among_others() -> None:
    masks = (("zero", 0.5), ("prototype", 0.6), ("oracle", 0.9))
    rows = [{"metric": "accuracy", "available": ["acc"], "missing": mask, "value": value} for mask, value in masks]
    state = LiveState()
    text = KINDS["evaluated"].apply(state, EventRow(1.0, "evaluated", 1, 1, data={"values": rows})) or ""
    assert "50.0 % zero mask, 60.0 % prototype mask" in text
    assert "oracle" not in text
    assert {mask for _, _, mask in state.scores} == {"zero", "prototype"}


def test_devices_stand_by_name_however_they_came() -> None:
    view = LiveView(Console(file=io.StringIO(), width=100), plain=True)
    for at, name in enumerate(("zebra", "ant", "mole")):
        view.feed(EventRow(float(at), "device_joined", device=name))
    drawn = Console(file=io.StringIO(), width=100)
    drawn.print(view._draw())
    text = drawn.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("ant") < text.index("mole") < text.index("zebra")


def test_refused_devices_beyond_the_first_eight_are_counted_by_reason() -> None:
    few = {"ok": False, "reason": "samples", "needed": 16.0, "allowed": 3.0}
    placed = [{"device": f"d{n:02}", **few} for n in range(30)] + [{"device": "e", "ok": False, "left_out": "web"}]
    console = Console(file=io.StringIO(), width=80)
    with LiveView(console) as view:
        view.feed(EventRow(1.0, "stage_planned", 2, data={"placements": placed}))
    lines = [line[11:] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]  # the StringIO
    assert len(lines) == 10
    assert lines[7].startswith("stage 2: d07 refused, ")
    assert lines[8].startswith("stage 2: and 22 more devices refused, ")
    assert lines[9] == "stage 2: and 1 more devices left out"
