"""Ranks that disagree raise an error at once, on both sides: other calls, batches or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_pipeline import ROWS, batch, model
from support.thread_pipeline import on_ranks, plan_of, rank_of, returned
from torch import Tensor, nn
from zbv_worker.errors import ChannelTimeout, Disagreement, InvalidRun, PeerLost, WorkerError
from zbv_worker.pipeline.pipeline import Pipeline

PLACES = [(2, "single"), (2, "v"), (4, "single")]
mse = nn.functional.mse_loss


def outcomes(program: Callable[[Pipeline, int], Any], ranks: int, kind: str, replicas: int = 1) -> list[Any]:
    """What a program returns or raises on every rank; two batches are known before it."""

    def run(pipe: Pipeline) -> Any:
        for rows in (ROWS, 2 * ROWS):
            pipe.step(*batch(rows=rows))
            pipe.evaluate(*batch(rows=rows))
        return program(pipe, rank_of(pipe))

    return on_ranks(plan_of(ranks, kind), model, mse, run, replicas=replicas)


def require_told(found: list[Any]) -> None:
    """No rank goes on or waits for its timeout, and those who disagree say so."""
    assert all(isinstance(each, Disagreement | PeerLost) for each in found), found
    assert any(isinstance(each, Disagreement) for each in found), found


CALLS: dict[str, Callable[[Pipeline, Path], Any]] = {
    "step": lambda pipe, folder: pipe.step(*batch()),
    "evaluate": lambda pipe, folder: pipe.evaluate(*batch()),
    "clip": lambda pipe, folder: pipe.clip_grad_norm_(1.0),
    "state": lambda pipe, folder: pipe.full_state_dict(),
    "trace": lambda pipe, folder: pipe.trace(),
    "checkpoints": lambda pipe, folder: pipe.checkpoints(folder, []),
    "close": lambda pipe, folder: pipe.close(),
}
PAIRS = [*zip(CALLS, [*CALLS][1:] + [*CALLS][:1], strict=True)]
"""Every call together with two others."""


def placed(cases: Iterable[Any]) -> Any:
    """Pairs of a place and a case; the places take turns."""
    return [(PLACES[at % len(PLACES)], case) for at, case in enumerate(cases)]


@pytest.mark.parametrize(("place", "calls"), placed(PAIRS))
def test_a_rank_that_makes_another_call_raises_an_error_with_both_calls(
    tmp_path: Path, place: tuple[int, str], calls: tuple[str, str]
) -> None:
    def program(pipe: Pipeline, rank: int) -> None:
        CALLS[calls[rank == place[0] - 1]](pipe, tmp_path)
        pipe.step(*batch())

    require_told(outcomes(program, *place))


OTHERS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "known rows": batch(rows=2 * ROWS),  # both are known
    "new rows": batch(rows=3 * ROWS),
    "other data": batch(seed=2),
    "no targets": (batch()[0], None),
    "only inputs": (batch(rows=2 * ROWS)[0], None),
    "only targets": (None, batch(rows=2 * ROWS)[1]),
    "dtype": (batch()[0], batch()[1].double()),
}


@pytest.mark.parametrize(("place", "kind"), placed(OTHERS))
def test_a_rank_with_another_batch_raises_an_error(place: tuple[int, str], kind: str) -> None:
    other = OTHERS[kind]

    def program(pipe: Pipeline, rank: int) -> None:
        call = pipe.evaluate if place[0] == 4 else pipe.step
        call(*(other if rank == 0 else batch()))
        pipe.step(*batch())

    found = outcomes(program, *place)
    require_told(found)
    if other[1] is not None and other[1].dtype == torch.float64:
        assert any("have different shapes" in str(each) for each in found)
    rows = {len(each) for each in (*other, *batch()) if each is not None}
    if None not in other and len(rows) > 1:
        assert all(f"{count} rows" in str(found[0]) or f"of {count}" in str(found[0]) for count in rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_batches_of_other_sizes_are_refused_in_the_first_call(ranks: int) -> None:
    """The ranks have nothing in common but the number of rows."""

    def program(pipe: Pipeline) -> None:
        rank = rank_of(pipe)
        pipe.step(batch()[0] if rank == 0 else None, batch(rows=2 * ROWS)[1] if rank == ranks - 1 else None)

    found = on_ranks(plan_of(ranks, "single"), model, mse, program)  # in a V, one rank has both
    assert all(isinstance(e, WorkerError) and not isinstance(e, ChannelTimeout) for e in found), found


def test_a_batch_that_one_rank_refuses_is_refused_by_all() -> None:
    def program(pipe: Pipeline, rank: int) -> None:
        pipe.step(*batch(rows=ROWS if rank else ROWS - 1))

    first, *others = outcomes(program, 4, "single")
    assert isinstance(first, InvalidRun)
    require_told(others)
    assert "7 rows" in str(others[0])


def test_a_batch_that_all_ranks_refuse_leaves_the_pipeline_usable() -> None:
    def program(pipe: Pipeline, rank: int) -> float:
        for wrong in (batch(rows=ROWS - 1), batch(rows=0)):
            with pytest.raises(InvalidRun):
                pipe.step(*wrong)
        with torch.no_grad(), pytest.raises(InvalidRun):
            pipe.step(*batch())
        pipe.step(*batch())
        return float(pipe.clip_grad_norm_(1.0))

    assert len({round(each, 4) for each in outcomes(program, 2, "v")}) == 1


@pytest.mark.parametrize("data_rank", [None, 0])
def test_shapes_change_only_if_all_ranks_see_them_or_one_has_all_data(data_rank: int | None) -> None:
    """A rank without data would not see it."""

    def program(pipe: Pipeline) -> None:
        for rows in (ROWS, ROWS, ROWS // 2):
            pipe.step(*(() if rank_of(pipe) else batch(rows=rows)))

    found = on_ranks(plan_of(2, "v"), model, mse, program, data_rank=data_rank)
    if data_rank is None:
        assert all("other shapes than in the first step" in str(each) for each in found), found
    else:
        assert found == [None, None]


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


UNUSED: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    "none": lambda x, y: (None, None),
    "on another device": lambda x, y: (x.to("meta"), y.to("meta")),
    "zeros": lambda x, y: (torch.zeros_like(x), torch.zeros_like(y)),
    "no columns": lambda x, y: (torch.empty(ROWS, 0), torch.empty(ROWS, 0)),
    "strided": lambda x, y: (strided(x), strided(y)),
    "transposed in memory": lambda x, y: (x.t().contiguous().t(), y),
    "augmented": lambda x, y: (x + torch.rand(()), y),
    "random targets": lambda x, y: (x, torch.rand_like(y)),
}


@pytest.mark.parametrize(("place", "kind"), placed(UNUSED))
def test_what_a_rank_does_not_use_may_differ(place: tuple[int, str], kind: str) -> None:
    """It takes the place of a batch, or inputs or targets are equal, so that all fit together."""
    ranks, placement = place

    def program(pipe: Pipeline) -> None:
        has_first, has_last = 0 in pipe.modules, max(pipe.modules) == len(pipe.modules) * ranks - 1
        for seed in range(2):
            inputs, targets = batch(seed=seed)
            other = UNUSED[kind](inputs, targets)
            given = inputs if has_first else other[0], targets if has_last else other[1]
            pipe.step(*given)
            pipe.evaluate(*given)

    returned(on_ranks(plan_of(ranks, placement), model, mse, program))


def test_replicas_that_train_other_parameters_raise_an_error() -> None:
    def program(pipe: Pipeline, rank: int) -> None:
        if rank == 0:
            next(pipe.parameters()).requires_grad_(False)
        pipe.step(*batch())

    require_told(outcomes(program, 2, "v", replicas=2))


def test_replicas_train_on_other_batches_and_make_the_same_calls() -> None:
    def same(pipe: Pipeline, rank: int) -> None:
        pipe.step(*batch(seed=rank % 2))

    returned(outcomes(same, 2, "v", replicas=2))

    def other(pipe: Pipeline, rank: int) -> None:
        (pipe.evaluate if rank % 2 else pipe.step)(*batch())
        pipe.step(*batch())

    require_told(outcomes(other, 2, "v", replicas=2))
