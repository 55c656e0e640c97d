"""Reads the ledger's rows, and assembles the report of a run from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, RowMapping, select

from coordinator.ledger import schema as tables
from coordinator.ledger.schema import TABLES, RunRow, SavedFigure
from edgefl.errors import StoreError
from edgefl.records import Figure, Figures
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EvaluationRow, EventRow, RoundRow, RunReport

T = TypeVar("T", bound=msgspec.Struct)


def rows(connection: Connection, kind: type[T], run: str) -> Iterator[T]:
    """A run's rows of one kind, in the order of their keys."""
    table = TABLES[kind]
    query = select(table).where(table.c.run == run).order_by(*table.primary_key)
    return (_convert(kind, row) for row in connection.execute(query).mappings())


def _convert(kind: type[T], row: RowMapping) -> T:
    values: dict[str, object] = {str(name): value for name, value in row.items()}  # its names are a kind of str
    if "metrics" in values:  # a metric that was not a number is null in JSON: it is left out
        metrics = msgspec.convert(values["metrics"], dict[str, float | None])
        values["metrics"] = {name: value for name, value in metrics.items() if value is not None}
    return msgspec.convert(values, kind)


def run_row(connection: Connection, run: str, ledger: str) -> RunRow:
    """One run. Raises StoreError naming the runs there are."""
    if (row := next(rows(connection, RunRow, run), None)) is not None:
        return row
    known = ", ".join(report.run for report in read_runs(connection)) or "none"
    raise StoreError(f"run {run!r} is not in the ledger {ledger}", remedy=f"Runs there are: {known}.")


def read_runs(connection: Connection) -> list[RunReport]:
    """All runs without their rows, newest first."""
    query = select(tables.runs).order_by(tables.runs.c.started_at.desc(), tables.runs.c.run)
    return [_head(_convert(RunRow, row)) for row in connection.execute(query).mappings()]


def read_report(connection: Connection, run: str, ledger: str) -> RunReport:
    """Everything about one run. Raises StoreError naming the runs there are."""
    return msgspec.structs.replace(
        _head(run_row(connection, run, ledger)),
        devices=tuple(rows(connection, DeviceRow, run)),
        rounds=_last_attempts(connection, run),
        assignments=_assignments(connection, run),
        evaluations=tuple(rows(connection, EvaluationRow, run)),
        events=tuple(rows(connection, EventRow, run)),
        bundles=tuple(rows(connection, BundleRow, run)),
    )


def _head(row: RunRow) -> RunReport:
    return RunReport(
        run=row.run,
        name=row.name,
        recipe=row.recipe,
        status=row.status,
        started_at=row.started_at,
        finished_at=row.finished_at,
        config=msgspec.convert(row.plan.get("config", {}), dict[str, Any]),
        part_bytes=row.part_bytes,
        stages=msgspec.convert(row.plan.get("stages", ()), tuple[dict[str, Any], ...]),
    )


def _last_attempts(connection: Connection, run: str) -> tuple[RoundRow, ...]:
    return tuple({(row.stage, row.round): row for row in rows(connection, RoundRow, run)}.values())


def _assignments(connection: Connection, run: str) -> tuple[AssignmentRow, ...]:
    figures: dict[tuple[int, int, int, str, bool], Figures] = defaultdict(dict)
    for row in rows(connection, SavedFigure, run):
        figure = Figure(row.value, row.kind, row.source, row.reason)
        figures[row.stage, row.round, row.attempt, row.device, row.predicted][row.name] = figure
    result = []
    for assignment in rows(connection, AssignmentRow, run):
        slot = (assignment.stage, assignment.round, assignment.attempt, assignment.device)
        predicted, measured = figures.get((*slot, True), {}), figures.get((*slot, False), {})
        result.append(msgspec.structs.replace(assignment, predicted=predicted, measured=measured))
    return tuple(result)
