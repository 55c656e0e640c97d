"""Writes a batch of transitions into the ledger: one statement per table, executed for all its rows.

Of a row that changes several times in a batch the last state is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import msgspec
from sqlalchemy import Connection, Delete, Insert, Table, bindparam, delete, insert, update

from coordinator.core.moves import Save, SaveAssignment, SaveDevice, SaveEnd, SaveEvaluation, SaveRound
from coordinator.core.state import SnapshotChanges
from coordinator.ledger import schema as tables
from coordinator.ledger.schema import TABLES, SavedFigure, SavedRound, SnapshotRow
from edgefl.protocol.messages import Hello
from edgefl.run_records import AssignmentRow, DeviceRow

#: Figures of one device in one round, some times as many as FIGURES names: a device that sends more is faulty.
MAX_FIGURES = 64


def put(connection: Connection, run: str, rows: Iterable[msgspec.Struct]) -> None:
    """Insert rows of one kind; one of the same key is replaced."""
    batch = list(rows)
    if batch:
        table = TABLES[type(batch[0])]
        names = [column.name for column in table.columns if column.name not in {"run", "id"}]
        values = [{"run": run, **{name: getattr(row, name) for name in names}} for row in batch]
        connection.execute(_upsert(table, connection.dialect.name), values)


def save(connection: Connection, run: str, saves: Iterable[Save], at: float) -> None:
    """Write what changed. ``at``: seconds since the epoch."""
    batch = list(saves)
    put(
        connection, run, {one.hello.device: _device(one.hello) for one in batch if isinstance(one, SaveDevice)}.values()
    )
    put(connection, run, {one.attempt: _round(one, at) for one in batch if isinstance(one, SaveRound)}.values())
    assignments = [one.row for one in batch if isinstance(one, SaveAssignment)]
    put(connection, run, {_slot(row): row for row in assignments}.values())
    _replace_figures(connection, run, assignments)
    put(connection, run, [row for one in batch if isinstance(one, SaveEvaluation) for row in one.rows])
    for one in batch:
        if isinstance(one, SaveEnd):
            query = update(tables.runs).where(tables.runs.c.run == run)
            connection.execute(query.values(status=one.status, finished_at=at))


def save_snapshot(connection: Connection, run: str, changed: SnapshotChanges) -> None:
    """Write what of the machine's state has changed."""
    if changed.new_attempt:
        of_run = (tables.snapshots.c.run == run) & (tables.snapshots.c.kind == "assignment")
        connection.execute(delete(tables.snapshots).where(of_run))
    if changed.deleted:
        gone = [{"of_run": run, "of_kind": kind, "of_name": name} for kind, name in changed.deleted]
        connection.execute(_removal(tables.snapshots, "run", "kind", "name"), gone)
    put(connection, run, [SnapshotRow(kind, name, value) for (kind, name), value in changed.rows.items()])


@cache
def _upsert(table: Table, dialect: str) -> Insert:
    """An insert that replaces the row of the same key, except when it started; of the dialects, only one is loaded."""
    if "id" in table.columns:
        return insert(table)
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert as dialect_insert
    else:
        from sqlalchemy.dialects.postgresql import insert as dialect_insert  # type: ignore[assignment]
    statement = dialect_insert(table)
    changing = [column.name for column in table.columns if not column.primary_key and column.name != "started_at"]
    values = {name: statement.excluded[name] for name in changing}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


@cache
def _removal(table: Table, *names: str) -> Delete:
    return delete(table).where(*(table.c[name] == bindparam(f"of_{name}") for name in names))


def _device(hello: Hello) -> DeviceRow:
    profile = _text(hello.profile, 128)
    return DeviceRow(hello.device, profile, hello.capabilities, hello.budget, hello.samples, hello.class_counts)


def _round(save: SaveRound, at: float) -> SavedRound:
    return SavedRound(
        stage=save.attempt.stage,
        round=save.attempt.round,
        attempt=save.attempt.attempt,
        status=save.status,
        started_at=at,
        ended_at=None if save.status == "running" else at,
        participants=save.participants,
        metrics=save.metrics,
        record=save.record,
        manifest=save.manifest,
    )


def _slot(row: AssignmentRow) -> tuple[int, int, int, str]:
    return (row.stage, row.round, row.attempt, row.device)


def _replace_figures(connection: Connection, run: str, assignments: Iterable[AssignmentRow]) -> None:
    """Figures that an assignment has take the place of those on record; without any, these stay."""
    sets = {
        (*_slot(row), predicted): figures
        for row in assignments
        for predicted, figures in ((True, row.predicted), (False, row.measured))
        if figures
    }
    if not sets:
        return
    names = ("run", "stage", "round", "attempt", "device", "predicted")
    keys = [{f"of_{name}": value for name, value in zip(names, (run, *key), strict=True)} for key in sets]
    connection.execute(_removal(tables.figures, *names), keys)
    rows = (
        SavedFigure(
            figure.value if figure.value is None or math.isfinite(figure.value) else None,
            figure.kind,
            _text(figure.source, 256),
            _text(figure.reason, 1024),
            *key,
            _text(name, 64),
        )
        for key, figures in sets.items()
        for name, figure in list(figures.items())[:MAX_FIGURES]
    )
    put(connection, run, rows)


def _text(value: str, size: int) -> str:
    """A device's text, as every database takes it: PostgreSQL has no character 0, and columns have a length."""
    return value.replace("\0", "")[:size]
