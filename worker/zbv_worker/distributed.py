"""The transport over ``torch.distributed``: gloo on CPU ranks, NCCL on CUDA ranks.

Every channel has its own process group, hence its own connection (gloo) or communicator (NCCL). On NCCL,
operations of one communicator run in the order they were issued, so a receive posted early would hold up a
later send; with one communicator per channel nothing waits behind something else. Control messages
(agreement, barriers) always go over gloo, the default group, and never touch a GPU.

gloo's Work of a send says that it is complete only once it was waited for, and completes only when the peer
has posted its receive. So a small thread per outgoing channel waits for the sends in order and lets go of
their tensors. NCCL's can be asked without waiting.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.channels import ChannelKey, Pending, TensorSpec, Transport
from zbv_worker.errors import InvalidRun

Backend = Literal["gloo", "nccl"]

_POLL_SECONDS = 0.0005
_EVER = timedelta(days=1)
_TAG = 0
"""Channels are ordered: nothing is told apart by tags."""


@dataclass(frozen=True)
class World:
    """Where this process stands among the ranks, as torchrun tells it."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; raises :class:`InvalidRun` when they are absent or wrong."""
        values = {}
        for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", os.environ.get("RANK"))):
            text = os.environ.get(name, default)
            if text is None or not text.isdigit():
                raise InvalidRun(
                    f"environment variable {name}: found {text!r}; must be a number. Start the ranks with "
                    f"`torchrun --nproc-per-node P --no-python zbv-worker run …`, or set RANK, WORLD_SIZE, "
                    f"MASTER_ADDR and MASTER_PORT."
                )
            values[name.lower()] = int(text)
        return cls(**values)


