"""What a device and its links achieve, and the times that follow. Microseconds, bytes, GB/s and TFLOP/s."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction

MICROSECONDS = 1e6
GIGA = 1e9
TERA = 1e12
NO_STEPS = PerAction()


@dataclass(frozen=True)
class GroupLink:
    """The link of a group of devices.

    Attributes
    ----------
    bandwidth
        GB/s that a device sends; None: the group's exchanges take no time.
    latency
        Microseconds of every call.
    overlap
        Share of the exchanges that compute hides, 0 to 1.
    step_latency
        Microseconds of every step of a ring, in addition.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    overlap: float = 0.0
    step_latency: float = 0.0

    def exposed(self, sent: PerAction, calls: PerAction, steps: PerAction = NO_STEPS) -> PerAction:
        """Time that compute does not hide, of calls with these steps together."""
        if self.bandwidth is None:
            return PerAction()
        time = sent.scaled(MICROSECONDS / (self.bandwidth * GIGA)) + calls.scaled(self.latency)
        return (time + steps.scaled(self.step_latency)).scaled(1 - self.overlap)

    def time(self, sent: float, steps: float = 0.0) -> float:
        """Time of a call that sends a number of bytes in some steps of a ring, with what compute hides."""
        if self.bandwidth is None or not sent:
            return 0.0
        return sent * MICROSECONDS / (self.bandwidth * GIGA) + self.latency + steps * self.step_latency


@dataclass(frozen=True)
class GroupLinks:
    """The links of all groups of a device.

    ``expert_in_node`` is that of devices with other experts on the same node, and ``expert`` that of those on
    other nodes. ``data`` is that of the replicas, ``expert_data`` that of the devices with the same experts,
    and ``pipeline`` that between neighbouring ranks.
    """

    tensor: GroupLink = GroupLink()
    context: GroupLink = GroupLink()
    expert: GroupLink = GroupLink()
    expert_in_node: GroupLink = GroupLink()
    data: GroupLink = GroupLink()
    expert_data: GroupLink = GroupLink()
    pipeline: GroupLink = GroupLink()


@dataclass(frozen=True)
class Device:
    """Achieved rates of a device.

    Attributes
    ----------
    tflops
        Matrix products; large ones, if there is a ``kernel_latency``.
    memory_bandwidth
        GB/s; None: memory traffic takes no time.
    kernel_latency
        Microseconds of every product in addition to its operations; None: products of all sizes have the same
        rate.
    attention_share
        Rate of flash attention as a share of ``tflops``.
    fp8_tflops, fp4_tflops
        Products of narrow operands; None: the device has none.
    product_bandwidth
        GB/s of the matrices of products, of adding gradients, and of the optimizer; None:
        ``memory_bandwidth``.
    processors
        Streaming multiprocessors or compute units; None: products fill all of them.
    launch_time
        Microseconds that the host adds to every kernel, if each launch waits for the kernel's end.
    """

    tflops: float
    memory_bandwidth: float | None = None
    kernel_latency: float | None = None
    attention_share: float = 1.0
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    product_bandwidth: float | None = None
    processors: int | None = None
    launch_time: float = 0.0

    def rate(self, product_dtype: str | None) -> float:
        """TFLOP/s of linear layers with operands of a type."""
        narrow = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops}.get(product_dtype or "")
        return narrow or self.tflops

    def moving(self, size: float) -> float:
        """Time to move bytes through memory."""
        if self.memory_bandwidth is None:
            return 0.0
        return size * MICROSECONDS / (self.memory_bandwidth * GIGA)

    def streaming(self, size: float) -> float:
        """Time to move bytes of large tensors through memory: matrices of products, and the optimizer."""
        bandwidth = self.product_bandwidth or self.memory_bandwidth
        return 0.0 if bandwidth is None else size * MICROSECONDS / (bandwidth * GIGA)
