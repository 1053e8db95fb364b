"""Losses with parameters, inputs with a graph and the user's gradients on several ranks and replicas."""

from __future__ import annotations

from typing import Any

import pytest
from support.rank_files import found_by

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks of a pipeline saw, and those of two replicas."""
    return found_by("loss_rank", request.param, tmp_path_factory.mktemp("losses"))


@pytest.mark.parametrize("case", ["v", "single", "tied v", "tied single"])
def test_parameters_of_a_loss_are_those_of_the_rank_with_the_last_layer(ranks: Found, case: str) -> None:
    found = [rank[case] for rank in ranks]
    assert max(each["apart"] for each in found) < 1e-5
    assert max(each["norm"] for each in found) < 1e-4
    own = ["loss.scale"]
    names = [each["names"] for each in found]
    with_loss = range(len(ranks) // 2) if case.endswith("v") else range(len(ranks) // 2, len(ranks))
    for rank, listed in enumerate(names):
        assert [name for name in listed if name != "loss.weight"] == (own if rank in with_loss else [])
        assert found[rank]["loss_grad"] == (rank in with_loss)  # another rank's copy is not touched
    assert found[0]["state"] == [*own, *(["loss.weight"] if case.startswith("tied") else [])]


@pytest.mark.parametrize("case", ["v", "single", "tied v", "tied single", "ties"])
def test_gradients_stay_in_the_memory_of_the_user(ranks: Found, case: str) -> None:
    assert all(rank[case]["kept"] for rank in ranks)
    assert max(rank[case]["apart"] for rank in ranks) < 1e-5
    assert all(rank[case].get("flat", True) for rank in ranks)


def test_inputs_with_a_graph_get_their_gradient_on_the_rank_with_the_first_layer(ranks: Found) -> None:
    assert max(rank["outer"]["apart"] for rank in ranks) < 1e-5
    for rank in ranks:
        assert (
            "inputs that require a gradient on a rank without the first layer" in rank["outer"]["everywhere"]
        )


def test_inputs_of_the_data_rank(ranks: Found) -> None:
    if len(ranks) == 4:
        pytest.skip("a program of two ranks")
    assert ranks[0]["data rank"]["apart"] < 1e-6
    for rank in (found["data rank"] for found in ranks):
        assert rank["from 0"] == rank["usable 0"] == rank["usable 1"] == "no error"
        assert "inputs that require a gradient on a rank without the first layer" in rank["from 1"]


def test_every_rank_hears_why_a_step_cannot_train(ranks: Found) -> None:
    if len(ranks) == 4:
        pytest.skip("a program of two ranks")
    for found in (rank["refused"] for rank in ranks):
        assert "does not depend on anything that requires a gradient" in found["no_graph"]
        assert found["frozen"].startswith("InvalidRun: found no parameter that requires a gradient")
        assert "uses a trainable tensor of shape [4, 4]" in found["elsewhere"]
        assert found["searched"].startswith("InvalidRun: found LBFGS")
