"""torchtitan, 0.3.0 or newer, trains its Llama 3 debug model with a plan, on CPUs or GPUs::

    torchrun --nproc-per-node 2 -m examples.torchtitan.train
    torchrun --nproc-per-node 4 -m examples.torchtitan.train

The second command has two data-parallel ranks per stage. docs/torchtitan.md explains the parts.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    # torchtitan computes on accelerators only. These replacements let it run on CPUs, for a trial.
    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed

    statistics = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: statistics, reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: monitor
    distributed.set_pg_timeouts = lambda **_: None

from examples.torchtitan.hook import with_plan
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import BaseDataLoader, Trainer

PLAN = Path(__file__).with_name("plan.json")
MICROBATCHES, LENGTH = 8, 64  # microbatches of the plan, and tokens of a sequence


class Bytes(BaseTokenizer):
    """Every byte of a text is a token, so no file of a tokenizer is needed."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Text(BaseDataLoader):
    """Sequences of this file; every data-parallel rank reads other ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, **given: Any):
        self.tokens = torch.tensor(given["tokenizer"].encode(Path(__file__).read_text()))
        self.ranks, self.rank = given["dp_world_size"], given["dp_rank"]
        self.is_flat = "num_tokens_per_batch" in given  # newer than 0.3.0: sequences follow each other
        length = given["max_context_length" if self.is_flat else "seq_len"]
        count = given["num_tokens_per_batch"] // length if self.is_flat else given["local_batch_size"]
        self.shape = count, length
        self.read = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        count, length = self.shape
        while True:
            places = (self.read + torch.arange(count)) * self.ranks + self.rank
            begin = 61 * places % (len(self.tokens) - length - 1)
            chosen = self.tokens[begin[:, None] + torch.arange(length + 1)]
            self.read += count
            inputs, labels = chosen[:, :-1], chosen[:, 1:]
            positions = torch.arange(length).expand(count, length)
            if self.is_flat:
                inputs, labels, positions = inputs.flatten(), labels.flatten(), positions.flatten()
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def sequences(config: Trainer.Config, count: int) -> None:
    """Set the sequences of a step and rank, each a microbatch."""
    training, parallelism = config.training, config.parallelism
    if hasattr(parallelism, "num_pp_microbatches"):  # newer than 0.3.0
        parallelism.num_pp_microbatches = count
        training.max_context_length = training.num_tokens_per_microbatch_per_dp_rank = LENGTH
    else:
        training.local_batch_size, training.seq_len = count, LENGTH


def configuration(plan: Path | None = PLAN) -> Trainer.Config:
    """The debug model's configuration, changed for the plan."""
    config = llama3_debugmodel()
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # the default, FlexAttention, has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = spec
    config.tokenizer, config.dataloader = Bytes.Config(), Text.Config()
    config.training = TrainingConfig(steps=10, disable_cuda_graphs=True)
    config.loss = CrossEntropyLoss.Config()
    config.activation_checkpoint = None
    config.checkpoint.enable = config.validator.enable = config.debug.enable_structured_logging = False
    config.dump_folder = "build/torchtitan-run"
    # torch 2.13 cannot run the default, spmd_types, with data parallelism; newer versions can.
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    sequences(config, MICROBATCHES)
    if plan is not None:  # --- from here on: the plan
        config.model_spec = with_plan(spec, plan)
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"  # for a plan with placement v
    return config


if __name__ == "__main__":
    init_logger()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trainer = configuration().build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
