"""Checks that a prepared layer computes what plain autograd computes, with B as well as with I and W."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import reject
from torch import Tensor, nn
from zbv_worker.stage.main_gradients import round_main_gradients, use_main_gradients
from zbv_worker.stage.recorder import SplitShare, defer_weight_gradients, stop_deferring
from zbv_worker.stage.weight_grads import WeightGrads

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-9, torch.complex128: 1e-9}

Attach = Callable[[nn.Module, list[Any]], None]
"""Adds hooks to a layer; keeps in the list what must stay alive."""


class Subclass(Tensor):
    """A tensor as a library may have it, with torch's default rules."""


class Several(nn.Module):
    """Uses one layer several times."""

    def __init__(self, layer: nn.Module, uses: int):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, *arguments: Any) -> Tensor:
        """The sum of all uses, with different factors."""
        output: Tensor = sum(self.layer(*arguments) * (at + 1) for at in range(self.uses))
        return output


def strided(shape: Sequence[int], strides: str, dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers in a tensor that may overlap itself, or have gaps."""
    if strides == "transposed":
        return torch.randn(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
    if strides == "expanded" and shape:
        return torch.randn(1, *shape[1:], dtype=dtype).expand(*shape)
    if strides == "gaps" and shape:
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    return torch.randn(*shape, dtype=dtype)


def _bent(gradient: Tensor) -> Tensor:
    """Not linear: the results for the parts of a gradient do not sum to the result for the whole."""
    return gradient * gradient.abs()


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.grad.mul_(0.5)


def _on_parameter(place: int, method: str, hook: Any) -> Attach:
    def attach(layer: nn.Module, _: list[Any]) -> None:
        parameter = list(layer.parameters())[place]
        if parameter.requires_grad:
            getattr(parameter, method)(hook)

    return attach


def _on_node(layer: nn.Module, kept: list[Any]) -> None:
    parameter = next(layer.parameters())
    if parameter.requires_grad:
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(lambda *_: _halve(parameter))
        kept.append(node)


def _on_all(layer: nn.Module, kept: list[Any]) -> None:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    kept.append(torch.autograd.graph.register_multi_grad_hook(trained, lambda _: None))


def _on_output(layer: nn.Module, _: list[Any]) -> None:
    def hook(_module: nn.Module, _input: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(_bent)  # type: ignore[no-untyped-call]
        return output * 2

    layer.register_forward_hook(hook)


def _on_backward(layer: nn.Module, _: list[Any]) -> None:
    def hook(_module: nn.Module, given: Any, _output: Any) -> Any:
        return tuple(None if gradient is None else gradient * 3 for gradient in given)

    layer.register_full_backward_hook(hook)


def _before_backward(layer: nn.Module, _: list[Any]) -> None:
    layer.register_full_backward_pre_hook(lambda _m, given: tuple(_bent(g) for g in given))


ON_PARAMETERS: dict[str, Attach] = {
    "first parameter": _on_parameter(0, "register_hook", _bent),
    "first parameter, after": _on_parameter(0, "register_post_accumulate_grad_hook", _halve),
    "last parameter": _on_parameter(-1, "register_hook", _bent),
    "node": _on_node,
    "all parameters": _on_all,
}
HOOKS: dict[str, Attach] = {
    "none": lambda *_: None,
    **ON_PARAMETERS,
    "output": _on_output,
    "full backward": _on_backward,
    "full backward, before": _before_backward,
}


def check(
    layer: nn.Module,
    inputs: Sequence[Callable[[], tuple[Any, ...]]],
    *,
    hooks: str = "none",
    uses: int = 1,
    autocast: torch.dtype | None = None,
    casts_backward: bool = False,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    is_split: bool | None = None,
) -> None:
    """Compare a layer that is prepared with a copy that is not.

    Parameters
    ----------
    inputs
        Per microbatch, makes the arguments of the layer. All F's come first, all W's last.
    casts_backward
        Whether autocast to bfloat16 is on in the backward and in W too, as when a user wraps whole steps.
    prepare
        Called with the module before it is prepared, for layers of libraries.
    is_split
        Whether W must compute all gradients (True) or none (False); None if either is right.
    """
    arguments = [make() for make in inputs]
    how = hooks, uses, autocast, casts_backward, prepare
    try:
        expected = _run("autograd", layer, arguments, *how)
    except (RuntimeError, NotImplementedError, IndexError):
        reject()  # what torch refuses needs no check
    for mode in ("B", "IW", "main")[: 3 if hooks == "none" else 2]:
        found = _run(mode, layer, arguments, *how, is_split)
        for name, right in expected.items():
            _require_close(name, found[name], right, torch.bfloat16 if casts_backward else autocast)
        assert found.keys() == expected.keys()


def _run(
    mode: str,
    layer: nn.Module,
    arguments: Sequence[tuple[Any, ...]],
    hooks: str,
    uses: int,
    autocast: torch.dtype | None,
    casts_backward: bool,
    prepare: Callable[[nn.Module], None],
    is_split: bool | None = None,
) -> dict[str, Any]:
    """The outputs and gradients of a copy: plain autograd, B, or I and W, also with main gradients."""
    module, kept = Several(copy.deepcopy(layer), uses), list[Any]()
    kind, split = type(module.layer), mode in ("IW", "main")
    HOOKS[hooks](module.layer, kept)
    if mode != "autograd":
        prepare(module)
    if mode == "main":
        use_main_gradients(module.parameters())
    recorder = None if mode == "autograd" else defer_weight_gradients(module)
    found: dict[str, Any] = {}
    queues, backwards = [], []
    for at, given in enumerate(arguments):
        given = tuple(_fresh(it) for it in given)
        queue = WeightGrads() if split else None
        context = nullcontext() if recorder is None else recorder.into(queue)
        with torch.autocast("cpu", autocast, enabled=autocast is not None), context:
            output = module(*given)
        found[f"output {at}"] = output.detach()
        found[f"output {at} requires a gradient"] = output.requires_grad
        if output.requires_grad:
            value = output.detach()
            backwards.append(functools.partial(output.backward, value / (1 + value.abs()) + 0.5))
        found[f"inputs {at}"] = given
        queues.append(queue)
    with warnings.catch_warnings():  # about hooks of layers whose inputs need no gradient
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts_backward):
            for backward in backwards:
                backward()
            if split:
                _require_split(module, queues, is_split)
            for queue in queues:
                if queue is not None:
                    queue.run()
    round_main_gradients(module.parameters())
    for at in range(len(arguments)):
        given = found.pop(f"inputs {at}")
        found |= {f"input {at}, {place}": it.grad for place, it in enumerate(given) if isinstance(it, Tensor)}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    stop_deferring(module)
    assert type(module.layer) is kind
    return found


def _fresh(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _require_split(module: nn.Module, queues: Sequence[Any], is_split: bool | None) -> None:
    share = SplitShare.of(module, set[Tensor]().union(*(queue.parameters() for queue in queues)))
    if is_split is not None and share is not None:
        assert share.share == float(is_split), str(share)
        assert bool(share.unsplit) is not is_split


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor.values() if tensor.is_nested else tensor


def _require_close(name: str, found: Any, right: Any, autocast: torch.dtype | None) -> None:
    if not isinstance(right, Tensor) or not isinstance(found, Tensor):
        assert found is right or found == right, name
        return
    assert found.dtype == right.dtype, name
    assert type(found) is type(right), name
    right, found = (_dense(it) for it in (right, found))
    tolerance = _TOLERANCE.get(autocast or right.dtype, 1e-5)
    largest = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(
        found, right, rtol=tolerance, atol=tolerance * (1 + largest), msg=lambda it: f"{name}: {it}"
    )
