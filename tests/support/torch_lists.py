"""PyTorch's pipelining runtime with mocked stages, which suffice to load a schedule."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from torch.distributed.pipelining import schedules
from zbv_solver.problem.problem import Problem


def torch_runtime(problem: Problem, rank: int, **options: Any) -> Any:
    """The runtime of one rank, without a schedule."""
    stages = []
    for index in problem.placement.stages_of[rank]:
        stage = Mock(
            stage_index=index, num_stages=problem.n_stages, group_size=problem.pp_degree, group_rank=rank
        )
        stage.is_first, stage.is_last = index == 0, index == problem.n_stages - 1
        stages.append(stage)
    runtime: Any = schedules._PipelineScheduleRuntime
    return runtime(stages, problem.microbatches, **options)


def loaded_lists(runtime: Any) -> list[list[str]]:
    """The actions of every rank, as text."""
    return [[str(action) for action in row] for _, row in sorted(runtime.pipeline_order_with_comms.items())]
