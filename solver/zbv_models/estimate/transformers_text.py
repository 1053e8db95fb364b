"""A language model from the keys of its ``config.json``: its type, layers and experts.

What configurations do not say about a type is in :data:`TEXT_KINDS`. The sources are the modeling files of
transformers 5 (``models/TYPE/modeling_TYPE.py``); for ``kimi_k2``, ``kimi_vl`` and ``mimo`` the files in
their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from zbv_solver.documents.validation import quoted

from zbv_models.estimate.sections import Section
from zbv_models.estimate.state_space import DeltaNet, Mamba
from zbv_models.estimate.transformers_keys import Keys

Window = Literal["all", "alternate", "switch"]


@dataclass(frozen=True)
class TextKind:
    """A type of language model."""

    model: Section = field(default_factory=dict)
    """Values of the section ``model`` that are not those of Llama: RMSNorm, a gate, rotary positions, no
    biases."""
    window: Window | None = None
    """Which blocks have the window: ``all``, ``alternate`` (all but every n-th; ``full_every``),
    ``switch`` (with ``use_sliding_window``, those from ``max_window_layers``), or none."""
    linear: bool = False
    """Whether the blocks that are not full attention are gated delta nets."""
    chunked: bool = False
    """Whether the window is a piece of the sequence."""
    halves: bool = False
    """Whether a layer is half a block."""
    full_every: int | None = None
    """Every n-th block attends to all tokens, unless the file says so."""
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    """The keys of the widths of experts, and of MLPs."""
    shared_experts: int = 0
    """Shared experts that the file does not count."""
    defaults: str = ""
    """The type whose defaults it has, if these are not its own."""
    computed: Section = field(default_factory=dict)
    """Defaults that transformers computes."""

    @property
    def window_keys(self) -> tuple[str, ...]:
        """The names of the key of the window's width."""
        return ("attention_chunk_size",) if self.chunked else SLIDING


UNBIASED: Section = {"bias": False, "qkv_bias": False}
QWEN2: Section = {"bias": False, "qkv_bias": True}
QWEN3: Section = {"qk_norm": True}
GPT: Section = {"gated": False, "norm": "layernorm", "bias": True, "qkv_bias": True}
GATED: Section = {"qk_norm": True, "output_gate": True, "shared_expert_gate": True}

