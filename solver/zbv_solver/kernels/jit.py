"""How kernels are compiled: one way, so that all of them cache and release the GIL alike.

Numba decides by a kernel's own file whether its machine code on disk is fresh, and does not see that a
kernel it calls, in another file, has changed. So code that is older than any file with kernels is dropped
here before it can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
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

    drop_stale_code(Path(__file__).parents[1])
    return cast(Kernel, njit(cache=True, nogil=True)(function))


def compiled_leaf(function: Kernel) -> Kernel:
    """:func:`compiled` for a kernel that makes no array: numba then counts no references.

    Counting references to the arrays of a record costs more than a short kernel's own work. Numba refuses
    to compile such a kernel if it makes an array.
    """
    from numba import njit

    drop_stale_code(Path(__file__).parent)
    return cast(Kernel, njit(cache=True, nogil=True, _nrt=False)(function))


def compiled_where_possible(function: Kernel) -> Kernel:
    """:func:`compiled`, or the plain function where numba is not installed.

    For what GPU nodes need too, which install no planner: a plain loop over a plan is slow, not wrong. Numba
    is imported at the first call: a rank that a service hands its list verifies no plan.
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
    """Whether numba is installed; imports it."""
    try:
        import numba  # noqa: F401 - it can be installed and broken
    except ModuleNotFoundError:
        return False
    return True


@cache
def drop_stale_code(package: Path) -> None:
    """Remove the package's cached machine code that is older than the newest file with kernels. Once."""
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
            # Another process was first, or the folder is not ours to write, and numba's is elsewhere.
            continue
