"""Profiles of layers whose numbers are the estimates."""

from __future__ import annotations

from zbv_models.estimate.device import GroupLinks
from zbv_models.estimate.layers import estimate_model
from zbv_models.estimate.replica import Running
from zbv_models.estimate.shapes import Degrees
from zbv_models.layouts.request import parse_request

from support.executor_layouts import MODEL, Document, cluster_of

MEASURED_MODEL = {**MODEL, "hidden": 512, "layers": 4, "kv_heads": 8, "vocabulary": 4096, "sequence": 512}
PROGRAM = {"precision": "bfloat16", "device": "NVIDIA H100 80GB HBM3"}


def as_estimated(size: int = 1, tensor: int = 1, factor: float = 1.0) -> Document:
    """A profile whose numbers are the estimates, and whose times are those times a factor."""
    cluster = cluster_of(1, 4, kernel_latency=6)
    setting = parse_request({"model": MEASURED_MODEL, "global_batch": 8}, cluster).setting
    degrees, links = Degrees(tensor, tensor > 1), GroupLinks(tensor=cluster.in_node)
    found = estimate_model(setting.model, degrees, cluster.device, links, setting.training, size)

    def costs(of: Running, static: float) -> Document:
        memory = {
            "forward": of.after_forward,
            "backward_input": of.after_input - of.after_forward,
            "backward_weight": -of.after_input,
            "static": static,
            "workspace": of.workspace,
        }
        return vars(of.times.scaled(factor)) | {"memory": memory}

    layers = []
    for layer in found.layers:
        document = costs(layer.plain, layer.static.total)
        document |= {"name": layer.name, "output_bytes": layer.output_bytes}
        if layer.full is not None:
            document["recompute"] = costs(layer.full, layer.static.total)
        layers.append(document | ({} if layer.repeat is None else {"repeat": layer.repeat}))
    updates = {layer.name: layer.step.optimizer for layer in found.layers}
    profile = {"microbatch_size": size, "sequence_length": 512, "tensor_parallel": tensor}
    document = {"pp_degree": 1, "microbatches": 4, "layers": layers, "measured": PROGRAM}
    return document | {"units": {"time": "us", "memory": "bytes"}, "profile": profile | {"update": updates}}
