"""Checkpoints: the complete state of a run, so that it can continue as if it had never stopped.

::

    DIRECTORY/step-00000040.g2/           complete: written under another name, then renamed
    DIRECTORY/step-00000050.g2.partial/   being written, or left by a run that was killed while writing it
    DIRECTORY/step-00000030.g1.damaged/   found with a wrong checksum by a run that resumed

Files are written in the background (:mod:`~.checkpoint_writer`), one checkpoint at a time.
The number after ``g`` is the generation that wrote it; :mod:`zbv_worker.checkpoints.fence` decides which
checkpoints count. All ranks must see the same directory. Parameters and optimizer state are stored by
parameter names, which do not depend on the partition: a run may resume with another plan, placement, number
of ranks or replicas.
"""

from __future__ import annotations

import errno
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zbv_worker.checkpoints.checkpoint_files import RankFiles, State, write_index
from zbv_worker.checkpoints.checkpoint_state import RunState, TrainedState
from zbv_worker.checkpoints.checkpoint_writer import BackgroundWriter, HostCopies
from zbv_worker.checkpoints.checksums import damage_of
from zbv_worker.checkpoints.fence import Claimant, Fence, checkpoints
from zbv_worker.errors import (
    ChannelTimeout,
    InvalidRun,
    PeerLost,
    StorageFailed,
    Superseded,
    WorkerError,
    naming_errors,
)
from zbv_worker.host.process import say
from zbv_worker.transport.channels import Transport

