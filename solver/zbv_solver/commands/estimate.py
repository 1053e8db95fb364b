"""``zbv estimate``: what it takes and what it writes. Imports nothing heavy until it runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

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
"""Every key of a configuration is a flag, too, of a type or of one of some words; ``docs/estimates.md`` says
what it means."""


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
        help="start from a model or device that is known here; may be repeated",
    )
    parser.add_argument("--list-presets", action="store_true", help="print the presets, and nothing else")
    parser.add_argument("--table", action="store_true", help="print tables for people, too")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="problem file (default: -)")
    for section, keys in FLAGS.items():
        group = parser.add_argument_group(f"{section}, in place of what the file and the presets say")
        for key, kind in keys.items():
            name, destination = f"--{key.replace('_', '-')}", f"{section}.{key}"
            if kind is bool:
                group.add_argument(name, dest=destination, action=argparse.BooleanOptionalAction)
            elif isinstance(kind, str):
                group.add_argument(name, dest=destination, metavar=kind)
            else:
                group.add_argument(name, dest=destination, type=kind, metavar=kind.__name__.upper())


def run(arguments: argparse.Namespace) -> None:
    """Estimate, and write the problem; tables go where the problem does not."""
    from zbv_solver.documents.files import read_json, write
    from zbv_solver.errors import InvalidInput
    from zbv_solver.estimate.config import parse_config
    from zbv_solver.estimate.layers import estimate_layers
    from zbv_solver.estimate.presets import with_presets
    from zbv_solver.estimate.problem_document import problem_document

    if arguments.list_presets:
        _list_presets()
        return
    if arguments.config is None and not arguments.preset:
        raise InvalidInput.at(
            "", "found neither --config nor --preset; give one of them. --list-presets says what there is."
        )
    document = {} if arguments.config is None else read_json(arguments.config)
    config = parse_config(with_presets(document, arguments.preset, _overrides(arguments)))
    layers = estimate_layers(config)
    write(arguments.output, json.dumps(problem_document(config, layers), indent=1) + "\n")
    if arguments.table:
        from zbv_solver.commands.estimate_tables import write_tables

        write_tables(config, layers, sys.stderr if arguments.output == "-" else sys.stdout)


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
