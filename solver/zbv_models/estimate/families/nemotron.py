"""Nemotron (NVIDIA): Nemotron-4, and the hybrids Nemotron-H and Nemotron 3."""

from zbv_models.estimate.transformers_kinds import TextKind, Wrapper
from zbv_models.estimate.transformers_mixers import mamba

TEXT = {
    "nemotron": TextKind({"gated": False, "norm": "layernorm"}),
    "nemotron_h": TextKind(
        {"gated": False, "positions": "none"}, window="all", halves=True, state_space=mamba
    ),
}
NAMES = (
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Super_Omni_Reasoning_V3"),
    "nemotron_h_omni",
)
"""Types of the models' repositories, and of transformers."""
WRAPPERS = dict.fromkeys(NAMES, Wrapper("nemotron_h"))
