"""Second half of a block: norm, MLP or mixture of experts, residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_models.estimate.part import (
    ALL_LINEAR,
    Exchange,
    Group,
    Held,
    Linear,
    Matrix,
    Module,
    Part,
    Product,
    around,
    gradient,
    half_exchange,
    half_tensors,
    norm_module,
)
from zbv_models.estimate.shapes import INDEX_BYTES, MASK_BYTES, STATISTIC_BYTES, Parameters, PerAction, Shapes

FIRST = ("gate_proj", "up_proj")
"""The matrices of the MLP's input."""
LAST = ("down_proj",)
OF_EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.linear_fc1")
"""The matrices of the input of routed experts."""


@dataclass(frozen=True)
class Mlp:
    """An MLP of two matrices, or of three with a gate (Shazeer 2020, §2)."""

    ffn: int
    """Width between its matrices, f."""
    gated: bool = True
    fused_activation: bool = True
    """Whether gate and activation are one kernel, which keeps its inputs alone."""

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
            matrices=self.matrices(*products),
        )

    def matrices(self, first: Product, last: Product) -> tuple[Matrix, ...]:
        """Gate and first matrix, both together, and the last one."""
        groups, one = ("mlp", ALL_LINEAR), replace(first, n_out=first.n_out // self.inputs)
        return (
            *(Matrix((name, *groups), one, "columns") for name in FIRST[-self.inputs :]),
            Matrix(("linear_fc1",), first, "columns"),
            Matrix(("down_proj", "linear_fc2", *groups), last, "rows"),
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
        return [
            *half_tensors(shapes, "MLP"),
            Held(
                "input of the MLP's first matrix",
                shapes.operand(shapes.kept_input),
                after_input=True,
                modules=("mlp",),
                of=(*FIRST, "linear_fc1"),
            ),
            *self.inner_tensors(shapes, ffn, "mlp"),
            gradient("gradient of the MLP's last matrix", shapes.operand(shapes.whole), LAST),
        ]

    def inner_tensors(self, shapes: Shapes, ffn: int, *modules: str) -> list[Held]:
        """What is kept between the matrices; ``ffn`` is the size of a tensor as wide as the MLP.

        Recomputation of all ``modules`` drops it; that of experts' activations only what they compute.
        """
        of_activation = ("moe_act", *modules) if "moe" in modules else modules
        into = self.inputs * ffn
        held = [
            gradient("gradient of the MLP's first matrix", shapes.operand(into), (*FIRST, "linear_fc1")),
            Held("input of the activation", into, modules=modules),
            Held(
                "input of the MLP's last matrix",
                shapes.operand(ffn),
                after_input=True,
                modules=of_activation,
                of=LAST,
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


def _exchange(group: Group, sent: float) -> Exchange:
    """Two collectives in F and two in I."""
    return Exchange(group, PerAction(sent, sent, 0.0), PerAction(2.0, 2.0, 0.0))


def _of_experts(matrix: Matrix) -> Matrix:
    """A matrix of every routed expert, which is no part of the group ``mlp``."""
    groups = {"mlp": "experts"}
    names = (groups.get(name, name) for name in matrix.names)
    return Matrix((f"experts.{matrix.names[0]}", *names), matrix.product, "experts")


BIAS_TRAFFIC = PerAction(28.0, 32.0)
"""Bytes per value of an expert's result for its bias, which is multiplied with the token's weight and added
in float32: the product, the sum, one tensor from those of all experts and its cast; in I the cast, the
product with the bias and with the weight and their sums (Megatron-LM, ``TEGroupedMLP._apply_bias``)."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: router, routed and shared experts.

    Every token goes to the k experts that its router prefers (Shazeer et al. 2017; Fedus et al. 2021, §2.1),
    and to all shared experts (Dai et al. 2024, DeepSeekMoE, §3.2). Devices of an expert-parallel group hold
    different experts: an all-to-all sends tokens to their experts, and another one sends results back
    (Lepikhin et al. 2020, GShard, §3). Routing is taken as balanced. An expert is whole on its device, also
    under tensor parallelism, whose devices route their own tokens (Megatron-LM with expert tensor
    parallelism 1).
    """

    experts: int
    """Routed experts, E."""
    chosen: int
    """Experts per token, k."""
    expert: Mlp
    """One routed expert."""
    shared: Mlp | None = None
    """All shared experts as one MLP; None if there are none."""
    shared_gate: bool = False
    """Whether a product of the token with a vector scales their output, as in Qwen2-MoE."""
    capacity: float | None = None
    """Factor of the balanced load that each expert computes, padded or dropped (Fedus et al. 2021, §2.2);
    None: no token is dropped, and none is padded (Gale et al. 2022, MegaBlocks)."""
    most_nodes: int | None = None
    """Most nodes that a token is sent to; None: no limit."""
    latent: int | None = None
    """Width of the vector to which a token is projected before it is sent to experts, and from which their
    sum is projected back (NVIDIA 2025, Nemotron 3, LatentMoE; Megatron-LM, ``moe_latent_size``); None: the
    token itself is sent."""

    def width(self, shapes: Shapes) -> int:
        """Width of what experts compute with."""
        return shapes.stream.hidden if self.latent is None else self.latent

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        h, width, devices = shapes.stream.hidden, self.width(shapes), shapes.degrees.expert
        local = self.experts // devices
        per_expert = self.rows(shapes) / local
        into, ffn = self.expert.inputs * self.expert.ffn, self.expert.ffn
        products = [
            Product(shapes.own_tokens, h, self.experts, is_narrow=False),
            Product(per_expert, width, into, local),
            Product(per_expert, ffn, width, local),
        ]
        if self.latent is not None:
            products += [Product(shapes.own_tokens, h, width), Product(shapes.own_tokens, width, h)]
        exchanges = list(self.exchanges(shapes))
        matrices = [_of_experts(matrix) for matrix in self.expert.matrices(*products[1:3])]
        activation = self.expert.activation_traffic(self.routed(shapes, ffn))
        moved = self.routing_traffic(shapes) + activation
        modules = [norm_module(shapes), Module("moe_act", moved=activation.forward, within="moe")]
        if self.shared is not None:
            of_device = self.shared.ffn // shapes.tensor
            products.append(Product(shapes.tokens, h, self.shared.inputs * of_device))
            products.append(Product(shapes.tokens, of_device, h))
            exchanges.append(half_exchange(shapes))
            of_shared = self.shared.activation_traffic(shapes.divided(self.shared.ffn))
            moved += of_shared
            matrices += self.shared.matrices(*products[-2:])
            again = (tuple(products[-2:]), of_shared.forward)
            modules.append(Module("shared_experts", *again, exchanges=(half_exchange(shapes),), within="moe"))
        modules.append(Module("moe", tuple(products), moved.forward, exchanges=tuple(exchanges)))
        return Part(
            parameters=self.parameters(shapes),
            products=tuple(products),
            tensors=tuple(self.tensors(shapes)),
            moved=around(shapes) + moved,
            modules=tuple(modules),
            exchanges=tuple(exchanges),
            workspace=self.workspace(shapes),
            output_bytes=shapes.hidden,
            linears=self.linears(shapes),
            saved=None if self.latent else (STATISTIC_BYTES + INDEX_BYTES) * shapes.own_tokens * self.chosen,
            is_routed=True,
            matrices=tuple(matrices),
        )

    def linears(self, shapes: Shapes) -> tuple[Linear, ...]:
        """Those of shared experts, and of their gate (torchtitan, ``MoE.forward``)."""
        found = () if self.shared is None else self.shared.linears(shapes)
        if self.shared_gate:
            gate = Product(shapes.tokens, shapes.stream.hidden, 1)
            found += (Linear(gate, shapes.stream.dtype_bytes * shapes.tokens),)
        return found

    def rows(self, shapes: Shapes) -> float:
        """Tokens of a device's experts, once per expert: a device receives as many as it sends."""
        return shapes.own_tokens * self.chosen * (1.0 if self.capacity is None else self.capacity)

    def routed(self, shapes: Shapes, width: int) -> int:
        """Size of a tensor of a given width for these tokens."""
        return int(shapes.stream.dtype_bytes * self.rows(shapes) * width)

    def exchanges(self, shapes: Shapes) -> tuple[Exchange, ...]:
        """Dispatch and combination, in F and in I.

        On one node, or on as many nodes as devices, each sends (g - 1) / g of k copies of a token, for a
        group of g devices (Lepikhin et al. 2020, §3; Rajbhandari et al. 2022, DeepSpeed-MoE, §5). With
        several devices on each of n nodes, a token is sent once to every node that has one of its experts,
        and copied there (DeepSeek-AI 2024b, §3.2.2; DeepEP). Both take place at once.
        """
        size, inside = shapes.degrees.expert, shapes.degrees.expert_in_node
        nodes, copies = size // inside, float(self.routed(shapes, self.width(shapes)))
        if size == 1:
            return ()
        if inside == 1 or nodes == 1:
            sent = 2 * copies * (size - 1) / size
            return (_exchange("expert" if inside == 1 else "expert_in_node", sent),)
        once = shapes.own(self.width(shapes)) * self.nodes_of_a_token(nodes) * (nodes - 1) / nodes
        within = copies * (inside - 1) / inside
        return (_exchange("expert", 2 * once), _exchange("expert_in_node", 2 * within))

    def nodes_of_a_token(self, nodes: int) -> float:
        """Expected number of nodes with an expert of a token, if its experts were chosen independently.

        Routing may limit it (DeepSeek-AI 2024b, §2.1.2).
        """
        expected = nodes * (1 - (1 - 1 / nodes) ** self.chosen)
        return expected if self.most_nodes is None else min(expected, self.most_nodes)

    def routing_traffic(self, shapes: Shapes) -> PerAction:
        """Memory traffic of the router, and of sorting tokens by expert.

        Tokens are copied when they are sorted by expert, and results when they are added up. With several
        experts on a device of a group, each is copied once more after it arrives and before it returns
        (Megatron-LM, ``MoEAlltoAllTokenDispatcher``).
        """
        devices = shapes.degrees.expert
        copies = 4 if devices > 1 and self.experts > devices else 2
        copied = 2.0 * copies * self.routed(shapes, self.width(shapes))
        logits = 3.0 * STATISTIC_BYTES * shapes.own_tokens * self.experts
        moved = PerAction(copied + logits, copied + logits)
        if shapes.stream.bias:
            moved += BIAS_TRAFFIC.scaled(self.rows(shapes) * self.width(shapes))
        return moved

    def parameters(self, shapes: Shapes) -> Parameters:
        """Norm, router, latent projections, experts; biases of experts where the stream has them."""
        stream = shapes.stream
        h, into = stream.hidden, self.expert.inputs * self.expert.ffn
        width = self.width(shapes)
        one = width * into + self.expert.ffn * width + (into + width if stream.bias else 0)
        shared = 0 if self.shared is None else h * self.shared.ffn * (self.shared.inputs + 1)
        router = self.experts * (h + (1 if stream.bias else 0)) + (h if self.shared_gate else 0)
        router += 0 if self.latent is None else 2 * h * self.latent
        return Parameters(
            shared=shared,
            replicated=stream.norm_parameters + router,
            experts=self.experts * one,
            chosen=self.chosen * one,
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """The tensors of the MLP for routed tokens, what the router keeps, and those of shared experts.

        The router's weights scale the activation of an expert, not its output, which is therefore not kept
        (Megatron-LM, ``TEGroupedMLP`` with weighted activations).
        """
        hidden = self.routed(shapes, self.width(shapes))
        scores = STATISTIC_BYTES * shapes.own_tokens * self.experts
        held = [
            *half_tensors(shapes, "MLP"),
            Held(
                "input of the router and of shared experts",
                shapes.hidden,
                after_input=True,
                modules=("layernorm",),
                of=(*FIRST, "linear_fc1"),
            ),
            Held("probabilities of experts", scores, modules=("moe",)),
            Held("map of tokens to experts", MASK_BYTES * shapes.own_tokens * self.experts, modules=("moe",)),
            gradient("gradient of the router", scores),
            Held(
                "input of the experts' first matrices",
                shapes.operand(hidden),
                after_input=True,
                modules=("moe",),
                of=OF_EXPERTS,
            ),
            *(
                replace(each, of=tuple(f"experts.{name}" for name in each.of))
                for each in self.expert.inner_tensors(shapes, self.routed(shapes, self.expert.ffn), "moe")
            ),
            gradient(
                "gradient of the experts' last matrices", shapes.operand(hidden), ("experts.down_proj",)
            ),
        ]
        if self.latent is not None:
            held.append(Held("sum of the experts' results", shapes.own(self.latent), after_input=True))
            held.append(gradient("gradient of the latent vector", shapes.own(self.latent)))
            held.append(gradient("gradient of the projection back", shapes.hidden))
        if self.shared is not None:
            width = shapes.divided(self.shared.ffn)
            held += [
                replace(each, modules=("shared_experts", "moe"))
                for each in self.shared.inner_tensors(shapes, width)
            ]
            last = shapes.operand(shapes.whole)
            held.append(gradient("gradient of the shared experts' last matrix", last, LAST))
        return held

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors.

        In F, tokens are sorted before they are sent, and results exist when they arrive and when they are
        sorted back. In I there are the gradients of the residual stream, of results, and of what lies between
        the matrices. The gradients of experts' weights are accumulated in place (grouped products of
        Megatron-LM with fused accumulation).
        """
        hidden = self.routed(shapes, self.width(shapes))
        between = (1 + self.expert.inputs) * self.routed(shapes, self.expert.ffn)
        found = [3 * hidden, shapes.whole + 2 * hidden + between]
        if self.shared is not None:
            found.append(self.shared.workspace(shapes))
        return max(found)
