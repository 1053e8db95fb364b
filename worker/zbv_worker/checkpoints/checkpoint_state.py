"""What a checkpoint contains: one rank's parameters, optimizer, progress and random numbers, by name.

Names of parameters do not depend on the partition. Tensors that all replicas hold are divided among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.checkpoints.checkpoint_files import Reader, State
from zbv_worker.checkpoints.optimizer_state import NamedOptimizers, ScheduleState, TiedNames, are_equal
from zbv_worker.errors import InvalidRun, StorageFailed, describe_error
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.gradients.ties import Ties
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.protocol import StatefulData
from zbv_worker.stage.dtensors import is_dtensor, is_first_holder
from zbv_worker.transport.channels import Transport

_SCHEDULE = "schedule."


@dataclass(frozen=True)
class TrainedState:
    """What training changes on one rank."""

    modules: Mapping[int, nn.Module]
    """This rank's stages."""
    model: str | None = None
    """Fingerprint of the model, its arguments and seed; the state of another model is refused. None if the
    model is known only by the names and shapes of its parameters."""
    optimizers: Sequence[torch.optim.Optimizer] = ()
    schedules: Sequence[Any] = ()
    """Those of this rank; none on a rank without parameters."""
    loss_scale: LossScale = field(default_factory=LossScale)
    data: object = None
    """It may have a state (:class:`StatefulData`)."""
    ties: Ties | None = None
    """Parameters with several copies, of which only the first is saved."""


