"""Talks to the process that plans the next steps (:mod:`.planner_process`). A step never waits for it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

_ROOM = 1 << 20
"""Bytes of a pipe, so that the process seldom waits until a rank reads a long answer."""
_CHUNK = 1 << 16
_END_SECONDS, _POLL_SECONDS = 5.0, 0.01


class PlannerClient:
    """A rank's connection to its planner's process, which it starts; at most once again.

    Parameters
    ----------
    problem
        The document of the problem that all steps share.

    Attributes
    ----------
    restarts
        How often the process was started again.
    is_alive
        False after its second failure.
    is_ready
        Whether the process has loaded the planner.
    """

    def __init__(self, problem: Mapping[str, Any]):
        self._problem = problem
        self._pending: dict[str, Mapping[str, Any]] = {}
        self._unsent, self._received = bytearray(), bytearray()
        self.restarts = 0
        self.is_alive, self.is_ready = True, False
        self._start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> None:
        """Request the plans of a step; its ``key`` comes back with the answers."""
        self._pending[request["key"]] = request
        self._write(request)

    def take_back(self, key: str) -> None:
        """Say that a step has begun: its plans are not needed any more."""
        if self._pending.pop(key, None) is not None:
            self._write({"key": key})

    def answers(self) -> list[dict[str, Any]]:
        """All answers that have arrived since the last call."""
        if not self.is_alive:
            return []
        self._flush()
        try:
            while part := os.read(self._output.fileno(), _CHUNK):
                self._received += part
            self._failed()
        except BlockingIOError:
            pass
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        found = [answer for answer in map(json.loads, lines) if answer]
        self.is_ready = self.is_ready or bool(lines)
        for answer in found:
            if "error" in answer or answer["seconds"] > 0:
                self._pending.pop(answer["key"], None)
        return found

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the process has loaded the planner and its kernels, or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        while self.is_alive and not self.is_ready and time.monotonic() < deadline:
            self.answers()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the process; a second call has no effect."""
        self.is_alive = False
        self._process.kill()
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "zbv_worker.pipeline.planner_process", str(os.getpid())]
        one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **one_thread},
        )
        self._input, self._output = _given(self._process.stdin), _given(self._process.stdout)
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
            with suppress(OSError, AttributeError):  # a limit of this system, or another than Linux
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _ROOM)
        self._unsent, self._received = bytearray(), bytearray()
        for request in (self._problem, *self._pending.values()):
            self._write(request)

    def _write(self, request: Mapping[str, Any]) -> None:
        self._unsent += json.dumps(request).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # answers() finds out that the process has ended
            while self._unsent and self.is_alive:
                del self._unsent[: os.write(self._input.fileno(), self._unsent)]

    def _failed(self) -> None:
        """The process has ended: start it again, but only once."""
        self.close()
        status = self._process.returncode
        if self.restarts:
            _say(
                f"the planner's process ended again (status {status}). All further steps use constructors' "
                f"plans, which take a little longer; the log above has its error."
            )
            return
        _say(f"the planner's process ended (status {status}); it is started again.")
        self.restarts, self.is_alive = 1, True
        self._start()


def _given(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the planner's process has no pipes; please report this bug in zbv.")
    return pipe


def _say(text: str) -> None:
    print(f"zbv: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a rank's log
