"""Reports of 30 and of 500 devices: their size, whom charts and tables name, and what stands for all others."""

from __future__ import annotations

import io
import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from report_fixture import MIB, SIZES, START, run_report
from rich.console import Console

from edgefl.report import crowds
from edgefl.report.writers import print_report, to_html, to_json
from edgefl.run_records import AssignmentRow, EndToEnd, EventRow, RunReport

#: Lines that `edgefl run` prints below: the heading, and two for the page, the report, the export or its uses.
NEXT = range(8)


def crowd(count: int) -> RunReport:
    """The fixture's run with each of its four devices many times over; every 25th goes away in the middle."""
    small = run_report()
    kinds = list(SIZES)
    names = {f"{kinds[n % 4]}-{n:03d}": kinds[n % 4] for n in range(count)}
    drift = {name: 1 + 0.25 * (n % 11) / 11 for n, name in enumerate(names)}
    devices = tuple(
        msgspec.structs.replace(row, device=name)
        for name in names
        for row in small.devices
        if row.device == names[name]
    )
    assignments = tuple(
        _varied(msgspec.structs.replace(row, device=name), drift[name])
        for row in small.assignments
        for name, kind in names.items()
        if row.device == kind
    )
    rounds = tuple(
        msgspec.structs.replace(
            row, participants=tuple(name for name, kind in names.items() if kind in row.participants)
        )
        for row in small.rounds
    )
    joined = (EventRow(START + 3 + n % 7, "device_joined", device=name) for n, name in enumerate(names))
    left = (EventRow(START + 60 + n % 5, "device_left", device=name) for n, name in enumerate(names) if n % 25 == 9)
    return msgspec.structs.replace(
        small,
        devices=devices,
        assignments=assignments,
        rounds=rounds,
        events=(*joined, *left),
        end_to_end={name: EndToEnd(96.0 * MIB * drift[name], 4e10, 8.0 * MIB) for name in names},
    )


def _varied(row: AssignmentRow, factor: float) -> AssignmentRow:
    figures = {
        name: msgspec.structs.replace(one, value=one.value * factor) if one.value is not None else one
        for name, one in row.measured.items()
    }
    return msgspec.structs.replace(row, measured=figures)


@pytest.fixture(scope="module", params=[30, 500])
def page(request: pytest.FixtureRequest) -> tuple[int, str]:
    return request.param, to_html(crowd(request.param))


def held(text: str) -> dict[str, Any]:
    """Figure -> the rows of all views of its wide chart."""
    figures = re.findall(r'<figure id="([^"]+)".*?<script type="application/json">(.*?)</script>', text, re.DOTALL)

    def rows(spec: Any) -> list[dict[str, Any]]:
        if isinstance(spec, list):
            return list(itertools.chain.from_iterable(map(rows, spec)))
        if not isinstance(spec, dict):
            return []
        own = spec["data"]["values"] if isinstance(spec.get("data"), dict) else []
        return own + rows([one for name, one in spec.items() if name != "data"])

    return {name: (body["rows"] or []) + rows(body["wide"]) for name, body in ((n, json.loads(b)) for n, b in figures)}


def test_the_page_is_small(page: tuple[int, str]) -> None:
    _, text = page
    assert len(text.encode()) < 5 * 10**6


def test_charts_name_all_of_few_and_the_worst_of_many(page: tuple[int, str]) -> None:
    count, text = page
    named = {
        chart: {row["device"] for row in rows if re.search(r"-\d{3}$", str(row.get("device", "")))}
        for chart, rows in held(text).items()
    }
    shown = count if count <= crowds.MANY else crowds.WORST
    assert {chart: len(names) for chart, names in named.items() if names} == dict.fromkeys(
        ("memory", "timeline", "prediction", "loss", "stages-of-devices")
        if count == shown
        else ("memory", "timeline", "stages-of-devices"),
        shown,
    )
    others = re.findall(r"<figcaption>[^<]*and (\d+) others", text)
    assert others == ([] if count == shown else [str(count - shown)] * 3)


def test_a_thousand_devices_of_whom_few_were_asked_end_with_forty_lines() -> None:
    """50 took part, one of them in two rounds, 950 in none: 8 rows, and one for each of the other kinds."""
    report = run_report()
    (closed, *_), (row, *_) = report.rounds, [one for one in report.assignments if one.status == "done"]
    names = [f"d-{n:03d}" for n in range(1000)]
    rounds = [msgspec.structs.replace(closed, round=n, participants=()) for n in (1, 2)]
    asked = [(name, 1) for name in names[:50]] + [(names[7], 2)]
    report = msgspec.structs.replace(
        report,
        devices=tuple(msgspec.structs.replace(report.devices[0], device=name) for name in names),
        assignments=tuple(msgspec.structs.replace(row, device=name, stage=1, round=n) for name, n in asked),
        rounds=tuple(rounds),
        events=(
            *(EventRow(START, "device_joined", device=name) for name in names[:990]),
            *(EventRow(START + n, "round_started", 1, n) for n in (1, 2)),
        ),
        end_to_end={},
    )
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the file is the StringIO above
    assert len(lines) <= 40 - len(NEXT)
    text = re.sub(r" +", " ", "\n".join(lines))
    assert len(re.findall(r"^d-\d+ ", text, re.MULTILINE)) == 8
    assert "d-007 2 / 2" in text
    assert "42 devices more 1 / 2" in text
    assert "940 devices: not 0 / 2 \nchosen" in text
    assert "10 devices: not 0 / 2 \nconnected yet" in text
    written = to_json(report)
    assert all(name in written for name in names)