class RunState:
    """One rank's state of a run, as checkpoints hold it."""

    def __init__(self, trained: TrainedState, transport: Transport):
        self._whole = _as_one_module(trained.modules)
        self._trained = trained
        self._data = trained.data if isinstance(trained.data, StatefulData) else None
        self._transport = transport
        self._names = TiedNames(trained.ties)
        _ = self._optimizers  # refuses parameters of others at once

    @property
    def layers(self) -> list[str]:
        """The names of this rank's layers, or other children of its stages."""
        return [whole_name(name) for name, _ in self._whole.named_children()]

    def load(self, folder: Path, layers: Sequence[str] | None = None) -> None:
        """Continue from a checkpoint.

        Parameters
        ----------
        layers
            The names of the whole model's layers, to find others in the checkpoint; None to skip that.

        Raises
        ------
        InvalidRun
            If it belongs to another model.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        with self._naming_files(folder):
            reader = Reader(folder)
            self._require_same_model(folder, reader, layers)
            state = self._model_state()
            self._require_names(folder, reader, state)
            tensors = _named_tensors(state)
            for some in self._names.by_stored(tensors, reader):
                reader.read_into(some)
            if state:
                set_model_state_dict(self._whole, state)
            self._optimizers.load(reader, partial(self._other_model, folder))
            self._go_on(reader, folder)

    def _require_same_model(self, folder: Path, reader: Reader, layers: Sequence[str] | None) -> None:
        saved, own = reader.value("progress.model"), self._trained.model
        if None not in (saved, own) and saved != own:
            raise self._other_model(folder, "the factory, its arguments or the seed differ")
        known = tuple(f"model.{layer}." for layer in layers or ())
        for name in reader.tensors if known else ():
            if name.startswith("model.") and not name.startswith(known):
                raise self._other_model(folder, f"it has {name.removeprefix('model.')}")

    def _require_names(self, folder: Path, reader: Reader, state: Mapping[str, Any]) -> None:
        for name in map(whole_name, state):
            if self._names.stored(f"model.{name}", reader) not in reader:
                raise self._other_model(folder, f"it lacks {name}")

    @property
    def _optimizers(self) -> NamedOptimizers:
        """The optimizers with the parameters that the layers have now."""
        return NamedOptimizers(self._whole, self._trained.optimizers, self._names)

    def _model_state(self) -> dict[str, Any]:
        """Parameters and buffers, by their names in the modules."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if not self._whole.state_dict():  # torch's function refuses that
            return {}
        return get_model_state_dict(self._whole)

    def before(self, step: int) -> State:
        """The state before a step, as far as this rank writes it; ranks divide tensors that they all hold."""
        column, columns = self._transport.column, self._transport.layout.columns
        of_optimizers = self._optimizers.entries()
        # The first rank with the same stages stands for parts that several of them hold.
        first = self._transport.layout.global_rank(self._transport.pp_rank, 0)
        every = _named_tensors(self._model_state())
        every |= {name: value for name, value in of_optimizers.items() if isinstance(value, Tensor)}
        tensors = {
            name: tensor
            for at, (name, tensor) in enumerate(every.items())
            if (is_first_holder(tensor, first) if is_dtensor(tensor) else at % columns == column)
            and not self._names.is_further(name)
        }
        values: dict[str, Any] = {f"random.{self._transport.rank}": _random_state()}
        if self._data is not None:
            values[f"data.{self._transport.rank}"] = self._data.data_state()
        if column == 0:
            values |= self._progress(step) | self._optimizers.rest(self._transport.rank)
            for name, value in of_optimizers.items():
                if not isinstance(value, Tensor) and not self._names.is_further(name):
                    values[name] = value
        return State(tensors, values)

    def _progress(self, step: int) -> dict[str, Any]:
        progress = {
            "progress.step": step,
            "progress.model": self._trained.model,
            "progress.loss_scale": asdict(self._trained.loss_scale),
        }
        schedules = enumerate(self._schedules())
        return progress | {f"{_SCHEDULE}{self._transport.rank}.{at}": vars(each) for at, each in schedules}

    def _schedules(self) -> list[ScheduleState]:
        """The states of this rank's schedules."""
        named, optimizers, states = self._optimizers, self._trained.optimizers, list[ScheduleState]()
        known: list[Any] = []
        for schedule in self._trained.schedules:
            alone = optimizers[0] if len(optimizers) == 1 else None
            optimizer = getattr(schedule, "optimizer", alone)
            groups = [] if optimizer is None else named.groups(optimizer)
            place = sum(other is optimizer for other in known)
            known.append(optimizer)
            states.append(ScheduleState(type(schedule).__name__, place, groups, schedule.state_dict()))
        return states

    def _go_on(self, reader: Reader, folder: Path) -> None:
        rank = self._transport.rank
        self._trained.loss_scale.go_on_from(LossScale(**reader.value("progress.loss_scale")))
        saved = [ScheduleState(**reader.value(name)) for name in reader.names if name.startswith(_SCHEDULE)]
        for schedule, state in zip(self._trained.schedules, self._schedules(), strict=True):
            schedule.load_state_dict(state.resumed(saved, partial(self._other_model, folder)))
        # The ranks of a pipeline share the user's random numbers. Those of a run have their own: a rank that
        # did not exist goes on with its new ones.
        if self._trained.model is None or f"random.{rank}" in reader:
            random_state = _of_rank(reader, "random.", rank, ("torch", "python"))
            if random_state is not None:
                _set_random_state(random_state)
        if self._data is not None:
            data_state = _of_rank(reader, "data.", rank)
            if data_state is not None:
                self._data.load_data_state(data_state)
            elif any(name.startswith("data.") for name in reader.names):
                raise InvalidRun(
                    f"checkpoint {folder} lacks the state of the data of rank {rank}, and those of the other "
                    f"ranks differ. Resume with as many ranks as it was saved with, or without data=, and "
                    f"choose the batch by the number of the step."
                )

    @contextmanager
    def _naming_files(self, folder: Path) -> Iterator[None]:
        """Convert errors of reading a checkpoint to :class:`InvalidRun`, and the file system's own."""
        try:
            yield
        except OSError as error:
            raise StorageFailed(f"checkpoint {folder}: {error.strerror or error}.") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise self._other_model(folder, f"its state does not fit: {describe_error(error)}") from error

    def _other_model(self, folder: Path, why: str) -> InvalidRun:
        return InvalidRun(
            f"checkpoint {folder} belongs to another model ({why}). Use one directory per model, or the same "
            f"layers and optimizer (for zbv-worker run, the same --model, --model-args and --seed)."
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


def _of_rank(reader: Reader, prefix: str, rank: int, keys: Sequence[str] = ()) -> Any:
    """What a rank saved; for a rank that did not exist, what all ranks saved if that is equal; else None.

    Parameters
    ----------
    keys
        Those that count for other ranks, if it is a mapping; by default all.
    """
    if f"{prefix}{rank}" in reader:
        return reader.value(f"{prefix}{rank}")
    saved = [reader.value(name) for name in reader.names if name.startswith(prefix)]
    if keys:
        saved = [{key: each[key] for key in keys} for each in saved]
    return saved[0] if saved and all(are_equal(each, saved[0]) for each in saved) else None


def _named_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {f"model.{whole_name(name)}": value for name, value in state.items()}
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
