"""Compilation of kernels: all of them are cached on disk and release the GIL.

Numba considers the cached code of a kernel fresh if the kernel's own file has not changed, even if it calls a
changed kernel of another file. So this module deletes cached code that is older than any file with kernels
before it can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile with Numba at the first call; the machine code is cached on disk next to the module.

    Raises :class:`ModuleNotFoundError` when Numba is not installed.
    """
    from numba import njit

    drop_stale_code(Path(__file__).parents[1])
    return cast(Kernel, njit(cache=True, nogil=True)(function))


def compiled_leaf(function: Kernel) -> Kernel:
    """:func:`compiled` for a kernel that makes no array: numba then counts no references.

    Counting references to the arrays of a record costs more than a short kernel's own work. Numba refuses
    to compile such a kernel if it makes an array.
    """
    from numba import njit

    drop_stale_code(Path(__file__).parents[1])
    return cast(Kernel, njit(cache=True, nogil=True, _nrt=False)(function))


def compiled_where_possible(function: Kernel) -> Kernel:
    """:func:`compiled`, or the plain Python function if Numba is not installed.

    Verification also runs on GPU nodes, where the planner's dependencies are not installed; there it is slow
    but correct. Numba is imported at the first call, because most ranks never verify a plan.
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
    """Whether Numba is installed; imports it."""
    try:
        import numba  # noqa: F401 - it can be installed and broken
    except ModuleNotFoundError:
        return False
    return True


@cache
def drop_stale_code(package: Path) -> None:
    """Delete the package's cached machine code that is older than the newest file with kernels, once."""
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
