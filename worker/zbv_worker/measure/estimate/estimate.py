"""Walks a model's stages, and its layers one by one, through F, I and W without memory and without values.

What is walked is the worker's own :class:`zbv_worker.execution.stage.Stage`, and what it holds is counted as
``zbv-worker profile`` counts it (:func:`zbv_worker.measure.stage_memory.stage_memory`), storage by storage.
So an estimate is what a profile on a CPU would find. Allocators that round sizes up, as CUDA's does to 512
bytes, hold a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.main_gradients import use_main_gradients
from zbv_worker.execution.precision import AUTOCAST, Precision
from zbv_worker.execution.stage import Stage
from zbv_worker.measure.estimate.flops import CountedFlops
from zbv_worker.measure.estimate.likeness import Likeness, likeness
from zbv_worker.measure.estimate.without_memory import CPU, NumbersAreOne, built, without_values
from zbv_worker.measure.profile.profile import StaticBytes
from zbv_worker.measure.stage_memory import StageMemory, stage_memory, static_bytes, tensor_bytes
from zbv_worker.model.protocol import Layered, PipelineModel, build_layers, build_stage, layer_names


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one microbatch."""

    forward: int
    backward_input: int
    backward_weight: int


@dataclass(frozen=True)
class Walked:
    """One microbatch's way through F, I and W: bytes and operations."""

    memory: StageMemory
    flops: Flops


@dataclass(frozen=True)
class Estimate:
    """A stage or a layer.

    Attributes
    ----------
    parameters
        How many numbers they are.
    static
        Bytes that are always there; their ``workspace`` and ``receives`` are 0.
    input_bytes, output_bytes
        Of one microbatch. The last output is the loss.
    recomputed
        The same with activations computed again in the backward; of layers only.
    """

    name: str
    parameters: int
    static: StaticBytes
    input_bytes: int
    output_bytes: int
    kept: Walked
    recomputed: Walked | None


def estimate_stages(
    model: PipelineModel, n_stages: int, precision: Precision = "float32"
) -> Iterator[Estimate]:
    """Every stage as the model itself cuts them; raises :class:`InvalidRun`, :class:`ModelError`."""
    walk = _Walk(model, n_stages, precision, are_layers=False)
    for stage in range(n_stages):
        yield walk.next(str(stage), partial(build_stage, model, stage, n_stages))


def estimate_layers(model: Layered, precision: Precision = "float32") -> Iterator[Estimate]:
    """Every layer as if it were a stage; raises :class:`InvalidRun`, :class:`ModelError`.

    A tensor that two neighbours hold both is counted with each, as it is where the model is cut between them.
    """
    if not isinstance(model, PipelineModel):
        raise InvalidRun(
            f"found a {type(model).__name__}; it must be a zbv_worker.model.protocol.PipelineModel, too."
        )
    names = layer_names(model)
    walk = _Walk(model, len(names), precision, are_layers=True)
    for name in names:
        yield walk.next(name, partial(build_layers, model, [name]))


class _Walk:
    """Goes through a model piece by piece, every piece taking what the one before gave."""

    def __init__(self, model: PipelineModel, n_pieces: int, precision: Precision, *, are_layers: bool):
        self._model = model
        self._n_pieces = n_pieces
        self._precision = precision
        self._are_layers = are_layers
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with without_values("microbatch(0, 0)"):
            input, target = model.microbatch(0, 0)
            self._input: Tensor = self._mode.from_tensor(input)
            self._target: Tensor = self._mode.from_tensor(target)
        self._at = 0
        self._known: dict[Likeness, tuple[Estimate, Tensor]] = {}

    def next(self, name: str, build: Callable[[torch.device], nn.Module]) -> Estimate:
        """The next piece."""
        with without_values(f"{name} as it is built"):
            module = built(build, self._mode)
        place = 0 if self._at == 0 else 2 if self._at == self._n_pieces - 1 else 1
        alike = likeness(module, self._input, place)
        found = self._known.get(alike)
        if found is None:
            with without_values(name), self._mode:
                found = self._known[alike] = self._walked(name, module)
        self._at += 1
        estimate, self._input = found
        return replace(estimate, name=name)

    def _walked(self, name: str, module: nn.Module) -> tuple[Estimate, Tensor]:
        is_last = self._at == self._n_pieces - 1
        stage = Stage(
            self._at,
            self._n_pieces,
            module,
            1,
            self._model.loss if is_last else None,
            AUTOCAST[self._precision],
        )
        use_main_gradients(module.parameters())  # as training does
        input, target = self._input, self._target if is_last else None
        output = stage.forward(0, input, target, split=False)
        gradient = None if is_last else torch.empty_like(output)
        kept = _run(stage, input, target, gradient)
        recomputed = None
        if self._are_layers:
            stage.is_recomputed = True
            recomputed = _run(stage, input, target, gradient)
        with NumbersAreOne():
            static = static_bytes(self._model, {self._at: stage}, receives=0, workspace=0)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        sizes = tensor_bytes([input]), tensor_bytes([output])
        return Estimate(name, parameters, static, *sizes, kept, recomputed), output


def _run(stage: Stage, input: Tensor, target: Tensor | None, gradient: Tensor | None) -> Walked:
    actions: Sequence[Callable[[], object]] = (
        lambda: stage.forward(0, input, target, split=True),
        lambda: stage.backward_input(0, gradient),
        lambda: stage.backward_weight(0),
    )
    counts = []
    for action in actions:  # they bring the parameters' gradients into being, which memory is looked at with
        with CountedFlops() as counted:
            action()
        counts.append(counted.total)
    return Walked(stage_memory(stage, input, target, gradient, CPU), Flops(*counts))
