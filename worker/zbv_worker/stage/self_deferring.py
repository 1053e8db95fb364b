"""Weight gradients that modules defer by themselves, made part of W.

Two libraries have such modules; neither is imported here:

- TransformerEngine's modules that were built with ``delay_wgrad_compute=True`` keep the work of a backward in
  ``wgrad_store.context``, a queue, and do it in ``backward_dw()``. That *sets* ``.grad`` of a weight, and
  ``.grad`` of a bias if that is None (module/base.py and module/_common.py of TransformerEngine 2.x).
- DualPipe's ``WeightGradStore`` collects functions while it is ``enabled``; they add to ``.grad``
  in place (dualpipe/utils.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.errors import ModelError
from zbv_worker.stage.main_gradients import add_gradient, gradient_of, has_main_gradient


class SelfDeferring:
    """The modules of one stage that defer weight gradients by themselves.

    Raises
    ------
    ModelError
        If a module adds to ``main_grad`` by itself.
    """

    def __init__(self, stage: nn.Module):
        self._modules = [module for module in stage.modules() if _delays(module)]
        for module in self._modules:
            if getattr(module, "fuse_wgrad_accumulation", False):
                raise ModelError(
                    f"found a {type(module).__name__} with fuse_wgrad_accumulation=True, which adds to "
                    f"main_grad by itself. Build it with fuse_wgrad_accumulation=False."
                )
        self._store: Any = getattr(sys.modules.get("dualpipe.utils"), "WeightGradStore", None)
        watched = stage.modules() if self._store is not None else self._modules
        self._parameters = list(_trainable(watched))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._modules and self._store is None

    @contextmanager
    def deferring(self, queue: Any) -> Iterator[None]:
        """A context for one I, whose deferred gradients go to W's queue."""
        if self._store is not None:
            _fill(self._parameters, with_main=False)  # DualPipe would, which would look like a gradient
            self._store.enabled = True
        before = {parameter: _state(parameter) for parameter in self._parameters}
        try:
            yield
        finally:
            if self._store is not None:
                self._store.enabled = False
        # Autograd calls hooks even if there is no gradient to accumulate, so compare the sums.
        arrived = frozenset(p for p, state in before.items() if _state(p) != state)
        for module in self._modules:
            context: Any = module.wgrad_store
            entries = _drained(context.context)
            if entries:
                own = list(_trainable([module]))
                queue.append(ModuleGrad(module, entries, tuple(own), arrived))
        if self._store is not None:
            self._store.flush()
            functions = self._store.funcs_queue.get()
            if functions:
                queued = {p for each in queue for p in each.parameters()}
                # DualPipe's zeros have moved to the main gradients of its weights, so those have arrived too.
                left = [
                    p
                    for p in self._parameters
                    if p not in queued and (p not in arrived or (has_main_gradient(p) and p.dim() > 1))
                ]
                queue.append(StoredGrad(functions, tuple(left)))


@dataclass(frozen=True, eq=False, slots=True)
class ModuleGrad:
    """The gradients that a module of TransformerEngine deferred in one I."""

    module: Any
    entries: list[Any]
    own: tuple[Tensor, ...]
    arrived: frozenset[Tensor]

    def accumulate(self) -> None:
        """Add the gradients; runs under ``no_grad``."""
        waiting = self.module.wgrad_store.context
        for entry in self.entries:
            waiting.put(entry)
        while not waiting.empty():
            kept = [parameter.grad for parameter in self.own]
            # What autograd has accumulated must not be None, or backward_dw would expect it in its queue.
            holders = [p.detach() if p in self.arrived else None for p in self.own]
            for parameter, holder in zip(self.own, holders, strict=True):
                parameter.grad = holder
            self.module.backward_dw()
            for parameter, before, holder in zip(self.own, kept, holders, strict=True):
                found, parameter.grad = parameter.grad, before
                if found is not None and found is not holder:
                    add_gradient(parameter, found)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to."""
        return tuple(p for p in self.own if p not in self.arrived)


@dataclass(frozen=True, eq=False, slots=True)
class StoredGrad:
    """The functions that DualPipe's store collected in one I."""

    functions: list[Callable[[], object]]
    left: tuple[Tensor, ...]

    def accumulate(self) -> None:
        """Run the functions under ``no_grad``; they add to ``.grad``, or to the main gradient here."""
        _fill(self.left, with_main=True)
        for function in self.functions:
            function()
        for parameter in self.left:
            if has_main_gradient(parameter) and parameter.grad is not None:
                found, parameter.grad = parameter.grad, None
                add_gradient(parameter, found)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to, as far as can be known."""
        return self.left


def delayed_parameters(stage: nn.Module) -> set[Tensor]:
    """The weights that modules of TransformerEngine will leave to W."""
    return {p for p in _trainable(filter(_delays, stage.modules())) if p.dim() > 1}


def _fill(parameters: Iterable[Tensor], *, with_main: bool) -> None:
    """Create ``.grad`` where it is None: DualPipe's functions add to it in place."""
    for parameter in parameters:
        if parameter.grad is None and (with_main or not has_main_gradient(parameter)):
            parameter.grad = torch.zeros_like(parameter)


def _state(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever something is added to a parameter's gradient."""
    total = gradient_of(parameter)
    return (0, 0) if total is None else (id(total), total._version)


def _delays(module: nn.Module) -> bool:
    asked = getattr(module, "need_backward_dw", None)
    return callable(asked) and callable(getattr(module, "backward_dw", None)) and bool(asked())


def _trainable(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    seen = {p: None for module in modules for p in module.parameters(recurse=False) if p.requires_grad}
    return iter(seen)


def _drained(waiting: Any) -> list[Any]:
    return [waiting.get() for _ in range(waiting.qsize())]
