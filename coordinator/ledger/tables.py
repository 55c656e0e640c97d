"""The ledger's tables, as SQLAlchemy Core: the columns of each are the fields of the struct that is its row.

``put`` writes rows of every kind, ``rows`` reads them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from coordinator.core.moves import SavedRound, Spending
from edgefl.records import EvaluationRow, Figure, Figures, Manifest
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EventRow, RoundRow, SightingRow

R = TypeVar("R", bound=msgspec.Struct)

#: Of the tables below; a ledger of another one is refused (docs/decisions/0086).
REVISION = "0005"
#: Figures of one device in one round, some times as many as FIGURES names: a device that sends more is faulty.
MAX_FIGURES = 64
#: Devices of one query: each name is a bound variable, of which SQLite before 3.32 takes 999.
MOST_NAMES = 500
#: Size of the cache of compiled statements: a dozen tables, in the dialects of a few open ledgers.
STATEMENTS = 64
#: Characters of a text column; any other holds an identifier of at most 64.
_LENGTHS = {
    **dict.fromkeys(("status", "kind", "missing", "matcher", "precision"), 16),
    "events.kind": 32,
    "profile": 128,
    "source": 256,
    "reason": 1024,
    "path": 1024,
}
#: Of columns that were added since the first revision.
_DEFAULTS = {"matcher": "", "agent_version": "", "precision": "f32", "lost_points": "0", "max_loss": "0"}
_NUMBERS: dict[object, TypeEngine[Any]] = {
    bool: sa.Boolean(),
    int: sa.Integer(),
    float: sa.Float(53),
    float | None: sa.Float(53),
}


class RunRow(msgspec.Struct, frozen=True):
    """A run as it was started."""

    run: str
    name: str
    recipe: str
    status: str
    started_at: float  # seconds since the epoch
    finished_at: float | None
    plan: dict[str, object]  # RunPlan: what a resume executes
    manifest: Manifest  # the initial state
    part_bytes: dict[str, int]  # of parameters and buffers alone


class SavedFigure(Figure, frozen=True):
    """One resource figure of a device in an attempt: ``predicted`` by the plan, else measured or counted."""

    stage: int = 0
    round: int = 0
    attempt: int = 0
    device: str = ""
    predicted: bool = False
    name: str = ""


#: The kind of the piece that says when a run was restored, in milliseconds since the epoch, each time.
MADE = "made"


class SnapshotRow(msgspec.Struct, frozen=True):
    """One piece of the coordinator's state (``coordinator.core.state``): its position, a device, an assignment."""

    kind: str
    name: str
    value: object


def _column(table: str, name: str, kind: object, *, key: bool) -> sa.Column[Any]:
    nullable = NoneType in get_args(kind)
    of: TypeEngine[Any]
    if kind is str or get_origin(kind) is Literal:
        of = sa.String(_LENGTHS.get(f"{table}.{name}") or _LENGTHS.get(name, 64))
    elif kind is int and name.endswith("_bytes"):
        of = sa.BigInteger()
    else:
        of = _NUMBERS.get(kind) or sa.JSON(none_as_null=nullable)
    default = _DEFAULTS.get(name)
    return sa.Column(name, of, primary_key=key, nullable=nullable, autoincrement=False, server_default=default)


