"""Several residual streams, which every half of a block reads and mixes (hyper-connections).

Zhu et al. 2024, Hyper-Connections, arXiv 2409.19606, §2; Xie et al. 2025, mHC: Manifold-Constrained
Hyper-Connections, arXiv 2512.24880, §4, whose sizes are those of DeepSeek-V4 (DeepSeek-AI 2026, §2.2). A
product of all n streams of a token gives n weights of what the half reads, n of what it adds to each stream,
and n x n that mix the streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_models.estimate.attention import Attention
from zbv_models.estimate.compressed_attention import CompressedAttention
from zbv_models.estimate.feed_forward import Experts, Mlp
from zbv_models.estimate.latent_attention import LatentAttention
from zbv_models.estimate.part import Held, Part, Product
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes
from zbv_models.estimate.state_space import GivenCosts

Half = Attention | LatentAttention | CompressedAttention | GivenCosts | Mlp | Experts


@dataclass(frozen=True)
class HyperConnected:
    """Half a block between n residual streams."""

    half: Half
    streams: int

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device: those of the half, and of the streams around it.

        F reads the streams for the weights, for the half's input and for their mix, and writes them; I has
        twice that traffic (two gradients per product). The weights have no cost but their product.
        """
        part, n, h = self.half.part(shapes), self.streams, shapes.stream.hidden
        weights, streams = n * (n + 2), n * shapes.hidden
        read = float(4 * streams + 2 * shapes.hidden)
        return replace(
            part,
            parameters=part.parameters + Parameters(replicated=weights * (n * h + 1) + 3),
            products=(*part.products, Product(shapes.own_tokens, n * h, weights, is_narrow=False)),
            tensors=(
                *(replace(held, is_input=False) for held in part.tensors),
                Held("residual streams", streams, after_input=True, is_input=True, for_input=True),
                Held("output of the half", shapes.hidden),
            ),
            moved=part.moved + PerAction(read, 2 * read),
            workspace=part.workspace + streams,
            output_bytes=streams,
            linears=(),
            saved=None,
        )


@dataclass(frozen=True)
class AttentionResidual:
    """Half a block that reads a mix of earlier sums, instead of the stream alone (attention residuals).

    Kimi Team 2026, Kimi K3, arXiv 2607.24653, §2.2. The weights are a softmax over products of the sums,
    after a norm, with one vector. All sums so far go to the next rank.
    """

    half: Half
    sums: int
    """Earlier sums, and the one that is not complete."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device: F reads the sums twice, and writes their mix.

        A sum is kept once for all halves that read it, so it counts with those that compute it.
        """
        part, sums = self.half.part(shapes), self.sums * shapes.hidden
        return replace(
            part,
            parameters=part.parameters + Parameters(replicated=2 * shapes.stream.hidden),
            tensors=(*part.tensors, Held("statistics of the sums", self.sums * 8 * shapes.own_tokens)),
            moved=part.moved + PerAction(2 * sums + shapes.hidden, 4 * sums + shapes.hidden),
            workspace=part.workspace + sums,
            output_bytes=sums,
            linears=(),
            saved=None,
        )


@dataclass(frozen=True)
class Collapse:
    """The sum of n residual streams before the head, with weights from a product of all of them."""

    streams: int

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        n, h, streams = self.streams, shapes.stream.hidden, self.streams * shapes.hidden
        moved = float(2 * streams + shapes.hidden)
        return Part(
            parameters=Parameters(replicated=n * (n * h + 1) + 1),
            products=(Product(shapes.own_tokens, n * h, n, is_narrow=False),),
            tensors=(Held("residual streams", streams, after_input=True, is_input=True, for_input=True),),
            moved=PerAction(moved, 2 * moved),
            exchanges=(),
            workspace=streams,
            output_bytes=shapes.hidden,
        )
