"""Checkpoints: all that a run needs to go on as if nothing had happened.

::

    DIRECTORY/step-00000040/           complete: written under another name, then renamed
    DIRECTORY/step-00000050.partial/   being written, or left behind by a run that was killed then

All ranks must see the same directory. Parameters and optimizer state are stored by the parameters' names,
which do not depend on the cut: a run may go on with another plan, placement, number of ranks or replicas.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbv_worker.errors import InvalidRun, naming_errors, raised
from zbv_worker.training.checkpoint_files import INDEX, Reader, State, write_index, write_part
from zbv_worker.training.precision import LossScale
from zbv_worker.training.update import Update
from zbv_worker.transport.channels import Transport

_NAME = re.compile(r"step-(\d{8})")
OLD_INDEX = ".metadata"
"""Of torch.distributed.checkpoint, which zbv used before: it is pickled, so reading it can run code."""
DEFAULT_KEPT = 3
DEFAULT_TIMEOUT = 600.0


@runtime_checkable
class StatefulData(Protocol):
    """A model whose microbatches depend on more than their step and index."""

    def data_state(self) -> dict[str, Any]:
        """What this rank's data needs to go on from here."""

    def load_data_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints are, and how often one is made.

    Attributes
    ----------
    directory
        The same on every rank, and shared.
    every
        Steps; another one is made after the last step.
    kept
        The newest so many stay.
    timeout
        Seconds for the slowest rank's file: a network file system may be busy. A rank that hangs while a
        checkpoint is made is noticed only then.
    """

    directory: Path
    every: int
    kept: int = DEFAULT_KEPT
    timeout: float = DEFAULT_TIMEOUT


class Checkpoints:
    """The checkpoints of a run. Its methods are collective.

    Parameters
    ----------
    modules
        This rank's stages.
    model
        Fingerprint of the model, its arguments and seed: what was trained as another is not read.
    data
        The pipeline model, which may have a state of its own (:class:`StatefulData`).
    """

    def __init__(
        self,
        options: CheckpointOptions,
        modules: Mapping[int, nn.Module],
        update: Update,
        model: str,
        data: object,
        transport: Transport,
    ):
        self._options = options
        self._whole = _together(modules)
        self._update = update
        self._model = model
        self._data = data if isinstance(data, StatefulData) else None
        self._transport = transport
        self._saved = 0

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save before ``step``, ``last`` being the number of steps of the run."""
        return step > self._saved and (step % self._options.every == 0 or step == last)

    def save(self, step: int) -> None:
        """Save the state before ``step``.

        Raises
        ------
        InvalidRun
            When the directory cannot be written.
        """
        final = self._options.directory / f"step-{step:08d}"
        partial = final.with_name(f"{final.name}.partial")
        self._alone(lambda: _make_empty(partial))
        # Asked for the state of an optimizer that has none yet, torch makes it by a step with zero gradients,
        # which counts as one in Adam's correction of its bias.
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        state = self._mine(step)
        for optimizer in fresh:
            optimizer.state.clear()
        self._together(lambda: write_part(partial, self._transport.rank, state))
        self._alone(lambda: write_index(partial, self._transport.world_size))
        self._alone(lambda: self._complete(partial, final))
        self._saved = step

    def load_newest(self) -> int:
        """Go on from the newest complete checkpoint; returns the step to do next, 0 without one.

        Raises
        ------
        InvalidRun
            When the ranks do not see the same directory, or the checkpoint is of another model.
        """
        newest = newest_step(self._options.directory)
        with naming_errors(self._transport.rank, "looking for checkpoints"):
            seen = self._transport.gather(newest, self._options.timeout)
        if len(set(seen)) > 1:
            said = ", ".join(f"rank {rank}: {_shown(step)}" for rank, step in enumerate(seen))
            raise InvalidRun(
                f"--checkpoint-dir {self._options.directory}: the ranks see different checkpoints ({said}). "
                f"It must be one directory on a file system that all nodes share."
            )
        old = _newest_old(self._options.directory)
        if old is not None and (newest is None or old > newest):
            raise InvalidRun(
                f"--checkpoint-dir {self._options.directory}: the checkpoint of step {old} has the format of "
                f"an older zbv, which can run code when it is read. If you trust it, convert it: "
                f"`python -m zbv_worker.training.convert_checkpoint "
                f"{self._options.directory / f'step-{old:08d}'}`; else remove it."
            )
        if newest is None:
            return 0
        self._load(self._options.directory / f"step-{newest:08d}")
        self._saved = newest
        return newest

    def _load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        reader = Reader(folder)
        state = self._trained()
        model, optimizer = state["model"], state["optimizer"]
        absent = [name for name in model if f"model.{name}" not in reader]
        if absent:
            raise self._other_model(folder, f"it has no {absent[0]}")
        absent = [name for name in optimizer if f"optimizer.{name}" not in reader]
        if absent:
            raise self._other_model(folder, f"it has no {absent[0]} of the optimizer")
        if reader.value("progress.model") != self._model:
            raise self._other_model(folder, "the factory, its arguments or the seed differ")
        tensors = _named_tensors(state)
        with self._naming_files(folder):
            reader.read_into(tensors)
            for name in optimizer:
                if f"optimizer.{name}" not in tensors:
                    optimizer[name] = reader.value(f"optimizer.{name}")
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
        """What this rank writes: of tensors that all replicas have alike, its share."""
        trained, replicas = self._trained(), self._transport.layout.replicas
        tensors = {
            name: tensor
            for at, (name, tensor) in enumerate(_named_tensors(trained).items())
            if isinstance(tensor, DTensor) or at % replicas == self._transport.replica
        }
        values: dict[str, Any] = {f"random.{self._transport.rank}": _random_state()}
        if self._data is not None:
            values[f"data.{self._transport.rank}"] = self._data.data_state()
        if self._transport.replica == 0:
            values |= self._progress(step)
            for name, value in trained["optimizer"].items():
                if not isinstance(value, Tensor):
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
        for name, value in asdict(LossScale(**reader.value("progress.loss_scale"))).items():
            setattr(self._update.loss_scale, name, value)
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(reader.value("progress.schedule"))
        # Another number of ranks has others; a run then goes on with fresh ones.
        if f"random.{rank}" in reader:
            _set_random_state(reader.value(f"random.{rank}"))
        if self._data is not None and f"data.{rank}" in reader:
            self._data.load_data_state(reader.value(f"data.{rank}"))

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._update.optimizer is None else [self._update.optimizer]

    def _alone(self, work: Callable[[], None]) -> None:
        """Something that rank 0 does while all wait."""
        self._together(work if self._transport.rank == 0 else lambda: None)

    def _together(self, work: Callable[[], None]) -> None:
        """Something that every rank does; where one cannot, all raise :class:`InvalidRun`."""
        with self._naming():
            failure = None
            try:
                work()
            except OSError as error:
                failure = f"--checkpoint-dir {self._options.directory}: {error.strerror or error}."
            except InvalidRun as error:
                failure = str(error)
            failures = self._transport.gather(failure, self._options.timeout)
        said = next((each for each in failures if each is not None), None)
        if said is not None:
            raise InvalidRun(said)

    def _naming(self) -> AbstractContextManager[None]:
        return naming_errors(self._transport.rank, "at a checkpoint")

    @contextmanager
    def _naming_files(self, folder: Path) -> Iterator[None]:
        """Gives errors of reading a checkpoint the worker's name."""
        try:
            yield
        except OSError as error:
            raise InvalidRun(f"--checkpoint-dir {folder}: {error.strerror or error}.") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise self._other_model(folder, f"its state does not fit: {raised(error)}") from error

    def _complete(self, partial: Path, final: Path) -> None:
        """Give a checkpoint its name, and remove those that are too old."""
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for step in sorted(_steps(self._options.directory))[: -self._options.kept]:
            shutil.rmtree(self._options.directory / f"step-{step:08d}", ignore_errors=True)

    def _other_model(self, folder: Path, why: str) -> InvalidRun:
        return InvalidRun(
            f"--checkpoint-dir: {folder} is of another model ({why}). Give each model a directory of its "
            f"own, or the same --model, --model-args and --seed."
        )


def newest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint of a directory; None when there is none."""
    return max(_steps(directory), default=None)


def _steps(directory: Path, index: str = INDEX) -> Iterable[int]:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and (path / index).is_file():
            yield int(found[1])


def _newest_old(directory: Path) -> int | None:
    """The step of the newest checkpoint that an older zbv wrote."""
    return max(_steps(directory, OLD_INDEX), default=None)


def _together(modules: Mapping[int, nn.Module]) -> nn.Module:
    """One module whose names are those of the stages, which name their layers alike in every cut."""
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
                    f"stage {stage} has {name!r}, and so has another stage; checkpoints go by names. Name "
                    f"modules after their layer, not after their place in the stage."
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


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _shown(step: int | None) -> str:
    return "none" if step is None else f"step {step}"
