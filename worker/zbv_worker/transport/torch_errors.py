"""Classifies torch's communication errors: all are RuntimeErrors, and only the text tells them apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_SOURCE_LINE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|h):\d+\] ?")
"""Where in its source gloo raised an error; it says nothing to a user."""


def classified(error: Exception, what: str) -> TimeoutError | ConnectionError:
    """Convert a RuntimeError of torch to a TimeoutError or ConnectionError.

    Raises an error of CUDA itself as it is: kernels fail later than their launch, so it may be any kernel of
    this rank, and no peer is to blame.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
    text = _SOURCE_LINE.sub("", first_line(error))
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower() or "timeout" in text.lower():
        return TimeoutError(f"{what}: {text}")
    return ConnectionError(f"{what}: {text}")


@contextmanager
def classifying(what: str) -> Iterator[None]:
    """Convert torch's RuntimeErrors in a block; too slow for the path of every transfer."""
    try:
        yield
    except RuntimeError as error:
        raise classified(error, what) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, without gloo's advice; what follows is a C++ trace."""
    return str(error).strip().partition("\n")[0].partition(". This is typically caused by")[0]
