"""Writes checkpoints in the background, so that training goes on meanwhile.

At a step boundary, every rank copies its state to host memory (:class:`HostCopies`). Then one of its
threads writes its files (:class:`BackgroundWriter`). Rank 0's thread completes the checkpoint as soon as all
ranks have published a note that they have written theirs: the ranks' collectives belong to the training.

``torch.distributed.checkpoint.async_save`` copies and writes in the same way. It cannot write these files: it
pickles its metadata, and completes a checkpoint by collectives, which cannot respect generations
(:mod:`zbv_worker.checkpoints.fence`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zbv_worker.checkpoints.checkpoint_files import Copy
from zbv_worker.errors import ChannelTimeout
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, CudaStream, torch_cuda

_POLL_SECONDS = 0.1


class HostCopies:
    """Copies of tensors in host memory, which do not change while training goes on.

    Copies from a GPU use a separate stream. The compute stream waits for them, the host does not. They
    are in pinned memory, which is kept for the next checkpoint: pinning takes longer than copying.

    Parameters
    ----------
    device
        Where the rank computes.
    pin
        Use pinned host memory.
    """

    def __init__(self, device: torch.device, cuda: CudaApi | None = None, *, pin: bool = True):
        self._device = device
        self._pin = pin
        self._pinned: dict[str, Tensor] = {}
        self._is_complete: CudaEvent | None = None
        self._cuda = (cuda or torch_cuda()) if device.type == "cuda" else None
        self._stream = None if self._cuda is None else self._cuda.Stream(device)

    @contextmanager
    def copying(self) -> Iterator[Copy]:
        """A context that gives a function that copies tensors; later writes to these do no harm."""
        if self._cuda is None or self._stream is None:
            yield _cloned
            return
        compute = self._cuda.current_stream(self._device)
        self._stream.wait_event(self._mark(self._cuda, compute))
        with self._cuda.stream(self._stream):
            yield self._to_pinned
        self._is_complete = self._mark(self._cuda, self._stream)
        compute.wait_event(self._is_complete)

    def wait(self) -> None:
        """Wait until the copies are complete; call it before reading them, on any thread."""
        if self._is_complete is not None:
            self._is_complete.synchronize()

    def _to_pinned(self, name: str, tensor: Tensor) -> Tensor:
        known = self._pinned.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
            self._pinned[name] = known
        known.copy_(tensor.detach(), non_blocking=True)
        return known

    @staticmethod
    def _mark(cuda: CudaApi, stream: CudaStream) -> CudaEvent:
        event = cuda.Event(enable_timing=False)
        event.record(stream)
        return event


def _cloned(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class BackgroundWriter:
    """One thread that writes a checkpoint; the next one starts only after it.

    Parameters
    ----------
    timeout
        Seconds that a rank may take longer than the others, or a caller waits.
    """

    def __init__(self, rank: int, timeout: float):
        self._rank = rank
        self._timeout = timeout
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = threading.Event()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread; call :meth:`wait` first."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="zbv-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again on the training's thread
            self._error = error

    @property
    def error(self) -> BaseException | None:
        """The error that :meth:`wait` would raise at once, if there is one."""
        return self._error

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written, on rank 0 complete; raises the thread's error.

        Raises
        ------
        ChannelTimeout
            If that takes too long.
        """
        thread = self._thread
        if thread is None:
            return
        # On rank 0 the thread itself waits as long for the other ranks.
        thread.join(2 * self._timeout)
        if thread.is_alive():
            raise ChannelTimeout(
                f"rank {self._rank}, at a checkpoint: its files were not written within "
                f"{2 * self._timeout:g} s. Check the file system, or raise the timeout of checkpoints."
            )
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def until_none(self, absent: Callable[[], list[int]]) -> None:
        """On rank 0's thread, wait until ``absent`` returns no rank.

        Raises
        ------
        ChannelTimeout
            If a rank takes too long, or the run ends.
        """
        deadline = time.monotonic() + self._timeout
        while ranks := absent():
            if time.monotonic() > deadline or self._is_closed.wait(_POLL_SECONDS):
                late = ", ".join(map(str, ranks))
                raise ChannelTimeout(
                    f"rank {self._rank}, at a checkpoint: rank {late} did not write its files within "
                    f"{self._timeout:g} s of rank {self._rank}."
                )

    def close(self) -> None:
        """Give up a checkpoint in progress, after a failure; does not wait."""
        self._is_closed.set()
