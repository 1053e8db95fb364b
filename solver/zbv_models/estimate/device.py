"""What a device and its links achieve, and the times that follow. Microseconds, bytes, GB/s and TFLOP/s."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from zbv_models.estimate.sections import Amount, ConfigSection, Rate, Share, Size
from zbv_models.estimate.shapes import NONE, PerAction

COMMUNICATING, HOPPER_PROCESSORS = 20, 132
"""Streaming multiprocessors that the all-to-all of experts needs, of those of an H800 (DeepSeek-AI 2024b,
§3.2.2 and §3.5.1)."""
MICROSECONDS = 1e6
GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True)
class GroupLink:
    """The link of a group of devices."""

    bandwidth: float | None = None
    """GB/s that a device sends; None: the group's exchanges take no time."""
    latency: float = 0.0
    """Microseconds of every call."""
    overlap: float = 0.0
    """Share of the exchanges that compute hides, 0 to 1."""
    step_latency: float = 0.0
    """Microseconds of every step of a ring, in addition."""

    def exposed(self, sent: PerAction, calls: PerAction, steps: PerAction = NONE) -> PerAction:
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


class Device(ConfigSection):
    """What a device and its links achieve in practice, as opposed to their specifications."""

    achieved_tflops: Rate = Field(
        description="TFLOP/s of matrix products; of large ones, with a kernel_latency"
    )
    peak_tflops: Rate | None = Field(None, description="TFLOP/s of the data sheet, for utilisation only")
    fp8_tflops: Rate | None = Field(None, description="achieved TFLOP/s with product_dtype fp8")
    fp4_tflops: Rate | None = Field(None, description="achieved TFLOP/s with product_dtype fp4")
    product_bandwidth: Rate | None = Field(
        None, description="GB/s of the matrices of products, and of the optimizer; null: memory_bandwidth"
    )
    kernel_latency: Amount | None = Field(
        None,
        description="us of a kernel in addition to its operations or traffic; null: one rate for all",
    )
    processors: Size | None = Field(
        None, description="streaming multiprocessors, which products fill in waves; null: without waves"
    )
    launch_time: Amount = Field(
        0.0, description="us that the host adds to every kernel, if each launch waits for the kernel's end"
    )
    attention_share: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        1.0, description="rate of flash attention as a share of achieved_tflops"
    )
    uneven_attention_share: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        None, description="the same where a head's keys and values differ in width; null: attention_share"
    )
    grouped_share: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        1.0, description="rate of products that run as one kernel, as those of experts, as a share of others"
    )
    memory_bandwidth: Rate | None = Field(
        None, description="GB/s of norms, softmax and other memory traffic; null: it takes no time"
    )
    link_bandwidth: Rate | None = Field(None, description="GB/s between pipeline ranks; null: no limit")
    link_latency: Amount = Field(0.0, description="us, of every transfer between pipeline ranks")
    tensor_parallel_bandwidth: Rate | None = Field(
        None, description="GB/s that a device sends within its tensor-parallel group"
    )
    tensor_parallel_latency: Amount = Field(0.0, description="us, of every collective of that group")
    tensor_parallel_step_latency: Amount = Field(
        0.0, description="us, of every step of those collectives around a ring, in addition"
    )
    tensor_parallel_overlap: Share = Field(0.0, description="share of those collectives that compute hides")
    context_parallel_bandwidth: Rate | None = Field(
        None, description="GB/s that a device sends to devices of its sequence; null: link_bandwidth"
    )
    context_parallel_latency: Amount | None = Field(
        None, description="us, of each of its calls; null: link_latency"
    )
    context_parallel_overlap: Share = Field(0.0, description="share of them that compute hides")
    expert_parallel_bandwidth: Rate | None = Field(
        None, description="GB/s that a device sends to devices with other experts; null: link_bandwidth"
    )
    expert_parallel_latency: Amount | None = Field(
        None, description="us, of each of its calls; null: link_latency"
    )
    expert_parallel_overlap: Share = Field(0.0, description="share of them that compute hides")
    data_parallel_bandwidth: Rate | None = Field(
        None, description="GB/s that a device sends to its replicas; null: these exchanges are left out"
    )
    data_parallel_latency: Amount = Field(0.0, description="us, of each collective of replicas")
    data_parallel_overlap: Share = Field(0.0, description="share of them that compute hides")
    pair_factor: Annotated[float, Field(strict=True, ge=1, le=100)] | None = Field(
        None,
        description="what a forward and a backward that run as a pair cost each other, at least 1; null: by "
        "the processors that their all-to-all needs",
    )
    host_bandwidth: Rate | None = Field(
        None,
        description="GB/s that a device copies to its host, and as much back, while all devices of the node "
        "do; null: unknown",
    )
    host_latency: Amount = Field(0.0, description="us, of every such copy")
    memory_limit: Amount | None = Field(None, description="bytes; null: no limit")
    reserved: Amount = Field(0.0, description="bytes that a device needs in addition to the layers")

    def rate(self, product_dtype: str | None) -> float:
        """TFLOP/s of linear layers with operands of a type."""
        narrow = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops}.get(product_dtype or "")
        return narrow or self.achieved_tflops

    @property
    def cost_of_pairs(self) -> float:
        """What the two actions of a pair cost each other, at least 1.

        While one communicates, the other computes with the remaining processors. In a profile of DualPipe
        (github.com/deepseek-ai/profile-data, ``train.json``), products have 112 of 132 processors, and a
        pair takes as long as its kernels on these: nothing of its all-to-all is left. That all parts of
        both actions are slower is cautious: norms are bound by memory, and DeepEP's second version needs
        4 to 6 processors (github.com/deepseek-ai/DeepEP, README).
        """
        if self.pair_factor is not None:
            return self.pair_factor
        known = self.processors or HOPPER_PROCESSORS
        return known / max(known - COMMUNICATING, known / 2)

    def moving(self, size: float) -> float:
        """Time to move bytes through memory."""
        if self.memory_bandwidth is None:
            return 0.0
        return size * MICROSECONDS / (self.memory_bandwidth * GIGA)

    def streaming(self, size: float) -> float:
        """Time to move bytes of large tensors through memory: matrices of products, and the optimizer."""
        bandwidth = self.product_bandwidth or self.memory_bandwidth
        return 0.0 if bandwidth is None else size * MICROSECONDS / (bandwidth * GIGA)

    @property
    def links(self) -> GroupLinks:
        """The links of a device's groups."""
        pipeline = GroupLink(self.link_bandwidth, self.link_latency)

        def group(kind: str, others: GroupLink) -> GroupLink:
            of = [getattr(self, f"{kind}_parallel_{key}") for key in ("bandwidth", "latency", "overlap")]
            bandwidth, latency, overlap = of
            return GroupLink(
                others.bandwidth if bandwidth is None else bandwidth,
                others.latency if latency is None else latency,
                overlap,
            )

        tensor, data = group("tensor", GroupLink()), group("data", GroupLink())
        return GroupLinks(
            tensor=replace(tensor, step_latency=self.tensor_parallel_step_latency),
            context=group("context", pipeline),
            expert=group("expert", pipeline),
            expert_in_node=replace(tensor, overlap=self.expert_parallel_overlap),
            data=data,
            expert_data=data,
            pipeline=pipeline,
        )
