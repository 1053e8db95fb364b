"""Second half of a block: norm, MLP, residual."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import (
    Held,
    Linear,
    Module,
    Part,
    Product,
    around,
    dropout_tensors,
    gradient,
    half_exchange,
    half_norms,
)
from zbv_models.estimate.shapes import Shapes


@dataclass(frozen=True)
class Mlp:
    """An MLP of two matrices, or of three with a gate (Shazeer 2020, §2).

    Attributes
    ----------
    ffn
        Width between its matrices, f.
    fused_activation
        Whether gate and activation are one kernel, which keeps its inputs alone.
    """

    ffn: int
    gated: bool = True
    fused_activation: bool = True

    @property
    def inputs(self) -> int:
        """Inputs of the activation."""
        return 2 if self.gated else 1

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device.

        The norm is part of the first product, so it is computed again with the MLP.
        """
        h, ffn = shapes.stream.hidden, self.ffn // shapes.tensor
        products = (Product(shapes.tokens, h, self.inputs * ffn), Product(shapes.tokens, ffn, h))
        activation, exchanges = self.activation_traffic(shapes.divided(self.ffn)), (half_exchange(shapes),)
        return Part(
            parameters=self.parameters(shapes),
            products=products,
            tensors=tuple(self.tensors(shapes)),
            moved=around(shapes) + activation,
            modules=(Module("mlp", products, activation.forward + 2 * shapes.hidden, exchanges=exchanges),),
            exchanges=exchanges,
            workspace=self.workspace(shapes),
            output_bytes=shapes.hidden,
            linears=self.linears(shapes),
            saved=0,
        )

    def linears(self, shapes: Shapes) -> tuple[Linear, ...]:
        """Gate, first and last matrix (torchtitan, ``FeedForward.forward``)."""
        h, ffn, has_bias = shapes.stream.hidden, self.ffn // shapes.tensor, shapes.stream.bias
        first = Linear(Product(shapes.tokens, h, ffn), shapes.divided(self.ffn), has_bias)
        return (*[first] * self.inputs, Linear(Product(shapes.tokens, ffn, h), shapes.whole, has_bias))

    def activation_traffic(self, size: int) -> PerAction:
        """Memory traffic of the activation; ``size`` is that of a tensor as wide as the MLP."""
        into = self.inputs * size
        moved = PerAction(into + size, 2 * into + size)
        if self.gated and not self.fused_activation:
            moved += PerAction(2 * size, 2 * size)
        return moved

    def parameters(self, shapes: Shapes) -> Parameters:
        """Norm and matrices, with their biases."""
        stream, into = shapes.stream, self.inputs * self.ffn
        h = stream.hidden
        return Parameters(
            shared=h * into + self.ffn * h + (into if stream.bias else 0),
            replicated=stream.norm_parameters + (h if stream.bias else 0),
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """21 s b h with dropout in 16 bits (Korthikanti et al. 2022, §4.1).

        With a gate the activation reads two tensors; unfused, the activated gate is kept as well.
        """
        ffn = shapes.divided(self.ffn)
        held = [
            *half_norms(shapes, "MLP's norm"),
            Held(
                "input of the MLP's first matrix",
                shapes.operand(shapes.kept_input),
                after_input=True,
                modules=("mlp",),
            ),
            *self.inner_tensors(shapes, ffn, "mlp"),
            gradient("gradient of the MLP's last matrix", shapes.operand(shapes.whole)),
        ]
        return held + dropout_tensors(shapes, "MLP's dropout mask")

    def inner_tensors(self, shapes: Shapes, ffn: int, *modules: str) -> list[Held]:
        """What is kept between the matrices; ``ffn`` is the size of a tensor as wide as the MLP.

        Recomputation of all ``modules`` drops it; that of experts' activations only what they compute.
        """
        of_activation = ("moe_act", *modules) if "moe" in modules else modules
        into = self.inputs * ffn
        held = [
            gradient("gradient of the MLP's first matrix", shapes.operand(into)),
            Held("input of the activation", into, modules=modules),
            Held(
                "input of the MLP's last matrix", shapes.operand(ffn), after_input=True, modules=of_activation
            ),
        ]
        if self.gated and not self.fused_activation:
            held.append(Held("activated gate", ffn, modules=of_activation))
        return held

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B."""
        h, ffn, whole = shapes.stream.hidden, shapes.divided(self.ffn), shapes.whole
        # I: the gradients of the residual stream, of the last matrix's input, and of the activation's inputs.
        gradients = whole + (1 + self.inputs) * ffn
        if shapes.degrees.keeps_gathered:
            # Gate and first matrix are apart, so each computes a gradient of the residual stream.
            gradients = max(gradients, self.inputs * (whole + ffn))
        # B also computes the gradients of weights. For the last matrix, everything that F kept is still
        # there. For the first one, the activation's inputs (whose gradients are as large) and the input of
        # the last matrix are released.
        last = whole + ffn + shapes.weight(self.ffn, h)
        released = (2 if self.gated and not self.fused_activation else 1) * ffn
        first = shapes.weight(h, self.inputs * self.ffn) + whole + shapes.hidden - released
        return max(gradients, last, first)
