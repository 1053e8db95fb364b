"""What a checkpoint contains: one rank's parameters, optimizer, progress and random numbers, by name.

Names of parameters do not depend on the partition. Tensors that all replicas hold are divided among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.model.protocol import StatefulData
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.training.checkpoint_files import Reader, State
from zbv_worker.training.loss_scale import LossScale
from zbv_worker.training.tied_names import TiedNames
from zbv_worker.training.ties import Ties
from zbv_worker.training.update import Update
from zbv_worker.transport.channels import Transport


class RunState:
    """One rank's state of a run.

    Parameters
    ----------
    modules
        This rank's stages.
    model
        Fingerprint of the model, its arguments and seed; the state of another model is refused.
    data
        The pipeline model, which may have a state itself (:class:`StatefulData`).
    ties
        Parameters with several copies, of which only the first is saved.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        update: Update,
        model: str,
        data: object,
        transport: Transport,
        ties: Ties | None = None,
    ):
        self._whole = _as_one_module(modules)
        self._update = update
        self._model = model
        self._data = data if isinstance(data, StatefulData) else None
        self._transport = transport
        self._names = TiedNames(ties)

    def before(self, step: int) -> State:
        """The state before a step, as far as this rank writes it."""
        return self._without_creating(lambda: self._mine(step))

    def _without_creating(self, work: Callable[[], State]) -> State:
        """Run something that returns the optimizer's state, and leave a new optimizer without a state.

        To return it, torch creates the state by a step with zero gradients. That would count as a step in
        Adam's bias correction.
        """
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        found = work()
        for optimizer in fresh:
            optimizer.state.clear()
        return found

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint; raises :class:`InvalidRun` if it belongs to another model."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        state = self._trained()
        model, optimizer = state["model"], state["optimizer"]
        with self._naming_files(folder):
            reader = Reader(folder)
            for kind, place in (("model", ""), ("optimizer", " of the optimizer")):
                for name in state[kind]:
                    if self._names.stored(f"{kind}.{name}", reader) not in reader:
                        raise self._other_model(folder, f"it lacks {name}{place}")
            if reader.value("progress.model") != self._model:
                raise self._other_model(folder, "the factory, its arguments or the seed differ")
            tensors = _named_tensors(state)
            for some in self._names.by_stored(tensors, reader):
                reader.read_into(some)
            for name in optimizer:
                if f"optimizer.{name}" not in tensors:
                    optimizer[name] = reader.value(self._names.stored(f"optimizer.{name}", reader))
            set_state_dict(
                self._whole,
                self._optimizers,
                model_state_dict=model,
                optim_state_dict=optimizer,
                options=StateDictOptions(flatten_optimizer_state_dict=True),
            )
            self._go_on(reader)

    def _trained(self) -> dict[str, dict[str, Any]]:
        """Parameters, buffers and optimizer state, by name."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self._whole, self._optimizers, options=options)
        return {"model": model, "optimizer": optimizer}

    def _mine(self, step: int) -> State:
        """The state that this rank writes; replicas divide tensors that they all hold."""
        trained, replicas = self._trained(), self._transport.layout.replicas
        tensors = {
            name: tensor
            for at, (name, tensor) in enumerate(_named_tensors(trained).items())
            if (is_dtensor(tensor) or at % replicas == self._transport.replica)
            and not self._names.is_further(name)
        }
        values: dict[str, Any] = {f"random.{self._transport.rank}": _random_state()}
        if self._data is not None:
            values[f"data.{self._transport.rank}"] = self._data.data_state()
        if self._transport.replica == 0:
            values |= self._progress(step)
            for name, value in trained["optimizer"].items():
                if not isinstance(value, Tensor) and not self._names.is_further(f"optimizer.{name}"):
                    values[f"optimizer.{name}"] = value
        return State(tensors, values)

    def _progress(self, step: int) -> dict[str, Any]:
        schedule = self._update.schedule
        progress = {
            "progress.step": step,
            "progress.model": self._model,
            "progress.loss_scale": asdict(self._update.loss_scale),
        }
        # A rank without parameters has no schedule.
        return progress if schedule is None else {**progress, "progress.schedule": schedule.state_dict()}

    def _go_on(self, reader: Reader) -> None:
        rank = self._transport.rank
        self._update.loss_scale.go_on_from(LossScale(**reader.value("progress.loss_scale")))
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(reader.value("progress.schedule"))
        # After a change of the number of ranks, some ranks have no saved random state; they use a new one.
        if f"random.{rank}" in reader:
            _set_random_state(reader.value(f"random.{rank}"))
        if self._data is not None and f"data.{rank}" in reader:
            self._data.load_data_state(reader.value(f"data.{rank}"))

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._update.optimizer is None else [self._update.optimizer]

    @contextmanager
    def _naming_files(self, folder: Path) -> Iterator[None]:
        """Convert errors of reading a checkpoint to :class:`InvalidRun`."""
        try:
            yield
        except OSError as error:
            raise InvalidRun(f"--checkpoint-dir {folder}: {error.strerror or error}.") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise self._other_model(folder, f"its state does not fit: {describe_error(error)}") from error

    def _other_model(self, folder: Path, why: str) -> InvalidRun:
        return InvalidRun(
            f"--checkpoint-dir: {folder} belongs to another model ({why}). Use one directory per model, or "
            f"the same --model, --model-args and --seed."
        )


def _as_one_module(modules: Mapping[int, nn.Module]) -> nn.Module:
    """One module with the children of all stages; their names do not depend on the partition."""
    whole = nn.Module()
    for stage, module in modules.items():
        own = [
            *module.named_children(),
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        for name, value in own:
            if hasattr(whole, name):
                raise InvalidRun(
                    f"stage {stage} and another stage both have {name!r}; checkpoints need unique names. "
                    f"Name modules after their layer, not after their position in the stage."
                )
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                whole.register_buffer(name, value)
            else:
                setattr(whole, name, value)
    return whole


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _named_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": value
        for kind, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
