"""A training run with a new plan for every step: did any step wait for its plan, and were searches in time?

Every step has microbatches of other lengths, which the ranks announce one step ahead, as a prefetching data
loader would. The ranks compute on the cores on which the planner's process runs as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from benchmarks.findings import Finding, at_least, at_most
from benchmarks.worker.ranks import on_ranks
from benchmarks.worker.workload import parse_workload, workload_json

if TYPE_CHECKING:
    from zbv_worker.transport.world import World

COSTS = ("forward", "backward_input", "backward_weight")
Request = Mapping[str, Any]


@dataclass(frozen=True)
class PerStepWorkload:
    """Linear layers on packed tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degree: int = 2
    microbatches: int = 16
    longest: int = 1024
    """Tokens of a microbatch: up to this many, most of them far fewer."""
    width: int = 512
    """Of the layers; the defaults make a step take about a third of a second on two cores."""
    layers: int = 8
    rounds: int = 200

    def lengths(self, step: int) -> list[int]:
        """The tokens of a step's microbatches."""
        random = Random(step)
        return [max(8, round(self.longest * random.random() ** 3)) for _ in range(self.microbatches)]

    def problem(self) -> dict[str, Any]:
        """The costs of all steps."""
        return {
            "pp_degree": self.pp_degree,
            "microbatches": self.microbatches,
            "features": {"tokens": self.lengths(-1)},
            "costs": {name: {"fixed": 20, "tokens": 1} for name in COSTS},
        }


def measure(workload: PerStepWorkload) -> list[Finding]:
    """Train on all ranks."""
    answers = on_ranks("per_step", {"workload": workload_json(workload)}, workload.pp_degree)
    return findings(workload, answers)


def findings(workload: PerStepWorkload, answers: Sequence[Request]) -> list[Finding]:
    """Findings from the reports of the ranks; the first rank chooses the plans."""
    reports = [answer["report"] for answer in answers]
    steps, first = workload.rounds, reports[0]
    are_equal = len({tuple(answer["plans"]) for answer in answers}) == 1
    different = len({*answers[0]["plans"]}) if are_equal else 0
    waited, agreed = sum(each["waited"] for each in reports), min(each["agreed"] for each in reports)
    return [
        Finding("steps that waited for their plan", waited, "", at_most(0)),
        Finding("plans with equal hashes on all ranks", agreed, "", at_least(steps)),
        Finding("different plans", different, "", at_least(steps)),
        Finding("steps with a searched plan", first["planned"]),
        Finding("steps with a constructor's plan, late", first["late"]),
        Finding("steps with a constructor's plan, not announced", first["constructed"]),
        Finding("time of a search", 1e3 * first["planning_seconds"] / max(1, first["planned"]), "ms"),
        Finding("longest time to choose a plan", 1e3 * first["longest_choice"], "ms"),
        Finding("step", 1e3 * median(answers[0]["seconds"]), "ms"),
    ]


# --- on a rank


def on_rank(request: Request, world: World) -> dict[str, Any]:
    """The report, the plans' ids, and the seconds of every step."""
    import torch
    import zbv_worker as zbv
    from torch import Tensor, nn
    from zbv_worker.pipeline.step_plans import PlanningReport

    workload = parse_workload(PerStepWorkload, request["workload"])
    width = workload.width

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return ((output - target) ** 2).sum(), target.numel()

    def shape_of(features: Mapping[str, float]) -> Tensor:
        return torch.empty(int(features["tokens"]), width, device="meta")

    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(workload.layers)]
    torch.manual_seed(0)  # equal batches on every rank
    data = torch.randn(workload.longest, width)
    pipe = zbv.Pipeline(
        "per-step", layers, loss, problem=workload.problem(), shape_of=shape_of, backend="gloo"
    )
    plans, seconds = [], []
    with pipe:
        for step in range(workload.rounds):
            pipe.announce(features={"tokens": workload.lengths(step + 1)})
            lengths = workload.lengths(step)
            begun = time.perf_counter()
            pipe.step(
                microbatches=[(data[:length], data[:length]) for length in lengths],
                features={"tokens": lengths},
            )
            seconds.append(time.perf_counter() - begun)
            for parameter in pipe.parameters():
                parameter.grad = None
            plans.append(pipe.plan_id)
    return {"report": asdict(pipe.planning or PlanningReport()), "plans": plans, "seconds": seconds}
