"""The precision of exported bundles and what it cost. What was exported before is float32."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.add_column("bundles", sa.Column("precision", sa.String(16), nullable=False, server_default="f32"))
    op.add_column("bundles", sa.Column("lost_points", sa.Float(53), nullable=False, server_default="0"))
    op.add_column("bundles", sa.Column("max_loss", sa.Float(53), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop them; bundles of other precisions than float32 lie in folders that their rows still name."""
    op.drop_column("bundles", "max_loss")
    op.drop_column("bundles", "lost_points")
    op.drop_column("bundles", "precision")
