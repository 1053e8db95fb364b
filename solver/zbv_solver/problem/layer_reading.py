"""From documents of layers to layers."""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.problem.cut import Link
from zbv_solver.problem.documents import (
    LayerDocument,
    LayerMemoryDocument,
    LinkDocument,
    OnDeviceDocument,
    RecomputeDocument,
)
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, OnDevice


def link_of(document: LinkDocument) -> Link:
    """A link."""
    return Link(document.latency, document.bandwidth)


def layer_of(document: LayerDocument) -> Layer:
    """A layer; absent keys of its recomputed costs, and of those on a device, have its own values."""
    costs = LayerCosts(
        document.forward,
        document.backward_input,
        document.backward_weight,
        document.backward,
        _memory(document.memory, document.parameters_bytes),
    )
    return Layer(
        document.name,
        costs,
        None if document.recompute is None else _changed(document.recompute, costs),
        document.parameters_bytes,
        document.output_bytes,
        document.repeat,
        tuple(_on(device, own, costs) for device, own in (document.on or {}).items()),
    )


def _on(device: str, document: OnDeviceDocument, plain: LayerCosts) -> OnDevice:
    """Costs on a device; absent keys have the values of the layer."""
    costs = _changed(document, plain)
    again = None if document.recompute is None else _changed(document.recompute, costs)
    return OnDevice(device, costs, again)


def _memory(document: LayerMemoryDocument | None, parameters_bytes: float) -> LayerMemory:
    given = {} if document is None else document.model_dump(exclude_none=True)
    return LayerMemory(**{"static": parameters_bytes, **given})


def _changed(document: RecomputeDocument, plain: LayerCosts) -> LayerCosts:
    """Costs of a recomputed layer or of one on another device; absent keys have the layer's values."""
    given = document.model_dump(exclude_none=True, exclude={"memory", "recompute"})
    costs = replace(plain, **given)
    if document.backward is None and plain.backward is not None:
        costs = replace(costs, backward=max(0.0, plain.backward + (costs.split - plain.split)))
    if document.memory is not None:
        costs = replace(costs, memory=_memory(document.memory, plain.memory.static))
    return costs
