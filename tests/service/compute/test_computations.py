"""Computations for requests: deadlines, memory limits, and turns between callers."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.processes import announce, is_alive
from support.serving import DEADLINE, until
from zbv_service.compute import computations
from zbv_service.compute.computations import LIGHT_BYTES, LIGHT_VALUES, Computations, is_light
from zbv_service.compute.processes import KEPT_BYTES, IsolatedProcesses, memory_of_all
from zbv_service.compute.waiting import CLIENT, Cache, Client, FairQueue, QueueFull
from zbv_service.errors import ApiError
from zbv_service.observability.context import CALLER
from zbv_solver.errors import InvalidInput

MEBIBYTE = 1024**2


@asynccontextmanager
async def computing(seconds: float = DEADLINE, memory: float = math.inf) -> AsyncIterator[Computations]:
    found = Computations(seconds, memory)
    try:
        yield found
    finally:
        found.stop()


def sleep(directory: str, _argument: object) -> None:
    """Write the id of this process, and sleep far too long."""
    announce(Path(directory, "process"), str(os.getpid()))
    time.sleep(10 * DEADLINE)


def allocate(_argument: object) -> int:
    return len(bytearray(2 * computations.MEMORY))


_kept: list[bytes] = []


def kept_bytes(size: int) -> int:
    _kept.append(b"x" * size)
    return os.getpid()


def end(_argument: object) -> None:
    os._exit(9)


def process_of(_argument: object) -> int:
    return os.getpid()


def refuse(_argument: object) -> None:
    raise InvalidInput.at("/x", "is wrong.")


def double(content: Any) -> bytes:
    return bytes(content) * 2


async def several_looks() -> None:
    await asyncio.sleep(5 * computations.LOOK_SECONDS)


async def test_a_computation_past_its_deadline_is_killed_with_its_process(tmp_path: Path) -> None:
    async with computing(seconds=0.5) as found:
        with pytest.raises(ApiError) as caught:
            await found.run(partial(sleep, str(tmp_path)), None)
        assert caught.value.kind.status == 503
        assert "longer than 0.5 seconds" in caught.value.detail
        assert "--computation-seconds" in caught.value.detail
        assert int(caught.value.headers["Retry-After"]) > 0
        started = tmp_path / "process"
        if started.exists():  # otherwise the deadline passed before it began
            await until(lambda: not is_alive(int(started.read_text())), "the process ends")
        with pytest.raises(ApiError, match=r"longer than 0\.1 seconds, the limit of such requests"):
            await found.run(partial(sleep, str(tmp_path)), None, seconds=0.1)


async def test_a_computation_that_needs_too_much_memory_is_refused_and_later_ones_run() -> None:
    async with computing() as found:
        # Only a lost process may have another fate next time, so only it is answered by 503.
        for function, status in ((allocate, 422), (end, 503)):
            with pytest.raises(ApiError) as caught:
                await found.run(function, None)
            assert caught.value.kind.status == status
            assert "memory" in caught.value.detail
        assert await found.run(process_of, None) != os.getpid()


def hold(file: str, size: int) -> str:
    """Hold so many bytes until the file is removed; its content is the id of this process."""
    held = b"x" * size
    announce(Path(file), str(os.getpid()))
    while Path(file).exists():
        time.sleep(0.01)
    return f"held {len(held)}"


async def test_the_largest_computation_ends_when_all_processes_hold_too_much(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("large", "middle", "search")]
    searches = IsolatedProcesses()
    async with computing(memory=memory_of_all() + 750 * MEBIBYTE) as found:
        run = (
            found.run(partial(hold, str(files[at])), size * MEBIBYTE) for at, size in enumerate((350, 150))
        )
        large, middle = map(asyncio.create_task, run)
        await until(lambda: all(file.exists() for file in files[:2]), "both hold their memory")
        await several_looks()
        assert not large.done(), "both fit"
        search = searches.submit(partial(hold, str(files[2])), 400 * MEBIBYTE)
        with pytest.raises(ApiError, match="needed its memory") as caught:
            await large
        assert (caught.value.kind.status, "Retry-After" in caught.value.headers) == (503, True)
        await until(lambda: not is_alive(int(files[0].read_text())), "its process ends")
        await until(files[2].exists, "the search holds its memory")
        await several_looks()
        for file in files[1:]:
            file.unlink()
        assert await middle == f"held {150 * MEBIBYTE}", "ending one was enough"
        assert search.result() == f"held {400 * MEBIBYTE}", "searches have their own limits"
    searches.shutdown()


async def test_a_small_computation_runs_however_much_memory_others_hold_and_a_large_idle_process_ends(
    tmp_path: Path,
) -> None:
    async with computing(memory=0) as found:
        file = tmp_path / "small"
        small = asyncio.create_task(found.run(partial(hold, str(file)), 1))
        await until(file.exists, "it begins")
        await several_looks()
        file.unlink()
        assert await small == "held 1"
    async with computing() as found:
        large = await found.run(kept_bytes, 2 * KEPT_BYTES)
        await until(lambda: not is_alive(large), "its process ends")


async def test_bytes_are_passed_completely_in_both_directions() -> None:
    async with computing() as found:
        for size in (0, 1, 3 * MEBIBYTE + 1):
            content = os.urandom(size)
            assert await found.run(double, bytearray(content)) == 2 * content


async def test_only_small_problems_are_computed_in_the_service_process() -> None:
    async with computing() as found:
        assert await found.of_body(process_of, b'{"problem": {"pp_degree": 4}}') == os.getpid()
        large = b'{"problem": {"pp_degree": 1024, "chunks": 64, "microbatches": 30}}'
        assert await found.of_body(process_of, large) != os.getpid()
        assert await found.of_body(process_of, b" " * LIGHT_BYTES + b"{}") != os.getpid()
        for values, is_here in ((1, True), (LIGHT_VALUES + 1, False)):
            document = {"pp_degree": 1, "features": {"tokens": [1] * values}}
            assert (await found.of_document(process_of, document) == os.getpid()) == is_here
        with pytest.raises(InvalidInput, match="is wrong"):
            await found.run(refuse, None)
        with pytest.raises(ApiError, match="not JSON") as caught:
            await found.of_body(process_of, b"[" * (LIGHT_BYTES + 1))
        assert caught.value.kind.status == 400
    for problem, expected in (
        ({"pp_degree": 2, "chunks": 64}, True),
        ({"pp_degree": 3, "chunks": 64}, False),
        ({"pp_degree": 10**9}, False),
        ({"pp_degree": "many"}, True),  # it is never expanded
        ({"pp_degree": 2, "layers": [{"repeat": 512}]}, False),
        (None, True),
        ([], True),
    ):
        assert is_light({"problem": problem}) is expected, problem
        assert not isinstance(problem, dict) or is_light(problem) is expected, problem
    assert not is_light({"model": {"presets": ["llama-3.1-8b"]}, "cluster": {"nodes": 1}})


class LeavingClient(Client):
    """A client that disconnects when a test says so."""

    def __init__(self) -> None:
        self._is_gone = asyncio.Event()
        super().__init__(self._message)

    def leave(self) -> None:
        self._is_gone.set()

    async def _message(self) -> dict[str, str]:
        await self._is_gone.wait()
        return {"type": "http.disconnect"}


async def compute_for(client: Client, making: Coroutine[Any, Any, Any]) -> Any:
    CLIENT.set(client)
    return await making


async def test_a_computation_ends_when_its_last_client_disconnects(tmp_path: Path) -> None:
    cache: Cache[object] = Cache(2)
    clients, started = [LeavingClient(), LeavingClient()], tmp_path / "process"
    async with computing() as found:

        def asked(client: Client) -> Coroutine[Any, Any, Any]:
            return compute_for(client, cache.get("x", lambda: found.run(partial(sleep, str(tmp_path)), None)))

        waiting = [asyncio.create_task(asked(client)) for client in clients]
        await until(started.exists, "it begins")
        process = int(started.read_text())
        clients[0].leave()  # the one that started it
        with pytest.raises(ApiError, match="disconnected"):
            await waiting[0]
        assert is_alive(process)
        clients[1].leave()
        with pytest.raises(ApiError, match="disconnected"):
            await waiting[1]
        await until(lambda: not is_alive(process), "the process ends")
        assert await cache.get("x", lambda: found.run(process_of, None)) != process  # begins again
        # Who leaves while waiting for a turn, leaves the queue, too.
        with pytest.raises(ApiError, match="disconnected"):
            await asyncio.create_task(compute_for(clients[0], found.run(process_of, None)))
        assert found._turns.waiting == 0


@pytest.mark.parametrize(
    ("has_body", "messages"),
    [
        (True, [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.request"}]),
        (False, [{"type": "http.request", "body": b""}]),
    ],
)
async def test_waiting_for_a_departure_takes_no_body(has_body: bool, messages: list[dict[str, Any]]) -> None:
    gone, left = asyncio.Event(), iter(messages)

    async def receive() -> dict[str, Any]:
        if (message := next(left, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    client = Client(receive, has_body=has_body)
    leaving = asyncio.create_task(client.departure())
    await asyncio.sleep(0)
    assert [await client.receive() for _ in messages] == messages
    gone.set()
    await leaving


async def test_what_continues_after_the_answer_does_not_end_with_the_client(tmp_path: Path) -> None:
    async with computing() as found:
        client, file = LeavingClient(), tmp_path / "held"
        waiting = asyncio.create_task(compute_for(client, found.run(partial(hold, str(file)), 1)))
        await until(file.exists, "it begins")
        client.is_answered = True
        client.leave()
        file.unlink()
        assert await waiting == "held 1"


async def test_lists_are_written_one_at_a_time_and_in_turns() -> None:
    async with computing() as found:
        writing = (found.write(lambda: threading.current_thread().name) for _ in range(8))
        names = await asyncio.gather(*writing)
        assert len(set(names)) == 1
        assert names[0] != threading.current_thread().name


async def order_of(turns: FairQueue, callers: str) -> str:
    """The order of the turns of callers that arrive in another order while one works."""
    came: list[str] = []
    working = 0

    async def one(caller: str) -> None:
        nonlocal working
        async with turns.turn(caller):
            came.append(caller)
            working += 1
            await asyncio.sleep(0)
            assert working == 1, "one works at a time"
            working -= 1

    async with turns.turn("somebody"):
        tasks = [asyncio.create_task(one(caller)) for caller in callers]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return "".join(came)


async def test_callers_take_turns_regardless_of_their_numbers_of_requests() -> None:
    assert await order_of(FairQueue(1, 1, 99, 99), "aaaaabbc") == "abcabaaa"


async def test_one_caller_cannot_use_all_places() -> None:
    turns = FairQueue(3, 2, 99, 99)
    async with turns.turn("a"), turns.turn("b"):
        own = [asyncio.create_task(turns.turn("a").__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        assert [each.done() for each in own] == [True, False]
        later = asyncio.create_task(turns.turn("a").__aenter__())
        await asyncio.sleep(0)
    # Two places became free, of which this caller gets the one that it had.
    await asyncio.sleep(0)
    assert [each.done() for each in (*own, later)] == [True, True, False]
    later.cancel()


async def test_requests_beyond_the_waiting_limit_are_refused() -> None:
    turns = FairQueue(1, 1, 3, 2)
    async with turns.turn("a"):
        own = [asyncio.create_task(turns.turn("a").__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await turns.turn("a").__aenter__()
        assert caught.value.is_own
        other = asyncio.create_task(turns.turn("b").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await turns.turn("c").__aenter__()
        assert not caught.value.is_own
        for task in (*own, other):  # cancelled ones release their places
            task.cancel()
        await asyncio.gather(*own, other, return_exceptions=True)
        assert turns.waiting == 0
    async with turns.turn("c"):
        pass


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_caller_that_leaves_when_its_turn_comes_releases_its_place(is_given: bool) -> None:
    turns = FairQueue(1, 1, 3, 3)
    async with turns.turn("a"):
        leaving = asyncio.create_task(turns.turn("b").__aenter__())
        staying = asyncio.create_task(order_of(turns, ""))
        await asyncio.sleep(0)
        if not is_given:
            leaving.cancel()
    leaving.cancel()  # it has not run since its place became free
    await asyncio.wait_for(staying, DEADLINE)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert turns.waiting == 0


async def test_requests_of_a_token_share_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computations, "WAITING_EACH", 0)
    monkeypatch.setattr(computations, "AT_A_TIME_EACH", 1)
    async with computing() as found:
        CALLER.set("mine")
        async with found._turns.turn("mine"):
            with pytest.raises(ApiError, match="Your token") as caught:
                await found.run(process_of, None)
            assert int(caught.value.headers["Retry-After"]) > 0
            CALLER.set("another")
            assert await found.run(process_of, None)
