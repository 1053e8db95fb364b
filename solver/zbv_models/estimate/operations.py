"""Selective recomputation of torchtitan: single operations of a block are saved, the rest is computed again.

``torchtitan/distributed/activation_checkpoint.py``, ``SelectiveAC``: F keeps the block's input and outputs
of some operations. These are every second product (``aten.mm``: the first, the third and so on of a block),
products with a bias (``aten.addmm``), flash attention and the choice of experts (``topk``). The router's
product and those of routed experts (``aten._grouped_mm``) are computed again. So are exchanges:
``SelectiveAC`` saves functional collectives, but the default ``spmd_backend``, ``spmd_types``, has others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zbv_models.estimate.device import Device
from zbv_models.estimate.part import Linear, Part
from zbv_models.estimate.shapes import Stream
from zbv_models.estimate.times import core_times, product_times

OPERATIONS = frozenset(("op",))
"""The name of this recomputation among modules."""


def is_known(parts: Iterable[Part]) -> bool:
    """Whether torchtitan has such a block."""
    return all(part.saved is not None for part in parts)


def saved_bytes(parts: list[Part]) -> int:
    """Bytes that F keeps of a block."""
    kept = parts[0].input_bytes + sum(part.saved or 0 for part in parts)
    return kept + sum(linear.output_bytes for linear in _saved(parts))


def saved_time(parts: list[Part], stream: Stream, device: Device) -> float:
    """Microseconds of F that are not repeated."""
    cores = sum(core_times(part, device).forward for part in parts)
    return cores + sum(product_times(linear.product, stream, device).forward for linear in _saved(parts))


def _saved(parts: list[Part]) -> Iterator[Linear]:
    """The linear layers whose output is saved."""
    counted = 0
    for linear in (each for part in parts for each in part.linears):
        counted += not linear.has_bias
        if linear.has_bias or counted % 2 == 1:
            yield linear
