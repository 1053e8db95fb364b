"""A cluster of equal nodes: its devices, their memory, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.estimate.config_device import DeviceConfig
from zbv_solver.estimate.config_fields import Amount, ConfigSection, Rate, Size
from zbv_solver.estimate.device import Device, GroupLink
from zbv_solver.estimate.presets import preset
from zbv_solver.problem.cut import Link


class LinkConfig(ConfigSection):
    """What a device sends over a link."""

    latency: Amount = Field(description="us of every call")
    bandwidth: Rate = Field(description="GB/s that a device sends")


class LinksConfig(ConfigSection):
    """The links of a cluster."""

    in_node: LinkConfig
    between_nodes: LinkConfig


def _name_or_section(value: Any) -> str:
    return "name" if isinstance(value, str) else "section"


class ClusterConfig(ConfigSection):
    """The document ``cluster.json``."""

    nodes: Size = Field(description="number of nodes")
    gpus_per_node: Size = Field(description="devices of a node")
    device: Annotated[
        Annotated[str, Tag("name")] | Annotated[dict[str, Any], Tag("section")],
        Discriminator(_name_or_section),
    ] = Field(description="a preset, or the section device of an estimate's configuration")
    memory: Amount | None = Field(None, description="bytes of a device; null: as the device says")
    links: LinksConfig | None = Field(None, description="null: as the device says")
    reserve: Amount | None = Field(
        None, description="bytes of a device that training does not use; null: as the device says"
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes
    ----------
    memory
        Bytes of a device that training may use, without ``reserve``.
    peak_tflops
        Of the data sheet, for utilisation; that of large products if it is unknown.
    in_node, between_nodes
        Links between two devices of a node and of different nodes; their ``overlap`` is 0.
    tensor_overlap, context_overlap, expert_overlap, data_overlap
        Share of each kind of exchange that compute hides.
    preset
        Name of the device; None if its rates were given.
    """

    nodes: int
    gpus_per_node: int
    device: Device
    peak_tflops: float
    memory: float
    reserve: float
    in_node: GroupLink
    between_nodes: GroupLink
    tensor_overlap: float = 0.0
    context_overlap: float = 0.0
    expert_overlap: float = 0.0
    data_overlap: float = 0.0
    preset: str | None = None

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.gpus_per_node

    def link(self, stride: int, size: int, overlap: float = 0.0) -> GroupLink:
        """The slowest link of groups of ``size`` devices that are ``stride`` apart.

        Devices are numbered node by node.
        """
        found = self.in_node if self.is_in_node(stride, size) else self.between_nodes
        return GroupLink(found.bandwidth, found.latency, overlap)

    def is_in_node(self, stride: int, size: int) -> bool:
        """Whether every group of ``size`` devices that are ``stride`` apart is on one node."""
        return size == 1 or self.gpus_per_node % (stride * size) == 0


BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""


def transfer(link: GroupLink) -> Link:
    """A link between pipeline ranks, in microseconds and bytes."""
    return Link(link.latency, (link.bandwidth or 0.0) * BYTES_PER_MICROSECOND)


def parse_cluster(document: Any) -> Cluster:
    """Parse a decoded JSON document.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    config = validated(ClusterConfig, document)
    device = _device(config)
    memory = device.memory_limit if config.memory is None else config.memory
    issues = []
    if memory is None:
        detail = "this key is absent, and the device says nothing about it. Give the bytes of a device."
        issues.append(Issue("/memory", detail))
    links = config.links or _links(device)
    if links is None:
        detail = (
            "this key is absent, and the device does not state tensor_parallel_bandwidth and link_bandwidth. "
            "Give latency and bandwidth of in_node and between_nodes."
        )
        issues.append(Issue("/links", detail))
    if links is None or memory is None:
        raise InvalidInput(issues)
    return Cluster(
        nodes=config.nodes,
        gpus_per_node=config.gpus_per_node,
        device=device.rates,
        peak_tflops=device.peak_tflops or device.achieved_tflops,
        memory=memory,
        reserve=device.reserved if config.reserve is None else config.reserve,
        in_node=GroupLink(links.in_node.bandwidth, links.in_node.latency),
        between_nodes=GroupLink(links.between_nodes.bandwidth, links.between_nodes.latency),
        tensor_overlap=device.tensor_parallel_overlap,
        context_overlap=device.context_parallel_overlap,
        expert_overlap=device.expert_parallel_overlap,
        data_overlap=device.data_parallel_overlap,
        preset=config.device if isinstance(config.device, str) else None,
    )


def _device(config: ClusterConfig) -> DeviceConfig:
    if isinstance(config.device, str):
        section = preset(config.device, "/device").device
        if not section:
            detail = f"found {config.device!r}, a preset of a model. Name a preset of a device."
            raise InvalidInput.at("/device", detail)
    else:
        section = config.device
    try:
        return validated(DeviceConfig, section)
    except InvalidInput as error:
        issues = [Issue(f"/device{issue.pointer}", issue.detail) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None


def _links(device: DeviceConfig) -> LinksConfig | None:
    inside, between = device.tensor_parallel_bandwidth, device.link_bandwidth
    if inside is None or between is None:
        return None
    return LinksConfig(
        in_node=LinkConfig(latency=device.tensor_parallel_latency, bandwidth=inside),
        between_nodes=LinkConfig(latency=device.link_latency, bandwidth=between),
    )
