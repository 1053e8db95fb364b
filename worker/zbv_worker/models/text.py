"""Training text that every machine has: the source of Python's standard library.

Characters are ASCII bytes; all others become question marks. The text depends only on the Python version, not
on the order in which a file system lists files.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 128
"""Number of characters: ASCII."""


@cache
def standard_library_text(limit: int) -> Tensor:
    """The first ``limit`` characters of the standard library's modules in alphabetical order, uint8 (n,)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    text = bytes(data[:limit]).decode("ascii", errors="replace").replace("�", "?")
    return torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)


def sample(text: Tensor, sequences: int, length: int, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs and the characters that follow them, each int64 (sequences, length).

    Deterministic: equal arguments give the same sample on every rank.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed))
    starts = torch.randint(len(text) - length - 1, (sequences, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def mixed_seed(numbers: tuple[int, ...]) -> int:
    """One 63-bit seed from several small numbers, so that similar inputs give uncorrelated seeds."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1
