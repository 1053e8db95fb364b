"""The layers and experts of a language model from the keys of its ``config.json``.

What a file does not say about its type is a :class:`~zbv_models.estimate.transformers_kinds.TextKind`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from zbv_solver.documents.validation import quoted

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import SLIDING, Blocks, TextKind

MIXERS = {
    "attention": "*",
    "full_attention": "*",
    "sliding_attention": "W",
    "chunked_attention": "W",
    "linear_attention": "M",
    "mamba": "M",
    "indexed_attention": "I",
    "deepseek_sparse_attention": "I",
}
"""Letters of ``pattern`` by transformers' names of layers."""
FFNS = {"sparse": "E", "dense": "-", "moe": "E", "hash_moe": "E"}
"""Letters of second halves by the names of ``mlp_layer_types``."""
SINGLE = {"-": "-", "mlp": "-", "E": "E", "moe": "E", "M": "M", "*": "*", **MIXERS}
"""The same for models whose layers have one half each, by names or letters."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_top_k", "moe_topk", "moe_k"),
)
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "share_expert_dims",
)
PER_LAYER = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "value_dim": "v_head_dim",
}
"""Keys of the section ``model`` by those of ``per_layer_config``."""
LISTED = ("layer_types", "attn_type_list", "compress_ratios", "hybrid_layer_pattern")
PREDICTIONS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
PREDICTED = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
OF_EXPERTS = (
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_freq", "decoder_sparse_step"),
    *("mlp_only_layers", "interleave_moe_layer_step", "n_group", "num_expert_group", "topk_group"),
)
"""Further keys that have no effect without experts."""
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers")
LARGEST_PERIOD = 16


def read_layers(keys: Keys, kind: TextKind) -> Section:
    """The number of layers, what they are, and modules of multi-token prediction."""
    if kind.halves:
        return _single_layers(keys, kind)
    count = keys.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if kind.blocks is not None:
        blocks = kind.blocks(keys, count)
    else:
        mixers = _mixers(keys, kind, count)
        blocks = Blocks(tuple(map("".join, zip(mixers, _ffns(keys, kind, count), strict=True))))
    letters = "".join(blocks.letters)
    blocks = _per_layer(keys, blocks)
    if kind.vary is not None:
        blocks = kind.vary(keys, blocks)
    model = {**_pattern(blocks, has_experts=bool(keys.count(*EXPERTS))), **_window(keys, kind, letters)}
    if "M" in letters and kind.state_space is not None:
        model["state_space"] = kind.state_space(keys)
    return {**model, "prediction_layers": _predictions(keys)}


def _per_layer(keys: Keys, blocks: Blocks) -> Blocks:
    """Sizes of single layers, as transformers writes them (``PreTrainedConfig.per_layer_config``)."""
    if keys.get("per_layer_config") is None:
        return blocks
    outer = keys.inside("per_layer_config")
    groups: dict[tuple[tuple[str, int | None], ...], list[int]] = {}
    for name in outer.names:  # numbers as texts, which may begin with 0
        if name.isdecimal() and int(name) < len(blocks.letters):
            inner = outer.inside(name)
            sizes = tuple((key, inner.size(own)) for key, own in PER_LAYER.items())
            groups.setdefault(sizes, []).append(int(name))
    for sizes, places in groups.items():
        blocks = blocks.varied(0, places, **dict(sizes))
    return blocks


def _predictions(keys: Keys) -> int:
    """Modules of multi-token prediction; MiniMax also says how many layers each has."""
    if keys.get("mtp_transformer_layers") not in (None, 1):
        found = quoted(keys.get("mtp_transformer_layers"))
        raise keys.wrong("mtp_transformer_layers", f"found {found}; zbv reads modules of one layer only.")
    count = keys.count(*PREDICTIONS)
    if keys.count("mtp_num_hidden_layers") > 1:
        rule = "layers of such a module share its projection, and zbv has a formula for one layer only."
        raise keys.wrong("mtp_num_hidden_layers", f"found {count}; {rule} Write model.json instead.")
    return count if keys.flag("use_mtp", null=True) else 0


def _window(keys: Keys, kind: TextKind, letters: str) -> Section:
    """How many tokens a query attends to, and what chooses them."""
    if keys.get("index_topk") is not None:
        names = {"window": "index_topk", "index_heads": "index_n_heads", "index_dim": "index_head_dim"}
        return {key: keys.size(name) for key, name in names.items()}
    if "W" not in letters:
        return {}
    return {"window": keys.size(*kind.window_keys), "chunked": kind.chunked or None}


def _single_layers(keys: Keys, kind: TextKind) -> Section:
    """Nemotron-H: a letter or a name per layer, which is half a block; also of the prediction's layers."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    pattern = _named(keys, None, SINGLE, *names)
    count = keys.get("num_hidden_layers")
    if count is not None and count != len(pattern):
        raise keys.wrong("num_hidden_layers", f"found {quoted(count)}; there are {len(pattern)} layers.")
    model: Section = {"layers": len(pattern), "pattern": pattern, "prediction_layers": _predictions(keys)}
    if _has_window(keys, kind):
        pattern = pattern.replace("*", "W")
        model |= {"pattern": pattern, **_window(keys, kind, pattern)}
    keys.get(*PREDICTED)
    if model["prediction_layers"]:
        model["prediction_pattern"] = f"({_named(keys, None, SINGLE, *PREDICTED)})"
    if "M" in pattern + model.get("prediction_pattern", "") and kind.state_space is not None:
        model["state_space"] = kind.state_space(keys)
    return model


