"""Reports of 30 and of 500 devices: their size, whom charts and tables name, and what stands for all others."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from report_fixture import MIB, SIZES, START, run_report

from edgefl.report import crowds
from edgefl.report.writers import to_html
from edgefl.run_records import AssignmentRow, EndToEnd, EventRow, RunReport


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
