"""Decides who may write to a checkpoint directory: the generation that claimed it last.

::

    DIRECTORY/step-00000040.g2/             complete, written by generation 2
    DIRECTORY/step-00000050.g3.partial/     being written by generation 3
    DIRECTORY/generations/3/claim.json      describes generation 3
    DIRECTORY/generations/3/inherited.json  the complete checkpoints that generation 3 found

Every start of a run claims the next number. Only rank 0 claims, publishes and prunes, and before each of
these it checks for a newer claim. That check alone is not enough: a process can be stopped between the check
and the rename, and resume when its successor is already running. These rules make a late rename harmless:

- Names contain the generation, so two generations never write to the same directory.
- The checkpoints that count are those in ``inherited.json`` of the newest generation that has one, those
  written by that generation, and those whose name has no generation. A checkpoint that an older generation
  publishes late is on no list and is removed later.
- A generation lists what it inherits after its claim. From then on its predecessor can perform at most the
  one publication or pruning that it had already checked. Pruning never removes the newest checkpoint, so the
  newest inherited checkpoint stays.

A claim creates a name exclusively, by renaming a directory to it: that fails if the name is a directory that
is not empty. Local file systems and NFS guarantee this, and no lock can outlive its holder.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from zbv_worker.checkpoints.checkpoint_files import INDEX
from zbv_worker.errors import InvalidRun, Superseded
from zbv_worker.host.state_files import read_json, write_json

_GENERATIONS = "generations"
_CLAIM = "claim.json"
_INHERITED = "inherited.json"
_CHECKPOINT = re.compile(r"step-(\d{8})(?:\.g(\d+))?")
"""A complete checkpoint; one without a generation was written before generations existed."""
_LATEST = 253_402_300_799.0
"""The last second of the year 9999."""
_LEFT_BEHIND = re.compile(r"step-\d{8}\.g(\d+)(?:\.partial|\.pruned)?")


@dataclass(frozen=True)
class Claimant:
    """The run that claims a checkpoint directory."""

    model: str | None
    """Fingerprint of the model; a directory belongs to one model. None if it is unknown."""
    run: str | None = None
    """Id of the service's run; None for a run without a service."""
    attempt: int = 0
    """The run's generation as counted by the service: an older attempt cannot take over from a newer one."""


