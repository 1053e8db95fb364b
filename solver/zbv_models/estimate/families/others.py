"""Models with known blocks: Apertus, Kolibri, nanochat, Phi-3.5-MoE and Solar."""

from zbv_models.estimate.transformers_kinds import TextKind

TEXT = {
    "apertus": TextKind({"gated": False, "qk_norm": True}),
    "jais2": TextKind({"gated": False, "norm": "layernorm"}),
    "kolibri1": TextKind({"post_norms": True}, window="alternate", full_every=5),
    "nanochat": TextKind({"gated": False}),
    "phimoe": TextKind({"norm": "layernorm"}, window="all", expert_width="intermediate_size"),
    "solar_open": TextKind({"bias": False}),
}
