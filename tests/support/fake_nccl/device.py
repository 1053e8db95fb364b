"""A device: streams, events, kernels, and what may run at the same time."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from support.fake_nccl.memory import Block, Clock, DeviceMemory, Use, merge
from support.fake_nccl.simulation import Host, ModelError, Simulation, this_host

STREAMS_PER_PRIORITY = 32
_CALL_SECONDS = 5e-6


@dataclass(frozen=True)
class DeviceModes:
    """What a device may do; each worse choice is allowed by CUDA's or NCCL's documentation."""

    kernel_slots: int | None = None
    """How many kernels of NCCL run at once (K); None for any number. More wait in the order in which their
    streams reach them."""
    slots_at_random: bool = False
    """A free slot goes to any waiting kernel, not to the first."""
    pool_streams: int = STREAMS_PER_PRIORITY
    """Streams per priority; the next one is the first again."""
    connections: int | None = None
    """Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); streams that share one start their work in the order
    of issue. None for a queue per stream."""
    sms_full: bool = False
    """A running compute kernel leaves no room in which a kernel of NCCL could start."""
    lazy_loading: bool = False
    """The first launch of a kernel blocks the host until the device is idle (CUDA_MODULE_LOADING=LAZY, and
    kernels that are compiled when they are first used)."""
    allocations_wait: bool = False
    """Memory of the device, and pinned memory, that torch has to get from CUDA blocks the host until the
    device is idle. Freed memory is used again without a wait."""
    launch_order: Literal["free", "start", "serial"] = "free"
    """NCCL_LAUNCH_ORDER_IMPLICIT: kernels of all communicators start, or run, in the host's order."""


@dataclass(eq=False)
class Item(ABC):
    """A piece of work in a stream."""

    label: str
    stream: FakeStream
    issued: float
    use: Use
    clock: Clock
    is_started: bool = False

    @abstractmethod
    def start(self) -> bool:
        """Start, if it can; it calls :meth:`finish` when it is done."""

    def finish(self) -> None:
        self.stream.finished(self)


@dataclass(eq=False)
class _Kernel(Item):
    seconds: float = 0.0
    run: Callable[[], object] = lambda: None

    def start(self) -> bool:
        device = self.stream.device
        device.computing += 1

        def end() -> None:
            device.computing -= 1
            self.run()
            device.retry()
            self.finish()

        device.simulation.at(device.simulation.now + self.seconds, end)
        return True


@dataclass(eq=False)
class Recording:
    """One ``record`` of an event."""

    stream: FakeStream
    clock: Clock
    passed: float | None = None
    is_awaited: bool = False
    waiting: list[FakeStream] = field(default_factory=list)


@dataclass(eq=False)
class _Record(Item):
    recording: Recording | None = None

    def start(self) -> bool:
        assert self.recording is not None
        self.recording.passed = self.stream.device.simulation.now
        if self.recording.is_awaited:
            self.stream.device.simulation.changed(self.stream.device.rank)
        self.finish()
        for stream in self.recording.waiting:
            stream.advance()
        return True


@dataclass(eq=False)
class _Wait(Item):
    recording: Recording | None = None

    def start(self) -> bool:
        assert self.recording is not None
        if self.recording.passed is None:
            if self.stream not in self.recording.waiting:
                self.recording.waiting.append(self.stream)
            return False
        self.finish()
        return True


