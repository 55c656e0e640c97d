"""Why devices of a simulated crowd were not offered rounds."""

from __future__ import annotations

import msgspec
from report_fixture import run_report

from edgefl.report.decisions import NOT_CHOSEN, OFFLINE, absences
from edgefl.run_records import EventRow


def test_devices_of_a_crowd_that_were_not_drawn_were_there_all_the_same() -> None:
    """Those that had not joined yet, and those that a coordinator that goes on has not called again."""
    report = run_report()
    (name, *_) = (row.device for row in report.devices)
    (first, *_) = report.rounds
    key = (first.stage, first.round)

    def events(kind: str, device: str = "", **data: object) -> EventRow:
        return EventRow(0.0, kind, *key, device, data)

    def why(*events: EventRow) -> list[str]:
        mine = msgspec.structs.replace(
            report,
            rounds=(msgspec.structs.replace(first, participants=()),),
            assignments=(),
            events=(*events, EventRow(0.0, "round_started", *key, data={"crowd": 9})),
        )
        return list(absences(mine)[name])

    joined, left, restarted = events("device_joined", name), events("device_left", name), events("run_started")
    assert why() == why(joined) == why(joined, restarted) == why(left, joined, restarted)
    assert why()[0].startswith(NOT_CHOSEN)
    assert why(joined, left) == why(joined, left, restarted) == [OFFLINE]
