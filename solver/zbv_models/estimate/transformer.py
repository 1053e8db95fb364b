"""A model as a sequence of layers, each made of parts.

The layers are in model order: with a vision encoder its patches, blocks and projector; the embedding; the
blocks, equal neighbours as one layer with copies; modules of multi-token prediction; the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Protocol

from zbv_models.estimate.ends import Embedding, Head
from zbv_models.estimate.experts import Experts
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import Part
from zbv_models.estimate.prediction import Joining
from zbv_models.estimate.shapes import Degrees, Shapes, Stream
from zbv_models.estimate.vision import Patches, Projector


class Kind(Protocol):
    """A kind of part: half a block, or an end of the model."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""

    def __hash__(self) -> int:
        """Kinds are frozen records."""


@dataclass(frozen=True)
class LayerKind:
    """Equal layers of a model.

    Attributes
    ----------
    halves
        Its parts in order, with their names.
    copies
        Number of copies; None for a single layer, which keeps its name.
    can_recompute
        Whether full recomputation applies.
    sees
        Stream, tokens per sequence, and sequences per sequence of the model, where they are not the model's.
    streams
        Number of outputs, each as large as the stream, that the next layer receives.
    """

    name: str
    halves: tuple[tuple[str, Kind], ...]
    copies: int | None = None
    can_recompute: bool = True
    sees: tuple[Stream, int, int] | None = None
    streams: int = 1

    @property
    def count(self) -> int:
        """Number of copies, at least 1."""
        return self.copies or 1


@dataclass(frozen=True)
class VisionEncoder:
    """A ViT in front of the model (:mod:`zbv_models.estimate.vision`).

    Attributes
    ----------
    patches
        Tokens of an image.
    images
        Images per sequence of the model.
    blocks
        The halves of each block.
    """

    stream: Stream
    patches: int
    images: int
    embedding: Patches
    blocks: tuple[tuple[tuple[str, Kind], ...], ...]
    projector: Projector


@dataclass(frozen=True)
class Transformer:
    """A decoder-only model.

    Attributes
    ----------
    sequence
        Tokens per sequence, s.
    blocks
        Equal neighbours as one layer with copies.
    predictions
        Modules of multi-token prediction, as one layer with copies: what follows the projection of their
        inputs; empty if there are none.
    tied
        Whether the head has the weights of the embedding.
    """

    stream: Stream
    sequence: int
    vocabulary: int
    blocks: tuple[LayerKind, ...]
    tied: bool = False
    learned_positions: bool = False
    predictions: tuple[LayerKind, ...] = ()
    vision: VisionEncoder | None = None
    fused_loss: bool = False

    def layers(self, gradient_bytes: float = 2.0, ends_share_rank: bool = True) -> Iterator[LayerKind]:
        """All layers in model order.

        Parameters
        ----------
        gradient_bytes
            Size of an accumulated gradient of a parameter.
        ends_share_rank
            Whether embedding and head are on one rank, so that shared tables are there once.
        """
        embedding = Embedding(self.vocabulary, self.learned_positions, gradient_bytes)
        if self.vision is not None:
            yield from vision_layers(self.vision)
        yield LayerKind("embedding", (("embedding", embedding),), can_recompute=False)
        yield from self.blocks
        count = sum(kind.count for kind in self.predictions)
        for kind in self.predictions:
            joining = Joining(replace(embedding, learned_positions=False), not ends_share_rank)
            yield replace(kind, halves=(("joining", joining), *kind.halves), streams=1 + count)
        has_table = not (self.tied and ends_share_rank)
        head = Head(self.vocabulary, has_table, 1 + count, self.fused_loss)
        yield LayerKind("head", (("head", head),), can_recompute=False)

    @property
    def n_layers(self) -> int:
        """Number of layers, copies counted."""
        return sum(kind.count for kind in self.layers())

    @property
    def experts(self) -> int:
        """Greatest number of devices that can share the routed experts of every block; 1 without experts."""
        counts = [
            half.experts for kind in self.layers() for _, half in kind.halves if isinstance(half, Experts)
        ]
        return gcd(*counts) or 1

    def shapes(self, kind: LayerKind, degrees: Degrees, sequences: int = 1) -> Shapes:
        """The sizes that a layer sees, for a number of sequences per microbatch."""
        if kind.sees is None:
            return Shapes(self.stream, self.sequence, sequences, degrees)
        stream, tokens, per_sequence = kind.sees
        return Shapes(stream, tokens, sequences * per_sequence, degrees)

    def parameters(self, *, with_predictions: bool = True) -> Parameters:
        """Those of the model; tied ones are counted once, and so are the tables that predictions share."""
        model = self if with_predictions else replace(self, predictions=())
        found = Parameters(0, 0)
        for kind in model.layers():
            shapes = self.shapes(kind, Degrees())
            for _, half in kind.halves:
                of_one = half.part(shapes).parameters
                for _ in range(kind.count):
                    found += of_one
        return found

    def model_flops(self) -> float:
        """Operations of a training step per sequence, without recomputation, also not that of flash
        attention.

        Narayanan et al. 2021, §5.1; Chowdhery et al. 2022, PaLM, appendix B. Attention counts as it is
        computed: half where flash attention leaves out what a causal mask hides.
        """
        found = 0.0
        for kind in self.layers():
            shapes = self.shapes(kind, Degrees())
            for _, half in kind.halves:
                part = half.part(shapes)
                products = sum(product.flops for product in part.products)
                found += kind.count * 3 * (products + part.core.forward)
        return found


def vision_layers(vision: VisionEncoder) -> Iterator[LayerKind]:
    """Patches, blocks and projector; blocks that differ from their neighbours are numbered by their place."""
    sees = (vision.stream, vision.patches, vision.images)
    yield LayerKind("patches", (("patches", vision.embedding),), can_recompute=False, sees=sees)
    if len(set(vision.blocks)) == 1:
        yield LayerKind("vision", vision.blocks[0], len(vision.blocks), sees=sees)
    else:
        for place, halves in enumerate(vision.blocks):
            yield LayerKind(f"vision.{place}", halves, sees=sees)
    yield LayerKind("projector", (("projector", vision.projector),), can_recompute=False, sees=sees)
