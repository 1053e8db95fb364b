"""Walks a model's stages, or its layers one by one, through F, I and W without memory and without values.

It runs the worker's own :class:`zbv_worker.stage.stage.Stage` and counts memory storage by storage, as
``zbv-worker profile`` does (:func:`zbv_worker.measure.stage_memory.stage_memory`). So an estimate equals a
profile on a CPU. Allocators that round sizes up, as CUDA's does to 512 bytes, hold a little more.

Floating-point operations are those of ``torch.utils.flop_counter``: a multiplication and an addition are two
operations, only matrix products, convolutions and attention count, and attention counts in full even under a
causal mask.

Each kind of layer is estimated once: most layers of a model are alike. Two modules are alike if they have the
same classes and settings, and tensors of the same shapes that are shared in the same way. A module with any
attribute of another kind, for instance an object, equals no other module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zbv_models.estimate.module_counts import FORMULAS

from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.without_memory import CPU, built, numbers_are_one, without_values
from zbv_worker.measure.live_bytes import InterceptedOperators
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes, stage_memory, static_bytes
from zbv_worker.model.checks import build_layers, build_stage, checked_microbatch, layer_names
from zbv_worker.model.protocol import Layered, Microbatch, PipelineModel
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import AUTOCAST, PLAIN, Program
from zbv_worker.stage.stage import Stage
from zbv_worker.values.packing import zero_gradient
from zbv_worker.values.structure import bytes_of, map_tensors


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
    """A stage or a layer."""

    name: str
    parameters: int
    """The number of parameters."""
    static: StaticBytes
    """Bytes that are held all the time; ``workspace`` and ``receives`` are 0."""
    input_bytes: int
    output_bytes: int
    """Bytes of one microbatch. The last output is the loss."""
    kept: Walked
    recomputed: Walked | None
    """Memory and operations with recomputed activations; for layers only."""


def estimate_stages(model: PipelineModel, n_stages: int, program: Program = PLAIN) -> Iterator[Estimate]:
    """Estimate every stage, as the model cuts them; raises :class:`InvalidRun`, :class:`ModelError`."""
    pieces = {str(stage): partial(build_stage, model, stage, n_stages) for stage in range(n_stages)}
    return _estimates(model, pieces, program, are_layers=False)


def estimate_layers(model: Layered, program: Program = PLAIN) -> Iterator[Estimate]:
    """Estimate every layer as if it were a stage; raises :class:`InvalidRun`, :class:`ModelError`.

    A tensor that two neighbours hold is counted with each, as if the model were cut between them.
    """
    if not isinstance(model, PipelineModel):
        raise InvalidRun(f"found a {type(model).__name__}; must also be a zbv_worker.model.PipelineModel.")
    pieces = {name: partial(build_layers, model, [name]) for name in layer_names(model)}
    return _estimates(model, pieces, program, are_layers=True)


def _estimates(
    model: PipelineModel,
    pieces: Mapping[str, Callable[[torch.device], nn.Module]],
    program: Program,
    *,
    are_layers: bool,
) -> Iterator[Estimate]:
    """Estimate a model piece by piece; each piece takes the output of the one before."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_values("microbatch(0, 0)"):
        data = checked_microbatch(model.microbatch(0, 0))
        data = Microbatch(*(map_tensors(mode.from_tensor, part) for part in data))
        input = data.input
    known: dict[Hashable, tuple[Estimate, Any]] = {}
    trains = False
    for at, (name, build) in enumerate(pieces.items()):
        is_last = at == len(pieces) - 1
        with without_values(f"building {name}"):
            module = built(name, build, mode)
        alike = trains, likeness(module, input, place=0 if at == 0 else 2 if is_last else 1)
        if alike not in known:
            loss = model.loss if is_last else None
            stage = Stage(at, len(pieces), module, 1, loss, AUTOCAST[program.precision])
            stage.trains_below = trains
            if program.has_main_gradients:
                use_main_gradients(module.parameters())  # as in training
            with without_values(name), mode:
                given = data._replace(input=input, target=data.target if is_last else None)
                known[alike] = _estimate(model, stage, given, is_last=is_last, is_layer=are_layers)
        trains = trains or any(parameter.requires_grad for parameter in module.parameters())
        estimate, input = known[alike]
        yield replace(estimate, name=name)


