"""Events of searches, Idempotency-Keys, and columns for the filters of lists."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_FINISHED = ("done", "cancelled", "failed", "infeasible")
_FOUND = ("objective", "lower_bound", "gap", "method", "plan_id", "error")
_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them, and fill them in for existing searches and plans."""
    op.create_table(
        "search_events",
        sa.Column("search_id", sa.String(32), sa.ForeignKey("searches.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("at", _moment, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key_hash", sa.String(64), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("search_id", sa.String(32), nullable=False),
        sa.Column("expires_at", _moment, nullable=False),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])
    _widen_searches()
    _widen_plans()


def _widen_searches() -> None:
    new: list[sa.Column[Any]] = [
        sa.Column("pp_degree", sa.Integer),
        sa.Column("microbatches", sa.Integer),
        sa.Column("placement", sa.String(16)),
        sa.Column("problem_objective", sa.String(16)),
        sa.Column("last_event", sa.Integer),
    ]
    with op.batch_alter_table("searches") as searches:
        for column in new:
            searches.add_column(column)
    _fill_searches()
    with op.batch_alter_table("searches") as searches:
        for column in new:
            searches.alter_column(column.name, existing_type=column.type, nullable=False)
        searches.create_index("ix_searches_queue", ["state", "cancel_requested", "created_at"])
        searches.create_index("ix_searches_shape", ["pp_degree", "microbatches", "created_at"])


def _fill_searches() -> None:
    """Fill columns from the summary, and add one event with the state of each search."""
    names = ("id", "state", "summary", "attempts", "cancel_requested", "updated_at", *_FOUND)
    searches = sa.table(
        "searches",
        *(sa.column(name) for name in names if name not in ("summary", "error", "updated_at")),
        sa.column("summary", sa.JSON),
        sa.column("error", sa.JSON),
        sa.column("updated_at", _moment),
        *map(sa.column, ("pp_degree", "microbatches", "placement", "problem_objective", "last_event")),
    )
    events = sa.table(
        "search_events",
        *map(sa.column, ("search_id", "number", "kind")),
        sa.column("at", _moment),
        sa.column("data", sa.JSON),
    )
    connection = op.get_bind()
    for row in connection.execute(sa.select(*(searches.c[name] for name in names))).mappings().all():
        summary = row["summary"]
        connection.execute(
            searches.update()
            .where(searches.c.id == row["id"])
            .values(
                pp_degree=summary["pp_degree"],
                microbatches=summary["microbatches"],
                placement=summary["placement"],
                problem_objective=summary["objective"],
                last_event=1,
            )
        )
        kind, data = _event(row)
        connection.execute(
            events.insert().values(search_id=row["id"], number=1, at=row["updated_at"], kind=kind, data=data)
        )


def _event(row: sa.RowMapping) -> tuple[str, dict[str, Any]]:
    if row["state"] in _FINISHED:
        return "end", {"state": row["state"], "seconds": None, **{name: row[name] for name in _FOUND}}
    data = {"state": row["state"], "reason": "upgraded", "attempts": row["attempts"]}
    return "state", {**data, "cancel_requested": bool(row["cancel_requested"])}


def _widen_plans() -> None:
    with op.batch_alter_table("plans") as plans:
        plans.add_column(sa.Column("problem_key", sa.String(64)))
    table = sa.table("plans", sa.column("plan_id"), sa.column("document"), sa.column("problem_key"))
    connection = op.get_bind()
    for plan_id in connection.scalars(sa.select(table.c.plan_id)).all():
        here = table.c.plan_id == plan_id
        packed = connection.execute(sa.select(table.c.document).where(here)).scalar_one()
        connection.execute(table.update().where(here).values(problem_key=_problem_key(packed)))
    with op.batch_alter_table("plans") as plans:
        plans.alter_column("problem_key", existing_type=sa.String(64), nullable=False)
        plans.create_index("ix_plans_shape", ["pp_degree", "microbatches", "created_at"])
        plans.create_index("ix_plans_problem_key", ["problem_key", "value"])


def _problem_key(packed: bytes) -> str:
    """The hash of a plan's problem; the hash of an empty text if the plan is unreadable."""
    try:
        problem = json.loads(zlib.decompress(packed))["problem"]
    except (zlib.error, ValueError, KeyError, TypeError):
        problem = None
    text = json.dumps(problem, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
