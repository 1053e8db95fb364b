"""All tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "first_release"
"""A change before the first release changes this name, so that older databases of development are refused."""
down_revision = None
branch_labels = None
depends_on = None

_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables, in the order of their references."""
    _create_tokens()
    _create_plans()
    _create_searches()
    _create_runs()
    _create_agents()
    _create_parts_of_runs()


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("parent_id", sa.String(16), sa.ForeignKey("tokens.id", ondelete="CASCADE")),
        sa.Column("local_id", sa.String(16)),
        sa.Column("max_searches", sa.Integer),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("expires_at", _moment),
        sa.Column("revoked_at", _moment),
        sa.Column("used_at", _moment),
    )
    op.create_index("ix_tokens_local_id", "tokens", ["local_id"])
    op.create_index("ix_tokens_name", "tokens", ["name"])
    op.create_index("ix_tokens_parent_id", "tokens", ["parent_id"])


def _create_plans() -> None:
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.String(64), primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("problem_key", sa.String(64), nullable=False),
        sa.Column("pp_degree", sa.Integer, nullable=False),
        sa.Column("microbatches", sa.Integer, nullable=False),
        sa.Column("placement", sa.String(16), nullable=False),
        sa.Column("objective", sa.String(16), nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("lower_bound", sa.Double, nullable=False),
        sa.Column("gap", sa.Double),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("bubble_rate", sa.Double, nullable=False),
        sa.Column("method", sa.String(200), nullable=False),
        sa.Column("time_unit", sa.String(32)),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("used_at", _moment),
    )
    op.create_index("ix_plans_created_at", "plans", ["created_at", "plan_id"])
    op.create_index("ix_plans_created_by", "plans", ["created_by"])
    op.create_index("ix_plans_problem_key", "plans", ["problem_key", "value"])
    op.create_index("ix_plans_shape", "plans", ["pp_degree", "microbatches", "created_at"])


def _create_searches() -> None:
    op.create_table(
        "searches",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("request_key", sa.String(64), unique=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.Column("pp_degree", sa.Integer),
        sa.Column("microbatches", sa.Integer),
        sa.Column("placement", sa.String(16)),
        sa.Column("problem_objective", sa.String(16)),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("jitter", sa.LargeBinary),
        sa.Column("problem", sa.LargeBinary, nullable=False),
        sa.Column("incumbent", sa.LargeBinary),
        sa.Column("objective", sa.Double),
        sa.Column("lower_bound", sa.Double),
        sa.Column("gap", sa.Double),
        sa.Column("method", sa.String(200)),
        sa.Column("progress", sa.JSON),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id")),
        sa.Column("error", sa.JSON),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("is_wanted_by_client", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("crashes", sa.Integer, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(200)),
        sa.Column("leased_until", _moment),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("started_at", _moment),
        sa.Column("updated_at", _moment, nullable=False),
        sa.Column("finished_at", _moment),
        sa.Column("last_event", sa.Integer, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
    )
    op.create_index("ix_searches_created_at", "searches", ["created_at", "id"])
    op.create_index("ix_searches_created_by", "searches", ["created_by", "state", "turn"])
    op.create_index("ix_searches_kind", "searches", ["kind", "created_at", "id"])
    op.create_index("ix_searches_plan_id", "searches", ["plan_id"])
    op.create_index("ix_searches_queue", "searches", ["state", "cancel_requested", "created_at"])
    op.create_index("ix_searches_shape", "searches", ["pp_degree", "microbatches", "created_at"])
    op.create_index("ix_searches_state", "searches", ["state", "created_at"])
    op.create_index("ix_searches_turn", "searches", ["state", "turn", "created_at", "id", "created_by"])
    op.create_table(
        "search_plans",
        sa.Column(
            "search_id", sa.String(32), sa.ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id"), primary_key=True),
    )
    op.create_index("ix_search_plans_plan_id", "search_plans", ["plan_id"])
    op.create_table(
        "search_events",
        sa.Column(
            "search_id", sa.String(32), sa.ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("at", _moment, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
    )


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id")),
        sa.Column("search_id", sa.String(32), sa.ForeignKey("searches.id", ondelete="SET NULL")),
        sa.Column("search_options", sa.LargeBinary),
        sa.Column("target_plan_id", sa.String(64), sa.ForeignKey("plans.plan_id")),
        sa.Column("offer", sa.JSON),
        sa.Column("replanning", sa.JSON),
        sa.Column("model", sa.JSON),
        sa.Column("script", sa.JSON),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("ranks_per_node", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("stop_requested", sa.Boolean, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("error", sa.JSON),
        sa.Column("failures", sa.JSON, nullable=False),
        sa.Column("refusals", sa.JSON, nullable=False),
        sa.Column("waits_for", sa.String),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("started_at", _moment),
        sa.Column("updated_at", _moment, nullable=False),
        sa.Column("finished_at", _moment),
        sa.Column("key_hash", sa.String(64), unique=True),
        sa.Column("key_fingerprint", sa.String(64)),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at", "id"])
    op.create_index("ix_runs_created_by", "runs", ["created_by"])
    op.create_index("ix_runs_plan_id", "runs", ["plan_id"])
    op.create_index("ix_runs_search_id", "runs", ["search_id"])
    op.create_index("ix_runs_state", "runs", ["state", "created_at"])
    op.create_index("ix_runs_target_plan_id", "runs", ["target_plan_id"])


def _create_agents() -> None:
    op.create_table(
        "agents",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("devices", sa.JSON, nullable=False),
        sa.Column("versions", sa.JSON, nullable=False),
        sa.Column("allowed_models", sa.JSON, nullable=False),
        sa.Column("allowed_scripts", sa.JSON, nullable=False),
        sa.Column("checkpoint_directories", sa.JSON),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id")),
        sa.Column("owner", sa.String(16), nullable=False),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("seen_at", _moment, nullable=False),
    )
    op.create_index("ix_agents_created_at", "agents", ["created_at", "id"])
    op.create_index("ix_agents_owner", "agents", ["owner", "state"])
    op.create_index("ix_agents_run_id", "agents", ["run_id"])
    op.create_index("ix_agents_state", "agents", ["state", "created_at"])
    op.create_table(
        "listeners",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("looked_at", _moment, nullable=False),
        sa.Column("listening_since", _moment, nullable=False),
    )


def _create_parts_of_runs() -> None:
    op.create_table(
        "run_nodes",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("node_rank", sa.Integer, primary_key=True),
        sa.Column("agent_id", sa.String(32), sa.ForeignKey("agents.id"), nullable=False),
        sa.Column("agent_name", sa.String(200), nullable=False),
        sa.Column("rendezvous", sa.String(300), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16)),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("failures", sa.JSON, nullable=False),
        sa.Column("ended_at", _moment),
    )
    op.create_index("ix_run_nodes_agent", "run_nodes", ["agent_id", "run_id", "generation"])
    op.create_table(
        "run_events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("at", _moment, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("detail", sa.String, nullable=False),
    )
    op.create_index("ix_run_events_run_id", "run_events", ["run_id", "id"])
    op.create_table(
        "run_parts",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("rank", sa.Integer, primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("plan_id", sa.String(64)),
        sa.Column("pp_rank", sa.Integer),
        sa.Column("replica", sa.Integer),
        sa.Column("last_step", sa.Integer),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("updated_at", _moment, nullable=False),
    )
    op.create_index("ix_run_parts_plan_id", "run_parts", ["plan_id"])
