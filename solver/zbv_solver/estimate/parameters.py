"""Parameter counts of layers, and the memory that training keeps per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.estimate.amounts import Summed
from zbv_solver.estimate.config import ModelConfig, Precision


@dataclass(frozen=True)
class Parameters(Summed):
    """A parameter count, split by how tensor parallelism treats the parameters.

    Attributes
    ----------
    shared
        Parameters of matrices that a tensor-parallel group divides.
    replicated
        Parameters that every device has whole: norms, positions, and biases after a sum over the group.
    """

    shared: int
    replicated: int

    @property
    def total(self) -> int:
        """Count in the whole model."""
        return self.shared + self.replicated

    def on_device(self, tensor_parallel: int) -> int:
        """Count on each device of a tensor-parallel group."""
        return self.shared // tensor_parallel + self.replicated


def attention_parameters(model: ModelConfig) -> Parameters:
    """Norm, projection to queries, keys and values, and the projection back.

    Shoeybi et al. 2019, §3, for what tensor parallelism divides; Ainslie et al. 2023, §2, for fewer key and
    value heads than query heads.
    """
    h, query, both = model.hidden, model.query_width, model.query_width + 2 * model.kv_width
    head_norms = 2 * model.width_of_head if model.qk_norm else 0
    return Parameters(
        shared=h * both + query * h + (both if model.has_qkv_bias else 0),
        replicated=_norm(model) + head_norms + (h if model.bias else 0),
    )


def mlp_parameters(model: ModelConfig) -> Parameters:
    """Norm and two matrices, or three with a gate (Shazeer 2020, §2)."""
    into = (2 if model.gated else 1) * model.ffn_width
    return Parameters(
        shared=model.hidden * into + model.ffn_width * model.hidden + (into if model.bias else 0),
        replicated=_norm(model) + (model.hidden if model.bias else 0),
    )


def embedding_parameters(model: ModelConfig) -> Parameters:
    """Table of tokens, divided by vocabulary (Shoeybi et al. 2019, §3), and of learned positions."""
    positions = model.sequence * model.hidden if model.positions == "learned" else 0
    return Parameters(shared=model.vocabulary * model.hidden, replicated=positions)


def head_parameters(model: ModelConfig) -> Parameters:
    """Final norm, and the matrix to the vocabulary unless it is tied to the embedding."""
    table = 0 if model.tied_embeddings else model.vocabulary * model.hidden
    return Parameters(shared=table, replicated=_norm(model))


def model_parameters(model: ModelConfig) -> int:
    """The model's parameters; tied ones are counted once."""
    block = attention_parameters(model) + mlp_parameters(model)
    ends = embedding_parameters(model) + head_parameters(model)
    return model.layers * block.total + ends.total


def _norm(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" else 1)


@dataclass(frozen=True)
class StaticBytes(Summed):
    """Memory that training holds all the time, in bytes on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer


def static_bytes(
    parameters: int, precision: Precision, optimizer_states: int, zero_stage: int = 0, data_parallel: int = 1
) -> StaticBytes:
    """Parameters, gradients and optimizer (master copy and states) of a number of parameters.

    Mixed-precision Adam is 2 + 2 + 12 bytes per parameter; ZeRO divides the last, the last two, or all three
    by the replicas (Rajbhandari et al. 2020, §3.1, §5 and figure 1).
    """

    def held(size: float, divided_from_stage: int) -> float:
        return parameters * size / (data_parallel if zero_stage >= divided_from_stage else 1)

    return StaticBytes(
        held(precision.parameters, 3),
        held(precision.gradients, 2),
        held(precision.master + optimizer_states * precision.state, 1),
    )
