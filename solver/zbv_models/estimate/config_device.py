"""The section ``device`` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zbv_models.estimate.config_fields import Amount, ConfigSection, Rate, Share, Size
from zbv_models.estimate.device import Device, GroupLink, GroupLinks


class DeviceConfig(ConfigSection):
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
        None, description="us of a product in addition to its operations; null: one rate for all sizes"
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
    memory_limit: Amount | None = Field(None, description="bytes; null: no limit")
    reserved: Amount = Field(0.0, description="bytes that a device needs in addition to the layers")

    @property
    def rates(self) -> Device:
        """What estimates use of it."""
        return Device(
            self.achieved_tflops,
            self.memory_bandwidth,
            self.kernel_latency,
            self.attention_share,
            self.fp8_tflops,
            self.fp4_tflops,
            self.product_bandwidth,
            self.processors,
            self.launch_time,
        )

    @property
    def links(self) -> GroupLinks:
        """The links of a device's groups."""
        pipeline = GroupLink(self.link_bandwidth, self.link_latency)

        def group(bandwidth: float | None, latency: float | None, overlap: float) -> GroupLink:
            return GroupLink(
                self.link_bandwidth if bandwidth is None else bandwidth,
                self.link_latency if latency is None else latency,
                overlap,
            )

        data = GroupLink(self.data_parallel_bandwidth, self.data_parallel_latency, self.data_parallel_overlap)
        return GroupLinks(
            GroupLink(
                self.tensor_parallel_bandwidth,
                self.tensor_parallel_latency,
                self.tensor_parallel_overlap,
                self.tensor_parallel_step_latency,
            ),
            group(
                self.context_parallel_bandwidth, self.context_parallel_latency, self.context_parallel_overlap
            ),
            group(self.expert_parallel_bandwidth, self.expert_parallel_latency, self.expert_parallel_overlap),
            GroupLink(
                self.tensor_parallel_bandwidth, self.tensor_parallel_latency, self.expert_parallel_overlap
            ),
            data,
            data,
            pipeline,
        )
