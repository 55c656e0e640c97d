"""Log lines in both forms: every line that a small run's programs print, read again."""

from __future__ import annotations

import io
import json
import logging
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fleet_fixture import RUN, Fleet, share

from coordinator.runtime.observers import logged
from edgefl.console import guarded
from edgefl.errors import StoreError
from edgefl.log_lines import LineHandler, line_writer
from edgefl.run_records import EventRow

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def line_of(event: str, **fields: Any) -> dict[str, Any]:
    out = io.StringIO()
    line_writer("json", out, program="agent", device="d")(event, **fields)
    found: dict[str, Any] = json.loads(out.getvalue(), parse_constant=pytest.fail)
    return found


def test_a_line_begins_with_the_same_keys_whatever_its_fields_are_called() -> None:
    line = line_of("update", at=1.5, level="x", event_="y", device="other", attempt="my/run/s2/r13/a1", loss=0.5)
    assert list(line)[:6] == ["ts", "at", "level", "event", "program", "device"]
    assert (line["ts"], line["at"], line["level"], line["device"]) == ("1970-01-01T00:00:01.500Z", 1.5, "info", "d")
    assert (line["run"], line["stage"], line["round"]) == ("my/run", 2, 13)
    assert line["loss"] == 0.5


@pytest.mark.parametrize(
    ("event", "fields", "brief"),
    [
        ("trained", {"attempt": "demo-20261129-235938/s1/r12/a1", "loss": 0.588, "steps": 24}, ("steps=",)),
        (
            "unreachable",
            {"text": "cannot", "remedy": "Ask", "finding": "broker-idle", "retry_s": 0.74},
            ("text", "rem"),
        ),
        ("unreachable", {"text": "cannot", "retry_s": 0.74}, ()),
    ],
)
def test_long_events_are_short_as_text_and_whole_to_debug(
    event: str, fields: dict[str, Any], brief: tuple[str]
) -> None:
    out = io.StringIO()
    line_writer("text", out)(event, **fields)
    assert len(out.getvalue()) <= 80
    assert all(word not in out.getvalue() for word in brief)
    out = io.StringIO()
    line_writer("text", out, whole=True)(event, **fields)
    assert all(f"{name}=" in out.getvalue() for name in fields)
    assert line_of(event, **fields).keys() >= fields.keys()


def test_what_json_can_not_say_is_null_or_text() -> None:
    line = line_of("update", loss=float("nan"), inner={"x": [float("inf")]}, path=Path("a"), text="zwei\nZeilen \ud800")
    assert (line["loss"], line["inner"], line["path"]) == (None, {"x": [None]}, "a")
    assert line["text"].startswith("zwei\nZeilen")


@pytest.mark.parametrize(
    ("event", "level"), [("progress", "info"), ("declined", "warning"), ("run_failed", "error"), ("error", "error")]
)
def test_levels(event: str, level: str) -> None:
    assert line_of(event)["level"] == level


def test_an_error_that_ends_a_program_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, guarded(tell=line_writer("json")):
        raise StoreError("the disk is full", remedy="Free space.")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["text"], line["remedy"], line["exit_code"]) == (
        "error",
        "the disk is full",
        "Free space.",
        ended.value.code,
    )


def test_a_warning_that_has_become_an_event_is_one_line() -> None:
    out, seen = io.StringIO(), list[EventRow]()
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        take = logged(seen.append, line_writer("json", out), run="r1", fleet="f")
        logging.getLogger("edgefl.transport").warning("lost %s", "it")
        take(EventRow(1.0, "warning", data={"text": "lost it", "source": "edgefl.transport"}))
        take(EventRow(2.0, "progress", 1, 1, "a", {"step": 1}))
        take(EventRow(3.0, "update", 1, 2, "a", {"loss": 0.5, "run": "forged", "event_": 1}))
    finally:
        logging.basicConfig(handlers=handlers, level=level, force=True)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["event"], line.get("text")) for line in lines] == [("warning", "lost it"), ("update", None)]
    assert (lines[1]["run"], lines[1]["stage"], lines[1]["round"], lines[1]["device"]) == ("r1", 1, 2, "a")
    assert [row.kind for row in seen] == ["warning", "progress", "update"]


