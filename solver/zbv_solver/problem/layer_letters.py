"""What layers are, by their names: embedding, transformer layers, MTP layers, and loss."""

from __future__ import annotations

import re

EMBEDDING, DECODER, MTP, LOSS, PART = "E", "t", "m", "L", ""
"""Megatron-LM's letters of modules, and the mark of a layer that belongs to the module before it."""

_RULES = (
    (PART, r"norm|\.(mlp|ffn|feed_forward|moe)$|^final_"),
    (MTP, r"mtp|nextn|^prediction"),
    (EMBEDDING, r"embed|wte"),
    (LOSS, r"head|loss|logits|classifier|^output"),
)
"""Letters by what a layer's name contains; any other layer is a transformer layer."""


def letter_of(name: str) -> str:
    """The letter of a layer with this name."""
    lowered = name.lower()
    return next((letter for letter, pattern in _RULES if re.search(pattern, lowered)), DECODER)
