"""How kernels are compiled: one way, so that all of them cache and release the GIL alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile with numba at the first call; machine code is cached on disk beside the module.

    Raises
    ------
    ModuleNotFoundError
        Where numba is not installed.
    """
    from numba import njit

    return cast(Kernel, njit(cache=True, nogil=True)(function))


def compiled_where_possible(function: Kernel) -> Kernel:
    """:func:`compiled`, or the plain function where numba is not installed.

    For what GPU nodes need too, which install no planner: a plain loop over a plan is slow, not wrong.
    """
    try:
        return compiled(function)
    except ModuleNotFoundError:
        return function
