"""A model for ``zbv-worker``, put together from layers, a loss, data and an optimizer: :class:`Model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from zbv_worker.errors import InvalidRun
from zbv_worker.model.layer_list import Layers, as_layered, even_partition, mixed
from zbv_worker.model.loss_module import loss_module, ties_of
from zbv_worker.model.optimizers import adamw
from zbv_worker.model.protocol import Layered

Data = Callable[[int, int], Any]
"""Takes the step and the index of a microbatch; returns (input, target) or (input, target, keywords)."""

_EVALUATION = 1
"""Mixed into the seed of evaluation data."""


class Model:
    """Layers with everything else that a run needs; satisfies :class:`zbv_worker.model.PipelineModel`.

    ::

        def build():
            layers = [nn.Linear(64, 64) for _ in range(8)]
            return zbv.Model(layers, loss=nn.functional.mse_loss, data=dataset, samples=16)

    Parameters
    ----------
    layers
        In model order, as for :func:`~zbv_worker.model.layer_list.as_layered`: a list or mapping of modules,
        or of functions that build one; an ``nn.Sequential``; or an object that builds layers by name.
    loss
        Takes the last layer's output and a target; returns the mean over the microbatch. The loss of
        ``layers`` by default.
    loss_sum
        In place of ``loss``, if microbatches have different weights: returns the sum over the microbatch, and
        its weight, such as the number of tokens that count (:class:`~zbv_worker.model.protocol.Weighted`).
    data
        A function of step and index that returns a microbatch, the same on every rank. Or a data set with a
        length, of samples (input, target): then each microbatch has ``samples`` samples drawn at random, with
        replacement, by torch's seed and the microbatch's number.
    samples
        Samples per microbatch of a data set.
    evaluation_data
        The same for evaluations; ``data`` by default.
    optimizer
        Takes this rank's parameters as pairs of name and parameter, and returns the optimizer. AdamW by
        default.
    schedule
        Takes the optimizer and returns its learning-rate schedule; none by default.
    shape_of
        Takes the plan's features of a microbatch, and returns what every stage passes to the next
        (:class:`~zbv_worker.model.protocol.Shaped`). The method of ``layers`` by default, if it has one.

    Raises
    ------
    InvalidRun
        If something is missing or cannot be used.
    """

    loss: Callable[[Any, Any], Any]
    loss_sum: Callable[[Any, Any], tuple[Tensor, Any]]
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
    shape_of: Callable[[Mapping[str, float]], Any]
    evaluation_microbatch: Data

    def __init__(
        self,
        layers: Layers,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        loss_sum: Callable[[Any, Any], tuple[Tensor, Any]] | None = None,
        data: Data | Sized,
        samples: int | None = None,
        evaluation_data: Data | Sized | None = None,
        optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] = adamw,
        schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        shape_of: Callable[[Mapping[str, float]], Any] | None = None,
    ):
        self._layers: Layered = as_layered(layers)
        self._set_loss(loss, loss_sum)
        self._microbatch = _microbatches("data", data, samples, torch.initial_seed())
        self._optimizer = optimizer
        # Without these attributes, the model does not satisfy the protocols Evaluated, Scheduled and Shaped,
        # and without loss_sum not Weighted.
        if evaluation_data is not None:
            seed = mixed(torch.initial_seed(), _EVALUATION)
            self.evaluation_microbatch = _microbatches("evaluation_data", evaluation_data, samples, seed)
        if schedule is not None:
            self.schedule = schedule
        given = shape_of if shape_of is not None else getattr(layers, "shape_of", None)
        if given is not None:
            self.shape_of = given

    def _set_loss(
        self,
        loss: Callable[[Any, Any], Any] | None,
        loss_sum: Callable[[Any, Any], tuple[Tensor, Any]] | None,
    ) -> None:
        if loss is not None and loss_sum is not None:
            raise InvalidRun(
                "zbv.Model: found loss and loss_sum; pass one of them. loss returns the mean over a "
                "microbatch, loss_sum a pair of sum and weight."
            )
        if loss is None and loss_sum is None:
            loss_sum = getattr(self._layers, "loss_sum", None)
            loss = getattr(self._layers, "loss", None)
        if loss is None and loss_sum is None:
            raise InvalidRun(
                "zbv.Model: found no loss. Pass loss=, a function of output and target, for instance "
                "torch.nn.functional.cross_entropy."
            )
        if loss_sum is not None:
            self.loss_sum = loss_sum
            loss = partial(_mean, loss_sum)
        if loss is not None:
            self.loss = loss
        self.loss_module = loss_module(loss if loss_sum is None else loss_sum, self._layers)

    def layer_names(self) -> Sequence[str]:
        """The names of all layers, in model order."""
        return self._layers.layer_names()

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Some layers; see :class:`zbv_worker.model.Layered`."""
        return self._layers.build_layers(names, device)

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """A stage with about as many layers as the others."""
        names = even_partition(self.layer_names(), n_stages)[stage]
        return self.build_layers(names, device) if names else nn.Sequential()

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """Pairs of names of parameters that layers share."""
        return ties_of(self._layers, self.loss_module)

    def microbatch(self, step: int, index: int) -> Any:
        """A microbatch of the training data."""
        return self._microbatch(step, index)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of parameters without names."""
        return self.named_optimizer((str(at), parameter) for at, parameter in enumerate(parameters))

    def named_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of one rank's parameters."""
        return self._optimizer(parameters)


def _mean(loss_sum: Callable[[Any, Any], tuple[Tensor, Any]], output: Any, target: Any) -> Tensor:
    """The mean over a microbatch."""
    total, weight = loss_sum(output, target)
    return total / (weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1))


def _microbatches(name: str, data: Any, samples: int | None, seed: int) -> Data:
    """Data as a function of step and index."""
    has_length = isinstance(data, Sized) and hasattr(data, "__getitem__")
    if has_length and samples is None:
        raise InvalidRun(
            f"zbv.Model: {name} is a data set of class {type(data).__name__}. Pass samples=, the number of "
            f"samples per microbatch."
        )
    if has_length and (not isinstance(samples, int) or samples < 1 or len(data) < 1):
        raise InvalidRun(
            f"zbv.Model: found samples={samples!r} and {len(data)} samples in {name}; must be at least 1."
        )
    if has_length:
        return _Drawn(data, samples or 1, seed)
    if callable(data):
        return data  # type: ignore[no-any-return]  # the user's function
    raise InvalidRun(
        f"zbv.Model: {name} is a {type(data).__name__}; must be a function of step and index that returns "
        f"(input, target), or a data set with __len__ and __getitem__. Several ranks, and a run after a "
        f"restart, cannot read an iterator at the same place."
    )


class _Drawn:
    """Microbatches of samples drawn from a data set; equal on every rank, and after a restart."""

    def __init__(self, data: Any, samples: int, seed: int):
        self._data = data
        self._samples = samples
        self._seed = seed

    def __call__(self, step: int, index: int) -> Any:
        generator = torch.Generator().manual_seed(mixed(self._seed, step, index))
        chosen: Tensor = torch.randint(len(self._data), (self._samples,), generator=generator)
        return tuple(default_collate([self._data[at] for at in chosen.tolist()]))
