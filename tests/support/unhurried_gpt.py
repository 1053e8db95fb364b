"""A model for runs that a test interrupts: its ranks sleep more than they compute."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from zbv_worker.models import gpt as hurried
from zbv_worker.models.gpt import GPT

PAUSE_SECONDS = 0.1


def gpt(*, pause: float = PAUSE_SECONDS, **arguments: Any) -> GPT:
    """A GPT that sleeps before every microbatch."""
    model = hurried.gpt(**arguments)
    microbatch = model.microbatch

    def unhurried(step: int, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(pause)
        return microbatch(step, index)

    model.microbatch = unhurried  # type: ignore[method-assign]  # only of this model
    return model
