"""A cluster: its devices, their memory, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.export.quantities import figure
from zbv_solver.problem.cut import Link

from zbv_models.estimate.device import Device, GroupLink
from zbv_models.estimate.sections import Amount, ConfigSection, Rate, Size, preset

DOUBTFUL = {"bytes": 5.0, "GB/s": 5.0, "µs": 50.0}
"""A value that differs from that of the named device by this factor is questioned. Gb/s is a factor of 8."""
LEAST_BYTES = 1e6
"""No device or host has less memory; fewer bytes are a number of gigabytes."""
MAX_GROUPS = 4
MAX_DEVICES = 1_000_000
"""Of a group: the number of layouts grows with the divisors."""
ALLOCATOR_SHARE = 1.13
"""What PyTorch's allocator reserves per byte of tensors: the median of published sources, which
``python -m benchmarks reserved`` lists (docs/layouts.md, What fits)."""


class LinkConfig(ConfigSection):
    """What a device sends over a link."""

    latency: Annotated[Amount, Field(le=1e6)] = Field(description="µs of every call")
    bandwidth: Rate = Field(description="GB/s (8 Gb/s) that a device sends")


class LinksConfig(ConfigSection):
    """The links of a cluster."""

    in_node: LinkConfig | None = Field(None, description="null: as the device says")
    between_nodes: LinkConfig | None = Field(None, description="null: as the device says")


def _name_or_section(value: Any) -> str | None:
    return "name" if isinstance(value, str) else "section" if isinstance(value, dict) else None


class NodesConfig(ConfigSection):
    """Equal nodes."""

    nodes: Size = Field(description="number of nodes")
    gpus_per_node: Size = Field(description="devices of a node")
    device: Annotated[
        Annotated[str, Tag("name")] | Annotated[dict[str, Any], Tag("section")],
        Discriminator(
            _name_or_section,
            custom_error_type="name_or_section",
            custom_error_message="must be the name of a preset or a JSON object",
        ),
    ] = Field(description="a preset, or the section device of an estimate's configuration")
    memory: Annotated[Amount, Field(ge=LEAST_BYTES)] | None = Field(
        None, description="bytes of a device, such as 80e9; null: as the device says"
    )
    reserve: Amount | None = Field(
        None, description="bytes of a device that training does not use; null: as the device says"
    )
    host_memory: Amount | None = Field(
        None, description="bytes of a node's host that copies may take; null: no limit"
    )
    allocator_share: Rate = Field(
        ALLOCATOR_SHARE, ge=1, description="what PyTorch's allocator reserves per byte of tensors"
    )


class ClusterConfig(NodesConfig):
    """The document ``cluster.json`` of equal nodes."""

    links: LinksConfig | None = Field(None, description="null: as the device says")


class GroupLinksConfig(ConfigSection):
    """The links of a group of nodes."""

    in_node: LinkConfig | None = Field(None, description="null: as the device says")


class GroupConfig(NodesConfig):
    """A group of equal nodes in a cluster of several."""

    links: GroupLinksConfig = GroupLinksConfig()


class CommonLinksConfig(ConfigSection):
    """The links between the nodes of several groups."""

    between_nodes: LinkConfig | None = Field(None, description="of one group; null: as its device says")
    between_groups: LinkConfig | None = Field(
        None, description="of different groups; null: between_nodes, or the slowest of the devices' links"
    )


class GroupsConfig(ConfigSection):
    """The document ``cluster.json`` of several groups of nodes."""

    groups: Annotated[list[GroupConfig], Field(min_length=1, max_length=MAX_GROUPS)]
    links: CommonLinksConfig = CommonLinksConfig()


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices."""

    nodes: int
    gpus_per_node: int
    device: Device
    peak_tflops: float
    """Of the data sheet, for utilisation; that of large products if it is unknown."""
    size: float
    """Bytes of a device."""
    memory: float
    """Bytes of tensors for which a device has room, and ``reserve``."""
    reserve: float
    """Bytes of a device that training does not use."""
    in_node: GroupLink
    """Between two devices of a node; its ``overlap`` is 0, as that of the next one."""
    between_nodes: GroupLink
    tensor_overlap: float
    """Share of this kind of exchange that compute hides; so with the next ones."""
    context_overlap: float
    expert_overlap: float
    data_overlap: float
    preset: str | None
    """Name of the device; None if its rates were given."""
    host_memory: float | None
    """Bytes of a node's host for copies; None if unlimited."""
    allocator_share: float
    """What PyTorch's allocator reserves per byte of tensors."""

    @property
    def groups(self) -> tuple[Cluster]:
        """The cluster as the only group of nodes."""
        return (self,)

    @property
    def between_groups(self) -> GroupLink:
        """That between nodes."""
        return self.between_nodes

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.gpus_per_node

    def reserved(self, tensors: float) -> float:
        """Bytes that a device needs for so many bytes of tensors, which include ``reserve``."""
        return self.reserve + self.allocator_share * (tensors - self.reserve)

    def link(self, stride: int, size: int, overlap: float = 0.0) -> GroupLink:
        """The slowest link of groups of ``size`` devices that are ``stride`` apart.

        Devices are numbered node by node.
        """
        found = self.in_node if self.is_in_node(stride, size) else self.between_nodes
        return replace(found, overlap=overlap)

    def ring(self, near: int, size: int, overlap: float = 0.0) -> GroupLink:
        """The link of a ring of ``size`` devices with ``near`` of them on each of its nodes.

        It leaves a node by as many links, unless the link inside the node is slower. A step takes the latency
        between nodes where it leaves one, so a step around the ring takes the mean of both (NCCL,
        ``src/graph/tuning.cc``).
        """
        if near == size:
            return replace(self.in_node, overlap=overlap)
        inside, across = self.in_node, self.between_nodes
        bandwidth = None if across.bandwidth is None else near * across.bandwidth
        if near > 1 and bandwidth is not None and inside.bandwidth is not None:
            bandwidth = min(bandwidth, inside.bandwidth)
        nodes = size // near
        steps = (nodes - 1) * across.latency + (size - nodes) * inside.step_latency
        return GroupLink(bandwidth, across.latency, overlap, steps / (size - 1))

    def is_in_node(self, stride: int, size: int) -> bool:
        """Whether every group of ``size`` devices that are ``stride`` apart is on one node."""
        return size == 1 or self.gpus_per_node % (stride * size) == 0


BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""


def transfer(link: GroupLink) -> Link:
    """A link between pipeline ranks, in microseconds and bytes."""
    return Link(link.latency, (link.bandwidth or 0.0) * BYTES_PER_MICROSECOND)


@dataclass(frozen=True)
class MixedCluster:
    """Several groups of equal nodes."""

    groups: tuple[Cluster, ...]
    between_groups: GroupLink
    """Between two devices of different groups; its ``overlap`` is 0."""

    @property
    def devices(self) -> int:
        """Devices of all groups."""
        return sum(group.devices for group in self.groups)

    @property
    def size(self) -> float:
        """Bytes of the largest device."""
        return max(group.size for group in self.groups)

    @property
    def memory(self) -> float:
        """Bytes of tensors for which the largest device has room, and its ``reserve``."""
        return max(group.memory for group in self.groups)


AnyCluster = Cluster | MixedCluster


def parse_cluster(document: Any) -> AnyCluster:
    """Parse a decoded JSON document; several groups become a :class:`MixedCluster`.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    if isinstance(document, dict) and "groups" in document:
        return _mixed(validated(GroupsConfig, document))
    return equal_cluster(document)


def equal_cluster(document: Any) -> Cluster:
    """Parse a decoded JSON document of equal nodes; raises :class:`InvalidInput`."""
    config = validated(ClusterConfig, document)
    links = config.links
    inside, between = (None, None) if links is None else (links.in_node, links.between_nodes)
    return _nodes(config, "", inside, between)


def doubts(document: Any) -> list[str]:
    """Values of a valid document that a wrong unit explains.

    They contradict its named device by a large factor, or are less than :data:`LEAST_BYTES`.
    """
    groups = document.get("groups", [document])
    common, found = document.get("links") or {}, []
    for number, each in enumerate(groups):
        at = f"/groups/{number}" if "groups" in document else ""
        found += [
            f"{at}/{key}: found {figure(each[key])} bytes. Check the unit."
            for key in ("reserve", "host_memory")
            if 0 < (each.get(key) or 0) < LEAST_BYTES
        ]
        if not isinstance(each["device"], str):
            continue
        device, links = _device(NodesConfig.model_validate(_of_nodes(each)), at), each.get("links") or {}
        known = {
            f"{at}/memory": (each.get("memory"), device.memory_limit, "bytes"),
            **_of_link(f"{at}/links/in_node", links.get("in_node"), _in_node(device)),
            **_of_link("/links/between_nodes", common.get("between_nodes"), _between_nodes(device)),
        }
        found += [
            f"{key}: found {figure(value)} {unit}, but {each['device']} has {figure(usual)} {unit}. "
            "Check the unit."
            for key, (value, usual, unit) in known.items()
            if value and usual and max(value / usual, usual / value) >= DOUBTFUL[unit]
        ]
    return list(dict.fromkeys(found))


def _of_nodes(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key in NodesConfig.model_fields}


def _of_link(at: str, given: dict[str, Any] | None, usual: LinkConfig | GroupLink | None) -> dict[str, Any]:
    if given is None or usual is None:
        return {}
    return {
        f"{at}/latency": (given["latency"], usual.latency, "µs"),
        f"{at}/bandwidth": (given["bandwidth"], usual.bandwidth, "GB/s"),
    }


def _mixed(config: GroupsConfig) -> MixedCluster:
    common, groups = config.links, []
    issues: list[Issue] = []
    for number, each in enumerate(config.groups):
        try:
            groups.append(_nodes(each, f"/groups/{number}", each.links.in_node, common.between_nodes))
        except InvalidInput as error:
            issues += error.issues
    if issues:
        raise InvalidInput(issues)
    if (given := common.between_groups) is not None:
        return MixedCluster(tuple(groups), GroupLink(given.bandwidth, given.latency))
    links = [group.between_nodes for group in groups]
    slowest = GroupLink(min(link.bandwidth or 0.0 for link in links), max(link.latency for link in links))
    return MixedCluster(tuple(groups), slowest)


def _nodes(config: NodesConfig, at: str, inside: LinkConfig | None, between: LinkConfig | None) -> Cluster:
    """Equal nodes; links that are None are those of the device."""
    device = _device(config, f"{at}/device")
    memory = device.memory_limit if config.memory is None else config.memory
    in_node = _in_node(device) if inside is None else GroupLink(inside.bandwidth, inside.latency)
    between = between or _between_nodes(device)
    issues = []
    if (devices := config.nodes * config.gpus_per_node) > MAX_DEVICES:
        issues.append(
            Issue(f"{at}/nodes", f"found {figure(devices)} devices; must be at most {figure(MAX_DEVICES)}.")
        )
    if config.reserve is not None and memory is not None and config.reserve >= memory > 0:
        detail = f"found {config.reserve:g}; must be less than the {memory:g} bytes of a device."
        issues.append(Issue(f"{at}/reserve", detail))
    if memory == 0:
        key = "device/memory_limit" if config.memory is None else "memory"
        issues.append(Issue(f"{at}/{key}", "found 0 bytes; must be above 0."))
    if memory is None:
        detail = "this key is absent, and the device says nothing about it. Give the bytes of a device."
        issues.append(Issue(f"{at}/memory", detail))
    if in_node is None or between is None:
        detail = (
            "this key is absent, and the device does not state tensor_parallel_bandwidth and link_bandwidth. "
            "Give latency and bandwidth of in_node and between_nodes."
        )
        # In a cluster of groups, the link between nodes is not a key of the group.
        issues.append(Issue("/links" if at and between is None else f"{at}/links", detail))
    if issues or in_node is None or between is None or memory is None:
        raise InvalidInput(issues)
    reserve = device.reserved if config.reserve is None else config.reserve
    return Cluster(
        nodes=config.nodes,
        gpus_per_node=config.gpus_per_node,
        device=device,
        peak_tflops=device.peak_tflops or device.achieved_tflops,
        size=memory,
        memory=reserve + (memory - reserve) / config.allocator_share,
        reserve=reserve,
        allocator_share=config.allocator_share,
        in_node=in_node,
        between_nodes=GroupLink(between.bandwidth, between.latency),
        tensor_overlap=device.tensor_parallel_overlap,
        context_overlap=device.context_parallel_overlap,
        expert_overlap=device.expert_parallel_overlap,
        data_overlap=device.data_parallel_overlap,
        preset=config.device if isinstance(config.device, str) else None,
        host_memory=config.host_memory,
    )


def _device(config: NodesConfig, at: str) -> Device:
    given = config.device
    section = preset(given, at, "device").device if isinstance(given, str) else given
    try:
        return validated(Device, section)
    except InvalidInput as error:
        issues = [Issue(f"{at}{issue.pointer}", issue.detail) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None


def _in_node(device: Device) -> GroupLink | None:
    bandwidth, latency = device.tensor_parallel_bandwidth, device.tensor_parallel_latency
    if bandwidth is None:
        return None
    return GroupLink(bandwidth, latency, step_latency=device.tensor_parallel_step_latency)


def _between_nodes(device: Device) -> LinkConfig | None:
    bandwidth = device.link_bandwidth
    return None if bandwidth is None else LinkConfig(latency=device.link_latency, bandwidth=bandwidth)
