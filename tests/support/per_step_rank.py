"""A rank that trains a small transformer with a plan for every step, and compares with one process.

Under torchrun's environment: ``python -m support.per_step_rank FOLDER STEPS MODE``. The rank writes what it
found to ``rank-RANK.json``. ``MODE`` is "all ranks"; "data rank", with stated shapes; or "loader": then a
process of a data loader plans most steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zbv_solver
import zbv_worker as zbv
from torch.utils.data import DataLoader, Dataset

from support.packed_rank import PackedBatch, gradients_apart, loss_sum, model, shape_of, trained_alone

MICROBATCHES, TIMEOUT = 4, 60.0
UNPLANNED = 3
"""The step that the loader does not plan."""


def problem(p: int) -> dict[str, Any]:
    """Costs by tokens; 20 tokens per microbatch are typical."""
    costs = {"tokens": 1.0, "tokens_squared": 0.05}
    return {
        "pp_degree": p,
        "microbatches": MICROBATCHES,
        "sequences": [[20]] * MICROBATCHES,
        "costs": dict.fromkeys(("forward", "backward_input", "backward_weight"), costs),
    }


def difference(pipe: zbv.Pipeline, batch: PackedBatch, given: dict[str, Any]) -> dict[str, float]:
    """A step; how far its loss and gradients are from those of one process, relatively."""
    reference = model()
    expected = trained_alone(reference, batch)
    for parameter in pipe.parameters():
        parameter.grad = None
    loss = pipe.step(**given)
    apart = 0.0 if loss is None else float(abs(loss - expected) / expected)
    return {"loss": apart, "gradients": gradients_apart(pipe, reference)}


class Steps(Dataset[tuple[PackedBatch, "zbv_solver.Plan | None"]]):  # type: ignore[misc]  # untyped
    """Batches and their plans."""

    def __init__(self, steps: int, p: int):
        parsed = zbv_solver.parse(problem(p))
        assert isinstance(parsed, zbv_solver.Problem)
        self._steps, self._planner = steps, zbv_solver.StepPlanner(parsed)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> tuple[PackedBatch, zbv_solver.Plan | None]:
        batch = PackedBatch.random(step, MICROBATCHES)
        lengths = batch.cu_seqlens.diff().tolist()
        own = [[lengths[at] for at in some] for some in batch.sequences]
        values = {
            "tokens": [sum(some) for some in own],
            "tokens_squared": [sum(length**2 for length in some) for some in own],
        }
        return batch, None if step == UNPLANNED else self._planner.plan(values, seconds=0.02)


def main(folder: Path, steps: int, mode: str) -> None:
    torch.set_num_threads(1)
    rank, p = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    more: dict[str, Any] = {"data_rank": p - 1, "shape_of": shape_of} if mode == "data rank" else {}
    found, plans, given_plans = [], [], []
    batches: Iterator[tuple[PackedBatch, zbv_solver.Plan | None]]
    batches = ((PackedBatch.random(step, MICROBATCHES), None) for step in range(steps))
    if mode == "loader" and rank == 0:
        batches = iter(DataLoader(Steps(steps, p), batch_size=None, num_workers=1))  # before threads exist
    pipe = zbv.Pipeline(
        "per-step",
        model(),
        loss_sum,
        problem=problem(p),
        timeout=TIMEOUT,
        startup_timeout=TIMEOUT,
        **more,
    )
    with pipe:
        for batch, plan in batches:
            given: dict[str, Any] = {}
            if mode != "data rank" or rank == p - 1:
                given = {"inputs": batch.tokens, "targets": batch.targets, "plan": plan}
                given |= {"cu_seqlens": batch.cu_seqlens, "sequences": batch.sequences}
            found.append(difference(pipe, batch, given))
            plans.append(pipe.plan_id)
            given_plans.append(None if plan is None else plan.plan_id)
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"found": found, "plans": plans, "given": given_plans})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
