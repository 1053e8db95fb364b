"""The estimate of a layer as a layer of a problem: its costs with and without recomputation."""

from __future__ import annotations

from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, OnDevice

from zbv_models.estimate.layers import LayerEstimate, Running

EVERYWHERE = ("selective", "full")
"""Kinds of recomputation that every stage has."""


def recomputed(layer: LayerEstimate, recompute: str) -> Running | None:
    """A layer's costs where its stage is recomputed; None if it then has no other costs."""
    return layer.selective if recompute == "selective" else layer.recomputed


def problem_layer(layers: tuple[LayerEstimate, ...], devices: list[str], recompute: str) -> Layer:
    """A layer, from its estimates on several devices."""
    layer, costs = layers[0], [_both_costs(each, recompute) for each in layers]
    return Layer(
        layer.name,
        *costs[0],
        layer.static.parameters,
        layer.output_bytes,
        layer.repeat,
        tuple(OnDevice(device, *each) for device, each in zip(devices[1:], costs[1:], strict=True)),
    )


def _both_costs(layer: LayerEstimate, recompute: str) -> tuple[LayerCosts, LayerCosts | None]:
    plain, again = layer.plain, recomputed(layer, recompute)
    if recompute in EVERYWHERE and again is not None:
        plain, again = again, None
    return _costs(plain, layer), None if again is None or recompute == "none" else _costs(again, layer)


def _costs(running: Running, layer: LayerEstimate) -> LayerCosts:
    times = running.times
    return LayerCosts(
        times.forward,
        times.backward_input,
        times.backward_weight,
        running.fused,
        LayerMemory(
            running.after_forward,
            running.after_input - running.after_forward,
            -running.after_input,
            layer.static.total,
            running.workspace,
        ),
    )


def row_of(running: Running) -> tuple[float, float, float, float]:
    """Least times of F, I and W, and the memory held after F."""
    times = running.shortest
    return times.forward, times.backward_input, times.backward_weight, running.after_forward


def least_work_of(layer: LayerEstimate) -> float:
    """Least time of a microbatch on one copy of a layer, recomputed or not."""
    variants = [layer.plain] if layer.recomputed is None else [layer.plain, layer.recomputed]
    return min(running.shortest.total for running in variants)
