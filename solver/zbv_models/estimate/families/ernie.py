"""ERNIE 4.5 (Baidu)."""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind


def _second(keys: Keys, count: int) -> str:
    start, end = keys.count("moe_layer_start_index"), keys.get("moe_layer_end_index")
    every = keys.count("moe_layer_interval", null=1, least=1)
    last = end if isinstance(end, int) and end >= 0 else count - 1
    return "".join("E" if start <= at <= last and (at + 1) % every == 0 else "-" for at in range(count))


TEXT = {
    "ernie4_5": TextKind(),
    "ernie4_5_moe": TextKind(
        second=_second,
        without_effect="compression_ratio is_quantized moe_capacity moe_gate moe_gate_act moe_use_aux_free",
    ),
}
