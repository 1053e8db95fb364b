"""Modules and tensors that have shapes and no memory, so that a model of any size fits.

A module is built on the meta device, which PyTorch's modules can do, and its tensors are then said to be on
the CPU by FakeTensorMode: operators choose the kernels of a CPU and autograd saves what it would save there,
but nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from zbv_worker.errors import InvalidRun

CPU = torch.device("cpu")
_META = torch.device("meta")


def built(build: Callable[[torch.device], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """A module without memory.

    Parameters
    ----------
    build
        Makes it on the device that it is given.
    """
    with _META:
        module = build(_META)
    imitated = _Imitated(mode)
    for child in module.modules():
        for tensors in cast("tuple[dict[str, Any], ...]", (child._parameters, child._buffers, vars(child))):
            _replace(tensors, imitated)
    return module


def _replace(tensors: dict[str, Any], imitated: _Imitated) -> None:
    for name, tensor in list(tensors.items()):
        if isinstance(tensor, Tensor):
            tensors[name] = imitated(tensor)


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

    def _made(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def without_values(what: str) -> Iterator[None]:
    """Names what asks a tensor without memory for its values; raises :class:`InvalidRun`."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise InvalidRun(
            f"{what} depends on the values of tensors (it uses {error.func}), and here they have none. "
            f"Measure this model instead: `zbv-worker profile`."
        ) from error


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
