"""The cache of values that are slow to compute."""

from __future__ import annotations

import asyncio

from zbv_service.compute.cache import Cache


async def test_many_readers_of_one_value_compute_it_once() -> None:
    cache: Cache[int] = Cache(2)
    made: list[str] = []

    async def make() -> int:
        made.append("x")
        await asyncio.sleep(0)
        return 7

    assert await asyncio.gather(*(cache.get("x", make) for _ in range(50))) == [7] * 50
    assert made == ["x"]


async def test_the_least_recently_used_value_is_dropped() -> None:
    cache: Cache[str] = Cache(2)
    made: list[str] = []

    async def get(key: str) -> str:
        async def make() -> str:
            made.append(key)
            return key

        return await cache.get(key, make)

    for key in "abacab":
        assert await get(key) == key
    assert made == ["a", "b", "c", "b"]


async def test_a_failure_reaches_all_readers_and_is_not_cached() -> None:
    cache: Cache[int] = Cache(2)

    async def fail() -> int:
        await asyncio.sleep(0)
        raise LookupError("nothing there")

    async def succeed() -> int:
        return 1

    answers = await asyncio.gather(*(cache.get("x", fail) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LookupError] * 3
    assert await cache.get("x", succeed) == 1


async def test_a_cancelled_reader_does_not_cancel_the_computation_for_others() -> None:
    cache: Cache[int] = Cache(2)
    release = asyncio.Event()

    async def make() -> int:
        await release.wait()
        return 7

    readers = [asyncio.create_task(cache.get("x", make)) for _ in range(2)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    release.set()
    assert await readers[1] == 7


async def test_older_values_are_dropped_when_all_are_too_large_together() -> None:
    cache: Cache[bytes] = Cache(10, most_bytes=100, weigh=len)

    async def keep(key: str, size: int) -> None:
        async def make() -> bytes:
            return bytes(size)

        await cache.get(key, make)
        await asyncio.sleep(0)  # its size is known after it was computed

    for key, size in (("a", 40), ("b", 40), ("c", 30)):
        await keep(key, size)
    assert [cache.known(key) is not None for key in "abc"] == [False, True, True]
    await keep("d", 1000)  # the newest value stays at any size
    assert [cache.known(key) is not None for key in "bcd"] == [False, False, True]
    await keep("e", 1)
    assert [cache.known(key) is not None for key in "de"] == [False, True]
