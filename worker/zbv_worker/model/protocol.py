"""What a model must offer to be run as a pipeline, and how a run names one.

A model is given as ``package.module:factory``. The factory takes keyword arguments (``--model-args``, and
``seed``) and returns an object that satisfies :class:`PipelineModel`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, ModelError, raised
from zbv_worker.model.search_path import searched


@runtime_checkable
class PipelineModel(Protocol):
    """A model that can be built stage by stage.

    Rules that the worker relies on and cannot check on one rank:

    - Stage k of S covers the same layers as stages 2k and 2k + 1 of 2S, in the same order.
    - A layer's initial parameters depend on the seed and the layer, never on S or on which other layers are
      built beside it. Then every placement trains the same model.
    - A parameter's name is the same in every cut (name modules after their layer, not after their place).
    - What else a model may offer: :class:`Layered`, :class:`Tied`, :class:`Weighted`, :class:`Evaluated`, a
      schedule of the learning rate (:class:`zbv_worker.training.update.Scheduled`), data with a state
      (:class:`zbv_worker.training.checkpoint.StatefulData`).
    - A stage maps one floating-point tensor to one; the first takes the microbatch's input. Their shapes do
      not change from microbatch to microbatch. A stage's output may be a view, but a stage must not write to
      its input.
    """

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """Stage ``stage`` of ``n_stages``, on ``device``, in training mode."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Input of the first stage and target of the last, on the CPU; the same on every rank.

        Only ranks that host the first or the last stage call this.
        """

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over a microbatch, a scalar. Gradients are those of its mean over the microbatches.

        Where microbatches count differently, that is not the mean over the batch; see :class:`Weighted`.
        """

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of one rank's parameters."""


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut between any two of its layers, as a plan's partition says.

    The modules of a layer have the names that they have in :meth:`PipelineModel.build_stage`, and the same
    initial parameters. A layer maps one tensor to one and must not write to its input: where its stage is
    recomputed, that is what is kept of it. What else a stage needs (positions, masks) a layer makes itself.
    """

    def layer_names(self) -> Sequence[str]:
        """Names of all layers, in model order, each once."""

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """One module per name, in their order, on ``device``; never called without names.

        The names lie next to each other in the model. The first layer of all takes the microbatch's input,
        the last one's output goes to the loss.
        """


@runtime_checkable
class Tied(Protocol):
    """A model of which stages share parameters, for instance the embedding and the language-model head."""

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """Pairs of names: the second parameter is the first.

        Both must lie on one rank, as the first stage and the last do in a V.
        """


@runtime_checkable
class Weighted(Protocol):
    """A model whose microbatches count differently, for instance by their tokens that are no padding.

    Gradients, and the losses that are reported, are then those of the sum of all totals divided by the sum of
    all weights, over all microbatches and replicas of a step. The ranks add up the weights once a step, and
    wait for each other then.
    """

    def loss_sum(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss summed over a microbatch (not its mean), and the weight, for instance the number of tokens.

        Both are scalars; the weight has no gradient, and may be 0 where the total is. Takes the place of
        :meth:`PipelineModel.loss` in training and evaluation.
        """


@runtime_checkable
class Evaluated(Protocol):
    """A model that keeps data for evaluation; without, evaluations use the step's microbatches."""

    def evaluation_microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """As :meth:`PipelineModel.microbatch`."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build: all ranks must agree on it.

    Attributes
    ----------
    factory
        ``package.module:name``.
    arguments
        Keyword arguments of the factory; values are what JSON can say.
    allowed
        An agent's patterns, where somebody else chose the factory (:func:`require_admitted`); None where the
        command's user did.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    allowed: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, factory: str, arguments: str | None, seed: int) -> ModelSpec:
        """Read the command line's ``--model`` and ``--model-args``; raises :class:`InvalidRun`."""
        try:
            decoded = json.loads(arguments) if arguments else {}
        except json.JSONDecodeError as error:
            raise InvalidRun(
                f"--model-args: found {arguments!r}; must be a JSON object ({error}). "
                f"""Write for example '{{"layers": 8}}'."""
            ) from None
        if not isinstance(decoded, dict):
            raise InvalidRun(
                f"--model-args: found {arguments!r}; must be a JSON object of keyword arguments."
            )
        return cls(factory, decoded, seed)

    def build(self) -> PipelineModel:
        """Call the factory.

        Raises
        ------
        InvalidRun
            When it cannot be found, refuses its arguments, or returns something else.
        """
        factory = self._load()
        try:
            model = factory(**{"seed": self.seed, **self.arguments})
        except (TypeError, ValueError) as error:
            raise InvalidRun(
                f"--model {self.factory}: its factory refuses seed={self.seed} and --model-args "
                f"{json.dumps(dict(self.arguments))}: {raised(error)}. It must take these keyword arguments."
            ) from error
        if not isinstance(model, PipelineModel):
            raise InvalidRun(
                f"--model {self.factory}: its result is a {type(model).__name__} without build_stage, "
                f"microbatch, loss and optimizer; see zbv_worker.model.protocol.PipelineModel."
            )
        return model

    def fingerprint(self, n_stages: int, partition: Sequence[Sequence[str]] | None = None) -> str:
        """Identity of the model as a pipeline of ``n_stages``; equal on ranks that may run together.

        Parameters
        ----------
        partition
            The layers of every stage; None where the model decides itself.
        """
        parts: list[Any] = [self.factory, dict(self.arguments), self.seed, n_stages]
        if partition is not None:
            parts.append([list(names) for names in partition])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _load(self) -> Callable[..., Any]:
        name, colon, attribute = self.factory.partition(":")
        if not (colon and name and attribute):
            raise InvalidRun(f"--model: found {self.factory!r}; must be package.module:factory.")
        if self.allowed is not None:
            require_named(self.factory, self.allowed)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InvalidRun(
                f"--model {self.factory}: there is no module {error.name!r} here; looked in {searched()}. "
                f"Install it, or put its directory on PYTHONPATH (of an agent: --path DIR)."
            ) from None
        factory = getattr(module, attribute, None)
        if not callable(factory):
            raise InvalidRun(f"--model {self.factory}: {name} has no callable {attribute!r}.")
        if self.allowed is not None:
            require_admitted(self.factory, factory, self.allowed)
        return factory  # type: ignore[no-any-return]  # what the user's module holds is Any


