"""Stages that compute exact numbers with kernels of random length, and what they must find.

Numbers are integers modulo a prime, so a stale, missing or swapped tensor gives another result. The kernels
read their inputs when they end, as late as a kernel can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zbv_worker.stage.kept import Kept

from support.fake_nccl.device import Device

_PRIME = 65521
WIDTH = 4
DTYPE = torch.float64


@dataclass(frozen=True)
class FakeBatches:
    """Inputs and targets of one replica."""

    replica: int = 0
    is_varied: bool = False
    """Whether microbatches have different sizes."""

    def times(self, index: int) -> int:
        """The size of a microbatch's data, in :data:`WIDTH`."""
        return 1 + index * index % 3 if self.is_varied else 1

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        seed = 1000 * step + 100 * self.replica + index
        size = WIDTH * self.times(index)
        return torch.arange(size, dtype=DTYPE) * 13 + seed, torch.full((size,), 3.0 + seed, dtype=DTYPE)


def parameters_of(stage: int) -> Tensor:
    """A stage's parameters, if its replicas divide them: every use checks that it has these numbers."""
    return torch.arange(WIDTH, dtype=DTYPE) + 100 * (stage + 1)


def _forward(stage: int, microbatch: int, input: Tensor) -> Tensor:
    return (input * 3 + 17 * (stage + 1) + 5 * microbatch) % _PRIME


def _gradient(stage: int, input: Tensor, grad: Tensor) -> Tensor:
    return (grad * 5 + input * 7 + stage + 1) % _PRIME


def _weight(microbatch: int, input: Tensor, grad: Tensor) -> Tensor:
    return (input * grad + microbatch).reshape(-1, WIDTH).sum(0) % _PRIME


