"""A layer whose costs are given: a state-space layer, for example, for which zbv has no formula."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import Held, Part, Product, half_exchange
from zbv_models.estimate.shapes import Shapes


@dataclass(frozen=True)
class GivenCosts:
    """Costs per token of a layer on one device without parallelism; tensor and context parallelism divide
    them.

    Attributes
    ----------
    parameters
        Number of parameters.
    flops
        Operations of its products with weights, in F; I and W have as many.
    core_flops
        Other operations, in F; I has twice as many, W none.
    moved
        Bytes of memory traffic in F; I has twice as many.
    after_forward, after_input
        Bytes that are kept after F, and after I.
    """

    parameters: int
    flops: float
    core_flops: float = 0.0
    moved: float = 0.0
    after_forward: float = 0.0
    after_input: float = 0.0

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        tokens, t = shapes.tokens, shapes.tensor
        moved = self.moved * tokens / t
        core = self.core_flops * tokens / t
        h = shapes.stream.hidden
        n_out = max(1, round(self.flops / (2 * h * t)))
        kept, waiting = (int(size * tokens) // t for size in (self.after_forward, self.after_input))
        inner = max(0, kept - shapes.hidden)
        return Part(
            parameters=Parameters(shared=self.parameters, replicated=0),
            products=(Product(self.flops * tokens / t / (2 * h * n_out), h, n_out),) if self.flops else (),
            core=PerAction(core, 2 * core, 0.0),
            tensors=(
                Held("input", shapes.hidden, is_input=True),
                Held("tensors inside the layer", inner),
                Held("inputs and gradients of its products", waiting, after_forward=False, after_input=True),
            ),
            moved=PerAction(moved, 2 * moved, 0.0),
            exchanges=(half_exchange(shapes),),
            workspace=shapes.whole + inner // 2,
            output_bytes=shapes.hidden,
        )