def _mixers(keys: Keys, kind: TextKind, count: int) -> str:
    """A letter per block for its first half."""
    if keys.get(*LISTED) is not None:
        return _named_mixers(keys, kind, count)
    if kind.first is not None:
        return kind.first(keys, count)
    if keys.get("index_topk") is not None:
        return indexed(keys, count)
    every = keys.count(*_EVERY, null=kind.full_every or 0, least=1)
    special = "M" if kind.state_space else "W" if _has_window(keys, kind) else "*"
    if kind.window == "switch":
        start = keys.count("max_window_layers") if special == "W" else 0
        return "".join("*" if place < start else special for place in range(count))
    return _mixed(special, count, every)


_EVERY = ("sliding_window_pattern", "full_attention_interval", "_sliding_window_pattern", "layer_switch")


def _named_mixers(keys: Keys, kind: TextKind, count: int) -> str:
    letters = _named(keys, count, {**(kind.mixers or MIXERS)}, *LISTED)
    for name in ("use_sliding_window", "max_window_layers", *SLIDING, "attention_chunk_size"):
        keys.get(name)  # the list says which of them count
    every = keys.get(*_EVERY)
    if every is not None:
        # EXAONE 4 has a period of letters: L for the window, G for all tokens.
        period = every if isinstance(every, str) else "L" * (keys.count(*_EVERY, least=1) - 1) + "G"
        is_full = [period[at % len(period)] == "G" for at in range(count)] if period else []
        _require(keys, is_full == [letter == "*" for letter in letters], "layer_types", *_EVERY)
    return indexed(keys, count) if "I" in letters and not kind.mixers else letters


def _require(keys: Keys, same: object, listed: str, *names: str) -> None:
    """Raise :class:`InvalidInput` where a number contradicts the list that has an entry per layer."""
    if not same:
        detail = f"found {quoted(keys.get(*names))}, but {listed} says otherwise. Correct one of them."
        raise keys.wrong(keys.name_of(names), detail)


def indexed(keys: Keys, count: int) -> str:
    """Blocks with an indexer, and blocks that use the choice of an earlier one."""
    every = keys.count("index_topk_freq", null=1, least=1)
    offset = keys.count("index_skip_topk_offset", null=2)
    is_full = (max(place - offset + 1, 0) % every == 0 for place in range(count))
    by_number = "".join("I" if full else "W" for full in is_full)
    names = ("indexer_types", "index_topk_pattern")
    if keys.get(*names) is None:
        return by_number
    found = _named(keys, count, {"full": "I", "F": "I", "shared": "W", "S": "W"}, *names)
    has_number = keys.has("index_topk_freq")
    _require(keys, not has_number or found == by_number, keys.name_of(names), "index_topk_freq")
    return found


def _named(keys: Keys, count: int | None, letters: dict[Any, str], *names: str) -> str:
    """The letters of a list with a name per layer; without a ``count``, of any length."""
    found = keys.listed(count, *names, padding=keys.count(*PREDICTIONS))
    others = [each for each in found if type(each) not in (int, str) or each not in letters]
    if others:
        detail = f"found {quoted(others[0])}; zbv has formulas for {', '.join(map(str, letters))}."
        raise keys.wrong(keys.name_of(names), f"{detail} Write model.json instead.")
    return "".join(letters[each] for each in found)


def _has_window(keys: Keys, kind: TextKind) -> bool:
    if not keys.flag("use_sliding_window", null=kind.window != "switch"):
        for name in (*SLIDING, "max_window_layers"):
            keys.get(name)  # has no effect
        return False
    return kind.window is not None and keys.size(*kind.window_keys) is not None