@pytest.mark.slow
def test_every_line_of_a_run_is_an_object_with_its_place(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        agent = fleet.agent("whole", share(24, "acc", "gyro", seed=1))
        (tmp_path / "r1.yaml").write_text(RUN)
        words = ["coordinator.cli", "run", "r1.yaml", "--run", "r1", "--set", "round.devices=1", "--log-format", "json"]
        words += ["--broker", fleet.broker.url, "--directory", str(fleet.runs)]
        coordinator = fleet._start(words, "coordinator.out", lines="stderr")
        assert coordinator.wait() == 0, coordinator.story()
        agent.stop()
    assert coordinator.log.read_text() == ""  # nothing on stdout
    assert "text" not in {line["event"] for line in (*coordinator.lines, *agent.lines)}  # what was no JSON
    for program, lines in (("coordinator", coordinator.lines), ("agent", agent.lines)):
        for line in lines:
            assert STAMP.fullmatch(line["ts"]), line
            when = datetime.fromisoformat(line["ts"].replace("Z", "+00:00"))
            assert when.tzinfo == timezone.utc
            assert when.timestamp() == pytest.approx(line["at"], abs=0.002)
            assert (line["program"], line["level"] in {"info", "warning", "error"}) == (program, True)
    assert {line["fleet"] for line in coordinator.lines if line["event"] != "notice"} == {"default"}
    assert {(line["fleet"], line["device"]) for line in agent.lines} == {("default", "whole")}
    (update, last) = (line for line in coordinator.lines if line["event"] == "update")
    assert [update[key] for key in ("run", "stage", "round", "device")] == ["r1", 1, 1, "whole"]
    assert last["stage"] == 2
    events = [line["event"] for line in coordinator.lines]
    assert {"notice", "run_started", "device_joined", "round_closed", "evaluated", "run_finished"} <= set(events)
    assert "progress" not in events
    told = [line for line in agent.lines if "attempt" in line]
    assert told
    assert all((line["run"], line["round"]) == ("r1", 1) and line["stage"] in {1, 2} for line in told), told


def test_text_is_what_it_was() -> None:
    out = io.StringIO()
    line_writer("text", out, program="agent", device="d")("declined", reason="disk", needed=2000.0, detail="two words")
    assert out.getvalue()[9:] == '! declined       reason=disk needed=2000 detail="two words"\n'
    LineHandler(line_writer("text", out)).handle(logging.LogRecord("x", logging.WARNING, "", 1, "a\nb", None, None))
    assert out.getvalue().splitlines()[1][9:] == '! warning        source=x text="a\\nb"'


def test_nested_fields_are_plain_text_without_what_they_lack() -> None:
    out = io.StringIO()
    budget = {"memory_bytes": None, "payload_bytes": 8388608.0, "energy_j": 0.5}
    scores = [{"available": ["acc", "gyro"], "value": 0.97812}, {"available": ["acc"], "value": 1.0}]
    line_writer("text", out)("device_joined", budget=budget, samples={"": 5, "acc": 4}, values=scores)
    assert out.getvalue().split("device_joined")[1].strip() == (
        "budget=payload_bytes:8388608,energy_j:0.5 samples=all:5,acc:4 "
        'values="available:acc,gyro,value:0.9781; available:acc,value:1"'
    )


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\x9b2Jb c", "a\rb", "a\u202eb"])
def test_what_a_terminal_would_obey_is_written_as_its_code(text: str) -> None:
    """A topic or a reason of whoever speaks on the broker reaches the agent's log."""
    out = io.StringIO()
    line_writer("text", out)("ignored", topic=text)
    line = out.getvalue().rstrip("\n")
    assert line.isprintable()
    assert json.loads(line.partition("topic=")[2]) == text
