"""``zbv estimate``: a problem from a model's configuration, and the estimate as tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from zbv_models.estimate.config import EstimateConfig, estimate_config, parse_config, problem_document
from zbv_models.estimate.layers import LayerEstimate, ModelEstimate
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import parameters_of, trained_parameters_of, training_text
from zbv_models.estimate.sections import preset, preset_names, presets_of, with_presets
from zbv_models.estimate.transformers_config import is_transformers_config, read_config

from zbv_solver.commands.messages import flag_of, table_of
from zbv_solver.commands.model_flags import SECTIONS, flags, read_adapter
from zbv_solver.documents.files import file_label, read_json, write
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.export.quantities import counted, figure, fixed, gigabytes

Rows = Sequence[tuple[LayerEstimate, int]]
"""Layers that differ, and how many there are of each."""
WIDTH = 120
"""Characters per line of the tables."""
_MEMORY_COLUMNS = (
    *("layer", "after F", "I", "W", "within", "F recomp.", "M params"),
    *("params", "gradients", "optimizer", "sum"),
)
_SHARES = ("products", "attention", "memory", "launches", "tensor", "context", "expert", "data parallel")


def estimate(arguments: argparse.Namespace) -> None:
    """Estimate and write the problem; tables go to the stream that the problem does not use."""
    if arguments.list_presets:
        width = max(map(len, preset_names()))
        for name in preset_names():
            sys.stdout.write(f"{name:{width}}  {preset(name).about}\n")
        return
    if arguments.config is None and not arguments.preset:
        detail = "found neither; give one of them. --list-presets lists the presets."
        raise InvalidInput([Issue("", detail, "--config, --preset")])
    document = {} if arguments.config is None else read_json(arguments.config)
    read_adapter(arguments, "model.")
    overrides = _overrides(arguments)
    try:
        if is_transformers_config(document):
            others = with_presets({}, arguments.preset, overrides)
            document = {"model": read_config(document, _sequence(others))}
        config = parse_config(with_presets(document, arguments.preset, overrides))
        estimated = estimate_config(config)
    except InvalidInput as error:
        issues = [_named(issue, overrides, arguments.config) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None
    layers = estimated.layers
    write(arguments.output, json.dumps(problem_document(config, layers), indent=1) + "\n")
    if arguments.table:
        _write_tables(config, estimated, sys.stderr if arguments.output == "-" else sys.stdout)


def _sequence(others: dict[str, Any]) -> Any:
    if "sequence" not in others.get("model", {}):
        detail = "a config.json does not say how long sequences are in training. Give their number of tokens."
        raise InvalidInput([Issue("", detail, "--sequence-length")])
    return others["model"]["sequence"]


def _named(issue: Issue, overrides: dict[str, dict[str, Any]], path: str | None) -> Issue:
    """An issue that names the flag or the file that holds the mistake."""
    _, section, key = (*issue.pointer.split("/"), "", "")[:3]
    if issue.pointer in ("/model", "/device") and "required" in issue.detail:
        names, values = ", ".join(presets_of(section)), "sizes" if section == "model" else "rates"
        detail = f"found no {section}. Name one of {names}, or give {values} in the file."
        return Issue("", detail, "--preset")
    if key in overrides.get(section, {}):
        return Issue("", issue.detail, flag_of(key))
    return issue if path is None or issue.source else replace(issue, source=file_label(path))


def _overrides(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The given flags by section; a value of None undoes one of the file or of presets."""
    found = vars(arguments)
    given = {
        section: {key: found[f"{section}.{key}"] for key in flags(section) if f"{section}.{key}" in found}
        for section in SECTIONS
    }
    return {section: values for section, values in given.items() if values}


def _write_tables(config: EstimateConfig, estimated: ModelEstimate, out: TextIO) -> None:
    """Costs and memory of the layers for one device and microbatch; equal layers share a row."""
    console = Console(file=out, width=WIDTH)
    rows = _distinct(estimated.layers)
    console.print(_costs(rows, config.recompute))
    console.print(_memory(rows, config.recompute))
    if config.parallel.data_parallel > 1 or config.parallel.context_parallel > 1:
        title = "times of a layer per step, in µs, that compute does not hide"
        names = ("gradient reduction", "parameter gathering", "optimizer")
        console.print(_times(rows, title, names, "step"))
    title = "what F, I and W of a microbatch consist of together, in µs"
    console.print(_times(rows, title, _SHARES, "shares"))
    console.print(_summary(config, rows), highlight=False)


