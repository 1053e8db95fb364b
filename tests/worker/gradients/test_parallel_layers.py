"""Tensor parallelism, FSDP and ties across ranks train like one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_rank import CASES, CPU, MICROBATCHES, NAMES, SAVED, STEPS, Case, Model
from support.rank_files import found_by
from torch import Tensor
from zbv_worker.checkpoints.checkpoint import newest_checkpoint
from zbv_worker.checkpoints.checkpoint_files import Reader

RANKS = range(4)
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """By rank and case."""
    return found_by("parallel_rank", len(RANKS), folder)


@cache
def alone(microbatches: int, clip_norm: float, *, is_tied: bool) -> dict[str, Any]:
    """The same training in one process, by torch alone."""
    model = Model(Case({}, is_tied=is_tied), None)
    module = model.build_layers(NAMES, CPU)
    if is_tied:
        module.get_submodule("head.logits").weight = module.get_parameter("embedding.token.weight")
    optimizer = model.optimizer(module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = (model.microbatch(step, index) for index in range(microbatches))
        mean = torch.stack([model.loss(module(x), y) for x, y in pairs]).mean()
        mean.backward()  # type: ignore[no-untyped-call]  # torch's own
        losses.append(mean.item())
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm).item())
        optimizer.step()
    parameters = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def expected(case: str) -> dict[str, Any]:
    its = CASES[case]
    return alone(MICROBATCHES * its.replicas, its.clip_norm, is_tied=its.is_tied)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(found: Found, case: str) -> None:
    reported = [found[rank][case]["losses"] for rank in RANKS if None not in found[rank][case]["losses"]]
    assert reported
    for losses in reported:
        assert losses == pytest.approx(expected(case)["losses"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_every_element_counts_once_in_the_norm(found: Found, case: str) -> None:
    for rank in RANKS:
        assert found[rank][case]["norms"] == pytest.approx(expected(case)["norms"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_one_process(found: Found, case: str) -> None:
    """After SGD, so an error of a gradient shows."""
    wanted: dict[str, Tensor] = expected(case)["parameters"]
    seen = set()
    for rank in RANKS:
        for name, value in found[rank][case]["parameters"].items():
            seen.add(name)
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert seen >= set(wanted) - {"head.logits.weight"}


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_divided_layers_is_gathered_and_loaded(found: Found, case: str) -> None:
    whole = found[0][case]["whole"]
    parameters = {n: p for rank in RANKS for n, p in found[rank][case]["parameters"].items()}
    torch.testing.assert_close(whole, parameters, rtol=0, atol=0)
    for rank in RANKS:
        assert found[rank][case]["negative"]
        assert rank == 0 or found[rank][case]["whole"] is None


@pytest.mark.parametrize("case", ["sp, mesh turned", "fsdp and tp", "tp, recomputed"])
def test_w_multiplies_only_local_parts(found: Found, case: str) -> None:
    for rank in RANKS:
        calls = found[rank][case]["calls"]
        assert calls["local"] > 0
        assert "not local" not in calls
        assert not any("Linear" in name for some in found[rank][case]["unsplit"] for name in some)


@pytest.mark.parametrize("case", ["fsdp, tied", "hsdp", "fsdp and tp"])
def test_replicas_keep_a_part_of_every_parameter(found: Found, case: str) -> None:
    parts = 4 if case == "fsdp and tp" else 2
    whole = expected(case)["parameters"]
    for rank in RANKS:
        kept = found[rank][case]["kept"].get("block1.up.weight")
        assert kept in (None, whole["block1.up.weight"].numel() / parts)


@pytest.mark.parametrize("case", CASES)
def test_evaluations_use_the_current_parameters(found: Found, case: str) -> None:
    """The first evaluation uses the first step's microbatches."""
    evaluations = [found[rank][case]["evaluations"] for rank in RANKS if found[rank][case]["evaluations"]]
    assert evaluations
    for each in evaluations:
        assert each[0] == pytest.approx(expected(case)["losses"][0], rel=1e-5)
        assert all(map(math.isfinite, each.values()))


@pytest.mark.parametrize("case", SAVED)
def test_a_mesh_resumes_from_its_checkpoint(found: Found, case: str) -> None:
    for rank in RANKS:
        parameters, steps = found[rank][case]["resumed"]
        assert steps == 0
        for name, value in parameters.items():
            assert torch.equal(value, found[rank][case]["parameters"][name])


@pytest.mark.parametrize("case", SAVED)
def test_one_process_reads_the_checkpoint_of_a_mesh(found: Found, folder: Path, case: str) -> None:
    """Every element is in it once: the reader refuses to fill one twice."""
    saved = newest_checkpoint(folder / case)
    assert saved is not None
    parameters = expected(case)["parameters"]
    tied = {"head.logits.weight"} if CASES[case].is_tied else set()
    read = {f"model.{n}": torch.zeros_like(p) for n, p in parameters.items() if n not in tied}
    Reader(saved).read_into(read)
    for name, value in read.items():
        torch.testing.assert_close(value, parameters[name.removeprefix("model.")], rtol=1e-5, atol=1e-6)
