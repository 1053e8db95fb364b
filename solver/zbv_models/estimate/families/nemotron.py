"""Nemotron (NVIDIA): Nemotron-4, and the hybrids Nemotron-H and Nemotron 3."""

from zbv_models.estimate.transformers_kinds import TextKind, Wrapper
from zbv_models.estimate.transformers_mixers import mamba

TEXT = {
    "nemotron": TextKind({"gated": False, "norm": "layernorm"}),
    "nemotron_h": TextKind(
        {"gated": False, "positions": "none"}, window="all", halves=True, state_space=mamba
    ),
}
WRAPPERS = {"nemotron_h_omni": Wrapper("nemotron_h")}