def _distinct(layers: Sequence[LayerEstimate]) -> list[tuple[LayerEstimate, int]]:
    """Every layer that differs from those before it by more than its name, and how many there are."""
    count: dict[LayerEstimate, int] = {}
    name: dict[LayerEstimate, str] = {}
    for layer in layers:
        unnamed = replace(layer, name="")
        name.setdefault(unnamed, layer.name)
        count[unnamed] = count.get(unnamed, 0) + (layer.repeat or 1)
    return [(replace(layer, name=name[layer]), number) for layer, number in count.items()]


def _costs(rows: Rows, recompute: str) -> Table:
    def cells(layer: LayerEstimate, count: int) -> list[str]:
        again = layer.recomputed(recompute)
        return [
            layer.name,
            str(count),
            *(fixed(value / 1e9, 1) for value in astuple(layer.flops)),
            *(fixed(value, 0) for value in astuple(layer.plain.times)),
            "–" if again is None else fixed(again.times.backward_input, 0),
            _mb(layer.output_bytes),
        ]

    columns = ("layer", "copies", "GFLOP F", "I", "W", "µs F", "I", "W", "I recomputed", "output MB")
    title = "operations and times of a microbatch on one device"
    return table_of(title, columns, (cells(*row) for row in rows))


def _memory(rows: Rows, recompute: str) -> Table:
    def cells(layer: LayerEstimate) -> list[str]:
        running, static, again = layer.plain, layer.static, layer.recomputed(recompute)
        return [
            layer.name,
            *(_mb(running.after_forward), _mb(running.after_input), "0", _mb(running.workspace)),
            "–" if again is None else _mb(again.after_forward),
            _mb(layer.parameters),
            *map(_mb, (static.parameters, static.gradients, static.optimizer, static.total)),
        ]

    title = "memory of a layer on one device, in MB: of a microbatch, and all the time"
    return table_of(title, _MEMORY_COLUMNS, (cells(layer) for layer, _ in rows))


def _times(rows: Rows, title: str, columns: Sequence[str], part: str) -> Table:
    """A table of a part of the estimates, in µs."""
    cells = ([each.name, *(fixed(value, 0) for value in astuple(getattr(each, part)))] for each, _ in rows)
    return table_of(title, ("layer", *columns), cells)


def _summary(config: EstimateConfig, rows: Rows) -> str:
    flops = sum(layer.flops.total * count for layer, count in rows)
    flops *= config.parallel.tensor_parallel * config.parallel.context_parallel
    static = sum(layer.static.total * count for layer, count in rows)
    origin = "" if config.model.origin is None else config.model.origin.text
    return (
        f"{origin}{_counted(config.model)}; {figure(flops / 1e12)} TFLOP per microbatch of "
        f"{counted(config.model.tokens, 'token')}; {gigabytes(static)} of static memory over "
        f"{counted(config.parallel.pp_degree, 'rank')}"
    )


def _counted(model: Transformer) -> str:
    """Parameters of the language model, as publishers count them, and what it has in addition."""
    text = model.model_copy(update={"vision": None})
    count = parameters_of(text, with_predictions=False)
    active = f" ({figure(count.active / 1e9, 3)} B active)" if count.active < count.total else ""
    found = f"{figure(count.total / 1e9, 3)} B parameters{active}"
    predictions = parameters_of(text).total - count.total
    encoder = parameters_of(model).total - parameters_of(text).total
    trained = trained_parameters_of(model).total
    for more, what in ((predictions, "multi-token prediction"), (encoder, "a vision encoder")):
        found += f", {figure(more / 1e9, 3)} B of {what}" if more else ""
    if trained < parameters_of(model).total:
        found += f", of which {figure(trained / 1e6, 4)} M train{training_text(model)}"
    return found


def _mb(size: float) -> str:
    return fixed(size / 1e6, 1)
