"""Muon's products, which orthogonalize the update of every matrix once per step.

A Newton-Schulz step makes of the momentum X, m x n with m <= n, the matrix a X + (b A + c A²) X with
A = X Xᵀ: 2 (2 n m² + m³) operations in 16 bits (Jordan et al. 2024, "Runtime analysis"). Every matrix is
whole for that: a tensor-parallel group gathers what it divides, in float32, and computes it on all of its
devices (Megatron-LM, ``muon_tp_mode`` duplicated, ``newton_schulz_tp``). Replicas share the matrices if they
share the optimizer, and exchange nothing more for that than with Adam: a matrix is whole in the part of one
of them (Megatron-LM, ``LayerWiseDistributedOptimizer``, whose buckets are reduced and scattered by whole
matrices; Liu et al. 2025, arXiv 2502.16982, §2.3, cut them and gather them again). Traffic between the
products is left out, and so are routers and what the group gathers of adapters. Tables, norms and biases have
no such products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zbv_models.estimate.device import Device, GroupLink
from zbv_models.estimate.part import ALL_LINEAR, Divided, Part, Product
from zbv_models.estimate.shapes import Degrees, Stream
from zbv_models.estimate.states import FLOAT32_BYTES
from zbv_models.estimate.times import product_times

STEPS = 5
"""Newton-Schulz steps; the default of Jordan et al. and of Megatron-LM."""


def orthogonalization_time(
    part: Part, stream: Stream, degrees: Degrees, device: Device, tensor: GroupLink
) -> float:
    """Microseconds per step of a device's share of the products of a part, and of gathering their matrices.

    Compute does not hide these all-gathers over ``tensor``: each is that of the next product.
    """
    shared, time = degrees.zero_stage > 0, 0.0
    for matrix, divided in _matrices(part, degrees):
        replicas = degrees.expert_replicas if divided == "experts" else degrees.replicas
        of_products = sum(product_times(product, stream, device).forward for product in _products(matrix))
        gathered = _gathering_time(matrix, degrees, tensor) if divided in ("rows", "columns") else 0.0
        time += (matrix.groups * of_products + gathered) / (replicas if shared else 1)
    return time


def _gathering_time(matrix: Product, degrees: Degrees, link: GroupLink) -> float:
    """A whole matrix: a device sends (t - 1) / t of it around the ring."""
    others = degrees.tensor - 1
    sent = FLOAT32_BYTES * matrix.n_in * matrix.n_out * others / degrees.tensor
    return link.time(sent, others)


def _products(matrix: Product) -> Iterator[Product]:
    """Those of one matrix: A, A² and the last one, in each step."""
    m, n = sorted((matrix.n_in, matrix.n_out))
    for rows, inner, columns in ((m, n, m), (m, m, m), (m, m, n)):
        yield from (Product(rows, inner, columns, is_narrow=False),) * STEPS


def _matrices(part: Part, degrees: Degrees) -> Iterator[tuple[Product, Divided]]:
    """The whole matrices of a device that train, and what of them parallelism divides."""
    tensor = degrees.tensor
    if part.frozen.total or not part.matrices:  # adapters, or a part whose matrices have no names
        of_matrices = part.trained.total - part.trained.tables
        for each in part.products:
            if each.has_weight_gradient and each.n_in * each.n_out * each.groups <= of_matrices:
                yield each, None
        return
    for matrix in part.matrices:
        if ALL_LINEAR in matrix.names:  # the others consist of these
            product, divided = matrix.product, matrix.divided
            n_in = product.n_in * (tensor if divided == "rows" else 1)
            n_out = product.n_out * (tensor if divided == "columns" else 1)
            yield replace(product, n_in=n_in, n_out=n_out), divided
