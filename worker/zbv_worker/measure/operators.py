"""Intercepts torch's operators, to count what they do or to change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class InterceptedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A context in which a function runs this thread's operators instead of torch.

    Parameters
    ----------
    run
        Gets an operator, its arguments and its keyword arguments, and returns the operator's result.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass an operator to the function; operators that the function uses are not intercepted."""
        return self._run(func, args, kwargs or {})