def _ffns(keys: Keys, kind: TextKind, count: int) -> str:
    """``E`` for a block with experts, ``-`` for one with an MLP."""
    if not keys.count(*EXPERTS):
        return "-" * count
    is_listed = isinstance(keys.get("moe_layer_freq"), list)
    if keys.has("mlp_layer_types"):
        found = _named(keys, count, FFNS, "mlp_layer_types")
        if is_listed:
            same = [bool(each) for each in keys.listed(count, "moe_layer_freq")] == [e == "E" for e in found]
            _require(keys, same, "mlp_layer_types", "moe_layer_freq")
        else:
            keys.count("moe_layer_freq", least=1)
        return _with_first_dense(keys, found, "mlp_layer_types")
    if kind.second is not None:
        return kind.second(keys, count)
    if keys.has("moe_layers"):
        places = keys.places(count, "moe_layers")
        step = keys.count("interleave_moe_layer_step", null=1, least=1)
        same = set(places) == set(range(step - 1, count, step))
        has_step = keys.has("interleave_moe_layer_step")
        _require(keys, same or not has_step, "moe_layers", "interleave_moe_layer_step")
        return "".join("E" if place in places else "-" for place in range(count))
    if is_listed:
        found = "".join("E" if each else "-" for each in keys.listed(count, "moe_layer_freq"))
        return _with_first_dense(keys, found, "moe_layer_freq")
    dense, only = keys.count(*FIRST_DENSE), keys.places(count, "mlp_only_layers")
    from_zero = keys.count("moe_layer_freq", null=1, least=1)
    step = keys.count("decoder_sparse_step", "interleave_moe_layer_step", null=1, least=1)
    return "".join(
        "E"
        if place >= dense and place not in only and place % from_zero == 0 and (place + 1) % step == 0
        else "-"
        for place in range(count)
    )


def _with_first_dense(keys: Keys, letters: str, listed: str) -> str:
    """The same letters; raises :class:`InvalidInput` where the file has another number of dense layers."""
    dense, first = keys.count(*FIRST_DENSE), (letters + "E").find("E")
    _require(keys, not keys.has(*FIRST_DENSE) or min(dense, len(letters)) == first, listed, *FIRST_DENSE)
    return letters


def _pattern(blocks: Blocks, *, has_experts: bool) -> Section:
    """The keys that describe the blocks, where they can: otherwise a pattern."""
    some = [each for each in blocks.letters if each]
    spelled: Section = {
        "layers": len(some),
        "pattern": "".join(f"({each})" if len(each) == 2 else each for each in some),
        "variants": list(blocks.variants) or None,
    }
    if blocks.variants or any(len(each) == 1 for each in some):
        return spelled
    mixers, ffns = map("".join, zip(*some, strict=True))
    periods = [None, *range(2, LARGEST_PERIOD)]
    full = next((each for each in periods if mixers == _mixed(mixers[0], len(mixers), each)), 0)
    firsts = (0, max(0, ffns.find("E")))
    fits = (
        (first, every)
        for every, first in product(range(1, LARGEST_PERIOD), firsts)
        if ffns == _dense_first(len(ffns), first, every)
    )
    found = next(fits, None) if has_experts else (0, 1)
    if full == 0 or found is None or set(mixers) - set("*WI") or {"W", "I"} <= set(mixers):
        return spelled
    return {
        "layers": len(some),
        "full_attention_every": full,
        "dense_layers": found[0],
        "expert_every": found[1],
    }


def _mixed(special: str, count: int, every: int | None) -> str:
    """Blocks of one letter, but for every n-th."""
    return "".join("*" if every and (place + 1) % every == 0 else special for place in range(count))


def _dense_first(count: int, first: int, every: int) -> str:
    return "".join("E" if place >= first and (place + 1) % every == 0 else "-" for place in range(count))


def read_experts(keys: Keys, kind: TextKind) -> Section:
    """The sizes of experts; empty without them."""
    if not keys.count(*EXPERTS):
        for name in (kind.expert_width, *CHOSEN, *SHARED, *SHARED_WIDTH, *OF_EXPERTS):
            keys.get(name)  # has no effect
        return {}
    width, shared = keys.size(kind.expert_width), keys.count(*SHARED_WIDTH)
    if kind.shared_experts or keys.get(*SHARED) is not None:
        count = kind.shared_experts or keys.count(*SHARED)
        shared = (shared or count * keys.number(kind.expert_width)) if count else 0
    groups, nodes = keys.count("n_group", "num_expert_group"), keys.size("topk_group")
    return {
        "experts": keys.count(*EXPERTS),
        "experts_per_token": keys.size(*CHOSEN),
        "expert_ffn": width,
        "expert_hidden": keys.size("moe_latent_size", "routed_expert_hidden_size"),
        "shared_expert_ffn": shared or None,
        "expert_nodes": nodes if groups > 1 else None,
    }
