"""The control plane over gloo and the ranks' store.

Messages are JSON, sent as the bytes of a tensor. torch's collectives for objects (``all_gather_object`` and
others) use pickle, and unpickling a message can run code that its sender chose. JSON cannot.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from typing_extensions import override
from zbv_solver.numerals import figure

from zbv_worker.transport.connected import ControlPlane
from zbv_worker.transport.gloo_ends import HostReceive
from zbv_worker.transport.rendezvous import lives_in_rank_0, meet, named, part_of, ranks_on_this_host
from zbv_worker.transport.torch_api import classified, classifying, first_line, new_group
from zbv_worker.transport.world import Layout, World

MAX_BYTES = 256 * 2**20
"""The longest message. A longer one is refused before memory for it is allocated."""

GatherTensors = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a uint8 or int64 tensor of equal size from every rank, ordered by rank."""


def gather_json(value: Any, gather: GatherTensors) -> list[Any]:
    """Return every rank's JSON value, ordered by rank. Collective.

    The ranks exchange the lengths first, then the bytes, padded to the longest message.

    Raises
    ------
    TypeError
        If this rank's value is not JSON.
    ValueError
        On every rank, if a message is too long or is not JSON.
    """
    content = bytearray(json.dumps(value).encode())
    lengths = [int(length) for length in gather(torch.tensor([len(content)], device="cpu"))]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_BYTES:
            raise ValueError(
                f"rank {rank} sent a message of {figure(length)} bytes; must be between 1 and "
                f"{figure(MAX_BYTES)}"
            )
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    parts = gather(padded)
    return [_decoded(rank, part[: lengths[rank]]) for rank, part in enumerate(parts)]