def _table(
    name: str, row: type[msgspec.Struct], *key: str, without: tuple[str, ...] = (), short: bool = False
) -> sa.Table:
    """The run, the rest of the key, then the other fields in their order. Rows without a key are numbered.

    ``short``: SQLite keeps the rows in the key's own tree, where those of more than a thousand bytes would cost a page
    of their own. A ledger of an earlier version has two trees for each, and is written and read alike.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(row) if field.name not in without}
    order = [*key, *(field for field in kinds if field not in {"run", *key})]
    number = sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True)
    run = sa.Column("run", sa.String(64), primary_key=bool(key), nullable=False, index=not key)
    rest = [_column(name, field, kinds[field], key=field in key) for field in order if field != "run"]
    columns = [run] if key else [number, run]
    return sa.Table(name, metadata, *columns, *rest, sqlite_with_rowid=not short)


metadata = sa.MetaData()
#: Has one row, the revision; Alembic's own table, which it takes up when a release has to migrate another's ledgers.
version = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
_ATTEMPT = ("stage", "round", "attempt")
runs = _table("runs", RunRow, "run")
rounds = _table("rounds", SavedRound, *_ATTEMPT)
figures = _table("figures", SavedFigure, *_ATTEMPT, "device", "predicted", "name", short=True)
evaluations = _table("evaluations", EvaluationRow)
events = _table("events", EventRow)
snapshots = _table("snapshots", SnapshotRow, "kind", "name")

#: Table of a row. A RoundRow, which lacks the state, is only read.
TABLES: dict[type[msgspec.Struct], sa.Table] = {
    RunRow: runs,
    DeviceRow: _table("devices", DeviceRow, "device"),
    SavedRound: rounds,
    RoundRow: rounds,
    AssignmentRow: _table(
        "assignments", AssignmentRow, *_ATTEMPT, "device", without=("predicted", "measured"), short=True
    ),
    SavedFigure: figures,
    EvaluationRow: evaluations,
    EventRow: events,
    SnapshotRow: snapshots,
    SightingRow: _table("sightings", SightingRow, "device"),
    BundleRow: _table("bundles", BundleRow, "name"),
}
#: Table -> its rows' struct, in the order in which a run is copied.
KEPT: dict[str, type[msgspec.Struct]] = {
    str(table.name): kind for kind, table in TABLES.items() if kind is not RoundRow
}
#: Texts that devices write, which are cut to their column; what is our own is stored as it is, or refused.
_DEVICES_TEXTS = {TABLES[DeviceRow].c.profile, figures.c.source, figures.c.reason, figures.c.name}


def rows(connection: sa.Connection, kind: type[R], run: str | None = None) -> Iterator[R]:
    """A run's rows of one kind (None: of all runs), in the order of their keys."""
    table = TABLES[kind]
    query = sa.select(table).order_by(*table.primary_key)
    if run is not None:
        query = query.where(table.c.run == run)
    for row in connection.execute(query).mappings():
        values: dict[str, object] = {str(name): value for name, value in row.items()}  # its names are a kind of str
        if "metrics" in values:  # a metric that was not a number is null in JSON: it is left out
            metrics = msgspec.convert(values["metrics"], dict[str, float | None])
            values["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        yield msgspec.convert(values, kind)


def put(connection: sa.Connection, run: str, batch: Iterable[msgspec.Struct]) -> None:
    """Insert rows, one statement per table; a row replaces one of the same key, in the ledger and in the batch.

    The driver is given the statement and its values at once: SQLAlchemy's way of each value to it took twice as long as
    the database.
    """
    found: dict[type[msgspec.Struct], dict[object, tuple[object, ...]]] = {}
    for row in batch:
        read, writers, key = _columns(type(row))
        pairs = zip(read(row), writers, strict=True)
        values = (run, *[value if write is None else write(value) for value, write in pairs])
        same = found.setdefault(type(row), {})
        same[values[:key] if key else len(same)] = values
    for kind, same in found.items():
        _execute(connection, _statement(TABLES[kind], connection.dialect), list(same.values()))


class _Statement(NamedTuple):
    """A statement as the driver takes it. ``names``: of its values in their order, where it takes them by name."""

    text: str
    names: tuple[str, ...] = ()


def _compiled(statement: sa.Insert | sa.Delete, dialect: sa.Dialect, names: Sequence[str]) -> _Statement:
    compiled = statement.compile(dialect=dialect, column_keys=names if isinstance(statement, sa.Insert) else None)
    if getattr(compiled, "positiontup", None):
        return _Statement(str(compiled))
    return _Statement(str(compiled), tuple(names))


def _execute(connection: sa.Connection, statement: _Statement, values: list[tuple[object, ...]]) -> None:
    """Execute a statement with each of these values, which are as the driver takes them."""
    text, names = statement
    if values:
        rows: list[Any] = [dict(zip(names, one, strict=True)) for one in values] if names else values
        connection.exec_driver_sql(text, rows)


#: Makes a value the driver's.
_Write = Callable[[Any], object]


@cache
def _columns(kind: type[msgspec.Struct]) -> tuple[Callable[[object], tuple[Any, ...]], list[_Write | None], int]:
    """Getter of columns without ``run``, converter of each (None: unchanged), columns of the key (0: no key)."""
    table = TABLES[kind]
    columns = [column for column in table.c if column.name not in {"run", "id"}]
    read = operator.attrgetter(*(column.name for column in columns))
    return read, [_writer(column) for column in columns], 0 if "id" in table.c else len(table.primary_key)


def _writer(column: sa.Column[Any]) -> _Write | None:
    """A value as every database takes it: PostgreSQL has no character 0, a text column a length; NaN is no number."""
    if isinstance(column.type, sa.JSON):  # NaN and infinity become null: JSON has neither
        nullable = column.nullable
        return lambda value: None if nullable and value is None else msgspec.json.encode(value).decode()
    if column in _DEVICES_TEXTS and isinstance(column.type, sa.String):
        length = column.type.length
        return lambda value: value.replace("\0", "")[:length]
    if column.nullable:
        return lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    return None


@lru_cache(maxsize=STATEMENTS)
def _statement(table: sa.Table, dialect: sa.Dialect) -> _Statement:
    """An insert that replaces the row of the same key, except when it started; of the dialects, only one is loaded."""
    names = [column.name for column in table.columns if column.name != "id"]
    if "id" in table.c:
        return _compiled(sa.insert(table), dialect, names)
    if dialect.name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert as dialect_insert
    else:
        from sqlalchemy.dialects.postgresql import insert as dialect_insert  # type: ignore[assignment]
    statement = dialect_insert(table)
    changing = [column.name for column in table.columns if not column.primary_key and column.name != "started_at"]
    values = {name: statement.excluded[name] for name in changing}
    return _compiled(
        statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values), dialect, names
    )


