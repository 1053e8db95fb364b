"""Measures transfers between neighbouring ranks, by size and direction, and fits latency and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from zbv_worker.measure.profile.profile import LinkProfile, LinkSample, Spread
from zbv_worker.transport.channels import ChannelKey, Transport
from zbv_worker.values.structure import TensorSpec

SIZES = (1 << 12, 1 << 16, 1 << 20)
"""Sizes of measured transfers in bytes; the size of the boundary's tensor is measured as well."""

ROUND_TRIPS = 20
_TINY = 8
_FLOAT_BYTES = 4


class LinkProfiler:
    """Measures one rank's transfers; all ranks create theirs, and call the same methods in the same order."""

    def __init__(
        self, transport: Transport, device: torch.device, timeout: float, settle: Callable[[], None]
    ):
        self._transport = transport
        self._device = device
        self._timeout = timeout
        self._settle = settle

    def links(self, near: int, far: int, own_size: int) -> Iterator[LinkProfile]:
        """Measure both directions between two ranks; yields them on ``near``, which times, nothing on others.

        A one-way time is that of a round trip with a tiny answer, minus the time of the answer.
        """
        if self._transport.pp_rank not in (near, far):
            return
        sizes = sorted({*SIZES, own_size})
        tiny = self.round_trips(near, far, _TINY, _TINY)
        there, back = (
            {size: self.round_trips(near, far, *pair(size)) for size in sizes}
            for pair in (lambda size: (size, _TINY), lambda size: (_TINY, size))
        )
        if self._transport.pp_rank != near:
            return
        for sender, receiver, trips in ((near, far, there), (far, near, back)):
            yield link_of(sender, receiver, {size: one_way(trips[size], tiny) for size in sizes})

    def round_trips(
        self, near: int, far: int, there_bytes: int, back_bytes: int, *, without_sends: bool = False
    ) -> list[float]:
        """Seconds of round trips; measured on ``near``, empty on ``far``.

        Parameters
        ----------
        without_sends
            Whether to leave out the time in which the ranks start their sends, which actions include
            (:mod:`zbv_worker.measure.profile.traffic`). Both sends of a trip then count as equally long.
        """
        is_far = self._transport.pp_rank == far
        there, back = ChannelKey(near, far), ChannelKey(far, near)
        send = self._transport.sender(back if is_far else there)
        receive = self._transport.receiver(there if is_far else back)
        out, answer = (
            torch.zeros(-(-n // _FLOAT_BYTES), device=self._device) for n in (there_bytes, back_bytes)
        )
        seconds: list[float] = []
        for _ in range(ROUND_TRIPS):
            if is_far:
                receive(TensorSpec.of(out)).wait(self._timeout)
                send(answer, "ping-pong")
                continue
            pending = receive(TensorSpec.of(answer))
            self._settle()
            start = time.perf_counter()
            send(out, "ping-pong")
            sent = time.perf_counter() - start
            pending.wait(self._timeout)
            self._settle()
            trip = time.perf_counter() - start
            seconds.append(max(0.0, trip - 2 * sent) if without_sends else trip)
        return seconds


def one_way(trips: Sequence[float], tiny: Sequence[float]) -> list[float]:
    """One-way seconds: round trips with a tiny answer, minus half of a tiny round trip."""
    answer = float(np.median(tiny)) / 2
    return [max(0.0, trip - answer) for trip in trips]


def link_of(sender: int, receiver: int, one_way: dict[int, list[float]]) -> LinkProfile:
    """A link from the seconds of its transfers, by size in bytes."""
    samples = tuple(LinkSample(size, Spread.of(one_way[size])) for size in sorted(one_way))
    latency, per_byte = fit(
        [sample.bytes for sample in samples], [sample.seconds.median for sample in samples]
    )
    return LinkProfile(sender, receiver, samples, latency, 1 / per_byte if per_byte > 0 else None)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds per byte: least squares of relative errors, so that small transfers count.

    A negative coefficient would promise transfers that take no time, so it is replaced by 0. A time of 0 is
    one that disturbances have hidden, so it does not count.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    x, y = x[y > 0], y[y > 0]
    if not len(x):
        return 0.0, 0.0
    rows = np.column_stack([1 / y, x / y])
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(x)), rcond=None)
    if latency < 0:
        return 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    if per_byte < 0:
        return float((1 / y).sum() / ((1 / y) ** 2).sum()), 0.0
    return float(latency), float(per_byte)
