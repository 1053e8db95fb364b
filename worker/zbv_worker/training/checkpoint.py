"""Checkpoints: all that a run needs to go on as if nothing had happened, by torch.distributed.checkpoint.

::

    DIRECTORY/step-00000040.g2/           complete: written under another name, then renamed
    DIRECTORY/step-00000050.g2.partial/   being written, or left behind by a run that was killed then

The number after ``g`` is that of the generation that wrote it; :mod:`zbv_worker.training.fence` says which
checkpoints count. All ranks must see the same directory. Parameters and optimizer state are stored by the
parameters' names, which do not depend on the cut: a run may resume with another plan, placement, number of
ranks or replicas.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, Superseded, WorkerError, naming_errors
from zbv_worker.training.fence import Claimant, Fence, checkpoints
from zbv_worker.training.precision import LossScale
from zbv_worker.training.update import Update
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.torch_errors import classified

_METADATA = ".metadata"
_VISIBLE_SECONDS = 10.0
"""How long a rank looks for what rank 0 wrote: a network file system may show it late."""
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
    run, attempt
        The service's run and its generation; None and 0 without a service. See
        :class:`zbv_worker.training.fence.Claimant`.
    """

    directory: Path
    every: int
    kept: int = DEFAULT_KEPT
    timeout: float = DEFAULT_TIMEOUT
    run: str | None = None
    attempt: int = 0


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
        self._fence: Fence | None = None

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

        fence = self._fence or self._claim()[0]
        partial = fence.partial(step)
        self._alone(lambda: shutil.rmtree(partial, ignore_errors=True))
        # Asked for the state of an optimizer that has none yet, torch makes it by a step with zero gradients,
        # which counts as one in Adam's correction of its bias.
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        state: dict[str, Any] = {**self._trained(), **self._progress(step)}
        for optimizer in fresh:
            optimizer.state.clear()
        with self._unless_superseded(), self._naming(), _naming_files(self._options.directory):
            save(state, checkpoint_id=partial, process_group=self._group)
        self._alone(lambda: fence.publish(step, self._options.kept))
        self._saved = step

    def load_newest(self) -> int:
        """Claim the directory and resume from its newest complete checkpoint; returns the step to do next.

        That is 0 without a checkpoint. From now on no older generation can write where this one does.

        Raises
        ------
        InvalidRun
            When the ranks do not see the same directory, or the checkpoint is of another model.
        Superseded
            When a newer generation of the run has claimed the directory.
        """
        _, newest, name = self._claim()
        if name is None:
            return 0
        with self._unless_superseded():
            self._load(self._options.directory / name)
        self._saved = newest
        return newest

    def _claim(self) -> tuple[Fence, int, str | None]:
        """Claim the directory; returns the step and the name of its newest checkpoint, None without one."""
        generation, newest, name = self._alone(self._claim_alone)
        self._fence = Fence(self._options.directory, generation, _is_complete)
        self._require_visible(self._fence)
        return self._fence, newest, name

    def _claim_alone(self) -> list[Any]:
        """On rank 0: the generation's number, and the newest checkpoint's step and name."""
        options = self._options
        claimant = Claimant(self._model, options.run, options.attempt)
        fence = Fence.claim(options.directory, claimant, _is_complete)
        found = checkpoints(options.directory, _is_complete)
        newest = max(found, default=0)
        return [fence.generation, newest, found[newest].name if found else None]

    def _require_visible(self, fence: Fence) -> None:
        """Every rank must see rank 0's claim, or the directory is not shared."""
        until = time.monotonic() + min(_VISIBLE_SECONDS, self._options.timeout)
        while not fence.is_visible and time.monotonic() < until:
            time.sleep(0.1)
        with naming_errors(self._transport.rank, "looking for checkpoints"):
            seen = self._transport.gather(fence.is_visible, self._options.timeout)
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise InvalidRun(
                f"--checkpoint-dir {self._options.directory}: the ranks see different directories: what rank "
                f"0 wrote there does not exist for rank {blind}. It must be one directory on a file system "
                f"that all nodes share."
            )

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

    def _alone(self, work: Callable[[], Any]) -> Any:
        """Have rank 0 do something while all wait; returns its result, which JSON can say, on all ranks."""
        with self._naming():
            said: list[Any] = ["", None]
            if self._transport.rank == 0:
                said = self._attempt(work)
            (said, *_) = self._transport.gather(said, self._options.timeout)
        kind, value = said
        if kind == "superseded":
            raise Superseded(value)
        if kind == "invalid":
            raise InvalidRun(value)
        return value

    def _attempt(self, work: Callable[[], Any]) -> list[Any]:
        """What rank 0 tells the others: how it went, and the result or the message."""
        try:
            return ["", work()]
        except Superseded as error:
            return ["superseded", str(error)]
        except InvalidRun as error:
            return ["invalid", str(error)]
        except OSError as error:
            return ["invalid", f"--checkpoint-dir {self._options.directory}: {error.strerror}."]

    @contextmanager
    def _unless_superseded(self) -> Iterator[None]:
        """Where files are missing because a newer generation removed them, say that."""
        try:
            yield
        except (WorkerError, OSError):
            if self._fence is not None:
                self._fence.check()
            raise

    def _naming(self) -> AbstractContextManager[None]:
        return naming_errors(self._transport.rank, "at a checkpoint")

    def _other_model(self, folder: Path, why: str) -> InvalidRun:
        return InvalidRun(
            f"--checkpoint-dir: {folder} is of another model ({why}). Give each model a directory of its "
            f"own, or the same --model, --model-args and --seed."
        )


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint of a directory; None when there is none."""
    found = checkpoints(directory, _is_complete)
    return found[max(found)] if found else None


def _is_complete(path: Path) -> bool:
    """Whether a directory contains a checkpoint: its metadata is written last."""
    return (path / _METADATA).is_file()


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
