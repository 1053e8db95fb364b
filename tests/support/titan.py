"""Stand-ins for what zbv uses of torchtitan; ``make torchtitan`` compares them with the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as nnf

WIDTH, WORDS, BLOCKS = 8, 12, 4


class Linear(nn.Linear):
    """As in torchtitan, a subclass that inherits the forward."""


class Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nnf.embedding(input, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Any:
        shifted = x if positions is None else x + positions[..., None].to(x.dtype) / 10
        return x + self.down(nnf.silu(self.up(self.norm(shifted))))


class Decoder(nn.Module):
    """Skips modules that a stage does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: Embedding | None = Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(at): Block() for at in range(BLOCKS)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(WIDTH)
        self.lm_head: Linear | None = Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)

    def initialize(self) -> None:
        """Values that depend only on the parameters' names."""
        for name, parameter in self.named_parameters():
            seed = torch.Generator().manual_seed(sum(map(ord, name)))
            whole = 0.3 * torch.randn(parameter.shape, generator=seed)
            with torch.no_grad():
                parameter.copy_(_placed(whole, parameter))


def _placed(whole: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def loss_fn(pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None) -> Any:
    """The summed cross entropy, divided by the tokens of the whole batch; and metrics."""
    total = nnf.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return (total if global_valid_tokens is None else total / global_valid_tokens), {}


@dataclass
class ParallelismConfig:
    pipeline_parallel_schedule: str = "ZBVZeroBubble"
    pipeline_parallel_microbatch_size: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None


@dataclass
class NewerParallelismConfig:
    """Of the source since August 2026, which counts microbatches instead of sequences."""

    pipeline_parallel_schedule: str = "ZBVZeroBubble"
    num_pp_microbatches: int = 4
    module_fqns_per_model_part: list[list[str]] | None = None


@dataclass
class TrainingConfig:
    """Newer sources have no ``local_batch_size``."""

    local_batch_size: int = 4
    mixed_precision_param: str = "float32"


@dataclass
class CompileConfig:
    enable: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])


class ParallelDims:
    def __init__(self, pp: int, world_size: int):
        self.pp = pp
        self.world_size = world_size
        self._whole = init_device_mesh("cpu", (pp, world_size // pp), mesh_dim_names=("pp", "fsdp"))

    def get_mesh(self, dims: str) -> DeviceMesh:
        return self._whole[dims]


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> Any:
    """``fully_shard`` where torchtitan applies it: norm and head share a group, and the stage is the root."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    given: dict[str, Any] = {"mesh": parallel_dims.get_mesh("fsdp"), "mp_policy": policy}
    part: Any = model
    if part.tok_embeddings is not None:
        fully_shard(part.tok_embeddings, **given)
    if part.norm is not None and part.lm_head is not None:
        fully_shard([part.norm, part.lm_head], **given)
    for block in part.layers.values():
        fully_shard(block, **given)
    fully_shard(part, **given)
    for module in part.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    return part


@dataclass
class ModelSpec:
    parallelize_fn: Callable[..., Any] = parallelize
    pipelining_fn: Callable[..., Any] | None = print


def pipelining_arguments(parallel_dims: ParallelDims, spec: ModelSpec) -> dict[str, Any]:
    """The keyword arguments with which torchtitan's trainer calls ``pipelining_fn``."""
    return {
        "parallel_dims": parallel_dims,
        "training": TrainingConfig(),
        "parallelism": ParallelismConfig(),
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
        "device": torch.device("cpu"),
        "model_config": None,
        "parallelize_fn": spec.parallelize_fn,
        "loss_fn": loss_fn,
    }
