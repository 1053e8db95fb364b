"""Floating-point operations of F, I and W, per microbatch and for the whole tensor-parallel group.

Only matrix products count, with 2 operations per multiply-add (Narayanan et al. 2021, §5.1 and appendix). The
backward has two products for every product of the forward. If the product is with a weight, one of them
belongs to I and one to W (Qi et al. 2023, §2.3 and table 1). Attention's products of activations have no
weight, so both belong to I.
"""

from __future__ import annotations

from zbv_solver.estimate.amounts import PerAction
from zbv_solver.estimate.config import ModelConfig

FLASH_BACKWARD = 2.5
"""Ratio of backward to forward of flash attention: five products to two, because scores are recomputed."""


def linear_flops(tokens: int, n_in: int, n_out: int) -> PerAction:
    """A linear layer: 2 · tokens · n_in · n_out in each of F, I and W (Qi et al. 2023, §2.3)."""
    once = 2.0 * tokens * n_in * n_out
    return PerAction(once, once, once)


def core_flops(model: ModelConfig) -> PerAction:
    """Scores and their product with the values: 4 b s² a d in F, twice that in I, nothing in W.

    Qi et al. 2023, table 1 (their 4s and 8s per s b h). Flash attention needs half where the mask is causal,
    and 2.5 times the forward in I (Dao 2023, §4.1).
    """
    once = 4.0 * model.microbatch_size * model.sequence**2 * model.query_width
    if model.attention == "plain":
        return PerAction(once, 2 * once, 0.0)
    once = once / 2 if model.causal else once
    return PerAction(once, FLASH_BACKWARD * once, 0.0)


def attention_flops(model: ModelConfig) -> PerAction:
    """Projections and scores."""
    h, query = model.hidden, model.query_width
    projections = linear_flops(model.tokens, h, query + 2 * model.kv_width)
    return projections + core_flops(model) + linear_flops(model.tokens, query, h)


def mlp_flops(model: ModelConfig) -> PerAction:
    """Two matrices, or three with a gate."""
    matrices = 3 if model.gated else 2
    return linear_flops(model.tokens, model.hidden, matrices * model.ffn_width)


def head_flops(model: ModelConfig) -> PerAction:
    """The product with the vocabulary's matrix (Narayanan et al. 2021, appendix: 6 B s h V in all)."""
    return linear_flops(model.tokens, model.hidden, model.vocabulary)
