"""Queued weight gradients of a Linear whose weight is a DTensor, as torch's ``parallelize_module`` makes it.

W multiplies the local parts. Where a rank's output gradient and input are whole or divided in the same way,
the product needs no communication, and its placement follows from the factors:

=====================  =====================  =================================  =========================
output gradient g      input x                weight gradient gᵀx                for instance
=====================  =====================  =================================  =========================
features divided       whole                  rows divided                       ``ColwiseParallel``
whole                  features divided       columns divided                    ``RowwiseParallel``
rows divided           rows divided           parts to add up (``Partial``)      sequence parallelism
whole                  whole                  whole
=====================  =====================  =================================  =========================

Parts are added up once per step, when the step's gradients are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zbv_worker.stage.dtensors import is_dtensor, local_of
from zbv_worker.stage.weight_grads import (
    add_product_to,
    dtype_of_sum,
    gradient_of,
    product,
    rows_of,
    set_gradient,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def add_linear_gradients(
    weight: Tensor | None, bias: Tensor | None, x: DTensor, grad_output: DTensor
) -> bool:
    """Add the gradients of a call of a Linear to its parameters'; runs under ``no_grad``.

    Returns False, and adds nothing, if the local parts do not suffice.
    """
    mesh, features = grad_output.device_mesh, grad_output.ndim - 1
    of_weight = _placements(grad_output.placements, x.placements, features)
    if of_weight is None or x.device_mesh != mesh:
        return False
    grad, rows = rows_of(local_of(grad_output)), rows_of(local_of(x))
    if weight is not None and weight.requires_grad:
        _add(weight, mesh, of_weight, grad.t(), rows)
    if bias is not None and bias.requires_grad:
        _add(bias, mesh, _placements_of_bias(grad_output.placements, features), grad.sum(0))
    return True


def _placements(
    grads: Sequence[Placement], inputs: Sequence[Placement], features: int
) -> tuple[Placement, ...] | None:
    """The placements of gᵀx, one per dimension of the mesh; None if it is more than a local product."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Placement] = []
    for grad, x in zip(grads, inputs, strict=True):
        if grad == Shard(features) and x == Replicate():
            found.append(Shard(0))
        elif grad == Replicate() and x == Shard(features):
            found.append(Shard(1))
        elif grad == Replicate() and x == Replicate():
            found.append(Replicate())
        elif (isinstance(grad, Shard) and grad == x and grad.dim != features) or (
            {grad, x} == {Partial(), Replicate()}
        ):
            found.append(Partial())
        else:
            return None
    return tuple(found)


def _placements_of_bias(grads: Sequence[Placement], features: int) -> tuple[Placement, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kept = {Shard(features): Shard(0), Replicate(): Replicate()}
    return tuple(kept.get(grad, Partial()) for grad in grads)


def _add(
    parameter: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    left: Tensor,
    right: Tensor | None = None,
) -> None:
    """Add a local part, or a product of local parts."""
    from torch.distributed.tensor import DTensor

    total = gradient_of(parameter)
    if is_dtensor(total) and total.placements == placements:
        if right is None:
            local_of(total).add_(left)
        else:
            add_product_to(local_of(total), left, right)
        return
    dtype = dtype_of_sum(parameter)
    local = left.to(dtype) if right is None else product(left, right, dtype)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    set_gradient(parameter, made if total is None else total + made)
