"""The ledger's tables, as SQLAlchemy Core. ``migrations/`` makes them; a test holds both equal."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table

#: The newest migration; a ledger of this revision is opened without loading Alembic.
HEAD = "0003"

metadata = MetaData()


def _attempt() -> list[Column[int]]:
    """The columns that name an attempt; stage and round count from 1."""
    return [Column(name, Integer, primary_key=True, autoincrement=False) for name in ("stage", "round", "attempt")]


runs = Table(
    "runs",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("recipe", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("started_at", Float(53), nullable=False),  # seconds since the epoch
    Column("finished_at", Float(53)),
    Column("plan", JSON, nullable=False),  # RunPlan: what a resume executes
    Column("manifest", JSON, nullable=False),  # the initial state: {part: {id, size}}
    Column("part_bytes", JSON, nullable=False),  # of parameters and buffers alone
)

devices = Table(
    "devices",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("profile", String(128), nullable=False),
    Column("capabilities", JSON, nullable=False),
    Column("budget", JSON, nullable=False),
    Column("samples", JSON, nullable=False),
    Column("class_counts", JSON, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run", String(64), primary_key=True),
    *_attempt(),
    Column("status", String(16), nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("participants", JSON, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("record", JSON, nullable=False),
    Column("manifest", JSON(none_as_null=True)),  # the state the round made; null while it runs or when it failed
)

assignments = Table(
    "assignments",
    metadata,
    Column("run", String(64), primary_key=True),
    *_attempt(),
    Column("device", String(64), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("refusal", JSON(none_as_null=True)),
    Column("batch_size", Integer, nullable=False),
    Column("micro_batch", Integer, nullable=False),
    Column("trained", JSON, nullable=False),
    Column("samples", JSON, nullable=False),
    Column("metrics", JSON, nullable=False),
)

#: One resource figure. ``predicted`` tells the plan's from what was measured or counted; ``value`` null has a reason.
figures = Table(
    "figures",
    metadata,
    Column("run", String(64), primary_key=True),
    *_attempt(),
    Column("device", String(64), primary_key=True),
    Column("predicted", Boolean, primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", Float(53)),
    Column("kind", String(16), nullable=False),
    Column("source", String(256), nullable=False),
    Column("reason", String(1024), nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("run", String(64), nullable=False, index=True),
    Column("stage", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("available", JSON, nullable=False),
    Column("missing", String(16), nullable=False),
    Column("matcher", String(16), nullable=False, server_default=""),
    Column("metric", String(64), nullable=False),
    Column("value", Float(53), nullable=False),
    Column("samples", Integer, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("run", String(64), nullable=False, index=True),
    Column("at", Float(53), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("stage", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("device", String(64), nullable=False),
    Column("data", JSON, nullable=False),
)

#: What the coordinator's process has to know again (``coordinator.core.snapshot``): its outline, each device, each
#: part in the open attempt.
snapshots = Table(
    "snapshots",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", JSON, nullable=False),
)

bundles = Table(
    "bundles",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("path", String(1024), nullable=False),
    Column("modalities", JSON, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("max_difference", Float(53), nullable=False),
    Column("tolerance", Float(53), nullable=False),
)
