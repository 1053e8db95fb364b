"""What ranks tell each other apart from tensors: JSON, as the bytes of a tensor.

torch's own collectives for objects (``all_gather_object`` and its relatives) pickle, and unpickling a message
runs the code that its sender chose. JSON cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 256 * 2**20
"""The largest message. A rank that announces more is refused before anything of that size is allocated."""

GatherTensors = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a uint8 or int64 tensor of the same size from every rank, by rank."""


def gather_json(value: Any, gather: GatherTensors) -> list[Any]:
    """Every rank's JSON value, by rank. Collective.

    The ranks exchange the lengths first, then the bytes, padded to the longest message.

    Raises
    ------
    TypeError
        When the own value is not JSON.
    ValueError
        On every rank, when a message is too long or is not JSON.
    """
    content = bytearray(json.dumps(value).encode())
    lengths = [int(length) for length in gather(torch.tensor([len(content)]))]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_BYTES:
            raise ValueError(
                f"rank {rank} has a message of {length:,} bytes; it must have between 1 and {MAX_BYTES:,}"
            )
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    parts = gather(padded)
    return [_decoded(rank, part[: lengths[rank]]) for rank, part in enumerate(parts)]


def _decoded(rank: int, content: Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message of rank {rank} is not JSON ({error})") from None
