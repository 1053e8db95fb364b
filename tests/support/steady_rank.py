"""A rank that runs several steps and writes down how much memory its receives used after each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import torch
from zbv_worker.execution.executor import Executor
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import key_of
from zbv_worker.transport.connect import connect
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.world import World

from support.plans import unit_problem
from support.selfcheck import hard_model, random_orders

STEPS = 4
TIMEOUT = 60.0
CPU = torch.device("cpu")


def allocated(transport: ConnectedTransport) -> int:
    assert isinstance(transport, GlooTransport)
    return transport._buffers.nbytes


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_environment()
    transport = connect(world, "gloo", CPU, TIMEOUT)
    problem = unit_problem(world.world_size, 6)
    plan = RankPlan.of("plan", problem, random_orders(problem, Random(5), 0.3), world.rank)
    transport.open([key_of(channel) for channel in plan.channels], TIMEOUT)
    model, n = hard_model(), plan.placement.n_stages
    stages = {
        index: Stage(
            index,
            n,
            model.build_stage(index, n, CPU),
            plan.microbatches,
            model.loss if index == n - 1 else None,
        )
        for index in plan.stages
    }
    executor = Executor(plan, stages, model, transport, device=CPU, timeout=TIMEOUT)
    taken, received = [], 0
    for step in range(STEPS):
        received = sum(record.received for record in executor.step(step).records)
        taken.append(allocated(transport))
    losses = executor.evaluate(0)
    transport.flush(TIMEOUT)
    transport.barrier(TIMEOUT)
    transport.close()
    found = {"taken": taken, "received": received, "losses": losses, "after_close": allocated(transport)}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
