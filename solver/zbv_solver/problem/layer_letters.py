"""Names of layers and of their parts: which are transformer layers, and which belong to the ends of a model.

The letters are those of Megatron-LM's layouts (``PipelineParallelLayerLayout.parse_str_to_list`` in
``megatron/core/transformer/pipeline_parallel_layer_layout.py``), and v for a layer of a vision encoder, for
which Megatron-LM has none.
"""

from __future__ import annotations

import re
from typing import Literal

Recomputed = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe", "op"]
"""What selective recomputation may repeat, by the names of Megatron-LM's ``--recompute-modules``.

``op`` alone is torchtitan's ``SelectiveAC``: every second product, and all that is cheap.
"""
VISION, EMBEDDING, DECODER, MTP, LOSS, PART = "v", "E", "t", "m", "L", ""
"""Modules, and the mark of a layer that belongs to the module before it."""

_RULES = (
    (PART, r"norm|\.(mlp|ffn|feed_forward|moe)$|^final_"),
    (MTP, r"mtp|nextn|^prediction"),
    (VISION, r"vision|visual|patch|projector|^vit\b"),
    (EMBEDDING, r"embed|wte"),
    (LOSS, r"head|loss|logits|classifier|^output"),
)
"""Letters by what a layer's name contains; any other layer is a transformer layer."""


def letter_of(name: str) -> str:
    """The letter of a layer by its name."""
    lowered = name.lower()
    return next((letter for letter, pattern in _RULES if re.search(pattern, lowered)), DECODER)
