"""Llama-Nemotron (NVIDIA 2025): blocks of a Llama that a search has made narrower, or replaced.

Bercovich et al. 2024, Puzzle, arXiv 2411.19146, §3; ``modeling_decilm.py`` of the models' repositories.
"""

import json

from zbv_solver.documents.validation import quoted

from zbv_models.estimate.recurrent import linear_map
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind

MULTIPLE = 256
"""Widths of MLPs are rounded up to multiples of it."""
UNKNOWN = (
    *("num_sink_tokens", "sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention"),
    "window_length",
)


def _attention(keys: Keys, hidden: int, heads: int) -> tuple[str, Section]:
    """The letter of a first half, which is empty if it does nothing, and its sizes."""
    group, groups = keys.size("n_heads_in_group"), keys.size("num_key_value_heads")
    sizes = {"kv_heads": groups or (heads // group if group else heads)}
    return _replaced(keys, hidden) or ("*", sizes)


def _mlp(keys: Keys, hidden: int) -> tuple[str, Section]:
    """The same of a second half."""
    multiple, width = keys.get("ffn_mult"), keys.size("intermediate_size")
    replaced = _replaced(keys, hidden)
    if replaced is None and width is None:
        if not isinstance(multiple, int | float) or not 0 < multiple <= 1000:
            raise keys.wrong("ffn_mult", f"found {quoted(multiple)}; must be a number above 0.")
        width = -(-int(2 * multiple * hidden / 3) // MULTIPLE) * MULTIPLE
    return replaced or ("-", {"ffn": width})


def _replaced(keys: Keys, hidden: int) -> tuple[str, Section] | None:
    for name in UNKNOWN:
        if keys.get(name):
            rule = "zbv has formulas for null only. Write model.json instead."
            raise keys.wrong(name, f"found {quoted(keys.get(name))}; {rule}")
    is_skipped, is_linear = keys.flag("no_op"), keys.flag("replace_with_linear")
    return ("", {}) if is_skipped else ("M", {"state_space": linear_map(hidden)}) if is_linear else None


def _blocks(keys: Keys, count: int) -> Blocks:
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    found = [
        (_attention(block.inside("attention"), hidden, heads), _mlp(block.inside("ffn"), hidden))
        for block in keys.each("block_configs", count)
    ]
    blocks = Blocks(tuple(first + second for (first, _), (second, _) in found))
    groups: dict[tuple[int, str], list[int]] = {}
    for place, halves in enumerate(found):
        for half, (letter, sizes) in enumerate(halves):
            if letter:
                at = half if halves[0][0] else 0
                groups.setdefault((at, json.dumps([letter, sizes])), []).append(place)
    for (at, text), places in groups.items():
        blocks = blocks.varied(at, places, **json.loads(text)[1])
    return blocks


TEXT = {"nemotron-nas": TextKind({"bias": False}, defaults="llama", blocks=_blocks)}
