"""Reads torch's errors of communication, which are all RuntimeErrors: what happened is in their text."""

from __future__ import annotations

import torch.distributed as dist


def classified(error: Exception, what: str) -> TimeoutError | ConnectionError:
    """A RuntimeError of torch's as what it is."""
    text = first_line(error)
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower() or "timeout" in text.lower():
        return TimeoutError(f"{what}: {text}")
    return ConnectionError(f"{what}: {text}")


def first_line(error: Exception) -> str:
    """The part of an error's text that is for people."""
    return str(error).strip().partition("\n")[0]
