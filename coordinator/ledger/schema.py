"""The ledger's tables, as SQLAlchemy Core: the columns of each are the fields of the struct that is its row.

``migrations/`` makes the tables; a test holds both equal.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table
from sqlalchemy.types import TypeEngine

from edgefl.records import EvaluationRow, Figure, Manifest
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EventRow, RoundRow

#: The newest migration; a ledger of this revision is opened without loading Alembic.
HEAD = "0003"

metadata = MetaData()

#: Characters of a text column; any other holds an identifier of at most 64.
_LENGTHS = {
    **dict.fromkeys(("status", "kind", "missing", "matcher"), 16),
    "events.kind": 32,
    "profile": 128,
    "source": 256,
    "reason": 1024,
    "path": 1024,
}
#: What rows hold in a column that a migration has added.
_DEFAULTS = {"matcher": ""}
_NUMBERS: dict[Any, TypeEngine[Any]] = {
    bool: Boolean(),
    int: Integer(),
    float: Float(53),
    float | None: Float(53),
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


class SavedRound(RoundRow, frozen=True):
    """A round with the state it made; None while it runs or when it failed."""

    manifest: Manifest | None = None


class SavedFigure(Figure, frozen=True):
    """One resource figure of a device in an attempt: ``predicted`` by the plan, else measured or counted."""

    stage: int = 0
    round: int = 0
    attempt: int = 0
    device: str = ""
    predicted: bool = False
    name: str = ""


class SnapshotRow(msgspec.Struct, frozen=True):
    """One piece of the coordinator's state (``coordinator.core.state``): its position, a device, an assignment."""

    kind: str
    name: str
    value: object


def _column(table: str, name: str, kind: Any, *, key: bool) -> Column[Any]:
    nullable = NoneType in get_args(kind)
    of: TypeEngine[Any]
    if kind is str or get_origin(kind) is Literal:
        of = String(_LENGTHS.get(f"{table}.{name}") or _LENGTHS.get(name, 64))
    elif kind is int and name.endswith("_bytes"):
        of = BigInteger()
    else:
        of = _NUMBERS.get(kind) or JSON(none_as_null=nullable)
    default = _DEFAULTS.get(name)
    return Column(name, of, primary_key=key, nullable=nullable, autoincrement=False, server_default=default)


def _table(name: str, row: type[msgspec.Struct], *key: str, without: tuple[str, ...] = ()) -> Table:
    """The run, the rest of the key, then the other fields in their order. Rows without a key are numbered."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(row) if field.name not in without}
    order = [*key, *(field for field in kinds if field not in {"run", *key})]
    number = Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    run = Column("run", String(64), primary_key=bool(key), nullable=False, index=not key)
    rest = [_column(name, field, kinds[field], key=field in key) for field in order if field != "run"]
    return Table(name, metadata, *([run] if key else [number, run]), *rest)


_ATTEMPT = ("stage", "round", "attempt")

runs = _table("runs", RunRow, "run")
devices = _table("devices", DeviceRow, "device")
rounds = _table("rounds", SavedRound, *_ATTEMPT)
assignments = _table("assignments", AssignmentRow, *_ATTEMPT, "device", without=("predicted", "measured"))
figures = _table("figures", SavedFigure, *_ATTEMPT, "device", "predicted", "name")
evaluations = _table("evaluations", EvaluationRow)
events = _table("events", EventRow)
snapshots = _table("snapshots", SnapshotRow, "kind", "name")
bundles = _table("bundles", BundleRow, "name")

#: Table of a row. A RoundRow, which lacks the state, is only read.
TABLES: dict[type[msgspec.Struct], Table] = {
    RunRow: runs,
    DeviceRow: devices,
    SavedRound: rounds,
    RoundRow: rounds,
    AssignmentRow: assignments,
    SavedFigure: figures,
    EvaluationRow: evaluations,
    EventRow: events,
    SnapshotRow: snapshots,
    BundleRow: bundles,
}
