"""Stand-ins for configurations of torchtitan, which settings change; ``make torchtitan`` uses real ones."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

VERSIONS = ("0.3.0", "newer")
_PIPELINE = (
    *("pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv"),
    *("module_fqns_per_model_part", "data_parallel_replicate_degree", "data_parallel_shard_degree"),
    *("fsdp_reshard_after_forward", "tensor_parallel_degree", "context_parallel_degree"),
    "expert_parallel_degree",
)
_FIELDS = {
    "0.3.0": {
        "parallelism": (*_PIPELINE, "pipeline_parallel_microbatch_size"),
        "training": ("local_batch_size", "global_batch_size", "seq_len", "disable_cuda_graphs"),
    },
    "newer": {
        "parallelism": (*_PIPELINE, "num_pp_microbatches"),
        "training": (
            *("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length"),
            "disable_cuda_graphs",
        ),
    },
}
"""The fields of torchtitan/config/configs.py that settings may set."""
UNTOUCHED, FULL, SELECTIVE = "untouched", "full", "selective"


def configured(text: str, version: str) -> Any:
    """What settings make of a configuration; AttributeError for a field that the version does not have."""
    sections = {
        name: make_dataclass(name, [(field, Any, None) for field in fields], slots=True)()
        for name, fields in _FIELDS[version].items()
    }
    config: Any = SimpleNamespace(
        **sections, compile=SimpleNamespace(enable=UNTOUCHED), activation_checkpoint=UNTOUCHED
    )
    if version == "0.3.0":
        config.parallelism.pipeline_parallel_microbatch_size = 1
    return _executed(text)["planned"](config)


def rows_of(text: str) -> list[list[str]]:
    """The schedule's actions of every rank."""
    return [row.split(",") for row in _executed(text)["ROWS"].splitlines()]


def _executed(text: str) -> dict[str, Any]:
    names = ("torchtitan", "torchtitan.distributed", "torchtitan.distributed.activation_checkpoint")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[names[-1]].FullAC = SimpleNamespace(Config=lambda: FULL)
    modules[names[-1]].SelectiveAC = SimpleNamespace(Config=lambda: SELECTIVE)
    found: dict[str, Any] = {}
    with patch.dict(sys.modules, modules):
        exec(text, found)
    return found
