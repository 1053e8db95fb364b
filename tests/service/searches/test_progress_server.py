"""The service's end of the connections of searches: expected, unknown and late ones."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.serving import until
from zbv_service.records.searches import Update
from zbv_service.searches.executors.progress import ProgressServer, TaskConnection

pytestmark = pytest.mark.anyio


async def said_to(server: ProgressServer, token: str) -> bytes:
    """The complete answer to a connection with this token."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(token.encode() + b"\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def test_unknown_connections_are_refused_and_late_ones_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ProgressServer()
    await server.start()
    updates: list[Update] = []
    late = TaskConnection(updates.append)
    server.expect(late)
    server.forget(late)
    with caplog.at_level(logging.WARNING):
        # A short search ends before its connection is accepted.
        assert await said_to(server, late.token) == b""
        assert caplog.messages == []
        assert await said_to(server, TaskConnection(updates.append).token) == b""
        assert "unknown token" in caplog.messages[0]
    assert updates == []
    await server.close()


async def test_a_task_that_was_stopped_before_it_connected_receives_the_stop() -> None:
    server = ProgressServer()
    await server.start()
    line = TaskConnection(lambda _update: None)
    server.expect(line)
    line.stop()
    answer = asyncio.create_task(said_to(server, line.token))
    await until(lambda: line.writer is not None, "the connection")
    server.forget(line)
    assert await answer == b"stop\n"
    await server.close()
