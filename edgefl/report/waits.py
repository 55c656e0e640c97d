"""Last device of each round and its longest activity there; seconds of the evaluation after it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from edgefl.records import Figure
from edgefl.report import timeline, units
from edgefl.run_records import AssignmentRow, RoundRow, RunReport

#: Activity of the timeline -> what a round waited for.
_FOR = {
    timeline.AWAY: "link gone",
    timeline.FETCHES: "download and preparation",
    timeline.TRAINS: "training",
    timeline.SENDS: "upload",
    timeline.FAILS: "no answer",
}
_TRANSFER = "transfer"
_PAYLOAD = ("payload_up_bytes", "payload_down_bytes")
_ANSWERS = frozenset({"update", "declined", "rejected"})
_Round = tuple[int, int]  # stage, round


class Wait(NamedTuple):
    """Last device to answer in a round, "" if unknown, and its longest activity; ``evaluation_s`` None: none."""

    device: str = ""
    what: str = ""
    seconds: float | None = None
    evaluation_s: float | None = None

    @property
    def text(self) -> str:
        """ "cam-b: link gone 40.0 s"."""
        return f"{self.device}: {self.what} {units.seconds(self.seconds)}" if self.device else ""


def waits(report: RunReport) -> dict[_Round, Wait]:
    """What each ended round waited for, from its events and the timeline."""
    answered: dict[_Round, dict[str, float]] = defaultdict(dict)
    evaluated: dict[_Round, float] = {}
    began: dict[_Round, float] = {}
    for event in report.events:
        key = event.stage, event.round
        if event.kind in _ANSWERS:
            answered[key][event.device] = event.at
        elif event.kind == "evaluated":
            evaluated[key] = event.at
        elif event.kind == "round_started":
            began[key] = event.at
            answered.pop(key, None)  # of an earlier attempt
    at = timeline.length(report).began
    spans: dict[str, list[timeline.Span]] = defaultdict(list)
    for span in timeline.spans(report):
        spans[span.device].append(span._replace(start=span.start + at, end=span.end + at))
    asked: dict[_Round, dict[str, AssignmentRow]] = defaultdict(dict)
    for row in report.assignments:
        if row.status not in {"refused", "quarantined", "left_out"}:
            asked[row.stage, row.round][row.device] = row
    result = {}
    for one in report.rounds:
        key = one.stage, one.round
        if one.ended_at is None:
            continue
        last = max(asked[key], key=lambda name: (answered[key].get(name, one.ended_at), name), default="")
        wait = _longest(one, asked[key].get(last), began.get(key, one.started_at), spans[last])
        after = evaluated[key] - one.ended_at if key in evaluated else None
        result[key] = wait._replace(evaluation_s=after)
    return result


def _longest(row: RoundRow, assigned: AssignmentRow | None, began: float, spans: list[timeline.Span]) -> Wait:
    """The device's longest activity within the round; without an update, by its own training time."""
    ended, spent = row.ended_at or began, dict.fromkeys((*_FOR.values(), _TRANSFER), 0.0)
    for span in spans:
        if span.activity in _FOR:
            spent[_FOR[span.activity]] += max(0.0, min(span.end, ended) - max(span.start, began))
    if assigned is None:
        return Wait()
    silent, trained = spent["no answer"], assigned.measured.get("compute_s", Figure()).value or 0.0
    if silent and any(assigned.measured.get(name, Figure()).value for name in _PAYLOAD):
        spent |= {"no answer": 0.0, "training": min(trained, silent), _TRANSFER: max(0.0, silent - trained)}
    what = max(spent, key=lambda one: spent[one])
    return Wait(assigned.device, what, spent[what]) if spent[what] else Wait()
