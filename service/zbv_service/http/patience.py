"""How long a connection may take to say what it wants.

The server limits how long a connection idles between requests, and not how long the head of one takes to
arrive: a stranger could hold all connections open by sending a byte now and then.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """The server's own protocol, which closes a connection whose request's head takes longer than that."""
    base: Any = AutoHTTPProtocol

    class Impatient(base):  # type: ignore[misc]  # which of two it is depends on what is installed
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            is_waiting = self.cycle is None or self.cycle.response_complete
            if not is_waiting:
                self._stop_watching()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._give_up)

        def _stop_watching(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return Impatient