def _decoded(rank: int, content: Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message of rank {rank} is not JSON ({error})") from None


_TAG = 1 << 20
"""No other operation uses this tag, so a receive with it can only time out."""
_AT_ONCE = timedelta(milliseconds=1)
_REPORT_SECONDS, _REPORT_POLL_SECONDS = 2.0, 0.05
"""How long a rank whose barrier failed waits for rank 0 to report the absent ranks."""


class StoreNotes:
    """Notes in the ranks' store; both methods raise ConnectionError if it is gone."""

    def __init__(self, store: Store):
        self._store = PrefixStore("zbv/notes", store)

    def post(self, name: str, value: str) -> None:
        """Publish a note."""
        with _naming_the_store():
            self._store.set(name, value)

    def posted(self, name: str) -> str | None:
        """Return a note, or None."""
        with _naming_the_store():
            return self._store.get(name).decode() if self._store.check([name]) else None


@contextlib.contextmanager
def _naming_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        host = "rank 0, which serves the ranks' store, ended" if lives_in_rank_0() else "its server ended"
        raise ConnectionError(f"the ranks' common store is gone ({host}): {first_line(error)}") from error


@dataclass
class _DefaultGroup:
    """A default group that the worker has made."""

    group: dist.ProcessGroup | None
    users: int = 0
    """The number of open control planes in it."""


_MADE: list[_DefaultGroup] = []
"""The newest, because a process has one default group."""

# A forked process, such as one of a DataLoader, has a copy of all objects, but none of their threads. If its
# garbage collector finds a process group, the group waits for its threads, and the process dies.
os.register_at_fork(after_in_child=gc.freeze)


class GlooControl(ControlPlane):
    """The control plane over ``torch.distributed``, with a gloo group on every device.

    If the user has initialised ``torch.distributed``, that stays as it is: the control plane has an own group
    and an own part of the store. Otherwise the first control plane makes the default group, later ones have
    own groups inside it, and the last one that closes destroys it. A world of one rank needs no address and
    no port.

    Parameters
    ----------
    timeout
        Seconds for the ranks to meet.
    layout
        The places of the ranks; by default one pipeline.

    Raises
    ------
    TimeoutError, ConnectionError
        If the ranks do not meet; names those that did not arrive.
    """

    def __init__(self, world: World, timeout: float, layout: Layout | None = None):
        self.rank = world.rank
        self.layout = layout or Layout(world.world_size)
        # Counts collectives to name their notes; equal on all ranks.
        self._barriers = self._sums = 0
        self._is_guest = dist.is_initialized()
        found = None  # the store at the address in the environment
        if self._is_guest:
            found = part_of(_get_default_store(), world.rank)
        elif world.world_size == 1:
            found = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = meet(world.rank, world.world_size, timeout, found)
        # Notes are only polled, so the store's own timeout matters for the rendezvous alone.
        self._notes = StoreNotes(self._store)
        self.ranks_on_host = ranks_on_this_host(self._store)
        with classifying(f"the {world.world_size} ranks did not meet"):
            self._group = self._new_group(world, timedelta(seconds=timeout))
        if not self._is_guest:
            _MADE[:] = [_DefaultGroup(dist.group.WORLD)]
        self._shared = next((made for made in _MADE if made.group is dist.group.WORLD), None)
        if self._shared is not None:
            self._shared.users += 1

    def _new_group(self, world: World, timeout: timedelta) -> dist.ProcessGroup | None:
        """A group of all ranks; None for the default group."""
        if self._is_guest:
            made: dist.ProcessGroup = new_group(backend="gloo", timeout=timeout)
            return made
        dist.init_process_group(
            "gloo", store=self._store, rank=world.rank, world_size=world.world_size, timeout=timeout
        )
        return None

    def other_notes(self) -> StoreNotes:
        """The same notes for another thread: a connection to the store serves one thread at a time.

        Raises TimeoutError or ConnectionError if the store does not answer.
        """
        with classifying("connecting to the ranks' store"):
            return StoreNotes(self._store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        self.barrier(timeout)

        def gather(tensor: Tensor) -> list[Tensor]:
            parts = [torch.empty_like(tensor) for _ in range(self.layout.world_size)]
            HostReceive(dist.all_gather(parts, tensor, group=self._group, async_op=True), tensor).wait(
                timeout
            )
            return parts

        try:
            return gather_json(value, gather)
        except ValueError as error:
            raise ConnectionError(str(error)) from error

    @override
    def barrier(self, timeout: float) -> None:
        self._barriers += 1
        try:
            # The only barrier that names absent ranks.
            dist.monitored_barrier(self._group, timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(self._who_is_absent(first_line(error))) from error

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        self.send(torch.tensor([value], device="cpu"), peer, timeout)

    @override
    def hear(self, peer: int, timeout: float) -> int:
        heard = torch.empty(1, dtype=torch.int64, device="cpu")
        self.receive(heard, peer, timeout)
        return int(heard)

    @override
    def send(self, tensor: Tensor, peer: int, timeout: float) -> None:
        self.start_send(tensor, peer)(timeout)

    @override
    def start_send(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        try:
            work = dist.isend(tensor, peer, self._group)
        except RuntimeError as error:
            raise classified(error, self._what(peer)) from error
        return partial(self._wait, work, peer)

    @override
    def receive(self, tensor: Tensor, peer: int, timeout: float) -> None:
        self.start_receive(tensor, peer)(timeout)

    @override
    def start_receive(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        try:
            work = dist.irecv(tensor, peer, self._group)
        except RuntimeError as error:
            raise classified(error, self._what(peer)) from error
        return partial(self._wait, work, peer)

    def _wait(self, work: dist.Work | None, peer: int, timeout: float) -> None:
        try:
            if work is not None:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise classified(error, self._what(peer)) from error

    def _what(self, peer: int) -> str:
        return f"a control message between ranks {self.rank} and {peer}"

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        total = values.clone()
        self._sums += 1
        with classifying("summing over all ranks"):
            work = dist.all_reduce(total, group=self._group, async_op=True)
        with self.naming_absent(f"ranks/{self._sums}", range(self.layout.world_size)):
            return HostReceive(work, total).wait(timeout)

    @override
    def post(self, name: str, value: str) -> None:
        self._notes.post(name, value)

    @override
    def posted(self, name: str) -> str | None:
        return self._notes.posted(name)

    @override
    @contextlib.contextmanager
    def naming_absent(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            with contextlib.suppress(ConnectionError):
                self.post(f"{name}/{self.rank}", "")
                notes = {f"{name}/{rank}": rank for rank in ranks}
                absent = [notes[note] for note in self._unpublished(notes)]
                if absent:
                    raise TimeoutError(f"{named(absent)} did not take part: {error}") from error
            raise

    def _who_is_absent(self, said: str) -> str:
        """Describe a failed barrier: only rank 0 knows who is absent, so the others wait for its report."""
        name = f"barrier/{self._barriers}"
        with contextlib.suppress(ConnectionError):
            if self.rank == 0:
                self.post(name, said)
            else:
                self._unpublished([name])
                return self.posted(name) or said
        return said

    def _unpublished(self, names: Iterable[str]) -> list[str]:
        """Wait a moment for other ranks to publish these notes; returns those that are still absent."""
        absent = list(names)
        deadline = time.monotonic() + _REPORT_SECONDS
        while absent and time.monotonic() < deadline:
            time.sleep(_REPORT_POLL_SECONDS)
            absent = [name for name in absent if self.posted(name) is None]
        return absent

    @override
    def abort(self) -> None:
        group = self._group or dist.group.WORLD
        if group is not None:
            break_connections(group)

    @override
    def close(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.users -= 1
        with contextlib.suppress(RuntimeError, ValueError):  # a group may be broken, or destroyed already
            if not dist.is_initialized():
                pass  # the user has destroyed all groups
            elif shared is not None and shared.users == 0 and shared.group is dist.group.WORLD:
                dist.destroy_process_group()  # also those of the channels
            else:
                for group in groups if self._group is None else (*groups, self._group):
                    dist.destroy_process_group(group)
        # Torch only forgets a group; its threads and connections end with the last reference.
        self._group = None
        if shared is not None and shared.users == 0:
            shared.group = None


def break_connections(group: dist.ProcessGroup) -> None:
    """Fail all pending and later operations of a gloo group, on its other ranks too; from any thread.

    ``ProcessGroup.abort`` has no effect on gloo in torch 2.13, and destroying a group closes nothing while an
    operation waits. But gloo closes all connections of a group, on both sides, when a receive times out.
    """
    if group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        with contextlib.suppress(RuntimeError):
            backend: Any = group._get_backend(torch.device("cpu"))
            backend.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(_AT_ONCE)