def put_figures(connection: sa.Connection, run: str, assignments: Collection[AssignmentRow]) -> None:
    """Put the assignments' figures in place of those on record; where an assignment has none, these stay.

    Measured ones of an attempt without a counted update join those on record: bytes that had moved before.
    """
    sets: dict[tuple[int, int, int, str, bool], Figures] = {}
    for row in assignments:
        for predicted, found in ((True, row.predicted), (False, row.measured)):
            if found:
                key = (row.stage, row.round, row.attempt, row.device, predicted)
                before = {} if predicted or row.status == "done" else sets.get(key, {})
                sets[key] = {**before, **found}
    counts = {(row.stage, row.round, row.attempt, row.device) for row in assignments if row.status == "done"}
    whole = [key for key in sets if key[-1] or key[:-1] in counts]
    remove(connection, figures, run, (*_ATTEMPT, "device", "predicted"), whole)
    put(
        connection,
        run,
        (
            SavedFigure(figure.value, figure.kind, figure.source, figure.reason, *key, name)
            for key, found in sets.items()
            for name, figure in list(found.items())[:MAX_FIGURES]
        ),
    )


def put_spent(connection: sa.Connection, run: str, spent: Iterable[Spending]) -> None:
    """Put figures of attempts beside those on record, in place of any of the same name.

    Nothing for attempts whose update counts, which have all their figures, and for those that are not on record.
    """
    found: dict[tuple[int, int, int], dict[str, Figures]] = {}
    for one in spent:
        attempt = (one.attempt.stage, one.attempt.round, one.attempt.attempt)
        devices = found.setdefault(attempt, {})
        devices[one.device] = {**devices.get(one.device, {}), **one.figures}
    table = TABLES[AssignmentRow]
    rows: list[SavedFigure] = []
    for attempt, devices in found.items():
        of_attempt = (table.c[name] == value for name, value in zip(_ATTEMPT, attempt, strict=True))
        asked = sa.select(table.c.device).where(table.c.run == run, *of_attempt, table.c.status != "done")
        names = list(devices)
        for first in range(0, len(names), MOST_NAMES):
            for (device,) in connection.execute(asked.where(table.c.device.in_(names[first : first + MOST_NAMES]))):
                own = devices[device].items()
                rows += (SavedFigure(f.value, f.kind, f.source, f.reason, *attempt, device, False, n) for n, f in own)
    put(connection, run, rows)


def remove(
    connection: sa.Connection, table: sa.Table, run: str, names: tuple[str, ...], keys: Iterable[tuple[object, ...]]
) -> None:
    """Delete a run's rows by key.

    ``names``: the key's columns; ``keys``: tuples of their values.
    """
    _execute(connection, _removal(table, ("run", *names), connection.dialect), [(run, *key) for key in keys])


@lru_cache(maxsize=STATEMENTS)
def _removal(table: sa.Table, names: tuple[str, ...], dialect: sa.Dialect) -> _Statement:
    where = (table.c[name] == sa.bindparam(f"of_{name}") for name in names)
    return _compiled(sa.delete(table).where(*where), dialect, [f"of_{name}" for name in names])
