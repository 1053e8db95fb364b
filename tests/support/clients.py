"""One interface for both clients, so that each test covers both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from zbv_service.client import AsyncClient, Client, Retries

Kind = Literal["sync", "async"]
KINDS: tuple[Kind, ...] = ("sync", "async")
AT_ONCE = Retries(count=2, first=0.0, longest=0.0)


class Driver:
    """A client of either kind; :meth:`do` returns the result of a call, and the items of an iterator."""

    def __init__(self, client: Client | AsyncClient, runner: asyncio.Runner):
        self.client = client
        self._runner = runner

    def do(self, action: Callable[[Any], Any]) -> Any:
        async def awaited() -> Any:
            made = action(self.client)
            if inspect.isasyncgen(made):
                return [item async for item in made]
            return await made if inspect.isawaitable(made) else made

        if isinstance(self.client, AsyncClient):
            return self._runner.run(awaited())
        made = action(self.client)
        return list(made) if inspect.isgenerator(made) else made


@contextmanager
def driving(kind: Kind, address: str, **options: Any) -> Iterator[Driver]:
    """A client of this kind; ``options`` are those of both kinds."""
    with asyncio.Runner() as runner:
        client = Client(address, **options) if kind == "sync" else AsyncClient(address, **options)
        driver = Driver(client, runner)
        try:
            yield driver
        finally:
            driver.do(lambda made: made.close())
