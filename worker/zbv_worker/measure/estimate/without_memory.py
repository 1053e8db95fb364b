"""Modules and tensors that have shapes and no memory, so that a model of any size fits.

A module is built on the meta device, which PyTorch's modules can do, and its tensors are then said to be on
the CPU by FakeTensorMode: operators choose the kernels of a CPU and autograd saves what it would save there,
but nothing is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from zbv_worker.errors import InvalidRun, WorkerError, raised

CPU = torch.device("cpu")
_META = torch.device("meta")
_INSTEAD = "Measure this model instead: `zbv-worker profile`."
_REGISTERED = ("_parameters", "_buffers", "_modules")
_KEEP_UNTOLD = {torch.ops.aten.mkldnn_rnn_layer}
"""Operators that keep something for their backward without saying how much (an LSTM of oneDNN)."""


def built(build: Callable[[torch.device], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """A module without memory.

    Parameters
    ----------
    build
        Makes it on the device that it is given.
    """
    try:
        with _META:
            module = build(_META)
    except Exception:  # as of initial values that are looked at: then they have to be there for a moment
        module = build(CPU)
    imitated = _Imitated(mode)
    for child in module.modules():
        for tensors in cast("tuple[dict[str, Any], ...]", (child._parameters, child._buffers)):
            for name, tensor in tensors.items():
                tensors[name] = imitated.all_in(tensor)
        for name, value in vars(child).items():
            if name not in _REGISTERED:
                vars(child)[name] = imitated.all_in(value)
    return module


class _Imitated:
    """Tensors without memory in place of those on the meta device; one for one, so that ties stay."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, whose id must stay its own

    def __call__(self, tensor: Tensor) -> Tensor:
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = tensor, self._made(tensor)
        return found[1]

    def all_in(self, value: Any) -> Any:
        """The same with the tensors in it replaced, and in lists, tuples and dictionaries in it."""
        if isinstance(value, Tensor):
            return self(value)
        if type(value) in (list, tuple):
            inside = [self.all_in(each) for each in value]
            return value if all(map(is_, inside, value)) else type(value)(inside)
        if type(value) is dict:
            values = [self.all_in(each) for each in value.values()]
            return value if all(map(is_, values, value.values())) else dict(zip(value, values, strict=True))
        return value

    def _made(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def without_values(what: str) -> Iterator[None]:
    """Names what fails, above all for asking a tensor without memory for its values.

    Raises
    ------
    InvalidRun
        In place of whatever was raised.
    """
    try:
        with _OnlyTold(what), _unlogged():
            yield
    except InvalidRun:
        raise
    except WorkerError as error:
        raise InvalidRun(f"{what}: {error}") from error
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise InvalidRun(
            f"{what} depends on the values of tensors (it uses {error.func}), and here they have none. "
            f"{_INSTEAD}"
        ) from error
    except Exception as error:
        raise InvalidRun(
            f"{what} raised {raised(error)}. If it does not where tensors have values, as they have none "
            f"here: {_INSTEAD[0].lower()}{_INSTEAD[1:]}"
        ) from error


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs the traceback of what it cannot run without values; here it is raised, and told once."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _OnlyTold(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Refuses operators of which nobody knows what they keep."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, unless it is one of them."""
        if func._overloadpacket in _KEEP_UNTOLD:
            raise InvalidRun(
                f"{self._what} uses {func}, which does not say how much it keeps for its backward. {_INSTEAD}"
            )
        return func(*args, **(kwargs or {}))


class NumbersAreOne(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, whoever asks a tensor for its number gets 1: optimizers ask for the count of their steps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, unless it reads a number."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))