def require_named(factory: str, patterns: Sequence[str]) -> None:
    """Check a factory's name, before its module is imported; raises :class:`InvalidRun`."""
    from zbv_service.client_runs import is_allowed  # and with it httpx, which other runs do not need

    if not is_allowed(factory, patterns):
        raise InvalidRun(
            f"--model {factory}: this agent allows {', '.join(patterns) or 'none'}. Start it with "
            f"--allow-model '{factory.partition(':')[0]}' if the module's code may run on this node."
        )


def require_admitted(factory: str, found: object, patterns: Sequence[str]) -> None:
    """Check that an agent's patterns admit what a factory's name stands for; raises :class:`InvalidRun`.

    A pattern for a module admits its public functions and classes that it defines itself. What it merely
    imports is not meant: a module that imports ``os.system`` would let anybody call that. A pattern with a
    colon whose part after it is a name admits that callable, wherever it comes from.
    """
    module, _, name = factory.partition(":")
    for pattern in patterns:
        of_module, colon, of_name = pattern.partition(":")
        if colon and of_name == name and fnmatchcase(module, of_module):
            return
    is_defined = inspect.isfunction(found) or inspect.isclass(found)
    home = getattr(found, "__module__", None)
    if is_defined and home == module and not name.startswith("_"):
        return
    if name.startswith("_"):
        why = "its name begins with an underscore"
    elif home != module:
        why = f"it comes from {home or 'elsewhere'}"
    else:
        why = f"it is a {type(found).__name__}, not a function or class"
    raise InvalidRun(
        f"--model {factory}: this agent allows what {module} defines itself, and {name} is not that: {why}. "
        f"Write a function in {module}, or start the agent with --allow-model '{factory}' if this very "
        f"callable may be called with any arguments."
    )


def has_ties(model: PipelineModel) -> bool:
    """Whether any stages share parameters."""
    return isinstance(model, Tied) and bool(model.tied_parameters())


def build_stage(model: PipelineModel, stage: int, n_stages: int, device: torch.device) -> nn.Module:
    """A model's stage, checked to be one; raises :class:`ModelError`."""
    module = model.build_stage(stage, n_stages, device)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"build_stage({stage}, {n_stages}) returned {type(module).__name__}; must be an nn.Module."
        )
    return module.train()


def layer_names(model: Layered) -> tuple[str, ...]:
    """A model's layers, checked to have names of their own; raises :class:`ModelError`."""
    names = tuple(model.layer_names())
    for at, name in enumerate(names):
        if not isinstance(name, str) or not name or name in names[:at]:
            again = " again" if name in names[:at] else ""
            raise ModelError(
                f"layer_names of a {type(model).__name__}: layer {at} is {name!r}{again}; every layer must "
                f"have a name of its own, a text that is not empty."
            )
    if not names:
        raise ModelError(
            f"layer_names of a {type(model).__name__} names no layers; there must be one at least."
        )
    return names


def build_layers(model: Layered, names: Sequence[str], device: torch.device) -> nn.Sequential:
    """Some layers of a model, checked to be what was asked for; raises :class:`ModelError`.

    Without names, what passes its input on.
    """
    if not names:
        return nn.Sequential()
    module = model.build_layers(names, device)
    if not isinstance(module, nn.Sequential) or len(module) != len(names):
        count = f" of {len(module)} modules" if isinstance(module, nn.Sequential) else ""
        raise ModelError(
            f"build_layers of {', '.join(names)} returned a {type(module).__name__}{count}; must be an "
            f"nn.Sequential of {len(names)}, one module per layer."
        )
    return module.train()
