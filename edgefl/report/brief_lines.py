"""Events of a run as short lines: one a round, and all that went wrong."""

from __future__ import annotations

from collections import Counter

from edgefl.records import ORACLE
from edgefl.report import units
from edgefl.report.events import LEFT_OUT, LiveState, how_many, listed
from edgefl.report.grid import Record
from edgefl.report.refusals import reason, refusal_of, refusal_text
from edgefl.run_records import EventRow

#: Devices with a line of their own as they join, and of those refused in a stage; the others are counted.
MOST_NAMED = 8
#: Kinds without a line: a round's own has what matters of them.
_SILENT = frozenset({"update", "standardized", "k_chosen"})
Line = tuple[EventRow, str]


class BriefLines:
    """Short lines of a run's events, in order.

    A closed round waits for its evaluation, which is in the same line, or for any other event that has a line.
    """

    def __init__(self) -> None:
        self._joined: set[str] = set()
        self._closed: EventRow | None = None

    def of(self, event: EventRow, text: str | None, state: LiveState) -> list[Line]:
        """Lines to print now. ``text``: the event's full line, None for none; ``state``: the run after the event."""
        closed, self._closed = self._closed, None
        if event.kind == "round_closed":
            self._closed = event
            return _round(closed)
        if (
            closed is not None
            and event.kind == "evaluated"
            and (event.stage, event.round) == (closed.stage, closed.round)
        ):
            return _round(closed, event)
        if text is None or event.kind in _SILENT:
            self._closed = closed
            return []
        return [*_round(closed), *((event, line) for line in self._others(event, text, state))]

    def _others(self, event: EventRow, text: str, state: LiveState) -> list[str]:
        if event.kind == "run_started":
            begin = "goes on" if event.data.get("resumed") else "started"
            return [f"{state.name} {begin}: recipe {state.recipe}, {state.stages} stages, {state.rounds_total} rounds"]
        if event.kind == "device_joined":
            self._joined.add(event.device)
            return [_joined(event)] if len(self._joined) <= MOST_NAMED else []
        if event.kind == "stage_planned":
            more, self._joined = len(self._joined) - MOST_NAMED, set()
            return [f"and {more} more devices joined"] * (more > 0) + _refused(event)
        if event.kind == "round_started":
            return [text] if state.attempt > 1 else []
        if event.kind == "stage_finished":
            return [text] if text != f"stage {event.stage} finished" else []
        if event.kind == "evaluated":
            return [f"stage {event.stage} round {event.round}: {_scores(event)}"]
        return [text]


def _joined(event: EventRow) -> str:
    counts, profile = event.data.get("samples") or {}, event.data.get("profile")
    total = {"": counts.get("", max(counts.values(), default=0))} if isinstance(counts, dict) else {"": int(counts)}
    named = f" ({profile})" if profile and profile != event.device else ""
    return f"{event.device}{named} joined: {units.samples(total, ' samples')}"


def _refused(event: EventRow) -> list[str]:
    found: list[Record] = [one for one in event.data.get("placements", []) if not one.get("ok", True)]
    named, more = found[:MOST_NAMED], found[MOST_NAMED:]
    lines = [
        f"stage {event.stage}: {one.get('device', '')} "
        + (LEFT_OUT if one.get("left_out") else f"refused, {refusal_text(one)}")
        for one in named
    ]
    whys = Counter(LEFT_OUT if one.get("left_out") else f"refused, {reason(refusal_of(one))}" for one in more)
    return lines + [f"stage {event.stage}: and {count} more devices {why}" for why, count in whys.items()]


def _round(closed: EventRow | None, evaluated: EventRow | None = None) -> list[Line]:
    """ "stage 1 round 2: 4 devices · loss 0.958 · 15.3 MiB · accuracy 94.1 %"."""
    if closed is None:
        return []
    data = closed.data
    count = how_many(data.get("participants"))
    parts = [
        f"stage {closed.stage} round {closed.round}: {count} {'device' if count == 1 else 'devices'}",
        f"loss {units.number(data.get('loss'))}",
        units.mib(data.get("payload_bytes")),
        *([_scores(evaluated)] if evaluated else []),
        *([units.privacy(data["account"])] if data.get("account") else []),
        *(f"{name}: {listed(data[name])}" for name in ("late", "lost", "behind") if data.get(name)),
    ]
    return [(closed, " · ".join(parts))]


def _scores(event: EventRow) -> str:
    """The leading metrics of the input with the most modalities: "accuracy 94.1 %"."""
    rows = [row for row in event.data.get("values", []) if row.get("missing") != ORACLE]
    most = max((len(row.get("available", ())) for row in rows), default=0)
    best = [
        row
        for row in rows
        if len(row.get("available", ())) == most and units.is_leading(str(row.get("metric", "accuracy")))
    ]
    named = {str(row.get("metric", "accuracy")): float(row.get("value", 0.0)) for row in best}
    named = {metric: value for metric, value in named.items() if metric != "loss" or len(named) == 1}
    return " · ".join(f"{units.metric_words(metric)} {units.score(metric, value)}" for metric, value in named.items())
