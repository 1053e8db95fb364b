"""The content of a malicious message or file: a pickle that has an effect when it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.mkdir, (self.path,)