def _estimate(
    model: PipelineModel, stage: Stage, data: Microbatch, *, is_last: bool, is_layer: bool
) -> tuple[Estimate, Any]:
    """Estimate a piece, without its name; returns its output too."""
    parameters = list(stage.module.parameters())
    output = stage.forward(0, data.input, data.target, split=False, keywords=data.keywords)
    kept = _walk(stage, data, is_last=is_last)
    recomputed = None
    if is_layer:
        stage.is_recomputed = True
        recomputed = _walk(stage, data, is_last=is_last)
    with numbers_are_one():
        static = static_bytes(model, {stage.index: stage}, receives=0, workspace=0)
    estimate = Estimate(
        name="",
        parameters=sum(parameter.numel() for parameter in parameters),
        static=static,
        input_bytes=bytes_of(data.input),
        output_bytes=bytes_of(output),
        kept=kept,
        recomputed=recomputed,
    )
    return estimate, output


def _walk(stage: Stage, data: Microbatch, *, is_last: bool) -> Walked:
    outputs = []

    def forward() -> None:
        outputs.append(stage.forward(0, data.input, data.target, split=True, keywords=data.keywords))

    # Counting also creates the parameters' gradients, which stage_memory expects.
    forward_flops = count_flops(forward)
    gradient = None if is_last else zero_gradient(outputs.pop())
    flops = Flops(
        forward_flops,
        count_flops(lambda: stage.backward_input(0, gradient)),
        count_flops(lambda: stage.backward_weight(0)),
    )
    return Walked(stage_memory(stage, data.input, data.target, gradient, CPU, data.keywords), flops)


_aten = torch.ops.aten
# PyTorch has formulas for attention on GPUs; the CPU operators have the same arguments in the same order.
_FORMULAS = {
    **FORMULAS,
    _aten._scaled_dot_product_flash_attention_for_cpu: FORMULAS[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: FORMULAS[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten.addmm_: FORMULAS[_aten.addmm],
    _aten.baddbmm_: FORMULAS[_aten.baddbmm],
}


def count_flops(work: Callable[[], object]) -> int:
    """The floating-point operations of some work on this thread."""
    total = 0

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal total
        found = operator(*args, **kwargs)
        formula = _FORMULAS.get(operator._overloadpacket)
        if formula is not None:
            total += formula(*args, **kwargs, out_val=found)
        return found

    with InterceptedOperators(run):
        work()
    return total


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that equals only itself; kept alive, because a later object could get its id."""

    object: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


def likeness(module: nn.Module, input: Any, place: int) -> Hashable:
    """A hashable description that is equal for two modules exactly if they are alike.

    Parameters
    ----------
    place
        Part of the description: modules at different places are never alike.
    """
    numbers: dict[int, int] = {}
    given = _value(input, numbers)
    around: Hashable = None
    if isinstance(module, nn.Sequential) and len(module) == 1:  # ignore the layer's own name
        around, module = _settings(module, numbers), module[0]
    children = tuple(
        (name, type(child), _settings(child, numbers))
        for name, child in module.named_modules(remove_duplicate=False)
    )
    return place, given, around, children


def _settings(module: nn.Module, numbers: dict[int, int]) -> Hashable:
    """A module's attributes without its children."""
    return tuple((name, _value(value, numbers)) for name, value in vars(module).items() if name != "_modules")


def _value(value: Any, numbers: dict[int, int]) -> Hashable:
    if isinstance(value, Tensor):
        return _tensor(value, numbers)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_value(each, numbers) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_value(each, numbers) for each in value)
    if isinstance(value, dict):
        return type(value), tuple((_value(k, numbers), _value(v, numbers)) for k, v in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple((f.name, _value(getattr(value, f.name), numbers)) for f in fields(value))
    return _Itself(value)


def _tensor(tensor: Tensor, numbers: dict[int, int]) -> Hashable:
    """A tensor's kind and identity; tensors are numbered in the order in which they are found."""
    number = numbers.setdefault(id(tensor), len(numbers))
    kind = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    return type(tensor), kind, number
