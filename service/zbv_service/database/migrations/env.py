"""The entry point of Alembic: migrates the connection passed by :mod:`zbv_service.database.migrate`."""

from __future__ import annotations

from alembic import context

from zbv_service.database.engine import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite can alter tables only by copying them.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