_VISIBLE_SECONDS = 10.0
"""How long a rank waits to see what rank 0 wrote; network file systems may delay it."""
_RAISED_TOGETHER = {
    error.__name__: error for error in (Superseded, InvalidRun, StorageFailed, ChannelTimeout, PeerLost)
}
"""Errors of one rank that all ranks raise, by name."""
_WRONG_PATH = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
}
"""Errors by which a claim finds that the directory is the wrong one; all others may pass."""
DEFAULT_KEPT = 3
DEFAULT_TIMEOUT = 600.0


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and how often to save checkpoints."""

    directory: Path
    """A shared directory; the same on every rank."""
    every: int
    """Steps between checkpoints; another one is saved after the last step."""
    kept: int = DEFAULT_KEPT
    """How many of the newest checkpoints to keep."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds to wait for the slowest rank's file; network file systems may be slow. If a rank hangs while
    saving, the others notice only then."""
    is_synchronous: bool = False
    """Whether training waits until a checkpoint is complete. Otherwise it waits only while the state is
    copied to host memory, and for the checkpoint before."""
    run: str | None = None
    attempt: int = 0
    """The service's run and its generation; None and 0 without a service. See
    :class:`zbv_worker.checkpoints.fence.Claimant`."""


Skipped = Callable[[int, str], None]
"""Reports the step of a checkpoint that could not be written, and why."""


class Checkpoints:
    """The checkpoints of a run. :meth:`save`, :meth:`finish` and :meth:`load_newest` are collective.

    A checkpoint that cannot be written, for instance because the disk is full, is skipped: the run can still
    resume from an older one, and the next one may succeed. Only the last one must: see :meth:`finish`.

    Parameters
    ----------
    on_skipped
        Called on rank 0 for each checkpoint that is skipped.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        trained: TrainedState,
        transport: Transport,
        device: torch.device,
        on_skipped: Skipped | None = None,
    ):
        self._options = options
        self._on_skipped = on_skipped
        self._failed: StorageFailed | None = None
        self._reported = 0
        self._state = RunState(trained, transport)
        self._model = trained.model
        self._ties = trained.ties
        self._transport = transport
        self._saved = 0
        self._fence: Fence | None = None
        self._notes = ""
        self._writer = BackgroundWriter(transport.rank, options.timeout)
        self._is_writing = False
        self._copies = HostCopies(device)

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save before ``step`` of a run with ``last`` steps."""
        return step > self._saved and (step % self._options.every == 0 or step == last)

    def save(self, step: int) -> None:
        """Save the state before ``step``, or start to: :meth:`finish` waits for the rest.

        Raises
        ------
        InvalidRun
            If the state has something that a checkpoint cannot hold, or copies of tied parameters differ.
        """
        if self._ties is not None:
            self._ties.check(self._options.timeout)
        self._settle()
        fence = self._fence or self._claim()[0]
        self._saved, self._failed = step, None
        try:
            self._on_rank_0(lambda: fence.begin(step))
        except StorageFailed as error:
            self._skip(error)
            return
        state = self._state.before(step)
        mine: list[RankFiles] = []
        self._on_every_rank(lambda: mine.append(self._copied(state)))
        self._writer.start(lambda: self._write(fence, step, mine[0]))
        self._is_writing = True
        if self._options.is_synchronous:
            self._settle()

    def _copied(self, state: State) -> RankFiles:
        """This rank's files, with tensors that training does not change if it goes on."""
        rank = self._transport.rank
        if self._options.is_synchronous:
            return RankFiles.of(rank, state)
        with self._copies.copying() as copy:
            return RankFiles.of(rank, state, copy)

    def _write(self, fence: Fence, step: int, files: RankFiles) -> None:
        """Write this rank's files, and on rank 0 complete the checkpoint; runs on the writer's thread."""
        folder, rank = fence.partial(step), self._transport.rank
        with self._unless_superseded(), naming_errors(rank, "at a checkpoint"):
            self._copies.wait()
            outcome = self._attempt(lambda: files.write(folder))
            self._transport.post(f"{self._notes}/{rank}", json.dumps([step, outcome]))
            if rank != 0:
                _raise_first([outcome])
                return
            outcomes = self._outcomes_of_all(step)
            try:
                _raise_first(outcomes)
                write_index(folder, [checksum for _, checksum in outcomes])
                fence.publish(step, self._options.kept)
            except (StorageFailed, OSError):
                fence.give_up(step)  # every rank has ended writing; what it wrote would keep the disk full
                raise

    def _outcomes_of_all(self, step: int) -> list[list[Any]]:
        """Wait until every rank has written its files, or could not; returns the outcomes by rank."""
        outcomes: dict[int, list[Any]] = {}

        def absent() -> list[int]:
            for rank in set(range(self._transport.world_size)) - outcomes.keys():
                note = json.loads(self._transport.posted(f"{self._notes}/{rank}") or "[0, null]")
                if note[0] == step:
                    outcomes[rank] = note[1]
            return sorted(set(range(self._transport.world_size)) - outcomes.keys())

        self._writer.until_none(absent)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def check(self) -> None:
        """Raise the error of this rank's part of the last :meth:`save`, if it has failed. Does not wait.

        A checkpoint that could not be written is only reported.
        """
        error = self._writer.error
        if error is None:
            return
        try:
            _raise_first([self._attempt(partial(_raise, error))])
        except StorageFailed as failed:
            self._report(failed)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises
        ------
        StorageFailed
            If it could not be written.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed

    def _settle(self) -> None:
        """Wait until the last checkpoint is complete or, on all ranks, skipped."""
        if self._is_writing:
            self._is_writing = False
            try:
                self._on_every_rank(self._writer.wait)
            except StorageFailed as error:
                self._skip(error)

    def _skip(self, error: StorageFailed) -> None:
        self._failed = error
        self._report(error)

    def _report(self, error: StorageFailed) -> None:
        """Report once, on rank 0, that the last checkpoint is skipped."""
        if self._transport.rank == 0 and self._reported < self._saved:
            self._reported = self._saved
            say(f"the checkpoint of step {self._saved} is skipped: {error} Training goes on.")
            if self._on_skipped is not None:
                self._on_skipped(self._saved, str(error))

    def complete_alone(self) -> None:
        """Wait until this rank's part of the last checkpoint is written, on rank 0 until it is complete."""
        self._writer.wait()

    def close(self) -> None:
        """Call when the run ends; gives up a checkpoint that is not complete."""
        self._writer.close()

    def load_newest(self) -> int:
        """Claim the directory and resume from its newest complete checkpoint; returns the next step.

        Returns 0 without a checkpoint. From now on no older generation can write where this one does. A
        damaged checkpoint is set aside, and the run resumes from an older one.

        Raises
        ------
        InvalidRun
            If the ranks see different directories, the checkpoint belongs to another model, or all are
            damaged.
        StorageFailed
            If the file system fails.
        Superseded
            If a newer generation of the run has claimed the directory.
        """
        fence, found = self._claim()
        if not found:
            return 0
        step, name = self._newest_undamaged(fence, found)
        layers = self._all_layers() if self._model is None else None
        with self._unless_superseded():
            self._state.load(self._options.directory / name, layers)
        self._saved = self._reported = step
        return step

    def _newest_undamaged(self, fence: Fence, found: list[tuple[int, str]]) -> tuple[int, str]:
        """The step and name of the first checkpoint that no rank finds damaged; sets the others aside."""
        rank, ranks = self._transport.rank, self._transport.world_size
        for step, name in found:
            folder = self._options.directory / name
            with self._unless_superseded():
                damages = self._on_every_rank(partial(damage_of, folder, rank, ranks))
            damage = next(filter(None, damages), None)
            if damage is None:
                return step, name
            self._on_rank_0(partial(fence.set_aside, name))
            if rank == 0:
                say(f"checkpoint {folder} is damaged: {damage}. It is set aside as {name}.damaged.")
        raise InvalidRun(
            f"checkpoints in {self._options.directory}: every checkpoint is damaged, the oldest because "
            f"{damage}. Restore one from a copy, or start the run again: it then begins at step 0."
        )

    def _all_layers(self) -> list[str]:
        """The layers of the whole model, to refuse the checkpoint of a model with more. Collective."""
        with naming_errors(self._transport.rank, "looking for checkpoints"):
            found = self._transport.gather(self._state.layers, self._options.timeout)
        return [name for names in found for name in names]

    def _claim(self) -> tuple[Fence, list[tuple[int, str]]]:
        """Claim the directory; returns its fence, and steps and names of its checkpoints, newest first."""
        generation, found, token = self._on_rank_0(self._claim_alone)
        self._fence = Fence(self._options.directory, generation)
        self._notes = f"checkpoint/{token}"
        self._require_visible(self._fence)
        return self._fence, found

    def _claim_alone(self) -> list[Any]:
        """Claim as rank 0; returns the generation, steps and names of the checkpoints, and a token.

        With the token, several directories of one process do not share their notes.
        """
        options = self._options
        claimant = Claimant(self._model, options.run, options.attempt)
        try:
            fence = Fence.claim(options.directory, claimant)
        except OSError as error:
            if error.errno in _WRONG_PATH:
                raise InvalidRun(self._naming_directory(error)) from error
            raise
        found = sorted(checkpoints(options.directory).items(), reverse=True)
        return [fence.generation, [[step, path.name] for step, path in found], uuid.uuid4().hex]

    def _require_visible(self, fence: Fence) -> None:
        """Check that every rank sees rank 0's claim; otherwise the directory is not shared."""
        until = time.monotonic() + min(_VISIBLE_SECONDS, self._options.timeout)
        while not fence.is_visible and time.monotonic() < until:
            time.sleep(0.1)
        with naming_errors(self._transport.rank, "looking for checkpoints"):
            seen = self._transport.gather(fence.is_visible, self._options.timeout)
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise InvalidRun(
                f"checkpoints in {self._options.directory}: the ranks see different directories: what rank "
                f"0 wrote does not exist on rank {blind}. Use a directory on a file system that all nodes "
                f"share."
            )

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run something on rank 0 while all ranks wait; returns its JSON result on all ranks."""
        (result, *_) = self._on_every_rank(work if self._transport.rank == 0 else lambda: None)
        return result

    def _on_every_rank(self, work: Callable[[], Any]) -> list[Any]:
        """Run something on every rank; returns all results. If it fails on one, all ranks raise its error."""
        with naming_errors(self._transport.rank, "at a checkpoint"):
            gathered = self._transport.gather(self._attempt(work), self._options.timeout)
        _raise_first(gathered)
        return [result for _, result in gathered]

    def _attempt(self, work: Callable[[], Any]) -> list[Any]:
        """Run something; returns its outcome as JSON: an error's name and message, or "" and the result."""
        try:
            return ["", work()]
        except tuple(_RAISED_TOGETHER.values()) as error:
            return [type(error).__name__, str(error)]
        except OSError as error:
            return [StorageFailed.__name__, self._naming_directory(error)]

    def _naming_directory(self, error: OSError) -> str:
        return f"checkpoints in {self._options.directory}: {error.strerror or error}."

    @contextmanager
    def _unless_superseded(self) -> Iterator[None]:
        """If files are missing because a newer generation removed them, report that instead."""
        try:
            yield
        except (WorkerError, OSError):
            if self._fence is not None:
                self._fence.check()
            raise


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint of a directory; None if there is none."""
    found = checkpoints(directory)
    return found[max(found)] if found else None


def _raise_first(outcomes: list[list[Any]]) -> None:
    """Raise the first error among outcomes of :meth:`Checkpoints._attempt`."""
    for error, result in outcomes:
        if error:
            raise _RAISED_TOGETHER[error](result)


def _raise(error: BaseException) -> None:
    raise error
