"""The methods that a model must offer to run as a pipeline, and those that it may offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Microbatch(NamedTuple):
    """The data of one microbatch, on the CPU; input, target and keywords may be nested containers."""

    input: Any
    """The input of the first layer; a plain tuple is passed as positional arguments."""
    target: Any = None
    """Passed to the loss."""
    keywords: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments of the layers: each layer gets those that its ``forward`` names, or all if it
    takes ``**kwargs``. They do not travel through the stages, and have no gradient."""


@dataclass(frozen=True)
class Whole:
    """A value of a batch that belongs to the whole batch: every microbatch gets it as it is.

    ::

        pipe.step(inputs, targets, mask=Whole(causal_mask))

    It may stand wherever a batch may have a tensor: in inputs, targets and keywords, and in their containers.
    """

    value: Any


@runtime_checkable
class PipelineModel(Protocol):
    """A model that can be built stage by stage.

    The worker relies on these rules and cannot check them on one rank:

    - Stage k of S covers the same layers as stages 2k and 2k + 1 of 2S, in the same order.
    - A layer's initial parameters depend only on the seed and the layer, not on S or on the layers that are
      built with it. Then every placement trains the same model.
    - A parameter has the same name in every partition (name modules after their layer, not their position).
    - A stage maps one value to one: a tensor, or tensors and constants (None, bool, int, float, str) in
      dicts, lists, tuples and named tuples. A plain tuple is passed as positional arguments. The first stage
      takes the microbatch's input. Constants are the same for all microbatches, and so are shapes if the plan
      has no features. A stage's output may be a view of its input, but a stage must not write to its input.

    Optional additions: :class:`Layered`, :class:`Tied`, :class:`Weighted`, :class:`Shaped`,
    :class:`Evaluated`, :class:`NamedOptimizer`, :class:`Scheduled`, :class:`StatefulData`,
    :class:`FetchedAhead`.
    """

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """Build stage ``stage`` of ``n_stages`` on ``device``, in training mode."""

    def microbatch(self, step: int, index: int) -> Microbatch | tuple[Any, ...]:
        """Input of the first stage and target of the last, on the CPU; the same on every rank.

        May return a :class:`Microbatch`, or a plain tuple of input and target, or of input, target and
        keywords. Called only on ranks that host the first stage, the last stage, or a layer with more than
        one parameter, which may need keywords. On GPUs it is called on another thread,
        ahead of use, but never at the same time as the model's other methods for data; see
        :class:`FetchedAhead`.
        """

    def loss(self, output: Any, target: Any) -> Tensor:
        """Mean loss over a microbatch, a scalar; of the last layer's output and the microbatch's target.

        The worker averages it over the microbatches. If microbatches have different weights, that is not the
        mean over the batch; see :class:`Weighted`.
        """

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of one rank's parameters."""


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut between any two of its layers, as a plan's partition requires.

    The modules of a layer have the same names and initial parameters as in :meth:`PipelineModel.build_stage`.
    A layer maps one value to one, as a stage does, and must not write to its input, because a recomputed
    stage keeps only the inputs of its layers. It may take keyword arguments of the microbatch
    (:class:`Microbatch`).
    """

    def layer_names(self) -> Sequence[str]:
        """Unique names of all layers, in model order."""

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Build consecutive layers, one module per name, on ``device``; never called without names.

        The model's first layer takes the microbatch's input; the output of the last one goes to the loss.
        """


@runtime_checkable
class Tied(Protocol):
    """A model whose stages share parameters, for instance the embedding and the language-model head."""

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """Pairs of parameter names; the second parameter becomes the first.

        If both are on one rank, as the first and the last stage of a V, they are one tensor. Otherwise each
        rank has a copy, and the ranks add up their gradients in every step.
        """


@runtime_checkable
class Weighted(Protocol):
    """A model whose microbatches have different weights, for instance their number of tokens without padding.

    Gradients and reported losses are then those of the sum of all losses divided by the sum of all weights,
    over all microbatches and replicas of a step. The ranks sum the weights once per step, which makes them
    wait for each other.
    """

    def loss_sum(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """The loss summed over a microbatch (not its mean), and the weight, for instance the number of
        tokens.

        Both are scalars; the weight has no gradient and may be 0 if the loss is. Training and evaluation call
        this instead of :meth:`PipelineModel.loss`.
        """


@runtime_checkable
class Shaped(Protocol):
    """A model that knows what its stages pass on, so that no rank waits for another one to tell.

    It is used with plans that have features: the shapes of microbatches then differ.
    """

    def shape_of(self, features: Mapping[str, float]) -> Any:
        """What passes from every stage to the next for a microbatch with some features of the plan.

        A value as stages pass them on, whose tensors are on the meta device: ``torch.empty(1,
        int(features["tokens"]), 512, device="meta")``. In a value of several tensors, those that need a
        gradient require it. Evaluations, whose data may differ, do not use it.
        """


@runtime_checkable
class Evaluated(Protocol):
    """A model with separate data for evaluation; other models are evaluated on the step's microbatches."""

    def evaluation_microbatch(self, step: int, index: int) -> Microbatch | tuple[Any, ...]:
        """Like :meth:`PipelineModel.microbatch`."""


@runtime_checkable
class NamedOptimizer(Protocol):
    """A model that chooses settings of its optimizer by the names of parameters."""

    def named_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of one rank's parameters, given as pairs of name and parameter.

        A parameter's name begins with its layer's name, and is the same in every partition. Training calls
        this instead of :meth:`PipelineModel.optimizer`.
        """


@runtime_checkable
class Scheduled(Protocol):
    """A model that changes the learning rate from step to step."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule of one rank's optimizer; equal on every rank."""


@runtime_checkable
class StatefulData(Protocol):
    """A model whose microbatches depend on more than their step and index."""

    def data_state(self) -> dict[str, Any]:
        """The state that this rank's data needs to continue from here; saved in checkpoints."""

    def load_data_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


@runtime_checkable
class FetchedAhead(Protocol):
    """A model that says how far ahead its microbatches are fetched, on a separate thread.

    The default is 4 on GPUs and 0 on CPUs. Microbatches that draw from a global random number generator are
    never fetched ahead. With :class:`StatefulData` no microbatch is fetched before its step begins.
    """

    fetch_ahead: int
    """The most microbatches fetched and not yet used; 0 to call ``microbatch`` on the training thread."""
