"""Runs exported schedules on PyTorch's runtime as one rank: ``python -m support.run_csv FOLDER``.

For every ``NAME.plan.json`` the runtime loads ``NAME.compute_only.csv`` and ``NAME.compute_comms.csv`` by its
own ``_load_csv``; in plans named ``…-scattered`` what stages take and give is not contiguous. Left behind for
each: ``NAME.FORMAT.RANK.pt``, the gradients, and ``NAME.FORMAT.RANK.json``, how many receive buffers there
were at once and how many are left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem

from benchmarks.worker.torch_runtime.stage import StoreStage
from support.selfcheck import hard_model

CPU = torch.device("cpu")


class CountingStage(StoreStage):
    """Counts its receive buffers."""

    most = 0

    def buffers(self) -> int:
        infos = [
            info for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()) for info in infos
        ]
        return sum(info.buffer is not None for info in infos)

    def _allocate(self, infos: Any) -> None:
        super()._allocate(infos)
        self.most = max(self.most, self.buffers())


def scattered(tensor: Tensor) -> Tensor:
    """The same numbers, their last dimension not the innermost in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def stages_of(problem: Problem, rows: list[list[str]], rank: int, is_scattered: bool) -> list[CountingStage]:
    model, stages = hard_model(), []
    for index in problem.placement.stages_of[rank]:
        split = {int(text.split("I")[1]) for text in rows[rank] if text.startswith(f"{index}I")}
        module = model.build_stage(index, problem.n_stages, CPU).train()
        if is_scattered:
            module.register_forward_pre_hook(lambda _, inputs: tuple(map(scattered, inputs)))
            module.register_forward_hook(lambda _, inputs, output: scattered(output))
        group = dist.group.WORLD
        assert group is not None
        stages.append(
            CountingStage(
                module, index, problem.n_stages, CPU, group, frozenset(split), lambda received: None
            )
        )
    return stages


def run(problem: Problem, path: Path, form: str, rank: int) -> list[CountingStage]:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    stages = stages_of(problem, rows, rank, "-scattered." in path.name)
    model, m, last = hard_model(), problem.microbatches, problem.n_stages - 1
    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, m, loss_fn=model.loss)
    schedule._load_csv(str(path), format=form)
    pairs = [model.microbatch(0, j) for j in range(m)]
    hosted = {stage.stage_index for stage in stages}
    inputs = (torch.cat([words for words, _ in pairs]),) if 0 in hosted else ()
    target = torch.cat([target for _, target in pairs]) if last in hosted else None
    schedule.step(*inputs, target=target, return_outputs=False)
    return stages


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for plan in sorted(folder.glob("*.plan.json")):
        name = plan.name.removesuffix(".plan.json")
        problem = parse_problem(json.loads(plan.read_text())["problem"])
        for form in ("compute_only", "compute_comms"):
            stages = run(problem, folder / f"{name}.{form}.csv", form, rank)
            named = [pair for stage in stages for pair in stage.submod.named_parameters()]
            gradients = {parameter: p.grad for parameter, p in named if p.grad is not None}
            torch.save(gradients, folder / f"{name}.{form}.{rank}.pt")
            counts = {str(s.stage_index): [s.most, s.buffers()] for s in stages}
            (folder / f"{name}.{form}.{rank}.json").write_text(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
