"""The cache of values that are slow to compute."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from zbv_service.compute.waiting import Cache


class Made:
    """Makes values for a cache, and counts what it makes."""

    def __init__(self, cache: Cache[bytes]):
        self.cache, self.keys = cache, ""
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def get(self, key: str, size: int = 1) -> bytes:
        """The value of a key; size 0 cannot be made."""

        async def make() -> bytes:
            self.keys += key
            await self.may_end.wait()
            if size == 0:
                raise LookupError("nothing there")
            return bytes(size)

        return await self.cache.get(key, make)


async def test_many_readers_of_one_value_compute_it_once_although_one_leaves() -> None:
    made = Made(Cache(2))
    made.may_end.clear()
    readers = [asyncio.create_task(made.get("x")) for _ in range(50)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    made.may_end.set()
    assert await asyncio.gather(*readers[1:]) == [b"\0"] * 49
    assert made.keys == "x"


async def test_a_failure_reaches_all_readers_and_is_not_cached() -> None:
    made = Made(Cache(2))
    answers = await asyncio.gather(*(made.get("x", 0) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LookupError] * 3
    assert await made.get("x", 1) == b"\0"


@pytest.mark.parametrize(("asked", "made_in_order"), [("abacab", "abcb"), ("aab", "ab")])
async def test_the_least_recently_used_value_is_dropped(asked: str, made_in_order: str) -> None:
    made = Made(Cache(2))
    for key in asked:
        await made.get(key)
    assert made.keys == made_in_order


async def test_older_values_are_dropped_when_all_are_too_large_together() -> None:
    cache: Cache[bytes] = Cache(10, most_bytes=100, weigh=len)
    made = Made(cache)
    for size_of, kept in (
        ({"a": 40, "b": 40, "c": 30}, {"a": False, "b": True, "c": True}),
        ({"d": 1000}, {"b": False, "c": False, "d": True}),  # the newest value stays at any size
        ({"e": 1}, {"d": False, "e": True}),
    ):
        for key, size in size_of.items():
            await made.get(key, size)
            await asyncio.sleep(0)  # its size is known after it was computed
        assert {key: cache.known(key) is not None for key in kept} == kept


async def test_a_reader_that_comes_as_the_last_one_leaves_begins_a_new_computation() -> None:
    cache: Cache[int] = Cache(2)

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def seven() -> int:
        return 7

    leaving = asyncio.create_task(cache.get("x", never))
    await asyncio.sleep(0)
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    assert await cache.get("x", seven) == 7
