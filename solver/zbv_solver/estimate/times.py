"""Times of F, I and W of a layer on a device, in microseconds.

The time of a layer is the sum of three parts: its matrix products at the device's achieved rate, the memory
traffic of all other operations (:mod:`zbv_solver.estimate.traffic`), and the collectives of its
tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.estimate.activations import Shapes
from zbv_solver.estimate.config import DeviceConfig, EstimateConfig
from zbv_solver.estimate.flops import Flops

MICROSECONDS = 1e6
GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Triple:
    """One number for each of F, I and W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: Triple) -> Triple:
        return Triple(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def scaled(self, factor: float) -> Triple:
        """All numbers multiplied by a factor."""
        return Triple(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)


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

    passes: Triple = Triple()
    calls: Triple = Triple()


def product_times(flops: Flops, device: DeviceConfig) -> Triple:
    """Time of matrix products on one device."""
    unit = MICROSECONDS / (device.achieved_tflops * TERA)
    return Triple(flops.forward, flops.backward_input, flops.backward_weight).scaled(unit)


def traffic_times(moved: Triple, device: DeviceConfig) -> Triple:
    """Time of memory traffic; 0 if no bandwidth is given."""
    if device.memory_bandwidth is None:
        return Triple()
    return moved.scaled(MICROSECONDS / (device.memory_bandwidth * GIGA))


def collective_times(collectives: Collectives, config: EstimateConfig) -> Triple:
    """Time of the tensor-parallel group's collectives that is not hidden by compute."""
    degree, device = config.parallel.tensor_parallel, config.device
    if degree == 1 or device.tensor_parallel_bandwidth is None:
        return Triple()
    whole = Shapes.of(config.model, degree).whole
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
        return Collectives(passes=Triple(2, 2, 1), calls=Triple(2, 2, 1))
    return Collectives(passes=Triple(2, 2, 0), calls=Triple(1, 1, 0))


def embedding_collectives(sequence_parallel: bool) -> Collectives:
    """A sum of the parts of the vocabulary in F; with sequence parallelism its gradient is gathered in I."""
    if sequence_parallel:
        return Collectives(passes=Triple(1, 1, 0), calls=Triple(1, 1, 0))
    return Collectives(passes=Triple(2, 0, 0), calls=Triple(1, 0, 0))


def head_collectives(sequence_parallel: bool) -> Collectives:
    """The gradient of the head's input is summed in I; sums of the loss over the group are left out."""
    if sequence_parallel:
        return Collectives(passes=Triple(1, 1, 1), calls=Triple(1, 1, 1))
    return Collectives(passes=Triple(0, 2, 0), calls=Triple(0, 1, 0))
