"""When each device was heard of last, and by what; the release of its agent. Empty for runs recorded before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, empty in the rows there are, and the table."""
    op.add_column("devices", sa.Column("agent_version", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "sightings",
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("device", sa.String(64), primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("source", sa.String(256), nullable=False),
        sa.Column("online", sa.Boolean(), nullable=False),
    )


def downgrade() -> None:
    """Drop both."""
    op.drop_table("sightings")
    op.drop_column("devices", "agent_version")