def select_device(backend: Backend, local_rank: int) -> torch.device:
    """The device of a rank: CPU for gloo, its own GPU for NCCL; raises :class:`InvalidRun`."""
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise InvalidRun(
            f"--backend nccl: local rank {local_rank} needs a GPU of its own; found {count} here. Start "
            f"fewer ranks on this node, or use --backend gloo."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


class DistributedTransport(Transport):
    """Channels as process groups of two.

    Parameters
    ----------
    device
        Where received tensors are wanted. gloo moves CUDA tensors through the CPU.
    timeout
        Seconds, of the rendezvous and of operations that are given none.
    init_method
        As for ``torch.distributed.init_process_group``; by default from the environment.
    """

    def __init__(
        self,
        world: World,
        backend: Backend,
        device: torch.device,
        timeout: float,
        init_method: str = "env://",
    ):
        self.rank = world.rank
        self.world_size = world.world_size
        self._backend = backend
        self._device = device
        self._wire_device = device if backend == "nccl" else torch.device("cpu")
        self._stages_through_cpu = backend == "gloo" and device.type != "cpu"
        self._opened: set[ChannelKey] = set()
        self._ends: dict[ChannelKey, _End] = {}
        self._senders: list[_Sender] = []
        try:
            dist.init_process_group(
                "gloo",
                init_method=init_method,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise _classified(error, f"the {world.world_size} ranks did not meet") from error

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        # new_group is collective over all ranks, so all must call it in one order, members or not.
        for key in sorted(set(keys) - self._opened):
            group = dist.new_group(
                [key.sender, key.receiver], timeout=timedelta(seconds=timeout), backend=self._backend
            )
            self._opened.add(key)
            if self.rank == key.sender:
                sender = _ThreadSender(key) if self._backend == "gloo" else _PollSender(key)
                self._senders.append(sender)
                self._ends[key] = _End(group, dist.get_group_rank(group, key.receiver), sender)
            elif self.rank == key.receiver:
                self._ends[key] = _End(group, dist.get_group_rank(group, key.sender), None)
            self._greet(key, timeout)

    def _greet(self, key: ChannelKey, timeout: float) -> None:
        """One small message per new channel: NCCL connects at first use, which must not be in a step.

        All ranks greet the channels in one order, so these blocking connections cannot wait in a circle.
        """
        greeting = torch.zeros(1, dtype=torch.int64)
        if self.rank == key.sender:
            self.isend(key, greeting, "greeting")
        elif self.rank == key.receiver:
            self.irecv(key, TensorSpec.of(greeting)).wait(timeout)

    @override
    def isend(self, key: ChannelKey, tensor: Tensor, label: str) -> None:
        payload = tensor.detach().contiguous()
        if self._stages_through_cpu:
            payload = payload.cpu()
        end = self._ends.get(key)
        if end is None or end.sender is None:
            raise InvalidRun(f"rank {self.rank} does not send on {key}.")
        try:
            work = end.group.send([payload], end.peer, _TAG)
        except RuntimeError as error:
            raise _classified(error, f"sending {label} to rank {key.receiver}") from error
        end.sender.add(_Sent(work, payload, label))

    @override
    def irecv(self, key: ChannelKey, spec: TensorSpec) -> Pending:
        # A buffer of its own for every tensor: W may hold it long after the next one arrived.
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._wire_device)
        end = self._ends.get(key)
        if end is None or end.sender is not None:
            raise InvalidRun(f"rank {self.rank} does not receive on {key}.")
        try:
            work = end.group.recv([buffer], end.peer, _TAG)
        except RuntimeError as error:
            raise _classified(error, f"posting a receive from rank {key.sender}") from error
        return _Posted(work, buffer, self._device, self._backend)

    @override
    def check(self) -> None:
        for sender in self._senders:
            sender.check()

    @override
    def flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for sender in self._senders:
            sender.flush(deadline)

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        self.barrier(timeout)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    @override
    def barrier(self, timeout: float) -> None:
        try:
            # The only barrier that says who is absent.
            dist.monitored_barrier(timeout=timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(_first_line(error)) from error

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        self._control(dist.isend, torch.tensor([value]), peer, timeout)

    @override
    def hear(self, peer: int, timeout: float) -> int:
        heard = torch.empty(1, dtype=torch.int64)
        self._control(dist.irecv, heard, peer, timeout)
        return int(heard)

    def _control(
        self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, timeout: float
    ) -> None:
        """One message of the default group, which is gloo's whatever the channels use."""
        try:
            work = operation(tensor, peer)
            if work is not None:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise _classified(error, f"a control message between ranks {self.rank} and {peer}") from error

    @override
    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        self._ends.clear()
        self._opened.clear()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a broken group cannot be taken down in order
                dist.destroy_process_group()


@dataclass(frozen=True, eq=False, slots=True)
class _End:
    """This rank's end of a channel. Sends and receives go to the group itself: the functions of
    ``torch.distributed`` look up again, at every call, what never changes.
    """

    group: dist.ProcessGroup
    peer: int
    """The other end's rank within the group."""

    sender: _Sender | None
    """None at the receiving end."""


@dataclass(frozen=True, eq=False)
class _Posted:
    work: dist.Work
    buffer: Tensor
    device: torch.device
    backend: Backend

    def wait(self, timeout: float) -> Tensor:
        """Arrived, or on NCCL: arrived as far as this rank's current stream is concerned."""
        try:
            if self.backend == "nccl":
                self._poll(timeout)
            self.work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise _classified(error, "receive") from error
        return self.buffer if self.buffer.device == self.device else self.buffer.to(self.device)

    def _poll(self, timeout: float) -> None:
        """NCCL's own wait only orders streams, and its watchdog aborts the process: time it here."""
        deadline = time.monotonic() + timeout
        while not self.work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError("nothing arrived")
            time.sleep(_POLL_SECONDS / 10)


class _Sent(NamedTuple):
    work: dist.Work
    payload: Tensor
    label: str


class _Sender(Protocol):
    """Keeps the sends of one channel alive until they are done."""

    def add(self, sent: _Sent) -> None: ...

    def check(self) -> None: ...

    def flush(self, deadline: float) -> None: ...

    def close(self) -> None: ...


class _ThreadSender:
    """Waits for sends in a thread of its own (gloo)."""

    def __init__(self, key: ChannelKey):
        self._key = key
        self._queue: SimpleQueue[_Sent | None] = SimpleQueue()
        self._added = 0
        self._finished = 0
        self._current = ""
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._reap, name=f"sends of {key}", daemon=True)
        self._thread.start()

    def add(self, sent: _Sent) -> None:
        self._added += 1
        self._queue.put(sent)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def flush(self, deadline: float) -> None:
        # By looking, once a run: a condition would cost every send something.
        while self._finished < self._added:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._key.receiver} did not take {self._current}")
            time.sleep(_POLL_SECONDS)
        self.check()

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout=0.2)  # a daemon: one that still waits for a lost peer is left behind

    def _reap(self) -> None:
        while True:
            try:
                sent = self._queue.get(timeout=60.0)
            except Empty:
                continue
            if sent is None:
                return
            self._current = sent.label
            try:
                # How long a peer may take is for it to say, whose receive has the timeout: it may be busy
                # with other microbatches. This one ends with the connection, or with the process.
                sent.work.wait(_EVER)
            except RuntimeError as error:
                if not self._closed:
                    self._failure = _classified(error, f"sending {sent.label} to rank {self._key.receiver}")
            del sent
            self._finished += 1


class _PollSender:
    """Asks the sends whether they are done (NCCL)."""

    def __init__(self, key: ChannelKey):
        self._key = key
        self._sent: deque[_Sent] = deque()

    def add(self, sent: _Sent) -> None:
        self.check()
        self._sent.append(sent)

    def check(self) -> None:
        while self._sent and self._sent[0].work.is_completed():
            done = self._sent.popleft()
            error = done.work.exception() if not done.work.is_success() else None
            if error is not None:
                raise ConnectionError(f"sending {done.label} to rank {self._key.receiver} failed: {error}")

    def flush(self, deadline: float) -> None:
        self.check()
        while self._sent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._key.receiver} did not take {self._sent[0].label}")
            time.sleep(_POLL_SECONDS)
            self.check()

    def close(self) -> None:
        self._sent.clear()


def _classified(error: Exception, what: str) -> TimeoutError | ConnectionError:
    """torch raises RuntimeError for both; the text says which."""
    text = _first_line(error)
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower() or "timeout" in text.lower():
        return TimeoutError(f"{what}: {text}")
    return ConnectionError(f"{what}: {text}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
