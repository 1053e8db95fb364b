"""A line between a browser and a service that a test can cut and mend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Line:
    """Passes on what comes to ``port``, one of its own, until it is cut; then nobody answers there."""

    def __init__(self, address: str):
        target = urlsplit(address)
        self._target = (target.hostname or "", target.port or 80)
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.mend()

    @property
    def url(self) -> str:
        """Where a browser finds the service."""
        return f"http://127.0.0.1:{self.port}"

    def mend(self) -> None:
        """Answer, at the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener, self.port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """End every connection, and answer no more."""
        if self._listener is not None:
            ends, self._ends = [self._listener, *self._ends], []
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the line is cut
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def line_to(address: str) -> Iterator[Line]:
    """A line to a service, as long as the block runs."""
    line = Line(address)
    try:
        yield line
    finally:
        line.cut()
