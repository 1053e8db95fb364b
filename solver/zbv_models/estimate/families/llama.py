"""Llama and models with its blocks; Llama 4 (Meta 2025), whose blocks attend to pieces of the sequence.

Every fifth block of Llama 3.2 Vision (``mllama``) attends to an image, and is read as one that attends to the
text: how many tokens an image has is not in the file.

The types ``baichuan``, ``exaone`` (up to 3.5), ``internlm2`` and ``minicpm`` are those of the models'
repositories.
"""

from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper
from zbv_models.estimate.transformers_mixers import every_fourth

PLAIN = "iquestcoder llama olmo seed_oss"
TEXT = {
    "cwm": TextKind(window="all", first=every_fourth),
    **dict.fromkeys(PLAIN.split(), TextKind()),
    "llama4_text": TextKind(
        window="alternate",
        chunked=True,
        full_every=4,
        expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        shared_experts=1,
    ),
    "baichuan": TextKind(without_effect="z_loss_weight"),
    "exaone": TextKind(),
    "internlm2": TextKind(),
    "minicpm": TextKind(without_effect="dim_model_base scale_depth scale_emb"),
    "mllama_text_model": TextKind(without_effect="cross_attention_layers"),
    "smollm3": TextKind(window="switch"),
}
VISION = {
    "clip_vision_model": VisionKind(),
    "llama4_vision_model": VisionKind({"positions": "both"}),
}
WRAPPERS = {
    "llama4": Wrapper(
        "llama4_text",
        "llama4_vision_model",
        merged="pixel_shuffle_ratio",
        projector=("projector_input_dim", "projector_output_dim"),
        tied="text",
    ),
    "mllama": Wrapper("mllama_text_model"),
    "llava": Wrapper("llama", "clip_vision_model", tied="either"),
}
