"""The service's end of the connections of searches; see :mod:`zbv_service.searches.executors.connection`."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Update

TOKEN_BYTES = 32
HELLO_SECONDS = 10.0
HANG_UP_SECONDS = 2.0
LATE_SECONDS = 60.0
"""Seconds after a task's end in which its connection may still arrive: a short task ends before that."""
MAX_RANKS_BYTES = 256 * 1024 * 1024

logger = logging.getLogger(__name__)


class TaskConnection:
    """The connection of one task: receives its reports, and can stop it."""

    def __init__(self, on_update: Callable[[Update], None]):
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.on_update = on_update
        self.is_stopped = False
        self.is_over = False
        self.writer: asyncio.StreamWriter | None = None

    def stop(self) -> None:
        """Ask the task to return its best plan, now or as soon as it connects."""
        self.is_stopped = True
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(b"stop\n")


class ProgressServer:
    """Listens on a local port for the tasks of this service."""

    def __init__(self) -> None:
        self._lines: dict[str, TaskConnection] = {}
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop listening and close all connections, which tasks take as a request to stop."""
        if self._server is not None:
            self._server.close()
        for writer in self._serving.values():
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=HANG_UP_SECONDS)

    @property
    def address(self) -> tuple[str, int]:
        """The address that tasks connect to."""
        if self._server is None:
            raise RuntimeError("the progress server was not started.")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def expect(self, line: TaskConnection) -> None:
        """Expect the connection of a task, which the caller gives its token."""
        self._lines[line.token] = line

    def forget(self, line: TaskConnection) -> None:
        """Forget a task that has ended."""
        line.is_over = True
        if line.writer is not None:
            line.writer.close()
            del self._lines[line.token]
        else:
            asyncio.get_running_loop().call_later(LATE_SECONDS, self._lines.pop, line.token, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                token = (await reader.readline()).strip().decode("ascii", errors="replace")
            # The token has 256 random bits, so the timing of this lookup reveals nothing.
            line = self._lines.get(token)
            if line is None:
                logger.warning("refused a connection with an unknown token")
                return
            if line.is_over:
                return
            line.writer = writer
            if line.is_stopped:
                line.stop()
            while (update := await _read_update(reader)) is not None:
                line.on_update(update)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            # Only reports are lost here. The end of the task decides the outcome of its search.
            logger.warning("the connection of a search broke: %s", error)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def _read_update(reader: asyncio.StreamReader) -> Update | None:
    header = await reader.readline()
    if not header:
        return None
    fields = json.loads(header)
    size = fields.pop("size")
    if size is not None and not 0 <= size <= MAX_RANKS_BYTES:
        raise ValueError(f"a report announces {size} bytes; at most {MAX_RANKS_BYTES} are taken.")
    refusal = fields.pop("refusal")
    if refusal is not None:
        fields["refusal"] = Refusal(**refusal)
    return Update(**fields, incumbent=None if size is None else await reader.readexactly(size))
