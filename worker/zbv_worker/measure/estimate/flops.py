"""Counts floating-point operations by the formulas of ``torch.utils.flop_counter``.

They count a multiplication and an addition as two, matrix products, convolutions and attention only, and
attention in full where a causal mask leaves half of it out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# PyTorch has formulas for attention on GPUs; the CPU's has the same arguments in the same places.
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


class CountedFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within its ``with`` block: floating-point operations of this thread.

    Attributes
    ----------
    total
        So far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and count it."""
        found = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found