class FakeStream:
    """An ordered queue of device work (``torch.cuda.Stream``)."""

    def __init__(self, device: Device, number: int, connection: int):
        self.device = device
        self.number = number
        self.connection = connection
        self.queue: deque[Item] = deque()
        self.clock: Clock = {}
        self._issued = 0
        self._is_advancing = False

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def wait_event(self, event: FakeEvent) -> None:
        """Make work queued from now on wait for the event's latest recording, if any."""
        if event.recording is not None:
            self.wait_recording(event.recording)

    def wait_stream(self, other: FakeStream) -> None:
        """Make work queued from now on wait for everything queued on another stream."""
        self.wait_recording(other.record())

    def wait_recording(self, recording: Recording) -> None:
        merge(self.clock, recording.clock)
        self.add(_Wait(*self.ticket(f"wait for {recording.stream}"), recording=recording))

    def record(self) -> Recording:
        ticket = self.ticket("event")
        recording = Recording(self, dict(self.clock))
        self.add(_Record(*ticket, recording=recording))
        return recording

    def launch(
        self,
        name: str,
        seconds: float,
        run: Callable[[], object],
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Queue a compute kernel that does ``run`` at its end."""
        self.device.load(name)
        ticket = self.ticket(name)
        self.use_memory(ticket[3], ticket[4], reads, writes)
        self.add(_Kernel(*ticket, seconds=seconds, run=run))

    def use_memory(self, use: Use, clock: Clock, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        memory = self.device.memory
        for tensors, access in ((reads, Block.read), (writes, Block.write)):
            for tensor in tensors:
                block = memory.block_of(tensor)
                if block is None:
                    raise ModelError(f"{use.label} uses host memory, which a device cannot reach")
                access(block, use, clock)

    def ticket(self, label: str) -> tuple[str, FakeStream, float, Use, Clock]:
        """The fields of the next item of this stream, issued now by this thread's host."""
        host = self.device.host()
        host.spend(_CALL_SECONDS * self.device.simulation.random.uniform(0.5, 2.0))
        merge(self.clock, host.observed)
        self._issued += 1
        self.clock[self.number] = self._issued
        return label, self, host.time, Use(self.number, self._issued, label), dict(self.clock)

    def add(self, item: Item) -> None:
        self.queue.append(item)
        self.device.issued(item)
        self.device.simulation.at(item.issued, self.advance)

    def advance(self) -> None:
        if self._is_advancing:
            return
        self._is_advancing = True
        while self.queue and not self.queue[0].is_started:
            item = self.queue[0]
            if item.issued > self.device.simulation.now or not self.device.may_start(item):
                break
            item.is_started = True
            if not item.start():
                item.is_started = False
                break
            self.device.started(item)
        self._is_advancing = False

    def finished(self, item: Item) -> None:
        assert self.queue[0] is item
        self.queue.popleft()
        self.device.ended(item)
        self.advance()


class FakeEvent:
    """A point in a stream (``torch.cuda.Event``)."""

    def __init__(self, device: Device, enable_timing: bool):
        self._device = device
        self._is_timed = enable_timing
        self.recording: Recording | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        """Mark the current end of a stream's queue, by default of the current one."""
        self.recording = (stream or self._device.current).record()

    def query(self) -> bool:
        """Whether the stream has passed the latest recording; True if there is none."""
        return self.recording is None or self._device.has_passed(self.recording)

    def synchronize(self) -> None:
        """Block the host until the stream has passed the latest recording."""
        if self.recording is not None:
            self._device.block_until_passed(self.recording)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds between two events; raises what ``CUDAEvent::elapsed_time`` raises."""
        if not (self._is_timed and later._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recording is None or later.recording is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and later.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        assert self.recording.passed is not None
        assert later.recording.passed is not None
        return (later.recording.passed - self.recording.passed) * 1e3


class Device:
    """One GPU and the rank that uses it."""

    def __init__(self, simulation: Simulation, rank: int, modes: DeviceModes):
        self.simulation = simulation
        self.rank = rank
        self.modes = modes
        self.memory = DeviceMemory(self._known, simulation.fail, self._grow)
        self._numbers = itertools.count()
        self.streams: list[FakeStream] = []
        self._pools: dict[bool, list[FakeStream]] = {False: [], True: []}
        self._handed_out = {False: 0, True: 0}
        self.default = self._new_stream()
        self._current = ContextVar(f"stream of rank {rank}", default=self.default)
        self.computing = 0
        self.connected_bytes = 0
        self.running: list[Item] = []
        self.most_running = 0
        self.unsent = self.most_unsent = 0
        self._waiting: list[Item] = []
        self._communication: list[Item] = []
        self._unstarted: dict[int, deque[Item]] = {}
        self._loaded: set[str] = set()

    @property
    def current(self) -> FakeStream:
        return self._current.get()

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._current.set(stream)

    def host(self) -> Host:
        """This thread's host; raises :class:`ModelError` if it is another rank's, or none."""
        host = this_host()
        if host.rank != self.rank:
            raise ModelError(f"rank {host.rank} uses the device of rank {self.rank}")
        return host

    def _known(self, stream: int) -> Clock:
        clock = dict(self.streams[stream].clock)
        host = self.simulation.hosts.get(self.rank)
        if host is not None:
            merge(clock, host.observed)
        return clock

    def _new_stream(self) -> FakeStream:
        number = next(self._numbers)
        connections = self.modes.connections
        stream = FakeStream(self, number, number if connections is None else number % connections)
        self.streams.append(stream)
        return stream

    def pool_stream(self, *, high_priority: bool) -> FakeStream:
        """The next stream of a pool, round robin (``getStreamFromPool``)."""
        pool = self._pools[high_priority]
        index = self._handed_out[high_priority] % self.modes.pool_streams
        self._handed_out[high_priority] += 1
        if index == len(pool):
            pool.append(self._new_stream())
        return pool[index]

    def load(self, name: str) -> None:
        if name in self._loaded:
            return
        self._loaded.add(name)
        if self.modes.lazy_loading:
            self.wait_until_idle(f"the first launch of {name}")

    def _grow(self) -> None:
        if self.modes.allocations_wait:
            self.wait_until_idle("an allocation")

    def wait_until_idle(self, what: str) -> None:
        self.host().block(
            lambda: not any(stream.queue for stream in self.streams), f"{what} waits until the device is idle"
        )

    def issued(self, item: Item) -> None:
        self._unstarted.setdefault(item.stream.connection, deque()).append(item)

    def issued_communication(self, item: Item) -> None:
        self._communication.append(item)

    def may_start(self, item: Item) -> bool:
        """Whether the hardware queue has reached an item."""
        return self.modes.connections is None or self._unstarted[item.stream.connection][0] is item

    def started(self, item: Item) -> None:
        """Let what is next in the hardware queue start."""
        queue = self._unstarted[item.stream.connection]
        queue.remove(item)
        if self.modes.connections is not None and queue:
            queue[0].stream.advance()
        if item in self._communication and self.modes.launch_order == "start":
            self._communication.remove(item)
            self.retry()

    def ended(self, item: Item) -> None:
        """Free the slot of a kernel of NCCL, and wake a host that waits for empty streams."""
        if not item.stream.queue:
            self.simulation.emptied(self.rank)
        if item in self.running:
            self.running.remove(item)
            if item in self._communication:
                self._communication.remove(item)
            self.retry()

    def take_slot(self, item: Item) -> bool:
        """Whether a kernel of NCCL may run now; if not, its stream is advanced again when it may."""
        modes = self.modes
        is_full = modes.kernel_slots is not None and len(self.running) >= modes.kernel_slots
        is_early = modes.launch_order != "free" and self._communication[0] is not item
        if is_full or is_early or (modes.sms_full and self.computing):
            if item not in self._waiting:
                self._waiting.append(item)
            return False
        if item in self._waiting:
            self._waiting.remove(item)
        self.running.append(item)
        self.most_running = max(self.most_running, len(self.running))
        return True

    def retry(self) -> None:
        waiting = list(self._waiting)
        if self.modes.slots_at_random:
            self.simulation.random.shuffle(waiting)
        for item in waiting:
            item.stream.advance()

    def has_passed(self, recording: Recording) -> bool:
        """Whether a recording was passed, as far as the host can see now."""
        host = self.host()
        host.time += 1e-6
        if recording.passed is None or recording.passed > host.time:
            host.catch_up()
        if recording.passed is None or recording.passed > host.time:
            recording.is_awaited = True
            return False
        merge(host.observed, recording.clock)
        return True

    def block_until_passed(self, recording: Recording) -> None:
        recording.is_awaited = True
        self.host().block(lambda: recording.passed is not None, f"synchronizes with {recording.stream}")
        merge(self.host().observed, recording.clock)

    def picture(self) -> list[str]:
        return [
            f"  rank {self.rank}, {stream}: {stream.queue[0].label}"
            f"{' runs' if stream.queue[0].is_started else ' waits'}, {len(stream.queue) - 1} behind it"
            for stream in self.streams
            if stream.queue
        ]
