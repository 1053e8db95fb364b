"""Counts floating-point operations by the formulas of ``torch.utils.flop_counter``.

They count a multiplication and an addition as two operations, only in matrix products, convolutions and
attention, and attention in full even under a causal mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zbv_worker.measure.operators import InterceptedOperators

_aten = torch.ops.aten
# PyTorch has formulas for attention on GPUs; the CPU operators have the same arguments in the same order.
_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
}


def count_flops(work: Callable[[], object]) -> int:
    """The floating-point operations of some work on this thread."""
    total = 0

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal total
        found = operator(*args, **kwargs)
        formula = _FORMULAS.get(operator._overloadpacket)
        if formula is not None:
            total += formula(*args, **kwargs, out_val=found)
        return found

    with InterceptedOperators(run):
        work()
    return total
