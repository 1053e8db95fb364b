"""An estimate as a problem given by layers (docs/formats.md), which ``zbv plan`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbv_solver.documents.text import number

from zbv_models.estimate.build import transformer
from zbv_models.estimate.config import EstimateConfig
from zbv_models.estimate.layers import LayerEstimate, ModelEstimate, Running, estimate_model

BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""


def estimate_config(config: EstimateConfig) -> ModelEstimate:
    """The estimate of a configuration."""
    return estimate_model(
        transformer(config.model),
        config.degrees,
        config.device.rates,
        config.device.links,
        config.training,
        config.model.microbatch_size,
    )


def estimate_layers(config: EstimateConfig) -> tuple[LayerEstimate, ...]:
    """The layers of a configuration."""
    return estimate_config(config).layers


def problem_document(config: EstimateConfig, layers: Sequence[LayerEstimate] | None = None) -> dict[str, Any]:
    """The problem: microseconds and bytes, of one device of each rank."""
    parallel, device = config.parallel, config.device
    document: dict[str, Any] = {
        "pp_degree": parallel.pp_degree,
        "microbatches": parallel.microbatches,
        "placement": config.placement,
        "objective": parallel.objective,
        "layers": [_layer(layer) for layer in layers or estimate_layers(config)],
        "costs": {"p2p": number(device.link_latency)},
        "memory": {"static": number(device.reserved), "limit": None},
        "units": {"time": "us", "memory": "bytes"},
    }
    if config.recompute == "selective":
        document["recompute_modules"] = list(parallel.recompute_modules)
    if parallel.chunks is not None:
        document["chunks"] = parallel.chunks
    if device.link_bandwidth is not None:
        bandwidth = number(device.link_bandwidth * BYTES_PER_MICROSECOND)
        document["costs"] = {"link": {"latency": number(device.link_latency), "bandwidth": bandwidth}}
    if device.memory_limit is not None:
        document["memory"]["limit"] = number(device.memory_limit)
    return document


def _layer(layer: LayerEstimate) -> dict[str, Any]:
    static = number(layer.static.total)
    document: dict[str, Any] = {"name": layer.name, **_costs(layer.plain, static)}
    document["parameters_bytes"] = number(layer.static.parameters)
    document["output_bytes"] = layer.output_bytes
    if layer.repeat is not None:
        document["repeat"] = layer.repeat
    if layer.recomputed is not None:
        document["recompute"] = _costs(layer.recomputed, static)
    return document


def _costs(running: Running, static: float) -> dict[str, Any]:
    times = running.times
    return {
        "forward": _shortened(times.forward),
        "backward_input": _shortened(times.backward_input),
        "backward_weight": _shortened(times.backward_weight),
        "memory": {
            "forward": running.after_forward,
            "backward_input": running.after_input - running.after_forward,
            "backward_weight": -running.after_input,
            "static": static,
            "workspace": running.workspace,
        },
    }


def _shortened(microseconds: float) -> float | int:
    """Six digits: more of them would be those of the formula, not of the machine."""
    return number(float(f"{microseconds:.6g}"))
