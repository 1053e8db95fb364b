"""Second half of a block with a mixture of experts: norm, router, routed and shared experts, residual.

Every token goes to the k experts that its router prefers (Shazeer et al. 2017; Fedus et al. 2021, §2.1), and
to all shared experts (Dai et al. 2024, DeepSeekMoE, §3.2). Devices of an expert-parallel group hold different
experts: an all-to-all sends tokens to their experts, and another one sends results back (Lepikhin et al.
2020, GShard, §3). Routing is taken as balanced. An expert is whole on its device, also under tensor
parallelism, whose devices route their own tokens (Megatron-LM with expert tensor parallelism 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.mlp import Mlp
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import (
    Exchange,
    Group,
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
    norm_module,
)
from zbv_models.estimate.shapes import INDEX_BYTES, MASK_BYTES, STATISTIC_BYTES, Shapes


def _exchange(group: Group, sent: float) -> Exchange:
    """Two collectives in F and two in I."""
    return Exchange(group, PerAction(sent, sent, 0.0), PerAction(2.0, 2.0, 0.0))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes
    ----------
    experts
        Routed experts, E.
    chosen
        Experts per token, k.
    expert
        One routed expert.
    shared
        All shared experts as one MLP; None if there are none.
    shared_gate
        Whether a product of the token with a vector scales their output, as in Qwen2-MoE.
    capacity
        Factor of the balanced load that each expert computes, padded or dropped (Fedus et al. 2021, §2.2);
        None: no token is dropped, and none is padded (Gale et al. 2022, MegaBlocks).
    most_nodes
        Most nodes that a token is sent to; None: no limit.
    latent
        Width of the vector to which a token is projected before it is sent to experts, and from which their
        sum is projected back (NVIDIA 2025, Nemotron 3, LatentMoE; Megatron-LM, ``moe_latent_size``); None:
        the token itself is sent.
    """

    experts: int
    chosen: int
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    capacity: float | None = None
    most_nodes: int | None = None
    latent: int | None = None

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
        return PerAction(copied + logits, copied + logits)

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
            *half_norms(shapes, "MLP's norm"),
            Held(
                "input of the router and of shared experts",
                shapes.hidden,
                after_input=True,
                modules=("layernorm",),
            ),
            Held("probabilities of experts", scores, modules=("moe",)),
            Held("map of tokens to experts", MASK_BYTES * shapes.own_tokens * self.experts, modules=("moe",)),
            gradient("gradient of the router", scores),
            Held(
                "input of the experts' first matrices",
                shapes.operand(hidden),
                after_input=True,
                modules=("moe",),
            ),
            *self.expert.inner_tensors(shapes, self.routed(shapes, self.expert.ffn), "moe"),
            gradient("gradient of the experts' last matrices", shapes.operand(hidden)),
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
            held.append(gradient("gradient of the shared experts' last matrix", shapes.operand(shapes.whole)))
        return held + dropout_tensors(shapes, "MLP's dropout mask")

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
