"""Layers whose costs per token are given; :mod:`zbv_models.estimate.recurrent` computes some of them."""

from __future__ import annotations

from pydantic import Field

from zbv_models.estimate.part import Held, Part, Product, half_exchange
from zbv_models.estimate.sections import Amount, ConfigSection, Total
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes


class GivenCosts(ConfigSection):
    """Costs per token of a layer for which zbv has no formula, on one device without parallelism.

    Tensor and context parallelism divide them.
    """

    parameters: Total = Field(description="number of parameters")
    flops: Amount = Field(description="of its products with weights in F; as many in I and in W")
    core_flops: Amount = Field(0.0, description="other operations in F")
    core_flops_back: Amount | None = Field(None, description="those in I; null: twice as many as in F")
    memory_traffic: Amount = Field(0.0, description="bytes in F; twice as many in I")
    after_forward: Amount = Field(0.0, description="bytes that are kept after F")
    after_input: Amount = Field(0.0, description="bytes that are kept after I")

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        tokens, t = shapes.tokens, shapes.tensor
        moved = self.memory_traffic * tokens / t
        core = self.core_flops * tokens / t
        back = 2 * core if self.core_flops_back is None else self.core_flops_back * tokens / t
        h = shapes.stream.hidden
        n_out = max(1, round(self.flops / (2 * h * t)))
        kept, waiting = (int(size * tokens) // t for size in (self.after_forward, self.after_input))
        inner = max(0, kept - shapes.hidden)
        return Part(
            parameters=Parameters(shared=self.parameters, replicated=0),
            products=(Product(self.flops * tokens / t / (2 * h * n_out), h, n_out),) if self.flops else (),
            core=PerAction(core, back, 0.0),
            tensors=(
                Held("input", shapes.hidden, is_input=True),
                Held("tensors inside the layer", inner),
                Held("inputs and gradients of its products", waiting, after_forward=False, after_input=True),
            ),
            moved=PerAction(moved, 2 * moved, 0.0),
            exchanges=(half_exchange(shapes),) if self.flops else (),
            workspace=shapes.whole + inner // 2,
            output_bytes=shapes.hidden,
            is_scan=True,
        )