class Fence:
    """One generation's right to write to a checkpoint directory.

    Rank 0 creates it with :meth:`claim`; other ranks, from the number that rank 0 got.
    """

    def __init__(self, directory: Path, generation: int):
        self.directory = directory
        self.generation = generation

    @classmethod
    def claim(cls, directory: Path, claimant: Claimant) -> Fence:
        """Claim a directory and list its checkpoints.

        Raises
        ------
        Superseded
            If a newer attempt of the same run has already claimed the directory.
        InvalidRun
            If the directory has checkpoints of another model.
        OSError
            If the directory cannot be written.
        """
        claims = directory / _GENERATIONS
        claims.mkdir(parents=True, exist_ok=True)
        prepared = claims / f".{uuid.uuid4().hex}"
        prepared.mkdir()
        about = {**asdict(claimant), "host": socket.gethostname(), "at": time.time(), "token": prepared.name}
        try:
            write_json(prepared / _CLAIM, about)
            number = _newest(directory)
            while True:
                _require_right(directory, claimant, number)
                number += 1
                if _take_name(prepared, claims / str(number), prepared.name):
                    break
                number = max(number, _newest(directory))
        finally:
            shutil.rmtree(prepared, ignore_errors=True)  # exists only if the claim failed
        fence = cls(directory, number)
        found = [path.name for path in checkpoints(directory).values()]
        fence.check()
        write_json(claims / str(number) / _INHERITED, found)
        fence._remove_left_behind(found)
        return fence

    def check(self) -> None:
        """Raise :class:`Superseded` if a newer generation has claimed the directory."""
        newest = _newest(self.directory)
        if newest > self.generation:
            raise Superseded(
                f"checkpoints in {self.directory}: generation {newest} has taken over "
                f"({_about(self.directory, newest)}). This is generation {self.generation}; it ends now and "
                f"writes nothing more. Use a separate directory for each run that trains at the same time."
            )

    @property
    def is_visible(self) -> bool:
        """Whether this host sees the claim that rank 0 wrote."""
        return (self.directory / _GENERATIONS / str(self.generation) / _INHERITED).is_file()

    def partial(self, step: int) -> Path:
        """The path of an incomplete checkpoint before ``step``."""
        return self.directory / f"{_name(step, self.generation)}.partial"

    def begin(self, step: int) -> None:
        """Create the folder of an incomplete checkpoint; remove those that this generation gave up."""
        for path in self.directory.glob(f"step-*.g{self.generation}.partial"):
            shutil.rmtree(path, ignore_errors=True)
        self.partial(step).mkdir(parents=True)

    def give_up(self, step: int) -> None:
        """Remove an incomplete checkpoint, as far as the file system permits."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def set_aside(self, name: str) -> None:
        """Rename a damaged checkpoint, so that it does not count any more.

        Raises
        ------
        Superseded
            If a newer generation has claimed the directory.
        """
        self.check()
        aside = self.directory / f"{name}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (self.directory / name).rename(aside)

    def publish(self, step: int, kept: int) -> None:
        """Rename a complete checkpoint to its final name, and remove all but the newest ``kept``.

        Raises
        ------
        Superseded
            If a newer generation has claimed the directory; then nothing is renamed or removed.
        """
        final = self.directory / _name(step, self.generation)
        self.check()
        try:
            self.partial(step).rename(final)
        except FileNotFoundError:
            self.check()  # a successor may have removed it
            if not is_complete(final):  # NFS may repeat a rename whose reply was lost
                raise
        _sync(self.directory)  # the new name must be on disk before an older checkpoint is removed
        # List before checking: this generation must not prune what a successor inherits in between.
        found = checkpoints(self.directory)
        for old in sorted(found)[: -max(kept, 1)]:
            self.check()
            _remove(found[old])

    def _remove_left_behind(self, inherited: list[str]) -> None:
        """Remove files of older generations that do not count."""
        self.check()
        for path in self.directory.iterdir():
            found = _LEFT_BEHIND.fullmatch(path.name)
            if found and int(found[1]) < self.generation and path.name not in inherited:
                shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Write a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(checkpoint: Path) -> bool:
    """Whether a directory contains a complete checkpoint; the index is written last."""
    return (checkpoint / INDEX).is_file()


def checkpoints(directory: Path, is_complete: Callable[[Path], bool] = is_complete) -> dict[int, Path]:
    """The checkpoints of a directory that are complete and count, by step."""
    owner, inherited = _owner(directory)
    found: dict[int, Path] = {}
    if not directory.is_dir():
        return found
    for path in directory.iterdir():
        name = _CHECKPOINT.fullmatch(path.name)
        if name is None or not is_complete(path):
            continue
        # Checkpoints without a generation, for instance copied there by hand, always count.
        is_placed = name[2] is None or owner == 0
        if is_placed or path.name in inherited or int(name[2]) == owner:
            found[int(name[1])] = path
    return found


def _owner(directory: Path) -> tuple[int, list[str]]:
    """The newest generation with a list of inherited checkpoints, and the list; 0 and empty if none."""
    for number in sorted(_numbers(directory), reverse=True):
        inherited = read_json(directory / _GENERATIONS / str(number) / _INHERITED)
        if isinstance(inherited, list):
            return number, inherited
    return 0, []


def _numbers(directory: Path) -> Iterator[int]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in (directory / _GENERATIONS).iterdir():
            if path.name.isdecimal() and path.name.isascii():
                yield int(path.name)


def _newest(directory: Path) -> int:
    return max(_numbers(directory), default=0)


def _require_right(directory: Path, claimant: Claimant, newest: int) -> None:
    """Refuse another model, and an attempt that its service has abandoned."""
    if newest == 0:
        return
    model = _claim_of(directory, newest).model
    if None not in (model, claimant.model) and model != claimant.model and checkpoints(directory):
        raise InvalidRun(
            f"checkpoints in {directory}: it belongs to another model (the factory, its arguments or the "
            f"seed differ). Use one directory per model, or the same --model, --model-args and --seed."
        )
    for number in _numbers(directory):
        other = _claim_of(directory, number)
        if claimant.run is not None and other.run == claimant.run and other.attempt > claimant.attempt:
            raise Superseded(
                f"checkpoints in {directory}: generation {other.attempt} of run {claimant.run} uses it "
                f"({_about(directory, number)}). This is generation {claimant.attempt}, which the service "
                f"has abandoned; it ends now and has written nothing."
            )


def _take_name(prepared: Path, name: Path, token: str) -> bool:
    """Rename a claim to its number; returns False if the number is taken."""
    try:
        prepared.rename(name)
    except OSError:
        if not name.is_dir():
            raise
        # NFS may repeat a rename whose reply was lost; then this very claim has taken the name.
        return _claim(name).token == token
    return True


class _Claim(BaseModel):
    """The content of ``claim.json``, which anyone who can write to the directory may have changed."""

    model: str | None = None
    run: str | None = None
    attempt: int = 0
    host: str = "unknown"
    at: float = Field(default=0.0, ge=0.0, le=_LATEST)
    token: str = ""


def _claim_of(directory: Path, number: int) -> _Claim:
    return _claim(directory / _GENERATIONS / str(number))


def _claim(folder: Path) -> _Claim:
    """Read a claim; an unreadable one has default values, but its number still counts."""
    try:
        return _Claim.model_validate(read_json(folder / _CLAIM))
    except ValidationError:
        return _Claim()


def _about(directory: Path, number: int) -> str:
    claim = _claim_of(directory, number)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(claim.at))
    run = "a run without a service" if claim.run is None else f"run {claim.run}"
    return f"{run}, host {claim.host}, since {since}"


def _name(step: int, generation: int) -> str:
    return f"step-{step:08d}.g{generation}"


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that an interrupted removal leaves no damaged one."""
    unnamed = path.with_name(f"{path.name}.pruned")
    with suppress(OSError):  # another process was faster
        path.rename(unnamed)
    shutil.rmtree(unnamed, ignore_errors=True)
