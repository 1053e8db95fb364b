"""A model as a sequence of layers with their costs.

A :class:`Model` that exists is valid. Layers are in model order. A layer with ``repeat`` stands for that many
copies, named ``block.0``, ``block.1``, ….
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.numeric import COMMUNICATION_ROUNDING, MAX_LAYERS, MIN_NUMBER, broken_rule, delta_rule

Recomputed = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe", "op"]
"""What selective recomputation may repeat, by the names of Megatron-LM's ``--recompute-modules``.

``op`` alone is torchtitan's ``SelectiveAC``: every second product, and all that is cheap.
"""
VISION, EMBEDDING, DECODER, MTP, LOSS, PART = "v", "E", "t", "m", "L", ""
"""Modules by the letters of Megatron-LM's layouts (``PipelineParallelLayerLayout.parse_str_to_list`` in
``megatron/core/transformer/pipeline_parallel_layer_layout.py``), with v for a layer of a vision encoder, for
which Megatron-LM has none; and the mark of a layer that belongs to the module before it."""

_RULES = (
    (PART, r"norm|\.(mlp|ffn|feed_forward|moe)$|^final_"),
    (MTP, r"mtp|nextn|^prediction"),
    (VISION, r"vision|visual|patch|projector|^vit\b"),
    (EMBEDDING, r"embed|wte"),
    (LOSS, r"head|loss|logits|classifier|^output"),
)
"""Letters by what a layer's name contains; any other layer is a transformer layer."""


def letter_of(name: str) -> str:
    """The letter of a layer by its name."""
    lowered = name.lower()
    return next((letter for letter, pattern in _RULES if re.search(pattern, lowered)), DECODER)


@dataclass(frozen=True)
class LayerMemory:
    """Memory of a layer, in the caller's unit."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    """Deltas of the layer's F, I and W; they sum to 0."""
    static: float = 0.0
    """Held all the time: parameters, gradients, optimizer states."""
    workspace: float = 0.0
    """Needed in addition while an action of the layer runs, and released at its end. A rank runs one
    action at a time, so it needs the largest workspace of its layers."""


@dataclass(frozen=True)
class LayerCommunication:
    """How much of a layer's F, I and B the other action of a pair can hide, at most its duration.

    As in :class:`~zbv_solver.problem.stages.Communication`, which has the sums of the layers of a stage.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward: float = 0.0


NOTHING_HIDDEN = LayerCommunication()


@dataclass(frozen=True)
class LayerCosts:
    """Durations and memory of a layer. ``backward`` is the fused backward; None means I + W."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float | None = None
    memory: LayerMemory = LayerMemory()
    communication: LayerCommunication | None = None
    """None: a pair hides nothing of this layer, and makes no pairs possible."""

    @property
    def hidden(self) -> LayerCommunication:
        """What a pair can hide."""
        return self.communication or NOTHING_HIDDEN

    def with_communication_hidden(self, pair_factor: float) -> LayerCosts:
        """The least that the layer adds to the time of a rank's entries, alone or in pairs: Lemma 65."""
        if self.communication is None:
            return self

        def least(duration: float, hidden: float) -> float:
            shorter = pair_factor * (duration - hidden)
            return min(duration, shorter) if shorter >= MIN_NUMBER else 0.0

        inputs = least(self.backward_input, self.hidden.backward_input)
        fused = least(self.fused, self.hidden.backward)
        return replace(
            self,
            forward=least(self.forward, self.hidden.forward),
            backward_input=inputs,
            backward=fused if fused < inputs + self.backward_weight else None,
            communication=None,
        )

    @property
    def split(self) -> float:
        """Duration of I and W together."""
        return self.backward_input + self.backward_weight

    @property
    def fused(self) -> float:
        """Duration of the fused backward B."""
        return self.split if self.backward is None else self.backward


@dataclass(frozen=True)
class OnDevice:
    """Costs of a layer on the ranks that have another device; ``recompute`` as in :class:`Layer`."""

    device: str
    costs: LayerCosts
    recompute: LayerCosts | None = None

    @property
    def pointer(self) -> str:
        """The JSON pointer of these costs in the layer."""
        return f"/on/{self.device.replace('~', '~0').replace('/', '~1')}"


