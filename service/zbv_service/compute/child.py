"""The code of a process that makes calls for another one: messages, calls, reports and limits."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import resource
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # has no type
from pathlib import Path
from typing import Any

NICENESS = 10
"""Niceness: computations use the CPU time that the service leaves, so requests stay fast."""
ORPHANED = 70
"""Exit status of a process that lost its service."""


@dataclass(frozen=True)
class Message:
    """What one process sends to the other."""

    kind: bytes
    """``function``, ``argument`` and ``stop`` to the process; ``begun``, ``report``, ``done`` and ``failed``
    from it."""
    is_raw: bool
    data: bytes

    @property
    def value(self) -> Any:
        """The object; raises the errors of unpickling."""
        return self.data if self.is_raw else pickle.loads(self.data)


def send(pipe: Connection, kind: bytes, value: Any) -> None:
    """Send a message. Bytes are sent without pickling, which would copy them in both processes."""
    is_raw = isinstance(value, bytes | bytearray)
    data = value if is_raw else pickle.dumps(value)
    pipe.send_bytes(kind + (b" raw" if is_raw else b""))
    pipe.send_bytes(data)


def receive(pipe: Connection) -> Message:
    """Wait for a message; raises EOFError or OSError if the other end is closed."""
    kind, _, form = pipe.recv_bytes().partition(b" ")
    return Message(kind, form == b"raw", pipe.recv_bytes())


class Caller:
    """The process that waits for a call of this one: takes its reports, and may ask it to stop."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._sending = threading.Lock()
        self._stopped = threading.Event()

    def report(self, value: Any) -> None:
        """Send a report; raises OSError if nobody waits any more."""
        self._send(b"report", value)

    def is_stopped(self) -> bool:
        """Whether the call should end soon: on request, or because nobody waits any more."""
        return self._stopped.is_set()

    def _send(self, kind: bytes, value: Any) -> None:
        with self._sending:
            send(self._pipe, kind, value)

    def listen(self, calls: queue.SimpleQueue[tuple[Message, Message] | None]) -> None:
        """Receive calls and requests to stop, until the other end is closed or memory runs out."""
        function = None
        with suppress(EOFError, OSError, MemoryError):
            while True:
                message = receive(self._pipe)
                if message.kind == b"function":
                    function = message
                elif message.kind == b"argument" and function is not None:
                    self._stopped.clear()  # a request to stop the call before may have come late
                    calls.put((function, message))
                else:
                    self._stopped.set()
        self._stopped.set()
        calls.put(None)

    def answer(self, function: Message, argument: Message) -> None:
        """Make a call, and send its result or its error; raises OSError if nobody waits any more."""
        kind, made = b"done", None
        self._send(b"begun", b"")
        try:
            call, is_reporting = function.value
            made = call(argument.value, self) if is_reporting else call(argument.value)
        except BaseException as error:
            kind, made = b"failed", _portable(error)
        try:
            self._send(kind, made)
        except OSError:
            raise
        except Exception as error:  # the result cannot be sent
            self._send(b"failed", _portable(error))


def _portable(error: BaseException) -> BaseException:
    """An error in a form that other processes can read, with its traceback as its cause."""
    try:
        portable = ExceptionWithTraceback(error, error.__traceback__)
        pickle.loads(pickle.dumps(portable))
    except Exception:  # its class cannot be pickled, or not be built again
        return RuntimeError(f"{type(error).__name__}: {error}")
    return portable  # type: ignore[no-any-return]


def serve(pipe: Connection, memory: int | None) -> None:
    """Make calls until the pipe is closed; what a new process runs."""
    _prepare(memory)
    caller, calls = Caller(pipe), queue.SimpleQueue[tuple[Message, Message] | None]()
    threading.Thread(target=caller.listen, args=(calls,), name="zbv-listen", daemon=True).start()
    with suppress(OSError):  # nobody waits for the call any more
        while (call := calls.get()) is not None:
            caller.answer(*call)
            del call  # an idle process holds nothing


def _prepare(memory: int | None) -> None:
    """Set up a new process: ignore Ctrl-C, exit if the service dies, and run at low priority."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory is not None:
        _limit_memory(memory)
    with suppress(OSError):  # systems without priorities, or without permission to change them
        os.nice(NICENESS)
    threading.Thread(target=_exit_with_parent, name="zbv-orphan-watch", daemon=True).start()


def _limit_memory(most: int) -> None:
    """Let this process allocate at most this many more bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit = 1024 * int(line.split()[1]) + most
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # the pipe from the parent closes however the parent dies
        os._exit(ORPHANED)
