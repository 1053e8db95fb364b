"""The balancing loss of a mixture of experts, for a model in several stages.

With ``output_router_logits``, transformers adds ``router_aux_loss_coef`` times a loss that is not a sum over
layers: the product, per expert, of the share of tokens and of the mean router probability over *all* layers
(Fedus et al. 2021, "Switch Transformers", equation 4). So the two sums travel with the hidden states: 2E
numbers for E experts. The last layer computes the loss from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.adapters.decoder_layers import (
    Anatomy,
    BlockArguments,
    DecoderBlock,
    DecoderEmbedding,
    DecoderHead,
)


@dataclass(frozen=True)
class Routing:
    """How a model's balancing loss is computed."""

    experts: int
    chosen: int
    """The number of experts, and of those that a token is sent to."""
    coefficient: float
    """The factor of the loss."""
    router: type[nn.Module]
    output: int
    """The class of the modules that return the router's logits, and their index among its outputs."""

    @classmethod
    def of(cls, model: Any) -> Routing | None:
        """The routing of a model; None if it has no experts or its configuration asks for no such loss."""
        recorder = (type(model.base_model)._can_record_outputs or {}).get("router_logits")
        if recorder is None or not getattr(model.config, "output_router_logits", False):
            return None
        return cls(
            model.num_experts,
            model.num_experts_per_tok,
            model.router_aux_loss_coef,
            recorder.target_class,
            recorder.index,
        )

    def sums(self, logits: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tokens sent to each expert, and the router's probabilities summed over tokens, each (experts,).

        Parameters
        ----------
        logits
            (tokens, experts).
        attention_mask
            0 for padding, which does not count; (b, t) with b·t tokens.
        """
        probabilities = logits.softmax(-1)
        tokens = nn.functional.one_hot(probabilities.topk(self.chosen, dim=-1).indices, self.experts).sum(1)
        if attention_mask is not None:
            mask = attention_mask.reshape(-1, 1).float()
            return (tokens * mask).sum(0), (probabilities.float() * mask).sum(0)
        return tokens.float().sum(0), probabilities.float().sum(0)

    def loss(self, counts: Tensor, probabilities: Tensor) -> Tensor:
        """The balancing loss with its coefficient, from the sums over all layers."""
        rows = counts.sum() / self.chosen
        return self.coefficient * self.experts * (counts / rows * (probabilities / rows)).sum()


class RoutedEmbedding(DecoderEmbedding):
    """An embedding that also returns the sums, zero before the first block."""

    def __init__(self, anatomy: Anatomy, modules: Mapping[str, nn.Module], routing: Routing):
        super().__init__(anatomy, modules)
        self._experts = routing.experts

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """``hidden`` (b, t, width), ``counts`` and ``probabilities`` (experts,)."""
        hidden = super().forward(input_ids, position_ids)
        zeros = torch.zeros(self._experts, device=hidden.device)
        return {"hidden": hidden, "counts": zeros, "probabilities": zeros}


class RoutedBlock(DecoderBlock):
    """A block that adds its own routing to the sums."""

    def __init__(self, layer: nn.Module, index: int, arguments: BlockArguments, routing: Routing):
        super().__init__(layer, index, arguments)
        self._routing = routing

    def forward(
        self, value: Any, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        """As :meth:`RoutedEmbedding.forward` returns it."""
        with self._logits() as logits:
            hidden = super().forward(value["hidden"], attention_mask, position_ids)
        counts, probabilities = value["counts"], value["probabilities"]
        for each in logits:  # none if the block has no experts
            own_counts, own_probabilities = self._routing.sums(each, attention_mask)
            counts, probabilities = counts + own_counts, probabilities + own_probabilities
        return {"hidden": hidden, "counts": counts, "probabilities": probabilities}

    @contextmanager
    def _logits(self) -> Iterator[list[Tensor]]:
        """A context that collects the router's logits."""
        found: list[Tensor] = []
        at = self._routing.output

        def collect(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output[at] if isinstance(output, tuple) else output)

        routers = [module for module in self.layer.modules() if isinstance(module, self._routing.router)]
        handles = [router.register_forward_hook(collect) for router in routers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


class RoutedHead(DecoderHead):
    """A head that also returns the balancing loss."""

    def __init__(self, anatomy: Anatomy, modules: Mapping[str, nn.Module], routing: Routing):
        super().__init__(anatomy, modules)
        self._routing = routing

    def forward(self, value: Any) -> Any:
        """``logits`` (b, t, vocabulary) and ``balance``, a scalar."""
        balance = self._routing.loss(value["counts"], value["probabilities"])
        return {"logits": super().forward(value["hidden"]), "balance": balance}
