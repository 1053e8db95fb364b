"""What torchtitan's ``SelectiveAC`` saves of a block, counted, as part of ``make torchtitan``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.layers import LayerEstimate

from support.estimates import estimate_config, llama

SEQUENCES, TOKENS = 2, 32
_SIZES = {"hidden": 256, "heads": 16, "layers": 1, "vocabulary": 2048}
_SIZES |= {"sequence": TOKENS, "microbatch_size": SEQUENCES}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SPARSE = {"experts": 8, "experts_per_token": 3, "expert_ffn": 256, "shared_expert_ffn": 512}
QWEN = {"head_dim": 128, "kv_heads": 8, "qk_norm": True}
BLOCKS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", 0, {"ffn": 768}),
    "deepseek_v3": ("deepseek_v3", "debugmodel", 0, {**LATENT, "ffn": 1024}),
    "deepseek_v3 with experts": ("deepseek_v3", "debugmodel", 1, {**LATENT, **SPARSE}),
    "qwen3 with experts": (
        *("qwen3", "debugmodel_moe", 0),
        {**QWEN, "experts": 64, "experts_per_token": 8, "expert_ffn": 768},
    ),
}
"""A model of torchtitan, its configuration, one of its blocks, and that block for ``zbv estimate``."""


def block(model: dict[str, Any], **parallel: Any) -> LayerEstimate:
    """The estimate of a block with ``SelectiveAC``."""
    chosen = {"recompute": "selective", "recompute_modules": ["op"], **parallel}
    return estimate_layers(estimate_config(llama(**_SIZES, **model), **chosen))[1]


def operations() -> Iterator[str]:
    """Blocks of which zbv counts other bytes than torchtitan saves."""
    for what, (name, flavor, index, model) in BLOCKS.items():
        estimated = block(model).selective
        width = model.get("v_head_dim", model.get("head_dim", 16))
        # The outputs of attention, and the normalisers of 16 heads, are not counted.
        others = SEQUENCES * TOKENS * (2 * 256 + 16 * (2 * width + 4))
        found = _saved(name, flavor, index) + others
        if estimated is None or estimated.after_forward != found:
            yield f"{what}: a block keeps {found} bytes; estimated is {estimated}"


class _Attention(torch.nn.Module):
    """Stands for attention, whose kernels are others on CPUs: outputs of the same shape."""

    def forward(self, queries: torch.Tensor, _: Any, values: torch.Tensor, **__: Any) -> torch.Tensor:
        return values.repeat_interleave(queries.shape[-2] // values.shape[-2], dim=-2)


def _saved(name: str, flavor: str, index: int) -> int:
    """Bytes of the products and of the choice of experts that a block saves in F."""
    import torchtitan.distributed.activation_checkpoint as checkpoints
    from torchtitan.config import ParallelismConfig

    storages: list[Any] = []
    create = checkpoints.create_selective_checkpoint_contexts

    def watched(policy: Any) -> Any:
        forward, again = create(policy)
        storages.append(forward.storage)
        return forward, again

    config = import_module(f"torchtitan.models.{name}").model_registry(flavor).model
    model = config.build()
    layer = model.layers[str(index)].to(torch.bfloat16)
    layer.attention.inner_attention = _Attention()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    with patch.object(checkpoints, "create_selective_checkpoint_contexts", watched):
        checkpoints.SelectiveAC.Config().build().apply(model)
        stream = torch.randn(SEQUENCES, TOKENS, config.dim, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(TOKENS).expand(SEQUENCES, TOKENS)
        if "num_pp_microbatches" in ParallelismConfig.__dataclass_fields__:  # newer than 0.3.0
            stream, positions = stream.flatten(0, 1), positions.flatten()
        model.layers[str(index)](stream, None, positions)
    found = 0
    for operation, calls in storages[0].items():
        for call in calls.values():
            outputs = torch.utils._pytree.tree_leaves(call)
            tensors = [each.val for each in outputs if hasattr(each, "val")]
            if "aten.mm." in str(operation):
                found += sum(each.nbytes for each in tensors)
            elif "topk" in str(operation):
                # A GPU's scores have 4 bytes, by autocast.
                found += sum(each.numel() * max(4, each.itemsize) for each in tensors)
    return found
