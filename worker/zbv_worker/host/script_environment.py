"""The variables through which a script finds the run in which an agent started it."""

from __future__ import annotations

from pathlib import Path

SERVER, PLAN, FOLDER = "ZBV_SERVER", "ZBV_PLAN", "ZBV_RUN_FOLDER"


def script_environment(server: str, plan_id: str, folder: Path) -> dict[str, str]:
    """The variables; ``folder`` is that of the run's generation on this node."""
    return {SERVER: server, PLAN: plan_id, FOLDER: str(folder)}
