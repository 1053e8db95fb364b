"""Clock offsets are exact for symmetric messages, and their error never exceeds the stated one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_worker.tracing.merged_trace import Alignment, Clock, Offset, find_offsets
from zbv_worker.transport.channels import Transport

SECOND = 1_000_000_000


class Post(ThreadTransport):
    """Rank 0 of two on a simulated clock; ``delays`` has the times of the messages there and back."""

    def __init__(self, delays: list[tuple[int, int]], ahead: int):
        super().__init__(ThreadHub(2), 0)
        self.now = 5 * SECOND
        self._delays = delays
        self._ahead = ahead
        self._turn = -1

    def clock(self) -> int:
        return self.now

    def tell(self, peer: int, value: int, timeout: float) -> None:
        self._turn += 1
        self.now += self._delays[self._turn][0]

    def hear(self, peer: int, timeout: float) -> int:
        shown = self.now + self._ahead
        self.now += self._delays[self._turn][1]
        return shown

    def gather(self, value: Any, timeout: float) -> list[Any]:
        return [value, None]

    def barrier(self, timeout: float) -> None: ...


def test_the_shortest_exchange_counts_and_a_symmetric_one_is_exact() -> None:
    post = Post([(400, 20), (30, 30), (50, 900)], ahead=-7_000)
    first, second = find_offsets(post, 1.0, post.clock, exchanges=3)
    assert (first.ahead, first.uncertainty) == (0, 0)
    assert (second.ahead, second.uncertainty) == (-7_000, 30)


@pytest.mark.parametrize("delays", [(0, 100), (100, 0), (33, 68)])
def test_the_error_of_an_asymmetric_exchange_is_at_most_its_uncertainty(delays: tuple[int, int]) -> None:
    post = Post([delays], ahead=12_345)
    found = find_offsets(post, 1.0, post.clock, exchanges=1)[1]
    assert abs(found.ahead - 12_345) <= found.uncertainty <= 51


def shifted(by: int) -> Clock:
    return lambda: time.perf_counter_ns() + by


def on_all_ranks(count: int, work: Callable[[Transport], Any]) -> list[Any]:
    hub = ThreadHub(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [hub.transport(rank) for rank in range(count)]))


def test_shifted_clocks_of_running_ranks_are_recovered_on_every_rank() -> None:
    shifts = (0, 5 * SECOND, -3 * SECOND, 17)
    answers = on_all_ranks(
        4, lambda transport: find_offsets(transport, 10.0, shifted(shifts[transport.rank]))
    )
    assert answers[1:] == answers[:1] * 3
    for offset, shift in zip(answers[0], shifts, strict=True):
        assert abs(offset.ahead - shift) <= offset.uncertainty


def test_a_rank_that_does_not_answer_ends_the_exchange() -> None:
    hub = ThreadHub(2)
    with ThreadPoolExecutor(1) as pool:
        barrier_only = pool.submit(hub.transport(1).barrier, 10.0)
        with pytest.raises(TimeoutError):
            find_offsets(hub.transport(0), 0.2)
        barrier_only.result(60)


def test_times_are_corrected_for_the_drift_between_two_measurements() -> None:
    origin = 2**60  # a clock that has run for decades: floats would round to 128 ns
    before = (Offset(origin), Offset(origin, ahead=1_000))
    after = (Offset(origin + SECOND), Offset(origin + SECOND, ahead=3_000))
    times = np.array([[origin, origin + SECOND // 2], [origin + SECOND, origin + 2 * SECOND]])
    alignment = Alignment(before, after)
    assert (alignment.to_rank_0(0, times) == times).all()
    assert (times - alignment.to_rank_0(1, times)).tolist() == [[1_000, 2_000], [3_000, 5_000]]
