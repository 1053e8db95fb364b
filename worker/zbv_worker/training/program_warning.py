"""Says in a rank's log that the costs of a plan were measured with another program than the run's."""

from __future__ import annotations

import torch

from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.process import say
from zbv_worker.stage.program import Program, differences


def warn_of_another_program(plan: RankPlan, program: Program, device: torch.device) -> None:
    """Report every difference between the program that was profiled for the plan, and this run's."""
    found = list(differences(plan.measured, program.described(device)))
    if found:
        say(
            f"plan {plan.plan_id[:12]}: its costs were measured with {', '.join(found)}. The step may take "
            f"longer than planned: measure this program with zbv-worker profile, and plan again."
        )