@dataclass(frozen=True)
class Layer:
    """A layer, or ``repeat`` equal copies of it."""

    name: str
    costs: LayerCosts
    recompute: LayerCosts | None = None
    """Its costs when its stage is recomputed; None if it cannot be recomputed."""
    parameters_bytes: float = 0.0
    """Size of its parameters alone."""
    output_bytes: float = 0.0
    """Size of the transfer when the model is cut after this layer."""
    repeat: int | None = None
    """Number of copies; None for a single layer, which keeps its name."""
    on: tuple[OnDevice, ...] = ()
    """Its costs on devices where they differ."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the copies."""
        return (self.name,) if self.repeat is None else tuple(f"{self.name}.{k}" for k in range(self.repeat))

    def costs_when(self, recomputed: bool, device: str | None = None) -> LayerCosts:
        """Its costs in a stage that is recomputed, or in one that is not, on a device."""
        own = next((each for each in self.on if each.device == device), self)
        return own.recompute if recomputed and own.recompute is not None else own.costs

    def costs_by_pointer(self) -> Iterator[tuple[str, LayerCosts]]:
        """All of its costs, plain and recomputed, everywhere and on every device, by their JSON pointers."""
        everywhere: list[tuple[str, Layer | OnDevice]] = [
            ("", self),
            *((each.pointer, each) for each in self.on),
        ]
        for at, of in everywhere:
            yield at, of.costs
            if of.recompute is not None:
                yield f"{at}/recompute", of.recompute

    def with_costs(self, change: Callable[[LayerCosts], LayerCosts]) -> Layer:
        """The layer with all of its costs changed: plain, recomputed, and on every device."""

        def changed(costs: LayerCosts | None) -> LayerCosts | None:
            return None if costs is None else change(costs)

        return replace(
            self,
            costs=change(self.costs),
            recompute=changed(self.recompute),
            on=tuple(OnDevice(each.device, change(each.costs), changed(each.recompute)) for each in self.on),
        )


class LayerColumns(NamedTuple):
    """Costs of all layers (n,), by kind; ``is_fused`` says which layers give the duration of B."""

    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    fused: list[float]
    is_fused: list[bool]
    after_forward: list[float]
    after_input: list[float]
    after_weight: list[float]
    static: list[float]
    workspace: list[float]
    hidden_forward: list[float]
    hidden_input: list[float]
    hidden_fused: list[float]

    @classmethod
    def of(cls, layers: Sequence[LayerCosts]) -> LayerColumns:
        """The costs of these layers."""
        rows = (
            (
                *(each.forward, each.backward_input, each.backward_weight, each.fused),
                each.backward is not None,
                *(each.memory.forward, each.memory.backward_input, each.memory.backward_weight),
                *(each.memory.static, each.memory.workspace),
                *(each.hidden.forward, each.hidden.backward_input, each.hidden.backward),
            )
            for each in layers
        )
        return cls(*map(list, zip(*rows, strict=True)))


@dataclass(frozen=True)
class Model:
    """Layers in model order.

    Raises :class:`InvalidInput` with all broken rules; pointers are those of the JSON document.
    """

    layers: tuple[Layer, ...]
    recompute_modules: tuple[Recomputed, ...] = ()
    """What recomputed layers repeat; empty if all of the layer."""

    def __post_init__(self) -> None:
        issues = list(_count_issues(self))
        for index, layer in enumerate(self.layers):
            at = f"/layers/{index}"
            issues += [replace(issue, pointer=at + issue.pointer) for issue in _layer_issues(layer)]
        if issues:
            raise InvalidInput(issues)

    @property
    def n_layers(self) -> int:
        """Number of layers, copies counted."""
        return sum(1 if layer.repeat is None else layer.repeat for layer in self.layers)

    @cached_property
    def each(self) -> tuple[Layer, ...]:
        """One entry per layer; a repeated layer has one entry per copy."""
        return tuple(layer for layer in self.layers for _ in layer.names)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of every layer."""
        return tuple(name for layer in self.layers for name in layer.names)

    @cached_property
    def place(self) -> dict[str, int]:
        """Index of every name in ``names``."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def blocks_before(self) -> tuple[int, ...]:
        """(n+1,) how many transformer layers begin before every place."""
        begins = (letter_of(layer.name) == DECODER for layer in self.each)
        return (0, *accumulate(map(int, begins)))

    def place_behind(self, blocks: int) -> int:
        """Where a stage ends that has the first ``blocks`` transformer layers, and no layer behind them."""
        letters = [letter_of(layer.name) for layer in self.each]
        at = next((place for place, number in enumerate(self.blocks_before) if number > blocks), None)
        if at is not None:
            return at - 1
        tail = len(letters) - next((k for k, letter in enumerate(reversed(letters)) if letter == DECODER), 0)
        while tail < len(letters) and letters[tail] == PART:
            tail += 1
        return tail

    @property
    def can_recompute(self) -> bool:
        """Whether any layer can be recomputed."""
        return any(layer.recompute is not None for layer in self.layers)

    @cached_property
    def has_communication(self) -> bool:
        """Whether any layer states communication, so that there are pairs."""
        return any(
            costs.communication is not None for layer in self.layers for _, costs in layer.costs_by_pointer()
        )

    def columns(self, recomputed: bool, device: str | None = None) -> LayerColumns:
        """Costs of all layers in stages that are recomputed, or in others, on a device."""
        known = self._columns
        if (recomputed, device) not in known:
            costs = [layer.costs_when(recomputed, device) for layer in self.each]
            known[recomputed, device] = LayerColumns.of(costs)
        return known[recomputed, device]

    @cached_property
    def _columns(self) -> dict[tuple[bool, str | None], LayerColumns]:
        return {}


