"""What packing gains on real ranks: planned and measured steps, against equal tokens in the given order.

A small transformer computes attention within each sequence, so a long sequence costs more than short ones of
as many tokens. Steps with microbatches of several sizes show first what a token and a squared token cost.
Then the batch is packed with these costs, and the steps of all replicas run one after another on the same
ranks. All replicas would wait for the slowest, so a step takes as long as that one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ConfigDict

from benchmarks.findings import Finding, at_least
from benchmarks.worker.ranks import MEETING_SECONDS, meeting, on_ranks
from benchmarks.worker.workload import parse_workload, workload_json

if TYPE_CHECKING:
    from torch import Tensor
    from zbv_solver.measure.rank_trace import RankTrace
    from zbv_solver.packing.batch import Batch
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.problem import Problem
    from zbv_solver.search.options import SearchOptions
    from zbv_worker.transport.world import World

LEAST_SHARE = 2 / 3
"""Of the planned gain, that real ranks must reach."""
OURS, MEAN, CLASSICAL = "zbv", "mean plan", "1F1B"
ACTIONS = ("forward", "backward_input", "backward_weight")
Request = Mapping[str, Any]
Contents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PackingWorkload:
    """A batch with a long tail, and a transformer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degree: int = 2
    replicas: int = 4
    law: Literal["web", "bimodal", "tail"] = "tail"
    sequences: int = 512
    """Distribution (:mod:`benchmarks.lengths`) and number of the batch's sequences."""
    scale: int = 16
    """Lengths are divided by this."""
    max_tokens: int = 2048
    """Of a microbatch; also the longest sequence."""
    share: float = 1.0
    """Memory limit as a share of what 1F1B holds for microbatches of the largest size."""
    blocks: int = 8
    width: int = 128
    heads: int = 2
    """Of the transformer. Attention costs as much as the rest of a block at about 12 x width tokens."""
    effort: Literal["quick", "standard", "thorough"] = "standard"
    """Of the searches."""
    profile_steps: int = 15
    """Steps that measure the costs, after one that warms up."""
    rounds: int = 5
    """Measured turns, after one warm-up turn."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"found width={self.width} and heads={self.heads}; heads must divide width.")

    def lengths(self) -> list[int]:
        """Of the batch's sequences, in order of arrival."""
        from benchmarks.lengths.distributions import distributions

        law = next(each for each in distributions() if each.name == self.law)
        drawn = law.lengths(self.sequences, "0")
        return [min(self.max_tokens, max(1, length // self.scale)) for length in drawn]

    def profiled(self) -> list[list[int]]:
        """Microbatches that tell the costs of tokens and of squared tokens apart."""
        sizes = [self.max_tokens >> halvings for halvings in range(4)]
        return [[max(1, size // parts)] * parts for size in sizes for parts in (1, 4, 16)]


class Replica(NamedTuple):
    """What one replica runs: the lengths of every microbatch's sequences, and the plan."""

    lengths: Contents
    plan: Plan

    def json(self) -> dict[str, Any]:
        """For the ranks."""
        from zbv_solver.plans.plan import plan_json

        return {"lengths": self.lengths, "plan": plan_json(self.plan)}


Variants = dict[str, list[Replica]]


def measure(workload: PackingWorkload) -> list[Finding]:
    """Measure the costs, pack, and run all steps in turns."""
    from zbv_solver.search.options import SearchOptions

    batch = batch_of(workload, measured_costs(workload))
    variants = planned(batch, SearchOptions(effort=workload.effort))
    request = {
        "workload": workload_json(workload),
        "variants": {name: [each.json() for each in replicas] for name, replicas in variants.items()},
    }
    return findings(variants, on_ranks("packing", request, workload.pp_degree))


def measured_costs(workload: PackingWorkload) -> Problem:
    """The problem of the profiled microbatches, with the costs that the ranks measured."""
    from zbv_solver.measure.refit import refit
    from zbv_solver.problem.reading import parse_problem
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    microbatches = workload.profiled()
    document = {
        "pp_degree": workload.pp_degree,
        "placement": "v",
        "microbatches": len(microbatches),
        "sequences": microbatches,
        "costs": {name: {"fixed": 1, "tokens": 1, "tokens_squared": 1} for name in ACTIONS}
        | {"p2p": {"fixed": 1, "tokens": 1}},
        "units": {"time": "us", "memory": "bytes"},
    }
    plan = search(parse_problem(document), SearchOptions(effort="quick"))
    request = {"workload": workload_json(workload), "profile": Replica(microbatches, plan).json()}
    steps = on_ranks("packing", request, workload.pp_degree)[0]
    by_rank = zip(*steps, strict=True)
    return refit(plan.problem, [_trace(plan, rank, own) for rank, own in enumerate(by_rank)])


def _trace(plan: Plan, rank: int, steps: Sequence[Request]) -> RankTrace:
    """A rank's trace from what :meth:`zbv_worker.Pipeline.trace` returned after every step."""
    import numpy as np
    from zbv_solver.measure.rank_trace import RankTrace, StepTrace
    from zbv_solver.plans.orders import Orders

    made = []
    for at, step in enumerate(steps):
        times, received = (np.array(step[name][0]) for name in ("times", "received"))
        made.append(StepTrace(at, None, Orders.from_actions([step["actions"]]), times, received))
    return RankTrace(rank, rank, 0, plan.plan_id, 0, tuple(made))


def batch_of(workload: PackingWorkload, measured: Problem) -> Batch:
    """The batch, with measured costs."""
    from zbv_solver.packing.batch import parse_batch
    from zbv_solver.problem.writing import problem_json

    from benchmarks.lengths.instances import limit

    document = problem_json(measured)
    for chosen in ("microbatches", "features", "sequences"):
        document.pop(chosen, None)
    ones = [1] * measured.n_stages
    full = [workload.max_tokens] * workload.pp_degree
    document["objective"] = "makespan"
    document["memory"] = {
        "forward": {"tokens": 1},
        "backward_input": 0,
        "backward_weight": {"tokens": -1},
        "limit": limit(ones, full, workload.share),
    }
    return parse_batch(
        {
            "sequences": workload.lengths(),
            "max_tokens": workload.max_tokens,
            "replicas": workload.replicas,
            "problem": document,
        }
    )


def planned(batch: Batch, options: SearchOptions) -> Variants:
    """By variant, what every replica runs."""
    from zbv_solver.construct.baselines import without_limit
    from zbv_solver.packing.packing import pack
    from zbv_solver.search.assemble import baseline_plan, make_plan
    from zbv_solver.search.run import search

    from benchmarks.planner.packing import given_order

    def replica(contents: Contents, plan: Plan) -> Replica:
        return Replica([[batch.sequences[index] for index in each] for each in contents], plan)

    variants: Variants = {MEAN: [], CLASSICAL: []}
    for contents in given_order(batch):
        problem = batch.problem_of(contents)
        orders = search(problem.averaged(), options).orders
        mean = make_plan(without_limit(problem), orders, method=MEAN)
        variants[MEAN].append(replica(contents, mean))
        variants[CLASSICAL].append(replica(contents, baseline_plan("1f1b", problem)))
    ours = [replica(each.microbatches, each.plan) for each in pack(batch, options).replicas]
    return {OURS: ours} | variants


def findings(variants: Variants, answers: Sequence[Request]) -> list[Finding]:
    """Findings from the begin and the end of every step, by rank; on one host the ranks share a clock."""
    steps = {
        name: max(each.plan.metrics.makespan for each in replicas) / 1e3
        for name, replicas in variants.items()
    }
    measured = {name: max(_medians([answer[name] for answer in answers])) for name in variants}
    found = []
    for name in variants:
        found += [
            Finding(f"{name}: step as planned", steps[name], "ms"),
            Finding(f"{name}: step as measured", measured[name], "ms"),
        ]
    for name in (MEAN, CLASSICAL):
        as_planned, as_measured = (100 * (1 - each[OURS] / each[name]) for each in (steps, measured))
        gain = f"gain over equal tokens, given order, {name}"
        found += [
            Finding(f"{gain}, planned", as_planned, "%"),
            Finding(f"{gain}, measured", as_measured, "%"),
        ]
        if as_planned > 0:
            share = as_measured / as_planned
            found.append(Finding(f"{gain}, measured / planned", share, "", at_least(LEAST_SHARE)))
    return found


def _medians(ranks: Sequence[Sequence[Sequence[tuple[int, int]]]]) -> list[float]:
    """By replica, the median time of a step in milliseconds; indexed rank, replica, round."""
    return [
        median(
            max(end for _, end in each) - min(begin for begin, _ in each) for each in zip(*own, strict=True)
        )
        / 1e6
        for own in zip(*ranks, strict=True)
    ]


# --- on a rank


def on_rank(request: Request, world: World) -> Any:
    """The begin and the end of every step in ns, or with ``profile`` the traces of all steps.

    The former by variant, replica and round, the latter by step and rank.
    """
    workload = parse_workload(PackingWorkload, request["workload"])
    if "profile" in request:
        return _profile(_Step(workload, request["profile"]), workload.profile_steps)
    steps = {name: [_Step(workload, each) for each in own] for name, own in request["variants"].items()}
    with meeting(world) as transport:
        times = _in_turns(steps, workload.rounds, lambda: transport.barrier(MEETING_SECONDS))
    for step in chain.from_iterable(steps.values()):
        step.pipe.close()
    return times


class _Step:
    """The training step of one replica, on the ranks of this run."""

    def __init__(self, workload: PackingWorkload, replica: Request) -> None:
        import torch
        import zbv_worker as zbv
        from torch.nn import functional as nnf

        from benchmarks.worker.packed_transformer import WORDS, blocks

        def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
            return nnf.cross_entropy(output, target, reduction="sum"), target.numel()

        def shape_of(features: Mapping[str, float]) -> Tensor:
            return torch.empty(int(features["tokens"]), workload.width, device="meta")

        lengths = [*chain.from_iterable(replica["lengths"])]
        self.offsets = [0, *accumulate(lengths)]
        self.tokens, self.targets = torch.randint(WORDS, (2, sum(lengths))).unbind()
        layers = blocks(workload.blocks, workload.width, workload.heads)
        self.pipe = zbv.Pipeline(replica["plan"], layers, loss, shape_of=shape_of, backend="gloo")

    def run(self) -> None:
        """Forward and backward, with gradients that start at zero."""
        for parameter in self.pipe.parameters():
            parameter.grad = None
        self.pipe.step(self.tokens, self.targets, cu_seqlens=self.offsets)


def _profile(step: _Step, count: int) -> list[list[dict[str, Any]]]:
    traces = []
    with step.pipe:
        for turn in range(1 + count):
            step.run()
            if turn:
                traces.append([each.document() for each in step.pipe.trace()])
    return traces


def _in_turns(
    steps: Mapping[str, Sequence[_Step]], rounds: int, meet: Callable[[], object]
) -> dict[str, list[list[tuple[int, int]]]]:
    times: dict[str, list[list[tuple[int, int]]]] = {name: [[] for _ in own] for name, own in steps.items()}
    turns = [(name, place) for name, own in steps.items() for place in range(len(own))]
    for turn in range(1 + rounds):
        for name, place in turns[:: 1 if turn % 2 else -1]:
            meet()
            begun = time.perf_counter_ns()
            steps[name][place].run()
            if turn:
                times[name][place].append((begun, time.perf_counter_ns()))
    return times
