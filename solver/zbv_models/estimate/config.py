"""The configuration of an estimate: a model, its parallelism, and a device.

The objects are parsed from JSON and frozen. Pydantic checks types and ranges, and :func:`parse_config` checks
the rules between several numbers. An :class:`EstimateConfig` that it returns is valid.
"""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput

from zbv_models.estimate.config_device import DeviceConfig
from zbv_models.estimate.config_fields import ConfigSection
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.config_parallel import PRECISION_OF, PRECISIONS, ParallelConfig, Precision
from zbv_models.estimate.config_rules import broken_rules
from zbv_models.estimate.layers import Training
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.states import StateBytes


class EstimateConfig(ConfigSection):
    """A complete configuration; made by :func:`parse_config`."""

    model: ModelConfig
    parallel: ParallelConfig
    device: DeviceConfig

    @property
    def precision(self) -> Precision:
        """Bytes per parameter."""
        chosen = self.parallel.precision
        if isinstance(chosen, Precision):
            return chosen
        return PRECISIONS[chosen or PRECISION_OF[self.model.dtype]]

    @property
    def state(self) -> StateBytes:
        """The states of training."""
        sizes = self.precision
        return StateBytes(
            sizes.parameters,
            sizes.gradients,
            sizes.master,
            sizes.state,
            self.parallel.optimizer,
            self.model.dtype,
            self.parallel.offloaded_states,
            sizes.gathered,
        )

    @property
    def degrees(self) -> Degrees:
        """How many devices share what."""
        parallel = self.parallel
        return Degrees(
            parallel.tensor_parallel,
            parallel.sequence_parallel,
            parallel.context_parallel,
            parallel.context_exchange == "all-gather",
            parallel.expert_parallel,
            parallel.expert_parallel_in_node,
            parallel.data_parallel,
            parallel.zero_stage,
        )

    @property
    def training(self) -> Training:
        """What training keeps, and how it is planned."""
        by_halves = self.parallel.granularity == "half"
        return Training(
            state=self.state,
            recompute=self.recompute,
            modules=frozenset(self.parallel.recompute_modules),
            ends_share_rank=self.placement == "v",
            by_halves=by_halves,
            fused_gradients=self.parallel.fused_gradients,
        )

    @property
    def recompute(self) -> str:
        """The recomputation that layers offer."""
        return self.parallel.recompute or ("selective" if self.model.attention == "plain" else "full")

    @property
    def placement(self) -> str:
        """The placement of the problem."""
        return self.parallel.placement or ("v" if self.model.tied_embeddings else "auto")


def parse_config(document: Any) -> EstimateConfig:
    """Parse a decoded JSON document with presets already merged.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    config = validated(EstimateConfig, document)
    issues = broken_rules(config.model, config.parallel, config.device)
    if issues:
        raise InvalidInput(issues)
    return config
