"""Walks a model's stages, or its layers one by one, through F, I and W without memory and without values.

It runs the worker's own :class:`zbv_worker.stage.stage.Stage` and counts memory storage by storage, as
``zbv-worker profile`` does (:func:`zbv_worker.measure.stage_memory.stage_memory`). So an estimate equals a
profile on a CPU. Allocators that round sizes up, as CUDA's does to 512 bytes, hold a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.flops import CountedFlops
from zbv_worker.measure.estimate.likeness import Likeness, likeness
from zbv_worker.measure.estimate.without_memory import CPU, NumbersAreOne, built, without_values
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes, stage_memory, static_bytes, tensor_bytes
from zbv_worker.model.checks import build_layers, build_stage, layer_names
from zbv_worker.model.protocol import Layered, PipelineModel
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.precision import AUTOCAST, Precision
from zbv_worker.stage.stage import Stage


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one microbatch."""

    forward: int
    backward_input: int
    backward_weight: int


@dataclass(frozen=True)
class Walked:
    """Memory and operations of one microbatch in F, I and W."""

    memory: StageMemory
    flops: Flops


@dataclass(frozen=True)
class Estimate:
    """A stage or a layer.

    Attributes
    ----------
    parameters
        The number of parameters.
    static
        Bytes that are held all the time; ``workspace`` and ``receives`` are 0.
    input_bytes, output_bytes
        Bytes of one microbatch. The last output is the loss.
    recomputed
        Memory and operations with recomputed activations; for layers only.
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
    """Estimate every stage, as the model cuts them; raises :class:`InvalidRun`, :class:`ModelError`."""
    walk = _Walk(model, n_stages, precision, are_layers=False)
    for stage in range(n_stages):
        yield walk.next(str(stage), partial(build_stage, model, stage, n_stages))


def estimate_layers(model: Layered, precision: Precision = "float32") -> Iterator[Estimate]:
    """Estimate every layer as if it were a stage; raises :class:`InvalidRun`, :class:`ModelError`.

    A tensor that two neighbours hold is counted with each, as if the model were cut between them.
    """
    if not isinstance(model, PipelineModel):
        raise InvalidRun(f"found a {type(model).__name__}; must also be a zbv_worker.model.PipelineModel.")
    names = layer_names(model)
    walk = _Walk(model, len(names), precision, are_layers=True)
    for name in names:
        yield walk.next(name, partial(build_layers, model, [name]))


class _Walk:
    """Estimates a model piece by piece; each piece takes the output of the one before."""

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
        """Estimate the next piece."""
        with without_values(f"building {name}"):
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
        use_main_gradients(module.parameters())  # as in training
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
    for action in actions:  # this also creates the parameters' gradients, which stage_memory expects
        with CountedFlops() as counted:
            action()
        counts.append(counted.total)
    return Walked(stage_memory(stage, input, target, gradient, CPU), Flops(*counts))
