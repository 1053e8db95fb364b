"""Estimates of models of transformers that the worker does not train, from the advisor's formulas and trees.

:func:`zbv_models.estimate.transformers_config.read_config` reads the file, as ``zbv estimate`` does. The
states are those of the worker: parameters and the moments of AdamW in the type of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.model import DTYPE_BYTES
from zbv_models.estimate.replica import Running
from zbv_models.estimate.shapes import INDEX_BYTES, PerAction
from zbv_models.estimate.transformers_config import is_transformers_config, read_config
from zbv_solver.errors import InvalidInput

from zbv_worker.adapters.transformers_source import SUPPORTED
from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.estimate import Estimate, Flops, Walked
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes
from zbv_worker.stage.program import Program

KEYS = {"sequence_length": 128, "sequences": 4, "dtype": None}
"""The arguments that change an estimate, with the defaults of models of transformers."""


def untrained_document(factory: str) -> dict[str, Any] | None:
    """The file of ``transformers:PATH`` whose type the worker does not train; None for other factories."""
    name, _, source = factory.partition(":")
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if name != "transformers" or not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # the adapter refuses it, and says why
        return None
    is_untrained = is_transformers_config(document) and document["model_type"] not in SUPPORTED
    return document if is_untrained else None


def untrained_config(
    document: dict[str, Any], arguments: Mapping[str, Any], program: Program
) -> EstimateConfig:
    """Its configuration with the arguments of ``--model-args``; raises :class:`InvalidRun`."""
    given = {**KEYS, **arguments}
    try:
        model = read_config(document, given["sequence_length"])
        model |= {"sequence": given["sequence_length"], "microbatch_size": given["sequences"]}
        model |= {"dtype": given["dtype"]} if given["dtype"] is not None else {}
        size = DTYPE_BYTES.get(model["dtype"], 0)
        gradients = 4 if program.has_main_gradients else size
        states = {"parameters": size, "gradients": gradients, "master": 0, "state": size}
        parallel = {"pp_degree": 1, "microbatches": 1, "placement": "single", "precision": states}
        return parse_config({"model": model, "parallel": parallel, "device": {"achieved_tflops": 1.0}})
    except InvalidInput as error:
        raise InvalidRun(f"--model, --model-args: {error}") from None


def untrained_layers(config: EstimateConfig) -> list[Estimate]:
    """The layers of a configuration; the states are those of the worker."""
    found: list[Estimate] = []
    size = INDEX_BYTES * config.model.tokens
    for layer in estimate_layers(config):
        sizes = (layer.static.parameters, layer.static.gradients, layer.static.optimizer)
        kept, again = _walked(layer, layer.plain), None
        if layer.full is not None:
            again = _walked(layer, layer.full, more=layer.flops.forward)
        for name in layer.names:
            static, output = StaticBytes(*map(int, sizes)), layer.output_bytes
            found.append(Estimate(name, layer.parameters, static, size, output, kept, again))
            size = output
    return found


def _walked(layer: LayerEstimate, running: Running, more: float = 0.0) -> Walked:
    flops = layer.flops + PerAction(backward_input=more)
    memory = StageMemory(running.after_forward, running.after_input, 0, running.workspace)
    return Walked(memory, Flops(*map(int, (flops.forward, flops.backward_input, flops.backward_weight))))
