"""The jitter of a search and the search options of a run: packed, in columns that lists do not read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from zbv_service.documents.packing import pack

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_SEARCHES = sa.table(
    "searches",
    sa.column("id", sa.String),
    sa.column("options", sa.JSON),
    sa.column("jitter", sa.LargeBinary),
)


_RUNS = sa.table("runs", sa.column("id", sa.String), sa.column("search_options", sa.LargeBinary))
_FORMER_RUNS = sa.table("runs", sa.column("id", sa.String), sa.column("search_options", sa.JSON))


def upgrade() -> None:
    """Pack the stored documents, and move them to their columns."""
    _pack_jitter()
    _pack_search_options()


def _pack_search_options() -> None:
    connection = op.get_bind()
    stored = connection.execute(sa.select(_FORMER_RUNS)).all()
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("search_options")
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("search_options", sa.LargeBinary))
    for run_id, options in stored:
        if options is not None:
            of_it = _RUNS.c.id == run_id
            connection.execute(sa.update(_RUNS).where(of_it).values(search_options=pack(options)))


def _pack_jitter() -> None:
    with op.batch_alter_table("searches") as searches:
        searches.add_column(sa.Column("jitter", sa.LargeBinary))
    connection, columns = op.get_bind(), _SEARCHES.c
    varied = columns.options["jitter"].as_string().is_not(None)
    for (search_id,) in connection.execute(sa.select(columns.id).where(varied)).all():
        of_it = columns.id == search_id
        options = connection.execute(sa.select(columns.options).where(of_it)).scalar_one()
        jitter = pack(options.pop("jitter"))
        connection.execute(sa.update(_SEARCHES).where(of_it).values(options=options, jitter=jitter))
