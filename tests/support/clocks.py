"""Wrong wall clocks: each service may run on another machine."""

from __future__ import annotations

import datetime as real
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from zbv_service.database import Database


@contextmanager
def clock_off_by(hours: float) -> Iterator[None]:
    """Within the block, the service reads a wrong wall clock; the database's clock is right."""
    wrong = real.timedelta(hours=hours)

    class WrongClock(real.datetime):
        @classmethod
        def now(cls, tz: real.tzinfo | None = None) -> real.datetime:  # type: ignore[override]
            return real.datetime.now(tz) + wrong

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("zbv_service") and getattr(module, "datetime", None) is real.datetime:
                patch.setattr(module, "datetime", WrongClock)
        yield


@contextmanager
def days_later(days: float) -> Iterator[None]:
    """Within the block, all clocks are this many days ahead."""
    told = Database.now

    async def later(self: Database, session: AsyncSession) -> real.datetime:
        return await told(self, session) + real.timedelta(days=days)

    with pytest.MonkeyPatch.context() as patch, clock_off_by(24 * days):
        patch.setattr(Database, "now", later)
        yield
