"""Mixed precision: the dtype in which stages compute, and the factor that protects small gradients.

Parameters, gradients and optimizer state keep the model's dtype; autocast selects the operators that compute
in the smaller dtype (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "float16"]

AUTOCAST: dict[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype of autocast; None for no autocast."""
