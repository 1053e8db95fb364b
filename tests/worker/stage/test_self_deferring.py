"""Modules of TransformerEngine and DualPipe that defer their weight gradients take part in W."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.stage.main_gradients import gradient_of, use_main_gradients
from zbv_worker.stage.stage import Stage


class TEStore:
    """TransformerEngine's WeightGradStore (module/_common.py)."""

    def __init__(self) -> None:
        self.context: queue.Queue[Any] = queue.Queue()
        self.enabled = True

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensors: list[Tensor], function: Callable[..., Any]) -> None:
        self.context.put([tensors, function])

    def pop(self) -> tuple[Any, list[Tensor]]:
        if self.context.qsize() > 0:
            tensors, function = self.context.get()
            return function(*tensors), tensors
        raise RuntimeError("Pop empty queue. No distributed environment detected.")


class _TEFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: TELinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        early = ctx.module.bias_in_backward

        def compute(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
            return gradient.t() @ x, None if early else gradient.sum(0)

        ctx.module.wgrad_store.put([x, gradient], compute)
        return gradient @ weight, None, gradient.sum(0) if early else None, None


class TELinear(nn.Module):
    """TransformerEngine's Linear with delay_wgrad_compute=True; its bias's gradient is delayed or not."""

    def __init__(self, width: int, *, bias_in_backward: bool, fuse_wgrad_accumulation: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))
        self.wgrad_store = TEStore()
        self.bias_in_backward = bias_in_backward
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    def need_backward_dw(self) -> bool:
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        (wgrad, bgrad), _ = self.wgrad_store.pop()
        self.weight.grad = wgrad.to(self.weight.dtype)
        if self.bias.grad is None:
            self.bias.grad = bgrad.to(self.bias.dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _TEFunction.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return output


class DualPipeStore:
    """DualPipe's WeightGradStore (dualpipe/utils.py)."""

    enabled = False
    cache: list[Callable[[], None]] = []  # noqa: RUF012 - as there
    funcs_queue: queue.Queue[list[Callable[[], None]]] = queue.Queue()

    @classmethod
    def put(cls, function: Callable[[], None]) -> None:
        cls.cache.append(function)

    @classmethod
    def flush(cls) -> None:
        cls.funcs_queue.put(cls.cache)
        cls.cache = []


class _DualPipeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        parameter = ctx.weight
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

        def add() -> None:
            parameter.grad += gradient.t() @ x

        if DualPipeStore.enabled:
            DualPipeStore.put(add)
        else:
            add()
        return gradient @ weight, None


class DualPipeLinear(nn.Module):
    """The Linear of DualPipe's examples."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _DualPipeFunction.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


KINDS: dict[str, Callable[[], nn.Module]] = {
    "engine": lambda: TELinear(6, bias_in_backward=False),
    "engine-early-bias": lambda: TELinear(6, bias_in_backward=True),
    "dualpipe": lambda: DualPipeLinear(6),
}


@pytest.fixture
def _dualpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("dualpipe.utils")
    module.WeightGradStore = DualPipeStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dualpipe.utils", module)


@pytest.mark.usefixtures("_dualpipe")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_gradients_are_those_of_autograd_and_weights_wait_for_w(kind: str, half: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(KINDS[kind](), nn.LayerNorm(6), nn.Linear(6, 6))
    plain = nn.Sequential(nn.Linear(6, 6, bias=kind != "dualpipe"), nn.LayerNorm(6), nn.Linear(6, 6))
    plain.load_state_dict(module.state_dict())
    if half:
        module = module.bfloat16()
        use_main_gradients(module.parameters())
    stage = Stage(1, 3, module, 1)
    weight = module.get_parameter("0.weight")
    data = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(4)]
    for microbatch, (x, gradient) in enumerate(data):
        plain(x).backward(gradient)
        stage.forward(microbatch, x.to(weight.dtype), split=microbatch < 3)
    for microbatch in range(3):
        stage.backward_input(microbatch, data[microbatch][1].to(weight.dtype))
    before = gradient_of(weight)
    assert before is None or not before.any()
    stage.backward_weight(2)
    after = gradient_of(weight)
    assert after is not None
    assert after.any()
    stage.backward(3, data[3][1].to(weight.dtype))
    for microbatch in (0, 1):
        stage.backward_weight(microbatch)
    for (name, parameter), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        found = gradient_of(parameter)
        assert found is not None
        assert expected.grad is not None
        difference = (found.float() - expected.grad).norm() / expected.grad.norm()
        assert difference < (3e-2 if half else 1e-5), name
    assert stage.split_share is not None
    assert not any("0 (" in name for name in stage.split_share.unsplit if kind != "engine-early-bias")


def test_the_share_of_w_is_known_before_the_first_step() -> None:
    stage = Stage(1, 3, TELinear(6, bias_in_backward=True), 1)
    assert stage.expected_share is not None
    assert stage.expected_share.share == pytest.approx(36 / 42)


def test_modules_that_defer_by_themselves_are_not_compiled() -> None:
    with pytest.raises(ModelError, match="Run without --compile"):
        Stage(1, 3, TELinear(6, bias_in_backward=True), 1, is_compiled=True)


def test_accumulation_that_a_module_fuses_is_refused() -> None:
    module = TELinear(6, bias_in_backward=False, fuse_wgrad_accumulation=True)
    with pytest.raises(ModelError, match="Build it with fuse_wgrad_accumulation=False"):
        Stage(1, 3, module, 1)
