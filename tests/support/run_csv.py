"""Runs exported schedules on PyTorch's runtime as one rank: ``python -m support.run_csv FOLDER``.

For every ``NAME.plan.json`` the runtime, with PyTorch's own stages, loads ``NAME.compute_only.csv`` and
``NAME.compute_comms.csv`` by its own ``_load_csv``. Left behind for each: ``NAME.FORMAT.RANK.pt``, the
gradients.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem

from support.selfcheck import hard_model

CPU = torch.device("cpu")


def run(problem: Problem, path: Path, form: str, rank: int) -> dict[str, Tensor]:
    model, m, last = hard_model(), problem.microbatches, problem.n_stages - 1
    modules = {
        index: model.build_stage(index, problem.n_stages, CPU).train()
        for index in problem.placement.stages_of[rank]
    }
    stages = [PipelineStage(module, index, problem.n_stages, CPU) for index, module in modules.items()]
    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, m, loss_fn=model.loss)
    schedule._load_csv(str(path), format=form)
    pairs = [model.microbatch(0, j) for j in range(m)]
    inputs = (torch.cat([words for words, _ in pairs]),) if 0 in modules else ()
    target = torch.cat([target for _, target in pairs]) if last in modules else None
    schedule.step(*inputs, target=target, return_outputs=False)
    named = [pair for module in modules.values() for pair in module.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for plan in sorted(folder.glob("*.plan.json")):
        name = plan.name.removesuffix(".plan.json")
        problem = parse_problem(json.loads(plan.read_text())["problem"])
        for form in ("compute_only", "compute_comms"):
            gradients = run(problem, folder / f"{name}.{form}.csv", form, rank)
            torch.save(gradients, folder / f"{name}.{form}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
