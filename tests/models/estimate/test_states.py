"""The memory that training keeps per parameter, against published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import estimate_config, llama
from zbv_models.estimate.config_parallel import PRECISIONS, Precision
from zbv_models.estimate.problem_document import estimate_layers
from zbv_models.estimate.states import OPTIMIZER_STATES, StateBytes, StaticBytes, by_zero

GB = 1e9


def state(precision: Precision, optimizer: str = "adam") -> StateBytes:
    return StateBytes(**precision.model_dump(), optimizer=optimizer)


def held(kept: StateBytes, count: int = 1, stage: int = 0, replicas: int = 1) -> StaticBytes:
    return by_zero(kept, stage).of(count, replicas)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_on_7_5_billion_parameters_and_64_replicas(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1."""
    found = held(state(PRECISIONS["mixed"]), 7_500_000_000, stage, 64)
    assert found.total / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("mixed", "adam", (2, 2, 12)),
        ("mixed-fp32-gradients", "adam", (2, 4, 12)),
        ("bf16-states", "adam", (2, 4, 8)),
        ("fp8-states", "adam", (2, 4, 6)),
        ("single", "adam", (4, 4, 8)),
        ("half", "adam", (2, 2, 4)),
        ("mixed", "muon", (2, 2, 8)),
        ("mixed", "lion", (2, 2, 8)),
        ("mixed", "sgd", (2, 2, 4)),
        ("single", "sgd", (4, 4, 0)),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, per_parameter: tuple[int, int, int]) -> None:
    found = held(state(PRECISIONS[precision], optimizer))
    assert (found.parameters, found.gradients, found.optimizer) == per_parameter


@given(
    parameters=st.integers(0, 10**12),
    replicas=st.integers(1, 1000),
    optimizer=st.sampled_from(sorted(OPTIMIZER_STATES)),
    sizes=st.tuples(*[st.integers(0, 8)] * 4),
)
def test_every_stage_of_zero_holds_at_most_as_much_as_the_previous_one(
    parameters: int, replicas: int, optimizer: str, sizes: tuple[int, int, int, int]
) -> None:
    precision = Precision(parameters=sizes[0], gradients=sizes[1], master=sizes[2], state=sizes[3])
    kept = state(precision, optimizer)
    found = [held(kept, parameters, stage, replicas).total for stage in range(4)]
    assert found == pytest.approx(sorted(found, reverse=True))
    assert found[3] == pytest.approx(found[0] / replicas)


def test_muon_leaves_the_tables_to_adam() -> None:
    """Megatron-LM, ``_is_nonlinear_or_embedding``: matrices of blocks have one state, tables two."""
    adam, muon = (
        estimate_layers(estimate_config(llama(layers=2), optimizer=name, zero_stage=1, data_parallel=4))
        for name in ("adam", "muon")
    )
    embedding, block, head = zip(adam, muon, strict=True)
    assert embedding[1] == embedding[0]
    assert block[0].static.optimizer - block[1].static.optimizer == pytest.approx(
        4 * block[0].parameters / 4, abs=4
    )
    assert block[1].step.optimizer < block[0].step.optimizer
    norm = 4096
    assert head[0].static.optimizer - head[1].static.optimizer == 4 * norm / 4
