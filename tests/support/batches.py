"""Batches to pack, for tests."""

from __future__ import annotations

from typing import Any

COSTS = {
    "forward": {"fixed": 3, "tokens": [1, 1, 1.2, 1], "tokens_squared": 0.01},
    "backward_input": {"fixed": 3, "tokens": 1, "tokens_squared": 0.025},
    "backward_weight": {"fixed": 2, "tokens": [0.9, 0.8, 0.8, 1]},
    "p2p": {"fixed": 1, "tokens": 0.05},
}
MEMORY = {"forward": {"tokens": 2}, "backward_input": {"tokens": -1}, "backward_weight": {"tokens": -1}}


def batch_document(
    sequences: list[int],
    *,
    max_tokens: int = 64,
    replicas: int = 2,
    limit: float | None = 400.0,
    scale: float = 1.0,
    **costs: Any,
) -> dict[str, Any]:
    """A batch for two ranks under V; ``scale`` multiplies all durations."""
    return {
        "sequences": sequences,
        "max_tokens": max_tokens,
        "replicas": replicas,
        "problem": {
            "pp_degree": 2,
            "costs": _scaled({**COSTS, **costs}, scale),
            "memory": {**MEMORY, "limit": limit},
        },
    }


def _scaled(value: Any, scale: float) -> Any:
    if isinstance(value, dict):
        return {key: _scaled(each, scale) for key, each in value.items()}
    if isinstance(value, list):
        return [_scaled(each, scale) for each in value]
    return value * scale
