"""Alembic's entry: runs the migrations over the connection that the ledger hands in."""

from __future__ import annotations

from alembic import context

from coordinator.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter a column in place
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
