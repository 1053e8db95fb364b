"""Checkpoints: all that a run needs to go on as if nothing had happened, by torch.distributed.checkpoint.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.training.precision import LossScale
from zbv_worker.training.update import Update
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.torch_errors import classified

_NAME = re.compile(r"step-(\d{8})")
_METADATA = ".metadata"
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
        patience = timedelta(seconds=options.timeout)
        self._group = dist.new_group(timeout=patience, backend="gloo") if dist.is_initialized() else None
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
        from torch.distributed.checkpoint.state_dict_saver import save

        final = self._options.directory / f"step-{step:08d}"
        partial = final.with_name(f"{final.name}.partial")
        self._alone(lambda: shutil.rmtree(partial, ignore_errors=True))
        # Asked for the state of an optimizer that has none yet, torch makes it by a step with zero gradients,
        # which counts as one in Adam's correction of its bias.
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        state: dict[str, Any] = {**self._trained(), **self._progress(step)}
        for optimizer in fresh:
            optimizer.state.clear()
        with self._naming(), _naming_files(self._options.directory):
            save(state, checkpoint_id=partial, process_group=self._group)
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
        if newest is None:
            return 0
        self._load(self._options.directory / f"step-{newest:08d}")
        self._saved = newest
        return newest

    def _load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {**self._trained(), **self._progress(0)}
        own = {key for key in state if key.startswith(("random.", "data."))}
        for key in own:  # another number of ranks has others; a run then goes on with fresh ones
            if not any(name == key or name.startswith(f"{key}.") for name in known):
                del state[key]
        absent = [name for name in state["model"] if f"model.{name}" not in known]
        if absent:
            raise self._other_model(folder, f"it has no {absent[0]}")
        with self._naming(), _naming_files(folder):
            load(state, checkpoint_id=folder, process_group=self._group)
        if state["progress"]["model"] != self._model:
            raise self._other_model(folder, "the factory, its arguments or the seed differ")
        set_state_dict(
            self._whole,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        self._go_on(state)

    def _trained(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state, by name."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self._whole, self._optimizers, options=options)
        return {"model": model, "optimizer": optimizer}

    def _progress(self, step: int) -> dict[str, Any]:
        rank, schedule = self._transport.rank, self._update.schedule
        state: dict[str, Any] = {
            "progress": {
                "step": step,
                "model": self._model,
                "loss_scale": asdict(self._update.loss_scale),
                "schedule": {} if schedule is None else schedule.state_dict(),
            },
            f"random.{rank}": _random_state(),
        }
        if self._data is not None:
            state[f"data.{rank}"] = self._data.data_state()
        return state

    def _go_on(self, state: dict[str, Any]) -> None:
        rank, progress = self._transport.rank, state["progress"]
        for name, value in asdict(LossScale(**progress["loss_scale"])).items():
            setattr(self._update.loss_scale, name, value)
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(progress["schedule"])
        if f"random.{rank}" in state:
            _set_random_state(state[f"random.{rank}"])
        if self._data is not None and f"data.{rank}" in state:
            self._data.load_data_state(state[f"data.{rank}"])

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._update.optimizer is None else [self._update.optimizer]

    def _alone(self, work: Any) -> None:
        """Something that rank 0 does while all wait."""
        with self._naming():
            failure = None
            if self._transport.rank == 0:
                try:
                    work()
                except OSError as error:
                    failure = f"--checkpoint-dir {self._options.directory}: {error.strerror}."
            (said, *_) = self._transport.gather(failure, self._options.timeout)
        if said is not None:
            raise InvalidRun(said)

    def _naming(self) -> AbstractContextManager[None]:
        return naming_errors(self._transport.rank, "at a checkpoint")

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


def _steps(directory: Path) -> Iterable[int]:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and (path / _METADATA).is_file():
            yield int(found[1])


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


@contextmanager
def _naming_files(path: Path) -> Iterator[None]:
    """Gives errors of files the worker's name, whichever rank had them."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise InvalidRun(f"--checkpoint-dir {path}: {first}.") from error
    except RuntimeError as error:
        raise classified(error, f"a checkpoint in {path}") from error


def _shown(step: int | None) -> str:
    return "none" if step is None else f"step {step}"
