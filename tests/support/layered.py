"""A small language model given by layers: a light embedding, equal blocks, a heavy head."""

from __future__ import annotations

from typing import Any

from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

_DELTAS = {"forward": 2, "backward_input": -1, "backward_weight": -1}
_OUTPUT = {"output_bytes": 100}
_EMBEDDING = {
    "name": "embedding",
    "forward": 1,
    "backward_input": 0,
    "backward_weight": 1,
    "output_bytes": 100,
}
_BLOCK = {
    **{"name": "block", "forward": 10, "backward_input": 11, "backward_weight": 8},
    **{"memory": {**_DELTAS, "static": 5}, "parameters_bytes": 400, **_OUTPUT, "repeat": 6},
}
_HEAD = {"name": "head", "forward": 22, "backward_input": 22, "backward_weight": 22, "memory": _DELTAS}
_KEPT = {"forward": 0.2, "backward_input": 0.8, "backward_weight": -1, "static": 5, "workspace": 1.8}
LAYERED: dict[str, Any] = {
    **{"pp_degree": 2, "microbatches": 4, "placement": "v"},
    "layers": [_EMBEDDING, _BLOCK, _HEAD],
    "costs": {"link": {"latency": 1, "bandwidth": 100}},
    "cut": {"together": [["embedding", "block.0"]]},
    "units": {"time": "us", "memory": "MiB"},
}
RECOMPUTED: dict[str, Any] = {
    **LAYERED,
    "layers": [_EMBEDDING, {**_BLOCK, "recompute": {"backward_input": 21, "memory": _KEPT}}, _HEAD],
    "memory": {"limit": 24},
}
"""With a limit that something must be recomputed for."""
NAMES = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]


def layered_problem(document: dict[str, Any], **changes: Any) -> LayeredProblem:
    problem = parse_any_problem({**document, **changes})
    assert isinstance(problem, LayeredProblem)
    return problem
