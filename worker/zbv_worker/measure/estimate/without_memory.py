"""Modules and tensors with shapes but without memory, so that models of any size fit.

A module is built on the meta device. FakeTensorMode then makes its tensors appear to be on the CPU: operators
select CPU kernels and autograd saves what it would save there, but nothing is computed.
"""

from __future__ import annotations

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

from zbv_worker.errors import InvalidRun, WorkerError, describe_error
from zbv_worker.host.process import say
from zbv_worker.measure.live_bytes import InterceptedOperators
from zbv_worker.stage.whole_batch import unlogged

CPU = torch.device("cpu")
_META = torch.device("meta")
_INSTEAD = "Measure this model instead: `zbv-worker profile`."
_REGISTERED = ("_parameters", "_buffers", "_modules")
_UNKNOWN_MEMORY = {torch.ops.aten.mkldnn_rnn_layer}
"""Operators that keep memory of unknown size for their backward (an LSTM of oneDNN)."""


def built(name: str, build: Callable[[torch.device], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Build a module without memory.

    If that is impossible because the module reads its initial values, it is built with memory for a moment,
    and standard error says so.

    Parameters
    ----------
    build
        Builds it on a given device.
    """
    try:
        with _META:
            module = build(_META)
    except (
        RuntimeError,
        ValueError,
    ) as error:  # PyTorch has no error class for this; it names the device
        if "meta" not in str(error).lower():
            raise
        say(f"zbv-worker: {name} reads its initial values, so it gets memory: {describe_error(error)}")
        module = build(CPU)
    fake = _FakeTensors(mode)
    for child in module.modules():
        for tensors in cast("tuple[dict[str, Any], ...]", (child._parameters, child._buffers)):
            for name, tensor in tensors.items():
                tensors[name] = fake.all_in(tensor)
        for name, value in vars(child).items():
            if name not in _REGISTERED:
                vars(child)[name] = fake.all_in(value)
    return module


class _FakeTensors:
    """Replaces tensors on the meta device by fake CPU tensors; one for one, so that ties stay."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # keeps originals alive, so ids stay unique

    def __call__(self, tensor: Tensor) -> Tensor:
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = tensor, self._made(tensor)
        return found[1]

    def all_in(self, value: Any) -> Any:
        """Replace a tensor, or the tensors in nested lists, tuples and dictionaries."""
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
    """Adds a description to errors, above all to those from reading values of a tensor without memory.

    Raises
    ------
    InvalidRun
        In place of any exception.
    """
    try:
        with _refuse_unknown_memory(what), unlogged():
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
            f"{what} depends on the values of tensors (it uses {error.func}), but an estimate has none. "
            f"{_INSTEAD}"
        ) from error
    except Exception as error:
        raise InvalidRun(
            f"{what} raised {describe_error(error)}. If that is because tensors have no values in an "
            f"estimate, {_INSTEAD[0].lower()}{_INSTEAD[1:]}"
        ) from error


def _refuse_unknown_memory(what: str) -> InterceptedOperators:
    """A context that refuses operators that keep an unknown amount of memory."""

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator._overloadpacket in _UNKNOWN_MEMORY:
            raise InvalidRun(
                f"{what} uses {operator}, which keeps memory of unknown size for its backward. {_INSTEAD}"
            )
        return operator(*args, **kwargs)

    return InterceptedOperators(run)


def numbers_are_one() -> InterceptedOperators:
    """A context in which reading a number from a tensor returns 1: optimizers read their step count."""

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return operator(*args, **kwargs)

    return InterceptedOperators(run)
