"""Latency and bandwidth from transfers of several sizes."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.thread_transport import ThreadHub
from zbv_worker.measure.profile.links import ROUND_TRIPS, SIZES, LinkProfiler, fit, link_of, one_way
from zbv_worker.measure.profile.profile import LinkProfile
from zbv_worker.transport.channels import ChannelKey


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_latency_and_bandwidth_are_recovered_from_exact_times(latency: float, per_byte: float) -> None:
    sizes = [1e3, 1e5, 1e7]
    assert fit(sizes, [latency + size * per_byte for size in sizes]) == pytest.approx(
        (latency, per_byte), rel=1e-3, abs=1e-15
    )


@pytest.mark.parametrize("seconds", [[3e-5, 2e-5, 1e-5], [1e-6, 2e-4, 4e-2]])
def test_neither_latency_nor_time_per_byte_is_negative(seconds: list[float]) -> None:
    latency, per_byte = fit([1e3, 1e5, 1e7], seconds)
    assert latency >= 0
    assert per_byte >= 0
    assert latency + per_byte > 0


def test_a_transfer_whose_time_was_hidden_by_a_disturbance_does_not_count() -> None:
    assert fit([8192, 1e3, 1e5], [0.0, 1e-4, 2e-4]) == fit([1e3, 1e5], [1e-4, 2e-4])
    assert fit([1e3], [0.0]) == (0.0, 0.0)


def test_a_link_whose_large_transfers_take_no_longer_has_no_bandwidth() -> None:
    assert link_of(0, 1, {1000: [1e-4], 1_000_000: [0.9e-4]}).bandwidth is None


def test_the_time_of_the_answer_is_subtracted() -> None:
    assert one_way([5.0, 7.0, 0.5], tiny=[2.0, 2.0, 9.0]) == [4.0, 6.0, 0.0]


def test_both_directions_are_measured_by_the_first_rank_and_answered_by_the_other() -> None:
    hub = ThreadHub(3)
    found: dict[int, list[LinkProfile]] = {}

    def rank_main(rank: int) -> None:
        transport = hub.transport(rank)
        transport.open([ChannelKey(0, 1), ChannelKey(1, 0)], 60)
        profiler = LinkProfiler(transport, torch.device("cpu"), 60, lambda: None)
        found[rank] = list(profiler.links(0, 1, 12_000))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(link.sender, link.receiver) for link in found[0]] == [(0, 1), (1, 0)]
    assert found[1] == found[2] == []
    for link in found[0]:
        assert [sample.bytes for sample in link.samples] == sorted((*SIZES, 12_000))
    assert ROUND_TRIPS > 1
