"""How kernels are compiled: one decorator, so that all of them cache and release the GIL alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile with numba at the first call; machine code is cached on disk beside the module."""
    return cast(Kernel, njit(cache=True, nogil=True)(function))
