"""A model that fails when a rank builds its stage."""

from __future__ import annotations

import torch
from torch import nn
from zbv_worker.models.tiny import Tiny


class Broken(Tiny):
    """Tiny, without a stage."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        raise RuntimeError("this model never builds a stage")


def broken(*, seed: int = 0) -> Broken:
    """The factory."""
    return Broken(8, 4, seed)
