"""Problems with stages that consist of layers."""

from __future__ import annotations

from collections.abc import Sequence

from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem


def parts(names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """The names in lists of the given lengths."""
    left = iter(names)
    return [[next(left) for _ in range(size)] for size in sizes]


def cut_problem(
    names: Sequence[str],
    sizes: Sequence[int],
    recompute: Sequence[bool] = (),
    microbatches: int = 4,
    placement: str = "v",
) -> Problem:
    """``sizes`` are the layers per stage, which all cost the same; a rank of a V has two stages."""
    document = {
        "pp_degree": len(sizes) // (1 if placement == "single" else 2),
        "microbatches": microbatches,
        "placement": placement,
        "layers": [{"name": name, **_LAYER} for name in names],
        "partition": parts(names, sizes),
        "recompute": list(recompute) or [False] * len(sizes),
        "cut": {"allow_empty": True},
    }
    return parse_problem(document)


_LAYER = {
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1},
    "recompute": {
        "backward_input": 2.0,
        "memory": {"forward": 1, "backward_input": 0, "backward_weight": -1, "workspace": 2},
    },
}
