"""``zbv estimate``: a problem from a model's configuration."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from zbv_solver.commands.flags import flag_of
from zbv_solver.documents.files import file_label
from zbv_solver.errors import InvalidInput, Issue

Kind = type[int] | type[float] | type[bool] | str

FLAGS: dict[str, dict[str, Kind]] = {
    "model": {
        "hidden": int,
        "layers": int,
        "heads": int,
        "kv_heads": int,
        "head_dim": int,
        "ffn": int,
        "gated": bool,
        "vocabulary": int,
        "tied_embeddings": bool,
        "sequence": int,
        "microbatch_size": int,
        "dtype": "bfloat16|float16|float32",
        "attention": "flash|plain",
        "causal": bool,
        "dropout": bool,
        "norm": "layernorm|rmsnorm",
        "bias": bool,
        "qkv_bias": bool,
        "qk_norm": bool,
        "positions": "learned|rotary|none",
        "fused_activation": bool,
    },
    "parallel": {
        "pp_degree": int,
        "microbatches": int,
        "placement": "auto|v|loop|single",
        "chunks": int,
        "objective": "span|makespan",
        "tensor_parallel": int,
        "sequence_parallel": bool,
        "data_parallel": int,
        "zero_stage": int,
        "optimizer": "adam|lion|sgd-momentum|sgd",
        "precision": "mixed|mixed-fp32-gradients|single|half",
        "recompute": "none|selective|full",
        "granularity": "block|half",
    },
    "device": {
        "achieved_tflops": float,
        "memory_bandwidth": float,
        "link_bandwidth": float,
        "link_latency": float,
        "tensor_parallel_bandwidth": float,
        "tensor_parallel_latency": float,
        "tensor_parallel_overlap": float,
        "memory_limit": float,
        "reserved": float,
    },
}
"""Flags per section of a configuration: every key is a flag with a type, or with the words that it accepts.
``docs/estimates.md`` explains the keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``zbv estimate``."""
    parser.description = (
        "Estimate the layers of a transformer from its configuration: times, activations and static memory, "
        "as a problem for zbv plan. docs/estimates.md explains every key and formula."
    )
    parser.add_argument("--config", metavar="FILE", help="model, parallel and device (JSON), or -")
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="start from a model or device that zbv knows; may be repeated",
    )
    parser.add_argument("--list-presets", action="store_true", help="list the presets, then exit")
    parser.add_argument("--table", action="store_true", help="also print tables of layers and memory")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="problem file (default: -)")
    for section, keys in FLAGS.items():
        group = parser.add_argument_group(f"{section}: replaces values of the file and the presets")
        for key, kind in keys.items():
            name, destination = flag_of(key), f"{section}.{key}"
            if kind is bool:
                group.add_argument(name, dest=destination, action=argparse.BooleanOptionalAction)
            elif isinstance(kind, str):
                group.add_argument(name, dest=destination, metavar=kind)
            else:
                group.add_argument(name, dest=destination, type=kind, metavar=kind.__name__.upper())


def run(arguments: argparse.Namespace) -> None:
    """Estimate and write the problem; tables go to the stream that the problem does not use."""
    from zbv_solver.documents.files import read_json, write
    from zbv_solver.estimate.config import parse_config
    from zbv_solver.estimate.layers import estimate_layers
    from zbv_solver.estimate.presets import with_presets
    from zbv_solver.estimate.problem_document import problem_document

    if arguments.list_presets:
        _list_presets()
        return
    if arguments.config is None and not arguments.preset:
        raise InvalidInput(
            [
                Issue(
                    "",
                    "found neither; give one of them. --list-presets lists the presets.",
                    "--config, --preset",
                )
            ]
        )
    document = {} if arguments.config is None else read_json(arguments.config)
    overrides = _overrides(arguments)
    try:
        config = parse_config(with_presets(document, arguments.preset, overrides))
    except InvalidInput as error:
        issues = [_named(issue, overrides, arguments.config) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None
    layers = estimate_layers(config)
    write(arguments.output, json.dumps(problem_document(config, layers), indent=1) + "\n")
    if arguments.table:
        from zbv_solver.commands.estimate_tables import write_tables

        write_tables(config, layers, sys.stderr if arguments.output == "-" else sys.stdout)


def _named(issue: Issue, overrides: dict[str, dict[str, Any]], path: str | None) -> Issue:
    """An issue that names the flag or the file that holds the mistake."""
    _, section, key = (*issue.pointer.split("/"), "", "")[:3]
    if key in overrides.get(section, {}):
        return Issue("", issue.detail, flag_of(key))
    return issue if path is None or issue.source else replace(issue, source=file_label(path))


def _overrides(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    given = {
        section: {key: value for key in keys if (value := getattr(arguments, f"{section}.{key}")) is not None}
        for section, keys in FLAGS.items()
    }
    return {section: values for section, values in given.items() if values}


def _list_presets() -> None:
    from zbv_solver.estimate.presets import preset, preset_names

    width = max(map(len, preset_names()))
    for name in preset_names():
        sys.stdout.write(f"{name:{width}}  {preset(name).about}\n")
