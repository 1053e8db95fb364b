"""Step-3.5 and 3.7 (StepFun): a gate per head, more heads in blocks with a window.

Files name these sizes as the models' repositories do (``attention_other_setting``), or as transformers does.
"""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind, Wrapper
from zbv_models.estimate.transformers_text import PREDICTIONS


def _translate(document: Section) -> Section:
    """``moe_layers_enum`` has the blocks with experts, as numbers or as a text; otherwise from the 4th on."""
    listed, count = document.get("moe_layers_enum"), document.get("num_hidden_layers", 45)
    others = {key: value for key, value in document.items() if key != "moe_layers_enum"}
    known = ("mlp_layer_types", "first_k_dense_replace", "moe_layer_freq")
    if isinstance(listed, str) and listed.replace(",", "").replace(" ", "").isdigit():
        listed = [int(place) for place in listed.split(",")]
    if listed is None and isinstance(count, int) and not any(document.get(key) is not None for key in known):
        listed = list(range(3, count))
    return others if listed is None else {**others, "moe_layers": listed}


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    other, heads = keys.inside("attention_other_setting"), keys.size("num_sliding_attention_heads")
    other.get("attention_type"), other.get("true_head_dim")
    return blocks.varied(
        0,
        blocks.places(0, "W"),
        heads=heads or other.size("num_attention_heads"),
        kv_heads=other.size("num_attention_groups"),
        head_dim=other.size("head_dim"),
    )


STEP = TextKind(
    {"bias": False, "qkv_bias": False, "qk_norm": True, "head_gate": True},
    window="all",
    without_effect=(
        "att_impl_type gating moe_every_n_layer moe_layer_offset moe_router_activation "
        "mtp_base_layer_idx mtp_layer_types mtp_mlp_layer_types need_fp32_gate "
        "norm_expert_weight use_head_wise_attn_gate use_moe use_rope_layers yarn_only_types "
        "zero_centered"
    ),
    defaults="step3p5",
    translate=_translate,
    vary=_vary,
    more=lambda keys: {"prediction_pattern": "(W-)" if keys.count(*PREDICTIONS) else None},
)
TEXT = {"step3p5": STEP}
WRAPPERS = {"step3p7": Wrapper("step3p5", "", flat=True)}
