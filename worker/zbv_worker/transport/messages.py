"""Control messages between ranks: JSON, sent as the bytes of a tensor.

torch's collectives for objects (``all_gather_object`` and others) use pickle, and unpickling a message can
run code that its sender chose. JSON cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 256 * 2**20
"""The longest message. A longer one is refused before memory for it is allocated."""

GatherTensors = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a uint8 or int64 tensor of equal size from every rank, ordered by rank."""


def gather_json(value: Any, gather: GatherTensors) -> list[Any]:
    """Return every rank's JSON value, ordered by rank. Collective.

    The ranks exchange the lengths first, then the bytes, padded to the longest message.

    Raises
    ------
    TypeError
        If this rank's value is not JSON.
    ValueError
        On every rank, if a message is too long or is not JSON.
    """
    content = bytearray(json.dumps(value).encode())
    lengths = [int(length) for length in gather(torch.tensor([len(content)], device="cpu"))]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_BYTES:
            raise ValueError(
                f"rank {rank} sent a message of {length:,} bytes; must be between 1 and {MAX_BYTES:,}"
            )
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    parts = gather(padded)
    return [_decoded(rank, part[: lengths[rank]]) for rank, part in enumerate(parts)]


def _decoded(rank: int, content: Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message of rank {rank} is not JSON ({error})") from None
