"""What torch's modules compute and keep, counted on the meta device: without memory, and without values.

Importing this module imports torch. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from zbv_models.estimate.sees import Sees

MOST_OPERATORS = 100_000
"""Operators that a model may run: about a minute."""


def _of_convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, *others: Any, out_val: Any
) -> float:
    """As many operations for each gradient as the convolution has.

    torch's formula multiplies every channel with all others for the weight's gradient, also in groups.
    """
    *_, is_transposed, _, _, wanted = others
    rows = input if is_transposed else grad
    gradients: int = sum(wanted[:2])
    return 2.0 * rows.numel() * weight[0].numel() * gradients


FORMULAS = {**flop_registry, torch.ops.aten.convolution_backward: _of_convolution_backward}


@dataclass
class Count:
    """What one run of some modules computes and keeps."""

    products: float = 0.0
    others: float = 0.0
    """Operations of F: of products with weights, and others."""
    backward: float = 0.0
    """Operations of I and W together."""
    kept: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Bytes by storage that are kept after F, and after I: inputs of weights' products, and gradients of
    what these give."""
    chosen: int = 0
    """Experts that a token is sent to."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts what this thread computes; :attr:`into` says where.

    Parameters
    ----------
    weights
        The storages of parameters.
    """

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.weights, self.into = weights, Count()
        self._is_backward, self._is_outside, self._operators = False, True, 0
        self._alive: list[Any] = []  # a later storage must not get the number of one that was counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it if torch has a formula for its operations."""
        self._operators += 1
        if self._operators > MOST_OPERATORS:
            raise RuntimeError(f"more than {MOST_OPERATORS} operators, as of a loop over tokens")
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # of conditions: most ask whether all of a mask, or of some arguments, is valid
        result = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            given = _sizes((args, kwargs))
            operations = float(formula(*args, **(kwargs or {}), out_val=result))
            # An indexer's products have no backward: they are like those of activations.
            trains = self._is_outside or torch.is_grad_enabled()
            self.add(operations, has_weight=trains and not self.weights.isdisjoint(given))
            if not self._is_backward and not self.weights.isdisjoint(given):
                self._alive.append((args, kwargs, result))
                sizes = given | _sizes(result)
                self.into.waiting |= {key: size for key, size in sizes.items() if key not in self.weights}
        return result

    def add(self, operations: float, *, has_weight: bool = False) -> None:
        """Count operations."""
        if self._is_backward:
            self.into.backward += operations
        elif has_weight:
            self.into.products += operations
        else:
            self.into.others += operations

    def run(self, work: Callable[..., Any], args: Any, kwargs: Any, weights: Sequence[Tensor]) -> Any:
        """Run some work forward and backward, as a separate layer; returns its count and its output.

        The first floating tensor of the arguments is the layer's input. All others are those of every layer:
        what is kept of them does not count.
        """
        args, kwargs = tree_map(_detached, (args, kwargs))
        first, *others = (each for each in tensors((args, kwargs)) if each.is_floating_point())
        first.requires_grad_()
        shared = self.weights | set(_sizes(others))
        before, self.into, self._is_outside = self.into, Count(), False

        def keep(tensor: Tensor) -> Tensor:
            if storage(tensor) not in shared:
                self.into.kept |= _sizes(tensor)
            return tensor

        with torch.enable_grad():
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                output = work(*args, **kwargs)
            ends = [each for each in tensors(output) if each.requires_grad]
            gradients, self._is_backward = [torch.empty_like(each) for each in ends], True
            torch.autograd.grad(ends, [first, *weights], gradients, allow_unused=True)
        self._is_backward, self._is_outside = False, True
        self._alive.clear()
        count, self.into = self.into, before
        return count, tree_map(_detached, output)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _sizes(tree: Any) -> dict[int, int]:
    return {storage(each): each.untyped_storage().nbytes() for each in tensors(tree)}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _Flash(torch.autograd.Function):
    """Flash attention: keeps its inputs, its output and a normaliser per row (Dao 2023, §3.1)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, counting: Counting, pairs: float, *others: Tensor
    ) -> Tensor:
        """(batch, heads, rows, width) to (batch, rows, heads, width); ``others`` get gradients, too."""
        ctx.others = [(each.shape, each.dtype) for each in others]
        batch, heads, rows, width = query.shape
        ctx.counting, ctx.operations = counting, 2.0 * batch * heads * pairs
        ctx.counting.add(ctx.operations * (width + value.shape[-1]))
        output = query.new_empty(batch, rows, heads, value.shape[-1])
        ctx.save_for_backward(
            query, key, value, output, query.new_empty((batch, heads, rows), dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Three products as wide as keys, and two as wide as values."""
        query, key, value, *_ = ctx.saved_tensors
        ctx.counting.add(ctx.operations * (3 * query.shape[-1] + 2 * value.shape[-1]))
        others = (query.new_empty(shape, dtype=dtype) for shape, dtype in ctx.others)
        return *(torch.empty_like(each) for each in (query, key, value)), None, None, *others


def flash(counting: Counting) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
        rows, columns = query.shape[-2], key.shape[-2]
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = options.get("sliding_window") or getattr(module, "sliding_window", None)
        sees = Sees(causal=is_causal, window=window if isinstance(window, int) else None)
        pairs = sees.pairs(rows) if rows == columns else float(rows * columns)
        others = [each for each in tensors((more, options)) if each.requires_grad]  # such as biases
        output: Tensor = _Flash.apply(query, key, value, counting, pairs, *others)  # type: ignore[no-untyped-call]
        return output, None

    return attend


class _Norm(torch.autograd.Function):
    """A norm as one kernel: keeps its input and a deviation per row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, values.new_empty(values.shape[:-1], dtype=torch.float32))
        ctx.weight = weight
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight = None if ctx.weight is None else torch.empty_like(ctx.weight)
        return torch.empty_like(ctx.saved_tensors[0]), weight


def norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The forward of an RMSNorm as one kernel."""

    def normalise(values: Tensor) -> Tensor:
        found: Tensor = _Norm.apply(values, module.weight)  # type: ignore[no-untyped-call]  # torch's own
        return found

    return normalise
