"""Classifies torch's communication errors: all are RuntimeErrors, and only the text tells them apart."""

from __future__ import annotations

import torch.distributed as dist


def classified(error: Exception, what: str) -> TimeoutError | ConnectionError:
    """Convert a RuntimeError of torch to a TimeoutError or ConnectionError."""
    text = first_line(error)
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower() or "timeout" in text.lower():
        return TimeoutError(f"{what}: {text}")
    return ConnectionError(f"{what}: {text}")


def first_line(error: Exception) -> str:
    """The first line of an error's text; what follows is a C++ trace."""
    return str(error).strip().partition("\n")[0]
