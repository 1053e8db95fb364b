"""Which degrees of parallelism a model allows; the rules of a configuration, without messages."""

from __future__ import annotations

from collections.abc import Iterator

from zbv_models.estimate.attention import Attention
from zbv_models.estimate.experts import Experts
from zbv_models.estimate.latent_attention import LatentAttention
from zbv_models.estimate.mlp import Mlp
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformer import Kind, Transformer


def fits(model: Transformer, degrees: Degrees) -> bool:
    """Whether the degrees divide what they share; :mod:`zbv_models.estimate.config_rules` says why not."""
    halves = [half for kind in model.layers() for _, half in kind.halves]
    experts = [half for half in halves if isinstance(half, Experts)]
    divided = [size for half in halves for size in _divided_by_tensor(half)] + [model.vocabulary]
    pieces = degrees.tensor if degrees.sequence_parallel else 1
    if degrees.context > 1:
        pieces *= 2 * degrees.context
        if any(not scores.flash for scores in _attentions(halves)):
            return False
    devices = degrees.tensor * degrees.context * degrees.data
    return (
        not any(size % degrees.tensor for size in divided)
        and model.sequence % pieces == 0
        and (not experts or degrees.tensor == 1 or degrees.sequence_parallel)
        and (bool(experts) or degrees.expert == 1)
        and not any(half.experts % degrees.expert for half in experts)
        and devices % degrees.expert == 0
        and degrees.expert % degrees.expert_in_node == 0
    )


def _attentions(halves: list[Kind]) -> Iterator[Attention | LatentAttention]:
    return (half for half in halves if isinstance(half, Attention | LatentAttention))


def _divided_by_tensor(half: Kind) -> tuple[int, ...]:
    """The sizes that tensor parallelism must divide."""
    if isinstance(half, Attention):
        return (half.heads, half.kv_heads)
    if isinstance(half, LatentAttention):
        return (half.heads,)
    if isinstance(half, Mlp):
        return (half.ffn,)
    if isinstance(half, Experts) and half.shared is not None:
        return (half.shared.ffn,)
    return ()