class FakeStage:
    """A stage on a fake device (:class:`zbv_worker.execution.binding.Computation`).

    Parameters
    ----------
    seconds
        The mean duration by letter.

    Attributes
    ----------
    parameters
        Returns the stage's whole parameters for F and I; None if it has none.
    exchange
        Passes the input and the output of F, and the gradients of I and B, through a collective, if the stage
        has one. Also takes a number that says which tensor it is.
    """

    def __init__(self, stage: int, n_stages: int, device: Device, seconds: Mapping[str, float]):
        self.stage = stage
        self._is_first, self._is_last = stage == 0, stage == n_stages - 1
        self._device = device
        self._seconds = seconds
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self.weight = torch.zeros(WIDTH, dtype=DTYPE, device="cuda")
        self.parameters: Callable[[], Tensor] | None = None
        self.exchange: Callable[[Tensor, int], Tensor] = lambda tensor, number: tensor

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """Queue F; returns the output, or the last stage's loss."""
        number = 4 * (100 * self.stage + microbatch)
        input = self.exchange(input, number)
        self._saved[microbatch] = (input, target)
        output = self._output(microbatch, input, target)
        return output if self._is_last else self.exchange(output, number + 1)

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluate(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Queue the F of an evaluation, which does not depend on the microbatch."""
        return self._output(0, input, target, "evaluation")

    def _output(self, microbatch: int, input: Tensor, target: Tensor | None, name: str = "F") -> Tensor:
        """The output, or with a target the loss."""
        stage, shape = self.stage, tuple(input.shape)
        if target is None:
            return self._queued(
                "F", (input,), lambda out, x: out.copy_(_forward(stage, microbatch, x)), shape, name
            )

        def loss(out: Tensor, x: Tensor, y: Tensor) -> None:
            out.copy_((_forward(stage, microbatch, x) + y).sum())

        return self._queued("F", (input, target), loss, (), name)

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        made = self.backward_input(microbatch, grad_output, letter="B")
        self._accumulate("B", microbatch)
        return made

    def backward_input(
        self, microbatch: int, grad_output: Tensor | None, *, letter: str = "I"
    ) -> Tensor | None:
        input, target = self._saved.pop(microbatch)
        grad: Any = target if grad_output is None else grad_output
        number = 4 * (100 * self.stage + microbatch)
        grad = self.exchange(grad, number + 2)
        self._gradients[microbatch] = (input, grad)
        if self._is_first:
            return None
        stage = self.stage
        made = self._queued(
            letter, (input, grad), lambda out, x, g: out.copy_(_gradient(stage, x, g)), tuple(input.shape)
        )
        return self.exchange(made, number + 3)

    def backward_weight(self, microbatch: int) -> None:
        self._accumulate("W", microbatch)

    def _accumulate(self, letter: str, microbatch: int) -> None:
        input, grad = self._gradients.pop(microbatch)
        memory = self._device.memory
        x, g, total = memory.raw(input), memory.raw(grad), memory.raw(self.weight)

        def run() -> None:
            total.copy_((total + _weight(microbatch, x, g)) % _PRIME)

        reads, writes = (input, grad, self.weight), (self.weight,)
        label, seconds = f"{letter} of stage {self.stage}", self._random(letter)
        self._device.current.launch(label, seconds, run, reads, writes)

    def _queued(
        self,
        letter: str,
        inputs: tuple[Tensor, ...],
        compute: object,
        shape: tuple[int, ...],
        name: str | None = None,
    ) -> Tensor:
        memory = self._device.memory
        output = memory.allocate(shape, DTYPE, self._device.current.number)
        raw, sources = memory.raw(output), [memory.raw(tensor) for tensor in inputs]
        assert callable(compute)
        parameters = () if self.parameters is None else (self.parameters(),)
        wholes = [memory.raw(whole) for whole in parameters]

        def run() -> None:
            compute(raw, *sources)
            for whole in wholes:
                raw.add_((whole - parameters_of(self.stage)).abs().sum())

        label, seconds = f"{name or letter} of stage {self.stage}", self._random(letter)
        self._device.current.launch(label, seconds, run, (*inputs, *parameters), (output,))
        return output

    def _random(self, letter: str) -> float:
        return self._seconds[letter] * self._device.simulation.random.uniform(0.1, 3)


class NestedFakeStage(FakeStage):
    """The same numbers, in nested values with integers that the next stage needs."""

    def forward(self, microbatch: int, input: Any, target: Tensor | None = None, *, split: bool) -> Any:
        """Queue F; the input of all stages but the first is nested."""
        if self._is_first:
            number = torch.full((3,), microbatch, device="cuda")
        else:
            number, given = input["numbers"][0], (input["x"].detach(), input["numbers"][0])
            shape = tuple(given[0].shape)
            input = self._queued("F", given, lambda out, x, n: out.copy_(x + (n[0] - microbatch)), shape)
        output = super().forward(microbatch, input, target, split=split)
        if self._is_last:
            return output
        return {"x": output.requires_grad_(), "numbers": (number, None), "y": output.clone().requires_grad_()}

    def backward_input(self, microbatch: int, grad_output: Any, *, letter: str = "I") -> Any:
        """Queue I; the second gradient is zero."""
        if not self._is_last:
            shape = tuple(grad_output[0].shape)
            grad_output = self._queued(letter, grad_output, lambda out, a, b: out.copy_(a + b), shape)
        made = super().backward_input(microbatch, grad_output, letter=letter)
        return None if made is None else (made, made * 0)


class MovedFakeStage(FakeStage):
    """What F keeps may be copied to the host (:class:`zbv_worker.execution.copies.Movable`)."""

    def tensors(self) -> list[Tensor]:
        """The sum of gradients."""
        return [self.weight]

    def hold_inputs(self, microbatch: int, kept: Kept) -> None:
        """The input of F, in a tensor of our own."""
        input, target = self._saved[microbatch]
        own = input.detach()
        kept.hold(own)
        self._saved[microbatch] = (own, target)


@dataclass(frozen=True)
class Expected:
    """What a step must find: losses by microbatch, and the sum of each stage's weight gradients."""

    losses: dict[int, float]
    weights: dict[int, list[float]]


def expected(n_stages: int, microbatches: int, step: int, replica: int, *, is_varied: bool) -> Expected:
    """Compute a step without a pipeline."""
    losses: dict[int, float] = {}
    weights = {stage: torch.zeros(WIDTH, dtype=DTYPE) for stage in range(n_stages)}
    for microbatch in range(microbatches):
        value, target = FakeBatches(replica, is_varied).microbatch(step, microbatch)
        inputs = []
        for stage in range(n_stages):
            inputs.append(value)
            value = _forward(stage, microbatch, value)
        losses[microbatch] = float((value + target).sum())
        grad = target
        for stage in reversed(range(n_stages)):
            weights[stage] = (weights[stage] + _weight(microbatch, inputs[stage], grad)) % _PRIME
            grad = _gradient(stage, inputs[stage], grad)
    return Expected(losses, {stage: weight.tolist() for stage, weight in weights.items()})


def evaluated(n_stages: int, microbatches: int, step: int, replica: int) -> dict[int, float]:
    """The losses of an evaluation, computed without a pipeline."""
    losses = {}
    for microbatch in range(microbatches):
        value, target = FakeBatches(replica).microbatch(step, microbatch)
        for stage in range(n_stages):
            value = _forward(stage, 0, value)
        losses[microbatch] = float((value + target).sum())
    return losses