def _count_issues(model: Model) -> Iterator[Issue]:
    if not model.layers:
        yield Issue("/layers", "found none; a model has at least one layer.")
    if any(layer.repeat is not None and layer.repeat < 1 for layer in model.layers):
        return  # reported with its layer
    if model.n_layers > MAX_LAYERS:
        count = model.n_layers if model.n_layers < 10**12 else "more than 10^12"
        rule = f"found {count} layers, copies counted; must be at most {MAX_LAYERS}. "
        yield Issue("/layers", rule + "Join neighbouring layers.")
        return
    seen: set[str] = set()
    for index, layer in enumerate(model.layers):
        for name in layer.names:
            if name in seen:
                yield Issue(f"/layers/{index}/name", f"found {name!r} twice; names must be unique.")
                return
            seen.add(name)


def _layer_issues(layer: Layer) -> Iterator[Issue]:
    if not layer.name:
        yield Issue("/name", "found an empty name; every layer needs one.")
    if layer.repeat is not None and layer.repeat < 1:
        yield Issue("/repeat", f"found {layer.repeat}; must be at least 1.")
    yield from _number_issues("", layer, ("parameters_bytes", "output_bytes"))
    for at, costs in layer.costs_by_pointer():
        yield from _cost_issues(at, costs)
    for each in layer.on:
        if (each.recompute is None) != (layer.recompute is None):
            lacking, other = (
                (each.pointer, "the layer") if each.recompute is None else ("", "the layer on a device")
            )
            detail = f"this key is absent, and {other} has it. Give recompute on every device, or on none."
            yield Issue(f"{lacking}/recompute", detail)


def _cost_issues(at: str, costs: LayerCosts) -> Iterator[Issue]:
    memory = costs.memory
    issues = [
        *_number_issues(at, costs, ("forward", "backward_input", "backward_weight", "backward")),
        *_number_issues(f"{at}/memory", memory, ("forward", "static", "workspace")),
        *_number_issues(f"{at}/memory", memory, ("backward_input", "backward_weight"), signed=True),
    ]
    if not issues:
        issues = [*_communication_issues(at, costs)]
    yield from issues
    broken = delta_rule(memory.forward, memory.backward_input, memory.backward_weight) if not issues else None
    if broken is not None:
        yield Issue(f"{at}/memory{broken[0]}", broken[1])


def _communication_issues(at: str, costs: LayerCosts) -> Iterator[Issue]:
    hidden = costs.hidden
    at = f"{at}/communication"
    yield from _number_issues(at, hidden, ("forward", "backward_input", "backward"))
    for name, duration in (
        ("forward", costs.forward),
        ("backward_input", costs.backward_input),
        ("backward", costs.fused),
    ):
        if (found := getattr(hidden, name)) > duration * (1 + COMMUNICATION_ROUNDING):
            yield Issue(
                f"{at}/{name}",
                f"found {found:.15g}, where the action takes {duration:.15g}. Communication is a part of an "
                f"action: it must not be longer.",
            )


def _number_issues(at: str, of: object, names: tuple[str, ...], *, signed: bool = False) -> Iterator[Issue]:
    for name in names:
        value = getattr(of, name)
        rule = None if value is None else broken_rule(value, signed)
        if rule is not None:
            yield Issue(f"{at}/{name}", rule)
