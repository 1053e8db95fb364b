"""Server-sent events: from the bytes of a stream to events, whoever reads the bytes."""

from __future__ import annotations

import json

from zbv_service.client.answers import SearchEvent
from zbv_service.client.errors import InvalidAnswer

END = "end"
"""The last event of every search."""


class EventReader:
    """Makes events of bytes, as the HTML standard says; remembers where a stream was cut off.

    Attributes
    ----------
    last_id
        Of the last event that was read whole.
    """

    def __init__(self, last_id: str | None = None):
        self.last_id = last_id
        self.restart()

    def restart(self) -> None:
        """Forget the half of an event that a broken connection left."""
        self._rest = b""
        self._clear_event()

    def feed(self, chunk: bytes) -> list[SearchEvent]:
        """Take some bytes of a stream; the events that they complete."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = (self._line(line.removesuffix(b"\r").decode(errors="replace")) for line in lines)
        return [event for event in found if event is not None]

    def _line(self, line: str) -> SearchEvent | None:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "event":
                self._kind = value
            elif name == "id":
                self._id = value
            return None  # a line that begins with a colon only keeps the connection awake
        data, kind, own_id = self._data, self._kind, self._id
        self._clear_event()
        if not data:
            return None
        try:
            decoded = json.loads("\n".join(data))
        except ValueError:
            raise InvalidAnswer("an event of the service is not JSON; is this a zbv service?") from None
        if not isinstance(decoded, dict):
            raise InvalidAnswer("an event of the service is no JSON object; is this a zbv service?")
        self.last_id = own_id or self.last_id
        return SearchEvent(self.last_id or "", kind or "message", decoded)

    def _clear_event(self) -> None:
        self._data: list[str] = []
        self._kind = ""
        self._id = ""
