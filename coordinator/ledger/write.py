"""What a batch of transitions changes in the ledger: a statement a table, made once and run for all its rows.

Of a row that changes several times in a batch the last state is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, Table, bindparam, delete, insert, update

from coordinator.core.instructions import Save, SaveAssignment, SaveDevice, SaveEnd, SaveEvaluation, SaveRound
from coordinator.core.snapshot import Changes
from coordinator.ledger import schema as tables
from edgefl.errors import StoreError
from edgefl.records import Attempt, Figures
from edgefl.run_records import EventRow

#: Figures of one device in one round, some times as many as FIGURES names. More is not a device of ours.
MAX_FIGURES = 64
_PLAIN = (tables.devices, tables.assignments, tables.bundles, tables.snapshots)

Row = dict[str, Any]


def _inserting(dialect: str) -> Callable[[Table], Any]:
    """Its insert, which can also change what is there; only its own code is loaded."""
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert as inserting
    elif dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as inserting  # type: ignore[assignment]
    else:
        raise StoreError(f"a ledger can not be kept in {dialect}", remedy="Use sqlite:///PATH or postgresql://…")
    return inserting


class Saving:
    """The statements for a kind of database. Raises StoreError for one that rows can not be put into."""

    def __init__(self, dialect: str) -> None:
        self._insert = _inserting(dialect)
        self._puts = {table: self._put(table) for table in _PLAIN}
        self._puts[tables.rounds] = self._put(tables.rounds, kept=("started_at",))
        self._no_figures = delete(tables.figures).where(
            *(tables.figures.c[name] == bindparam(f"of_{name}") for name in _FIGURES_OF)
        )
        key = ("run", "kind", "name")
        self._no_row = delete(tables.snapshots).where(*(tables.snapshots.c[n] == bindparam(f"of_{n}") for n in key))

    def put(self, connection: Connection, table: Table, rows: Iterable[Row]) -> None:
        """Insert rows, or change those that are there."""
        values = list(rows)
        if values:
            connection.execute(self._puts[table], values)

    def save(self, connection: Connection, run: str, saves: Iterable[Save], at: float) -> None:
        """Write what changed. ``at``: seconds since the epoch."""
        batch = _Batch(run, at)
        for save in saves:
            batch.add(save)
        self.put(connection, tables.devices, batch.devices.values())
        self.put(connection, tables.rounds, batch.rounds.values())
        self.put(connection, tables.assignments, batch.assignments.values())
        if batch.figures:
            gone = [
                {f"of_{name}": value for name, value in zip(_FIGURES_OF, key, strict=True)} for key in batch.figures
            ]
            connection.execute(self._no_figures, gone)
        self._add(connection, tables.figures, [row for rows in batch.figures.values() for row in rows])
        self._add(connection, tables.evaluations, batch.evaluations)
        if batch.end is not None:
            connection.execute(update(tables.runs).where(tables.runs.c.run == run).values(batch.end))

    def keep(self, connection: Connection, run: str, changed: Changes) -> None:
        """Write what of the machine's state has changed."""
        if changed.new_attempt:
            of_run = (tables.snapshots.c.run == run) & (tables.snapshots.c.kind == "assignment")
            connection.execute(delete(tables.snapshots).where(of_run))
        if changed.deleted:
            gone = [{"of_run": run, "of_kind": kind, "of_name": name} for kind, name in changed.deleted]
            connection.execute(self._no_row, gone)
        rows = [
            {"run": run, "kind": kind, "name": name, "value": value} for (kind, name), value in changed.rows.items()
        ]
        self.put(connection, tables.snapshots, rows)

    def tell(self, connection: Connection, run: str, events: Iterable[EventRow]) -> None:
        """Write what will be told."""
        self._add(connection, tables.events, [{"run": run, **msgspec.structs.asdict(event)} for event in events])

    def _add(self, connection: Connection, table: Table, rows: list[Row]) -> None:
        if rows:
            connection.execute(insert(table), rows)

    def _put(self, table: Table, kept: tuple[str, ...] = ()) -> Any:
        """``kept``: columns that stay as they were first."""
        statement = self._insert(table)
        changing = [c.name for c in table.columns if not c.primary_key and c.name not in kept]
        values = {name: statement.excluded[name] for name in changing}
        return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


