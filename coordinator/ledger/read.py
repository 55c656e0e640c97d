"""From the ledger's rows to the values of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Table, select

from coordinator.ledger import schema as tables
from edgefl.errors import StoreError
from edgefl.records import Figure, Figures
from edgefl.run_records import (
    AssignmentRow,
    BundleRow,
    DeviceRow,
    EvaluationRow,
    EventRow,
    RoundRow,
    RunReport,
)

T = TypeVar("T")
Slot = tuple[int, int, int, str, bool]


def read_runs(connection: Connection) -> list[RunReport]:
    """All runs without their rows, newest first."""
    query = select(tables.runs).order_by(tables.runs.c.started_at.desc(), tables.runs.c.run)
    return [_head(row) for row in connection.execute(query).mappings()]


def read_report(connection: Connection, run: str, ledger: str) -> RunReport:
    """Everything about one run. Raises StoreError naming the runs there are."""
    row = connection.execute(select(tables.runs).where(tables.runs.c.run == run)).mappings().first()
    if row is None:
        known = ", ".join(report.run for report in read_runs(connection)) or "none"
        raise StoreError(f"run {run!r} is not in the ledger {ledger}", remedy=f"Runs there are: {known}.")
    by_attempt = ("stage", "round", "attempt")
    return msgspec.structs.replace(
        _head(row),
        devices=tuple(_convert(DeviceRow, row) for row in _rows(connection, tables.devices, run, "device")),
        rounds=_last_attempts(connection, run),
        assignments=_assignments(connection, run, by_attempt),
        evaluations=tuple(_convert(EvaluationRow, row) for row in _rows(connection, tables.evaluations, run, "id")),
        events=tuple(_convert(EventRow, row) for row in _rows(connection, tables.events, run, "id")),
        bundles=tuple(_convert(BundleRow, row) for row in _rows(connection, tables.bundles, run, "name")),
    )


def _head(row: Mapping[Any, Any]) -> RunReport:
    plan = msgspec.convert(row["plan"], dict[str, Any])
    return RunReport(
        run=row["run"],
        name=row["name"],
        recipe=row["recipe"],
        status=row["status"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        config=msgspec.convert(plan.get("config", {}), dict[str, Any]),
        part_bytes=msgspec.convert(row["part_bytes"], dict[str, int]),
        stages=msgspec.convert(plan.get("stages", ()), tuple[dict[str, Any], ...]),
    )


def _rows(connection: Connection, table: Table, run: str, *order: str) -> Iterator[dict[str, Any]]:
    query = select(table).where(table.c.run == run).order_by(*(table.c[name] for name in order))
    for row in connection.execute(query).mappings():
        yield {str(name): value for name, value in row.items()}  # SQLAlchemy names are a kind of str


def _convert(kind: type[T], row: dict[str, Any]) -> T:
    if "metrics" in row:  # a metric that was not a number is null in JSON: it is left out
        metrics = msgspec.convert(row["metrics"], dict[str, float | None])
        row["metrics"] = {name: value for name, value in metrics.items() if value is not None}
    return msgspec.convert(row, kind)


def _last_attempts(connection: Connection, run: str) -> tuple[RoundRow, ...]:
    last: dict[tuple[int, int], RoundRow] = {}
    for row in _rows(connection, tables.rounds, run, "stage", "round", "attempt"):
        last[row["stage"], row["round"]] = _convert(RoundRow, row)
    return tuple(last.values())


def _assignments(connection: Connection, run: str, order: tuple[str, ...]) -> tuple[AssignmentRow, ...]:
    figures: dict[Slot, Figures] = defaultdict(dict)
    for row in _rows(connection, tables.figures, run, *order):
        slot = (row["stage"], row["round"], row["attempt"], row["device"], row["predicted"])
        figures[slot][row["name"]] = _convert(Figure, row)
    result = []
    for row in _rows(connection, tables.assignments, run, *order, "device"):
        slot_of = (row["stage"], row["round"], row["attempt"], row["device"])
        assignment = _convert(AssignmentRow, row)
        predicted, measured = figures.get((*slot_of, True), {}), figures.get((*slot_of, False), {})
        result.append(msgspec.structs.replace(assignment, predicted=predicted, measured=measured))
    return tuple(result)
