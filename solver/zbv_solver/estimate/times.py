"""Times of F, I and W of a layer on a device, in microseconds.

The time of a layer is the sum of three parts: its matrix products at the device's achieved rate, the memory
traffic of all other operations (:mod:`zbv_solver.estimate.traffic`), and the collectives of its
tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.estimate.activations import Shapes
from zbv_solver.estimate.amounts import PerAction
from zbv_solver.estimate.config import DeviceConfig, EstimateConfig

MICROSECONDS = 1e6
GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Collectives:
    """Collectives of F, I and W within a tensor-parallel group.

    Attributes
    ----------
    passes
        Ring passes, in each of which a device sends (t - 1) / t of a hidden tensor. An all-reduce has two
        passes, an all-gather or a reduce-scatter one (Patarasuk and Yuan 2009, §3).
    calls
        Number of collectives.
    """

    passes: PerAction
    calls: PerAction


def product_times(flops: PerAction, device: DeviceConfig) -> PerAction:
    """Time of matrix products on one device."""
    return flops.scaled(MICROSECONDS / (device.achieved_tflops * TERA))


def traffic_times(moved: PerAction, device: DeviceConfig) -> PerAction:
    """Time of memory traffic; 0 if no bandwidth is given."""
    if device.memory_bandwidth is None:
        return PerAction()
    return moved.scaled(MICROSECONDS / (device.memory_bandwidth * GIGA))


def collective_times(collectives: Collectives, config: EstimateConfig) -> PerAction:
    """Time of the tensor-parallel group's collectives that is not hidden by compute."""
    degree, device = config.parallel.tensor_parallel, config.device
    if degree == 1 or device.tensor_parallel_bandwidth is None:
        return PerAction()
    whole = Shapes(config.model).whole
    per_pass = whole * (degree - 1) / degree * MICROSECONDS / (device.tensor_parallel_bandwidth * GIGA)
    exposed = collectives.passes.scaled(per_pass) + collectives.calls.scaled(device.tensor_parallel_latency)
    return exposed.scaled(1 - device.tensor_parallel_overlap)


def half_collectives(sequence_parallel: bool) -> Collectives:
    """Of attention, and of an MLP.

    An all-reduce in F and one in I (Shoeybi et al. 2019, §3); with sequence parallelism an all-gather and a
    reduce-scatter in each, and one more all-gather of the first matrix's input, here before W (Korthikanti et
    al. 2022, §4.2.2).
    """
    if sequence_parallel:
        return Collectives(passes=PerAction(2, 2, 1), calls=PerAction(2, 2, 1))
    return Collectives(passes=PerAction(2, 2, 0), calls=PerAction(1, 1, 0))


def embedding_collectives(sequence_parallel: bool) -> Collectives:
    """A sum of the parts of the vocabulary in F; with sequence parallelism its gradient is gathered in I."""
    if sequence_parallel:
        return Collectives(passes=PerAction(1, 1, 0), calls=PerAction(1, 1, 0))
    return Collectives(passes=PerAction(2, 0, 0), calls=PerAction(1, 0, 0))


def head_collectives(sequence_parallel: bool) -> Collectives:
    """The gradient of the head's input is summed in I; sums of the loss over the group are left out."""
    if sequence_parallel:
        return Collectives(passes=PerAction(1, 1, 1), calls=PerAction(1, 1, 1))
    return Collectives(passes=PerAction(0, 2, 0), calls=PerAction(0, 1, 0))
