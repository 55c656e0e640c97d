"""Add the prototype matcher of an evaluation; empty for evaluations recorded before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, empty in the rows there are."""
    op.add_column("evaluations", sa.Column("matcher", sa.String(16), nullable=False, server_default=""))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("evaluations", "matcher")
