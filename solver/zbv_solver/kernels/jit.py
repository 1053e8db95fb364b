"""How kernels are compiled: with Numba, without the GIL, and cached on disk next to their module.

Numba reuses the cached code of a kernel as long as the kernel's own file is unchanged, even if the kernel
calls one from another file that has changed. So all cached code that is older than the newest file with
kernels is deleted before any is loaded.

A kernel is compiled again for every combination of argument types, and Numba gives a literal such as 0 a
separate type. Kernels therefore pass variables or NumPy integers to each other, never literal integers.
They take arrays of floats and of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]
"""Integers of any width; a kernel's docstring states the width where it matters."""
BoolArray = NDArray[np.bool_]

ZERO = cast(int, np.int64(0))
"""0 as an argument of a kernel. Numba would compile the kernel a second time for a literal 0."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile at the first call.

    Raises :class:`ModuleNotFoundError` when Numba is not installed.
    """
    return _compiled(function)


def compiled_leaf(function: Kernel) -> Kernel:
    """:func:`compiled` for a kernel that allocates no array; Numba refuses to compile any other.

    Such a kernel counts no references. In a short kernel, counting those to the arrays of a record takes
    longer than the kernel's own work.
    """
    return _compiled(function, _nrt=False)


def compiled_inline(function: Kernel) -> Kernel:
    """:func:`compiled_leaf` for a part of a longer kernel, inlined where it is called.

    A call passes every field of every array of a record. In list scheduling by injections, such calls took
    more than half of the time.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def compiled_where_possible(function: Kernel) -> Kernel:
    """:func:`compiled`, or the plain Python function if Numba is not installed.

    Plans are also verified on GPU nodes without the planner's dependencies; there it is slow but correct.
    Numba is imported at the first call, because most ranks never verify a plan.
    """

    @cache
    def kernel() -> Kernel:
        return compiled(function) if can_compile() else function

    @wraps(function)
    def call(*arguments: object) -> object:
        return kernel()(*arguments)

    return cast(Kernel, call)


@cache
def can_compile() -> bool:
    """Whether Numba is installed and works."""
    try:
        import numba  # noqa: F401 - it can be installed and broken
    except ModuleNotFoundError:
        return False
    return True


def _compiled(function: Kernel, **options: bool) -> Kernel:
    from numba import njit

    drop_stale_code(Path(__file__).parents[1])
    return cast(Kernel, njit(cache=True, nogil=True, **options)(function))


@cache
def drop_stale_code(package: Path) -> None:
    """Delete the package's cached code that is older than its newest file with kernels; once per process."""
    newest = max(
        path.stat().st_mtime_ns
        for path in package.rglob("*.py")
        if "zbv_solver.kernels.jit import" in path.read_text(encoding="utf-8")
    )
    for index in package.rglob("*.nbi"):
        try:
            if index.stat().st_mtime_ns < newest:
                index.unlink()
        except OSError:
            # Another process deleted it first, or the folder is read-only and Numba caches elsewhere.
            continue
