"""Table of each device's seconds by activity, over the run."""

from __future__ import annotations

from typing import NamedTuple

from edgefl.report import timeline
from edgefl.report.grid import Column, Grid, measure, table
from edgefl.run_records import RunReport

#: The activities that every device has; the others have a column where some device has one.
_ALWAYS = (timeline.TRAINS, timeline.FETCHES, timeline.SENDS, timeline.WAITS)
_NOTE = (
    "Seconds of the timeline, of all rounds. Trains: inside training steps, by the device's clock. Fetches, prepares: "
    "the rest of its time from offer to update, not measured apart: download, reading data, loading parts. Sends: from "
    "there until the coordinator had the update, by its clock. Waits: for other devices and the coordinator."
)


class _Row(NamedTuple):
    device: str
    spent: dict[str, float]  # activity -> seconds


def seconds_of_devices(report: RunReport) -> Grid:
    """One row per device: its seconds of each activity."""
    spent: dict[str, dict[str, float]] = {}
    for span in timeline.spans(report):
        mine = spent.setdefault(span.device, {})
        mine[span.activity] = mine.get(span.activity, 0.0) + span.end - span.start
    seen = {activity for one in spent.values() for activity in one}
    rows = [_Row(device, one) for device, one in spent.items()]

    def column(activity: str) -> Column[_Row]:
        return measure(activity, lambda row: row.spent.get(activity, 0.0), "s")

    shown = [*_ALWAYS, *(one for one in timeline.ACTIVITIES if one in seen and one not in _ALWAYS)]
    key = Column[_Row]("device", lambda row: row.device, key=True, text=True)
    return table("Where each device's time went", [key, *map(column, shown)], rows, [_NOTE], "No round yet.")
