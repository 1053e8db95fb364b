"""Every method that the worker calls on ``torch.cuda`` and on NCCL's process groups, as protocols.

The protocols let the transport and the executor run on models of CUDA and NCCL, without a GPU. A method that
is not listed here must not be called: several methods that torch declares raise an error, block the host or
hang with NCCL (``Work.is_success``, ``Work.result``, ``Work.source_rank``, ``Work.wait`` with a timeout,
``ProcessGroup.shutdown`` after an error).

Checked against torch 2.13.0: the headers ``ProcessGroupNCCL.hpp``, ``ProcessGroup.hpp`` and ``Backend.hpp``
and the stubs ``_C/_distributed_c10d.pyi`` of the installed package, and ``distributed_c10d.py``. Statements
about C++ sources refer to ``ProcessGroupNCCL.cpp`` of torch's main branch.

torch's communication errors are all RuntimeErrors, and only the text tells them apart (:func:`classified`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zbv_worker.transport import nccl_environment

_TAG = 0
"""Channels are ordered, so all messages use the same tag, which NCCL ignores."""


class CudaStream(Protocol):
    """An ordered queue of device work."""

    def wait_event(self, event: Any) -> None:
        """Make work queued from now on wait for the event."""


class CudaEvent(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Mark the current end of the stream's queue."""

    def query(self) -> bool:
        """Whether the stream has passed the event."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed the event."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later event; the streams must have passed both."""


class CudaApi(Protocol):
    """The functions of ``torch.cuda`` that the worker calls."""

    def Event(self, *, enable_timing: bool) -> CudaEvent:
        """A new event."""

    def Stream(self, device: torch.device) -> CudaStream:
        """A new stream."""

    def current_stream(self, device: torch.device) -> CudaStream:
        """The stream that this thread queues on."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread queues on another stream."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free and total bytes of the device's memory, for all processes (``cudaMemGetInfo``)."""


class NcclWork(Protocol):
    """A queued operation of one group (``WorkNCCL``)."""

    def is_completed(self) -> bool:
        """Whether the operation ended on the device or failed; does not block.

        After the group is aborted this is True, whatever happened (``WorkNCCL::isCompleted``). So the caller
        must remember that it aborted the group.
        """

    def wait(self) -> object:
        """Make the current stream wait for the operation; the host goes on (``WorkNCCL::synchronize``).

        Raises RuntimeError if the operation's failure is known already.
        """


class NcclGroup(Protocol):
    """A process group of NCCL. Its operations run in order on the group's stream.

    Every operation first waits for the work queued on the current stream. The first one connects the group:
    it blocks the host until every member issues it (``ProcessGroupNCCL::pointToPoint``, ``initNCCLComm``). A
    peer is an index into the group's ranks in ascending order.
    """

    def send(self, tensor: Tensor, peer: int) -> NcclWork:
        """Queue a send of a contiguous tensor, which must not change until the send is complete."""

    def receive(self, tensor: Tensor, peer: int) -> NcclWork:
        """Queue a receive into a contiguous tensor. A wrong size is not reported."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's object of the group, for a device mesh; None in a model of NCCL."""

    def all_reduce(self, tensor: Tensor) -> NcclWork:
        """Queue a sum over the group, in place."""

    def all_gather(self, whole: Tensor, part: Tensor) -> NcclWork:
        """Queue the concatenation of every member's part."""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> NcclWork:
        """Queue the sum of every member's whole tensor; each gets its own block."""

    def abort(self) -> None:
        """End the group's operations and connections, from any thread.

        Raises RuntimeError if that takes longer than the group's timeout, but may not even return then: torch
        aborts in a thread, and the future of that thread waits for its end when it is destroyed
        (``ProcessGroupNCCL::abort``). One group's abort may wait for a kernel of another group.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the group's timeout (``ProcessGroup::setTimeout``)."""


@dataclass(frozen=True)
class GroupOptions:
    """How NCCL runs one group."""

    max_ctas: int | None = None
    """The most thread blocks of one kernel, each of which occupies a streaming multiprocessor; None for
    NCCL's choice (up to 32)."""
    is_high_priority: bool = True
    """Whether kernels run on a stream of high priority, before queued kernels of the compute stream."""


class NcclApi(Protocol):
    """Creates groups of NCCL."""

    def version(self) -> str:
        """NCCL's version."""

    def streams_of_groups(self) -> int:
        """The number of groups of this process whose kernels run on a stream of high priority."""

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, options: GroupOptions, name: str
    ) -> NcclGroup | None:
        """Create a group of global ranks, in ascending order; None for a rank that is no member.

        Collective over all ranks, members or not, in one order (``torch.distributed.new_group``). Does not
        connect the members: their first operation does.
        """