FAMILIES = (
    ("cohere ernie4_5 gemma granite llama", TextKind()),
    ("arcee", TextKind({"gated": False})),
    ("bloom", TextKind({**GPT, "positions": "none"})),
    ("cohere2", TextKind(window="alternate", full_every=4)),
    ("deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa", TextKind(UNBIASED)),
    ("kimi_k2", TextKind(UNBIASED, defaults="deepseek_v3")),
    ("glm4_moe_lite", TextKind(UNBIASED, computed={"first_k_dense_replace": 1})),
    ("ministral ministral3 mistral phi3", TextKind(UNBIASED, window="all")),
    ("mixtral", TextKind(UNBIASED, window="all", expert_width="intermediate_size")),
    ("gemma2", TextKind({"post_norms": True}, window="alternate", full_every=2)),
    ("gemma3_text", TextKind({"post_norms": True, **QWEN3}, window="alternate", full_every=6)),
    ("glm glm4_moe glm4v_moe_text seed_oss", TextKind({"bias": False})),
    ("glm4", TextKind({"bias": False, "post_norms": True})),
    ("glm4v_text", TextKind({**QWEN2, "post_norms": True})),
    ("gpt2", TextKind({**GPT, "positions": "learned"})),
    ("gpt_neox phi", TextKind(GPT)),
    ("gpt_oss", TextKind({"bias": True}, "alternate", full_every=2, expert_width="intermediate_size")),
    ("llama4_text", TextKind(
        window="alternate", chunked=True, full_every=4, expert_width="intermediate_size",
        dense_width="intermediate_size_mlp", shared_experts=1)),
    ("mimo", TextKind({"bias": False}, window="switch", defaults="qwen2")),
    ("minimax_m2", TextKind({**UNBIASED, **QWEN3}, expert_width="intermediate_size")),
    ("nemotron", TextKind({"gated": False, "norm": "layernorm"})),
    ("starcoder2", TextKind({"gated": False, "norm": "layernorm"}, window="all")),
    ("nemotron_h", TextKind({"gated": False, "positions": "none"}, window="all", halves=True)),
    ("olmo2 qwen3_vl_moe_text qwen3_vl_text", TextKind(QWEN3)),
    ("olmoe", TextKind(QWEN3, expert_width="intermediate_size")),
    ("exaone4 olmo3", TextKind(QWEN3, window="alternate", full_every=4)),
    ("dots1 qwen3 qwen3_moe", TextKind(QWEN3, window="switch")),
    ("qwen2 qwen2_5_vl_text qwen2_vl_text", TextKind(QWEN2, window="switch")),
    ("qwen2_moe", TextKind({**QWEN2, "shared_expert_gate": True}, window="switch")),
    ("qwen3_5_moe_text qwen3_5_text qwen3_next", TextKind(GATED, linear=True, full_every=4)),
    ("smollm3", TextKind(window="switch")),
    ("stablelm", TextKind({"norm": "layernorm", "bias": False})),
)  # fmt: skip
TEXT_KINDS: Mapping[str, TextKind] = {name: kind for names, kind in FAMILIES for name in names.split()}

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
SINGLE = {"-": "-", "mlp": "-", "E": "E", "moe": "E", "M": "M", "*": "*", **MIXERS}
"""The same for models whose layers have one half each, by names or letters."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
SHARED = ("n_shared_experts", "num_shared_experts")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
PREDICTIONS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
PREDICTED = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
SLIDING = ("sliding_window", "sliding_window_size")
FIRST_DENSE = "first_k_dense_replace"
LARGEST_PERIOD = 16


def read_layers(keys: Keys, kind: TextKind) -> Section:
    """The number of layers, what they are, and modules of multi-token prediction."""
    if kind.halves:
        return _single_layers(keys, kind)
    count = keys.number("num_hidden_layers", "n_layer")
    mixers, ffns = _mixers(keys, kind, count), _ffns(keys, count)
    pattern = _pattern(mixers, ffns, has_experts=bool(keys.count(*EXPERTS)))
    model: Section = {"layers": count, **pattern, **_window(keys, kind, mixers)}
    if "M" in mixers:
        model["state_space"] = _delta_net(keys)
    model["prediction_layers"] = _predictions(keys)
    return model


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
    if "M" in pattern + model.get("prediction_pattern", ""):
        model["state_space"] = _mamba(keys)
    return model


def _mixers(keys: Keys, kind: TextKind, count: int) -> str:
    """A letter per block for its first half."""
    kinds = keys.get("attn_type_list")
    if kinds is not None and kinds != [1] * count:
        detail = f"found {quoted(kinds)}; zbv has formulas for 1 only, attention. Write model.json instead."
        raise keys.wrong("attn_type_list", detail)
    if keys.has("layer_types"):
        return _named_mixers(keys, count)
    if keys.get("index_topk") is not None:
        return _indexed(keys, count)
    every = keys.count(*_EVERY, null=kind.full_every or 0, least=1)
    special = "M" if kind.linear else "W" if _has_window(keys, kind) else "*"
    if kind.window == "switch":
        start = keys.count("max_window_layers") if special == "W" else 0
        return "".join("*" if place < start else special for place in range(count))
    if not every:
        return special * count
    return "".join("*" if (place + 1) % every == 0 else special for place in range(count))


_EVERY = ("sliding_window_pattern", "full_attention_interval", "_sliding_window_pattern", "layer_switch")


def _named_mixers(keys: Keys, count: int) -> str:
    letters = _named(keys, count, MIXERS, "layer_types")
    for name in ("use_sliding_window", "max_window_layers", *SLIDING, "attention_chunk_size"):
        keys.get(name)  # the list says which of them count
    every = keys.get(*_EVERY)
    if every is not None:
        # EXAONE 4 has a period of letters: L for the window, G for all tokens.
        period = every if isinstance(every, str) else "L" * (keys.count(*_EVERY, least=1) - 1) + "G"
        is_full = [period[at % len(period)] == "G" for at in range(count)] if period else []
        _require(keys, is_full == [letter == "*" for letter in letters], "layer_types", *_EVERY)
    return _indexed(keys, count) if "I" in letters else letters


def _require(keys: Keys, same: object, listed: str, *names: str) -> None:
    """Raise :class:`InvalidInput` where a number contradicts the list that has an entry per layer."""
    if not same:
        detail = f"found {quoted(keys.get(*names))}, but {listed} says otherwise. Correct one of them."
        raise keys.wrong(keys.name_of(names), detail)


def _indexed(keys: Keys, count: int) -> str:
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


def _named(keys: Keys, count: int | None, letters: dict[str, str], *names: str) -> str:
    """The letters of a list with a name per layer; without a ``count``, of any length."""
    found = keys.listed(count, *names)
    others = [each for each in found if not isinstance(each, str) or each not in letters]
    if others:
        detail = f"found {quoted(others[0])}; zbv has formulas for {', '.join(letters)}."
        raise keys.wrong(keys.name_of(names), f"{detail} Write model.json instead.")
    return "".join(letters[each] for each in found)


def _has_window(keys: Keys, kind: TextKind) -> bool:
    if not keys.flag("use_sliding_window", null=kind.window != "switch"):
        for name in (*SLIDING, "max_window_layers"):
            keys.get(name)  # has no effect
        return False
    return kind.window is not None and keys.size(*kind.window_keys) is not None


def _ffns(keys: Keys, count: int) -> str:
    """``E`` for a block with experts, ``-`` for one with an MLP."""
    if not keys.count(*EXPERTS):
        return "-" * count
    is_listed = isinstance(keys.get("moe_layer_freq"), list)
    if keys.has("mlp_layer_types"):
        found = _named(keys, count, {"sparse": "E", "dense": "-"}, "mlp_layer_types")
        if is_listed:
            same = [bool(each) for each in keys.listed(count, "moe_layer_freq")] == [e == "E" for e in found]
            _require(keys, same, "mlp_layer_types", "moe_layer_freq")
        else:
            keys.count("moe_layer_freq", least=1)
        return _with_first_dense(keys, found, "mlp_layer_types")
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
    dense, only = keys.count(FIRST_DENSE), keys.places(count, "mlp_only_layers")
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
    dense, first = keys.count(FIRST_DENSE), (letters + "E").find("E")
    _require(keys, not keys.has(FIRST_DENSE) or min(dense, len(letters)) == first, listed, FIRST_DENSE)
    return letters


def _pattern(mixers: str, ffns: str, *, has_experts: bool) -> Section:
    """The keys that describe the blocks, where they can: otherwise a pattern."""
    periods = [None, *range(2, LARGEST_PERIOD)]
    full = next((each for each in periods if mixers == _mixed(mixers, each)), 0)
    firsts = (0, max(0, ffns.find("E")))
    fits = (
        (first, every)
        for every, first in product(range(1, LARGEST_PERIOD), firsts)
        if ffns == _dense_first(len(ffns), first, every)
    )
    found = next(fits, None) if has_experts else (0, 1)
    if full == 0 or found is None or set(mixers) - set("*WI") or {"W", "I"} <= set(mixers):
        return {"pattern": "".join(f"({first}{second})" for first, second in zip(mixers, ffns, strict=True))}
    return {"full_attention_every": full, "dense_layers": found[0], "expert_every": found[1]}


def _mixed(mixers: str, every: int | None) -> str:
    special = mixers[0]
    if every is None:
        return special * len(mixers)
    return "".join("*" if (place + 1) % every == 0 else special for place in range(len(mixers)))


def _dense_first(count: int, first: int, every: int) -> str:
    return "".join("E" if place >= first and (place + 1) % every == 0 else "-" for place in range(count))


def read_experts(keys: Keys, kind: TextKind) -> Section:
    """The sizes of experts; empty without them."""
    if not keys.count(*EXPERTS):
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
        "expert_hidden": keys.size("moe_latent_size"),
        "shared_expert_ffn": shared or None,
        "expert_nodes": nodes if groups > 1 else None,
    }


def _mamba(keys: Keys) -> dict[str, Any]:
    heads, width = keys.number("mamba_num_heads"), keys.number("mamba_head_dim")
    for name in ("expand", "use_conv_bias", "mamba_proj_bias"):
        keys.get(name)
    return Mamba(
        keys.number("hidden_size"),
        heads=heads,
        inner=heads * width,
        state=keys.number("ssm_state_size"),
        groups=keys.number("n_groups"),
        kernel=keys.number("conv_kernel"),
        chunk=keys.number("chunk_size"),
    ).costs()


def _delta_net(keys: Keys) -> dict[str, Any]:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = (keys.number(f"linear_{name}") for name in names)
    return DeltaNet(keys.number("hidden_size"), *sizes).costs()
