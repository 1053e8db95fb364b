"""A model for runs that last until something happens to them: its ranks sleep more than they compute."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from zbv_worker.models import gpt as hurried
from zbv_worker.models.gpt import GPT

PAUSE_SECONDS = 0.02


def gpt(*, pause: float = PAUSE_SECONDS, **arguments: Any) -> GPT:
    """A GPT that takes its time over every microbatch."""
    model = hurried.gpt(**arguments)
    microbatch = model.microbatch

    def unhurried(step: int, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(pause)
        return microbatch(step, index)

    model.microbatch = unhurried  # type: ignore[method-assign]  # of this one model
    return model