def torch_cuda() -> CudaApi:
    """``torch.cuda`` itself."""
    return cast(CudaApi, torch.cuda)


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Create a group as ``torch.distributed.new_group`` does, connected by its first operation.

    If the user has initialised the default group with ``device_id``, torch would connect the new group at
    once, by splitting the default group's communicator (``ncclCommSplit``): all ranks of the world would wait
    for each other at every group, members or not, and for groups of gloo only the others would call it
    (``_new_process_group_helper``). So the default group has no device meanwhile. Torch's
    ``use_local_synchronization`` is no remedy: it names a group by the number of groups that a rank has.
    """
    default = dist.group.WORLD
    device = None if default is None else default.bound_device_id
    if default is None or device is None:
        return dist.new_group(ranks, **options)
    default.bound_device_id = None
    try:
        return dist.new_group(ranks, **options)
    finally:
        default.bound_device_id = device


class TorchNccl:
    """NCCL through ``torch.distributed``; the default process group must exist."""

    def version(self) -> str:
        """See :class:`NcclApi`."""
        found: tuple[object, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's own
        return ".".join(map(str, found))

    def streams_of_groups(self) -> int:
        """See :class:`NcclApi`."""
        return sum(map(_is_of_high_priority, dist.distributed_c10d._world.pg_map))

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, options: GroupOptions, name: str
    ) -> NcclGroup | None:
        """See :class:`NcclApi`."""
        made = _options(options, timeout)
        with nccl_environment.of_groups(os.environ):
            group = new_group(
                sorted(ranks), timeout=timeout, backend="nccl", pg_options=made, group_desc=name
            )
        return TorchNcclGroup(group) if isinstance(group, dist.ProcessGroup) else None


@dataclass(frozen=True, eq=False, slots=True)
class TorchNcclGroup:
    """A group of ``torch.distributed``.

    Sends and receives call the group directly: the functions of ``torch.distributed`` repeat lookups whose
    result never changes.
    """

    process_group: dist.ProcessGroup

    def send(self, tensor: Tensor, peer: int) -> NcclWork:
        """See :class:`NcclGroup`."""
        return self.process_group.send([tensor], peer, _TAG)

    def receive(self, tensor: Tensor, peer: int) -> NcclWork:
        """See :class:`NcclGroup`."""
        return self.process_group.recv([tensor], peer, _TAG)

    def all_reduce(self, tensor: Tensor) -> NcclWork:
        """See :class:`NcclGroup`."""
        return self.process_group.allreduce([tensor])

    def all_gather(self, whole: Tensor, part: Tensor) -> NcclWork:
        """See :class:`NcclGroup`."""
        work = dist.all_gather_single(whole, part, group=self.process_group, async_op=True)
        return cast(NcclWork, work)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> NcclWork:
        """See :class:`NcclGroup`."""
        work = dist.reduce_scatter_single(part, whole, group=self.process_group, async_op=True)
        return cast(NcclWork, work)

    def abort(self) -> None:
        """See :class:`NcclGroup`."""
        self.process_group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """See :class:`NcclGroup`."""
        self.process_group.set_timeout(timeout)


def _is_of_high_priority(group: dist.ProcessGroup) -> bool:
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for GPUs
        return False
    options = getattr(backend, "options", None)
    return bool(getattr(options, "is_high_priority_stream", False))


def _options(wanted: GroupOptions, timeout: timedelta) -> Any:
    """``ProcessGroupNCCL.Options``, which exist only in builds of torch with CUDA."""
    made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=wanted.is_high_priority)
    made._timeout = timeout  # new_group sets it too, but warns if it had another value
    if wanted.max_ctas is not None:
        made.config.min_ctas = 1
        made.config.max_ctas = wanted.max_ctas
    return made


_SOURCE_LINE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|h):\d+\] ?")
"""Where in its source gloo raised an error; it says nothing to a user."""


def classified(error: Exception, what: str) -> TimeoutError | ConnectionError:
    """Convert a RuntimeError of torch to a TimeoutError or ConnectionError.

    Raises an error of CUDA itself as it is: kernels fail later than their launch, so it may be any kernel of
    this rank, and no peer is to blame.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
    text = _SOURCE_LINE.sub("", first_line(error))
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower() or "timeout" in text.lower():
        return TimeoutError(f"{what}: {text}")
    return ConnectionError(f"{what}: {text}")


@contextmanager
def classifying(what: str) -> Iterator[None]:
    """Convert torch's RuntimeErrors in a block; too slow for the path of every transfer."""
    try:
        yield
    except RuntimeError as error:
        raise classified(error, what) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, without gloo's advice; what follows is a C++ trace."""
    return str(error).strip().partition("\n")[0].partition(". This is typically caused by")[0]
