"""The first ledger: runs, devices, rounds, assignments, figures, evaluations, events, bundles."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _key(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(64), primary_key=True) for name in names]


def _attempt() -> list[sa.Column[Any]]:
    names = ("stage", "round", "attempt")
    return [sa.Column(name, sa.Integer(), primary_key=True, autoincrement=False) for name in names]


def _must(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "runs",
        *_key("run"),
        *_must(sa.String(64), "name", "recipe"),
        *_must(sa.String(16), "status"),
        *_must(sa.Float(53), "started_at"),
        sa.Column("finished_at", sa.Float(53)),
        *_must(sa.JSON(), "plan", "manifest", "part_bytes"),
    )
    op.create_table(
        "devices",
        *_key("run", "device"),
        *_must(sa.String(128), "profile"),
        *_must(sa.JSON(), "capabilities", "budget", "samples", "class_counts"),
    )
    op.create_table(
        "rounds",
        *_key("run"),
        *_attempt(),
        *_must(sa.String(16), "status"),
        *_must(sa.Float(53), "started_at"),
        sa.Column("ended_at", sa.Float(53)),
        *_must(sa.JSON(), "participants", "metrics", "record"),
        sa.Column("manifest", sa.JSON()),
    )
    op.create_table(
        "assignments",
        *_key("run"),
        *_attempt(),
        *_key("device"),
        *_must(sa.String(16), "status"),
        sa.Column("refusal", sa.JSON()),
        *_must(sa.Integer(), "batch_size", "micro_batch"),
        *_must(sa.JSON(), "trained", "samples", "metrics"),
    )
    op.create_table(
        "figures",
        *_key("run"),
        *_attempt(),
        *_key("device"),
        sa.Column("predicted", sa.Boolean(), primary_key=True),
        *_key("name"),
        sa.Column("value", sa.Float(53)),
        *_must(sa.String(16), "kind"),
        *_must(sa.String(256), "source"),
        *_must(sa.String(1024), "reason"),
    )
    _rows()


def _rows() -> None:
    op.create_table(
        "evaluations",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("run", sa.String(64), nullable=False, index=True),
        *_must(sa.Integer(), "stage", "round"),
        *_must(sa.JSON(), "available"),
        *_must(sa.String(16), "missing"),
        *_must(sa.String(64), "metric"),
        *_must(sa.Float(53), "value"),
        *_must(sa.Integer(), "samples"),
    )
    op.create_table(
        "events",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("run", sa.String(64), nullable=False, index=True),
        *_must(sa.Float(53), "at"),
        *_must(sa.String(32), "kind"),
        *_must(sa.Integer(), "stage", "round"),
        *_must(sa.String(64), "device"),
        *_must(sa.JSON(), "data"),
    )
    op.create_table(
        "bundles",
        *_key("run", "name"),
        *_must(sa.String(1024), "path"),
        *_must(sa.JSON(), "modalities"),
        *_must(sa.BigInteger(), "size_bytes"),
        *_must(sa.Float(53), "max_difference", "tolerance"),
    )


def downgrade() -> None:
    """Drop all tables, and with them every run on record."""
    for name in ("bundles", "events", "evaluations", "figures", "assignments", "rounds", "devices", "runs"):
        op.drop_table(name)
