"""Costs of a GPT of 6.2 B parameters for microbatches that differ: coefficients of tokens and tokens_squared.

zbv's estimate (preset ``gpt-6.2b`` on H100, with flash attention) is a polynomial in the length of a
sequence: linear layers, norms and memory grow with its tokens, attention with their square, and the
accumulation of weight gradients is fixed. Three lengths determine the coefficients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from zbv_models.estimate.config import parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.presets import with_presets
from zbv_models.estimate.problem_document import estimate_layers

PRESETS = ["gpt-6.2b", "h100-80gb"]
MODEL = {
    "microbatch_size": 1,
    "attention": "flash",
    "dropout": False,
    "dtype": "bfloat16",
    "positions": "rotary",
}
"""The preset is of 2023; these are usual today for sequences of 32 k tokens."""
LENGTHS = (1024, 8192, 32_768)
NAMES = ("fixed", "tokens", "tokens_squared")
ACTIONS = ("forward", "backward_input", "backward_weight")
BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""
LAYERS = 32
"""Embedding, 30 blocks and head: they divide evenly into 8, 16 and 32 stages."""


def costs_and_memory(pp_degree: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``costs`` and ``memory`` (without a limit) of a problem document for 4, 8 or 16 ranks.

    Microseconds and bytes. Placement V, with the same number of layers on every stage.
    """
    layers = _layers()
    per_stage = LAYERS // (2 * pp_degree)
    sums = [layers[first : first + per_stage].sum(axis=0) for first in range(0, LAYERS, per_stage)]
    stages = np.array(sums)  # (S, 5, 3): F, I, W, bytes after F, bytes after I; by feature
    costs: dict[str, Any] = {
        action: {name: _rounded(stages[:, row, column]) for column, name in enumerate(NAMES)}
        for row, action in enumerate(ACTIONS)
    }
    config = _config(LENGTHS[0])
    per_token = config.model.hidden * config.model.dtype_bytes
    bandwidth = (config.device.link_bandwidth or np.inf) * BYTES_PER_MICROSECOND
    costs["p2p"] = {"fixed": config.device.link_latency, "tokens": float(f"{per_token / bandwidth:.6g}")}
    after_forward, after_input = (np.rint(stages[:, row, 1]).astype(int).tolist() for row in (3, 4))
    memory = {
        "forward": {"tokens": after_forward},
        "backward_input": {"tokens": [b - a for a, b in zip(after_forward, after_input, strict=True)]},
        "backward_weight": {"tokens": [-each for each in after_input]},
    }
    return costs, memory


@cache
def _layers() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Coefficients of all layers, (32, 5, 3)."""
    samples = np.array([[_figures(layer) for layer in _estimated(length)] for length in LENGTHS])
    powers = np.vander(np.array(LENGTHS, dtype=np.float64), 3, increasing=True)
    return np.moveaxis(np.tensordot(np.linalg.inv(powers), samples, axes=1), 0, 2)


def _estimated(length: int) -> list[LayerEstimate]:
    layers = estimate_layers(_config(length))
    return [layer for layer in layers for _ in range(layer.repeat or 1)]


def _config(length: int) -> Any:
    return parse_config(with_presets({}, PRESETS, {"model": {**MODEL, "sequence": length}}))


def _figures(layer: LayerEstimate) -> list[float]:
    running = layer.plain
    times = running.times
    return [
        times.forward,
        times.backward_input,
        times.backward_weight,
        running.after_forward,
        running.after_input,
    ]


def _rounded(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Six digits; 0 where the fit leaves less than rounding errors."""
    return [float(f"{value:.6g}") if value > 1e-12 else 0.0 for value in values]