#: What the figures of a device in an attempt are found by.
_FIGURES_OF = ("run", "stage", "round", "attempt", "device", "predicted")


class _Batch:
    """The rows of a batch, by their keys."""

    def __init__(self, run: str, at: float) -> None:
        self.devices: dict[str, Row] = {}
        self.rounds: dict[Attempt, Row] = {}
        self.assignments: dict[tuple[Attempt, str], Row] = {}
        self.figures: dict[tuple[Any, ...], list[Row]] = {}
        self.evaluations: list[Row] = []
        self.end: Row | None = None
        self._run = run
        self._at = at

    def add(self, save: Save) -> None:
        if isinstance(save, SaveAssignment):
            self._assignment(save)
        elif isinstance(save, SaveRound):
            self._round(save)
        elif isinstance(save, SaveDevice):
            self._device(save)
        elif isinstance(save, SaveEvaluation):
            of_run = {"run": self._run}
            self.evaluations += [
                {**of_run, **msgspec.structs.asdict(row), "available": list(row.available)} for row in save.rows
            ]
        elif isinstance(save, SaveEnd):
            self.end = {"status": save.status, "finished_at": self._at}

    def _device(self, save: SaveDevice) -> None:
        hello = msgspec.to_builtins(save.hello)
        row = {name: hello[name] for name in ("capabilities", "budget", "samples", "class_counts")}
        row["profile"] = _text(save.hello.profile, 128)
        self.devices[save.hello.device] = {"run": self._run, "device": save.hello.device, **row}

    def _round(self, save: SaveRound) -> None:
        self.rounds[save.attempt] = {
            **self._key(save.attempt),
            "status": save.status,
            "participants": list(save.participants),
            "metrics": save.metrics,
            "record": save.record,
            "manifest": msgspec.to_builtins(save.manifest),
            "started_at": self._at,
            "ended_at": None if save.status == "running" else self._at,
        }

    def _assignment(self, save: SaveAssignment) -> None:
        key = {**self._key(save.attempt), "device": save.device}
        self.assignments[save.attempt, save.device] = {
            **key,
            "status": save.status,
            "refusal": msgspec.to_builtins(save.refusal),
            "batch_size": save.batch_size,
            "micro_batch": save.placement.hyper.micro_batch,
            "trained": list(save.placement.stage.trained),
            "samples": dict(save.update.samples) if save.update is not None else {},
            "metrics": dict(save.update.metrics) if save.update is not None else {},
        }
        if save.status in {"offered", "refused"}:
            self._figures({**key, "predicted": True}, save.placement.predicted)
        if save.measured:
            self._figures({**key, "predicted": False}, save.measured)

    def _figures(self, key: Row, figures: Figures) -> None:
        self.figures[tuple(key[name] for name in _FIGURES_OF)] = [
            {
                **key,
                "name": _text(name, 64),
                "value": figure.value if figure.value is None or math.isfinite(figure.value) else None,
                "kind": figure.kind,
                "source": _text(figure.source, 256),
                "reason": _text(figure.reason, 1024),
            }
            for name, figure in list(figures.items())[:MAX_FIGURES]
        ]

    def _key(self, attempt: Attempt) -> Row:
        return {"run": self._run, "stage": attempt.stage, "round": attempt.round, "attempt": attempt.attempt}


def _text(value: str, size: int) -> str:
    """What a device wrote, as every database takes it: PostgreSQL has no character 0, and columns have a length."""
    return value.replace("\0", "")[:size]
