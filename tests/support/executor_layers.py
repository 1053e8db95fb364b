"""Layers that executors with fixed orders run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbv_models.fixed_orders.executor_cut import ExecutorCut
from zbv_models.layouts.executor_search import ExecutorLayout
from zbv_solver.problem.layered_problem import LayeredProblem

from support.layered import layered_problem

Document = dict[str, Any]
PUBLISHED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "models/fixed_orders/published_layouts.json").read_text(encoding="utf-8")
)
"""Layouts of configurations in use; every entry names its repository, commit and file, or its paper."""


def layer(
    name: str,
    forward: float,
    inputs: float | None = None,
    weights: float | None = None,
    *,
    held: float = 0,
    **more: Any,
) -> dict[str, Any]:
    """A layer whose I and W take as long as its F, unless given; a microbatch holds memory from F to I."""
    return {
        "name": name,
        "forward": forward,
        "backward_input": forward if inputs is None else inputs,
        "backward_weight": forward if weights is None else weights,
        "memory": {"forward": held, "backward_input": -held, "backward_weight": 0},
        **more,
    }


def layered(
    ranks: int, microbatches: int, layers: list[dict[str, Any]], p2p: float = 0, **more: Any
) -> LayeredProblem:
    """The problem of these layers; the placement is that of the executor."""
    document = {"pp_degree": ranks, "microbatches": microbatches, "placement": "auto", "layers": layers}
    return layered_problem(document | {"costs": {"p2p": p2p}} | more)


def flags_of(best: ExecutorCut | ExecutorLayout) -> dict[str, str]:
    """Megatron-LM's flags with their values; those without one have an empty one."""
    assert best.settings is not None
    lines = best.settings.replace("\\\n", "\n").splitlines()
    return {name: value.strip(' "') for name, _, value in (line.strip().partition(" ") for line in lines)}
