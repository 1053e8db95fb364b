"""The arguments of ``zbv estimate``."""

from __future__ import annotations

import argparse

from zbv_solver.commands.messages import flag_of

Kind = type[int] | type[float] | type[bool] | str

FLAGS: dict[str, dict[str, Kind]] = {
    "model": {
        "hidden": int,
        "layers": int,
        "heads": int,
        "kv_heads": int,
        "head_dim": int,
        "q_lora_rank": int,
        "kv_lora_rank": int,
        "qk_nope_head_dim": int,
        "qk_rope_head_dim": int,
        "v_head_dim": int,
        "window": int,
        "full_attention_every": int,
        "ffn": int,
        "gated": bool,
        "experts": int,
        "experts_per_token": int,
        "expert_ffn": int,
        "shared_expert_ffn": int,
        "shared_expert_gate": bool,
        "expert_nodes": int,
        "capacity_factor": float,
        "dense_layers": int,
        "expert_every": int,
        "pattern": "LETTERS",
        "prediction_layers": int,
        "vocabulary": int,
        "tied_embeddings": bool,
        "sequence": int,
        "microbatch_size": int,
        "dtype": "bfloat16|float16|float32",
        "product_dtype": "fp8|fp4",
        "attention": "flash|plain",
        "causal": bool,
        "dropout": bool,
        "norm": "layernorm|rmsnorm",
        "bias": bool,
        "qkv_bias": bool,
        "qk_norm": bool,
        "positions": "learned|rotary|none",
        "fused_activation": bool,
        "fused_loss": bool,
    },
    "parallel": {
        "pp_degree": int,
        "microbatches": int,
        "placement": "auto|v|loop|single",
        "chunks": int,
        "objective": "span|makespan",
        "tensor_parallel": int,
        "sequence_parallel": bool,
        "context_parallel": int,
        "context_exchange": "ring|all-gather",
        "expert_parallel": int,
        "expert_parallel_in_node": int,
        "data_parallel": int,
        "zero_stage": int,
        "optimizer": "adam|muon|lion|sgd-momentum|sgd",
        "precision": "mixed|mixed-fp32-gradients|bf16-states|fp8-states|single|half",
        "offloaded_states": float,
        "recompute": "none|selective|full",
        "fused_gradients": bool,
        "granularity": "block|half",
    },
    "device": {
        "achieved_tflops": float,
        "peak_tflops": float,
        "fp8_tflops": float,
        "fp4_tflops": float,
        "product_bandwidth": float,
        "kernel_latency": float,
        "processors": int,
        "launch_time": float,
        "attention_share": float,
        "memory_bandwidth": float,
        "link_bandwidth": float,
        "link_latency": float,
        "tensor_parallel_bandwidth": float,
        "tensor_parallel_latency": float,
        "tensor_parallel_step_latency": float,
        "tensor_parallel_overlap": float,
        "context_parallel_bandwidth": float,
        "context_parallel_latency": float,
        "context_parallel_overlap": float,
        "expert_parallel_bandwidth": float,
        "expert_parallel_latency": float,
        "expert_parallel_overlap": float,
        "data_parallel_bandwidth": float,
        "data_parallel_latency": float,
        "data_parallel_overlap": float,
        "memory_limit": float,
        "reserved": float,
    },
}
"""Flags per section of a configuration: every key is a flag with a type or the words that it accepts, but
``state_space`` and ``vision``, which are objects.
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
