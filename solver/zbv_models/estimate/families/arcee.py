"""AFM and Trinity (Arcee AI)."""

from zbv_models.estimate.transformers_kinds import TextKind

TEXT = {
    "afmoe": TextKind(
        {"bias": False, "qk_norm": True, "post_norms": True, "output_gate": True},
        window="alternate",
        full_every=4,
        without_effect="global_attn_every_n_layers mup_enabled num_expert_groups num_limited_groups "
        "route_norm route_scale score_func use_grouped_mm",
    ),
    "arcee": TextKind({"gated": False}),
}
