"""The warnings that hold for a whole run, as its report shows them."""

from __future__ import annotations

from edgefl.run_records import RunReport


def warnings(report: RunReport) -> tuple[str, ...]:
    """Texts of the events "warning" that are ``lasting``, each once; those of a moment are in the events alone."""
    told = (event.data for event in report.events if event.kind == "warning" and event.data.get("lasting"))
    return tuple(dict.fromkeys(str(data.get("text", "")) for data in told))
