"""What a stored plan is turned into: pages, pictures, files, and the parts of its ranks.

The functions run in other processes. They import the code that draws and writes formats when they are called,
because loading it takes a second, which the service should not spend.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, channels
from zbv_solver.plans.plan import Plan, simulation_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.problem import Problem, Units

from zbv_service.documents.problems import unpack
from zbv_service.plans.documents import SimulationQuery
from zbv_service.records.shared import json_bytes

if TYPE_CHECKING:
    from zbv_solver.export.report import PlanView


MOST_SIMULATED = 100_000_000
"""Largest number of scenarios times actions that the service simulates; about fifteen seconds."""


def plan_of(packed: bytes) -> Plan:
    """A packed plan."""
    plan = parse_plan(unpack(packed))
    _ = plan.plan_id  # computes the cached hash here, in the other process
    return plan


def view_of(packed: bytes) -> PlanView:
    """The content of a packed plan's page."""
    from zbv_solver.export.report import plan_view

    return plan_view(plan_of(packed))


def simulation_of(asked: SimulationQuery, packed: bytes) -> bytes:
    """A simulation of a packed plan, as JSON text; raises :class:`InvalidInput`."""
    from zbv_solver.search.jitter import simulate

    plan = plan_of(packed)
    most = MOST_SIMULATED // max(1, len(plan.orders))
    if asked.scenarios > max(1, most):
        raise InvalidInput.at(
            "/scenarios",
            f"found {asked.scenarios}; for a plan with {len(plan.orders)} actions, this service simulates at "
            f"most {max(1, most)}. `zbv simulate` has no such limit.",
        )
    found = simulate(plan, asked.read(), scenarios=asked.scenarios, seed=asked.seed)
    return json_bytes({"plan_id": plan.plan_id, **simulation_json(found)})


def actions_of(packed: bytes) -> bytes:
    """A packed plan's actions for the script of its page."""
    from zbv_solver.export.timeline import timeline, timeline_bytes

    return timeline_bytes(timeline(plan_of(packed)))


def export_of(name: str, packed: bytes) -> bytes:
    """A packed plan in another format."""
    from zbv_solver.export import FORMATS

    return FORMATS[name].render(plan_of(packed)).encode()


def thumbnail_of(packed: bytes) -> bytes:
    """A thumbnail of a packed plan as PNG."""
    from zbv_service.plans.thumbnail import thumbnail

    return thumbnail(plan_of(packed))


def ranks_of(packed: bytes) -> list[bytes]:
    """The parts of all ranks of a packed plan, as JSON texts."""
    plan = plan_of(packed)
    ends: list[list[Channel]] = [[] for _ in range(plan.problem.pp_degree)]
    for channel in channels(plan.problem, plan.orders):
        ends[channel.sender].append(channel)
        ends[channel.receiver].append(channel)
    return [canonical_json(_rank_document(plan, rank, found)).encode() for rank, found in enumerate(ends)]


def _cut_json(problem: Problem) -> dict[str, Any]:
    """The layers of each stage, and which stages are recomputed; empty if the stages were given."""
    model = problem.model
    if model is None:
        return {}
    document: dict[str, Any] = {"partition": [list(names) for names in model.partition]}
    if model.model.can_recompute:
        document["recompute"] = list(model.cut.recompute)
    return document


def _rank_document(plan: Plan, rank: int, found: Sequence[Channel]) -> dict[str, Any]:
    """The actions of one rank, and its channels."""
    problem, placement = plan.problem, plan.problem.placement
    features = {each.name: list(each.value) for each in problem.features}
    listed = [
        {
            "peer": channel.receiver if channel.sender == rank else channel.sender,
            "direction": "send" if channel.sender == rank else "receive",
            "transfers": [str(transfer) for transfer in channel.transfers],
        }
        for channel in found
    ]
    return {
        "plan_id": plan.plan_id,
        "rank": rank,
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": placement.kind,
        "chunks": placement.chunks,
        "stages": list(placement.stages_of[rank]),
        "actions": plan.orders.text(rank),
        "peers": sorted({channel["peer"] for channel in listed}),
        "channels": listed,
        **_cut_json(plan.problem),
        **({"measured": dict(problem.measured)} if problem.measured else {}),
        **({"features": features} if features else {}),
    }


def load() -> None:
    """Load the code of pages, and the machine code of the timing, by making a page."""
    from zbv_solver.export.report import plan_view
    from zbv_solver.problem.reading import parse_problem
    from zbv_solver.search.assemble import baseline_plan

    from zbv_service.plans.thumbnail import thumbnail

    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    plan = baseline_plan("1f1b", parse_problem({"pp_degree": 2, "microbatches": 2, "costs": costs}))
    plan_view(plan)
    thumbnail(plan)
    # Loaded modules stay in memory. Without this, every forked process would scan them for garbage.
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class PlanFacts:
    """Values of a plan."""

    plan_id: str
    pp_degree: int
    microbatches: int
    objective: str
    value: float
    units: Units
    shape: str
    """What a run cannot change, as text."""
    cut: str | None
    """A hash of the layers of every stage; None where stages were given."""
    schedules: tuple[str, ...]
    """The names of the classical schedules of its problem."""


def facts_of(packed: bytes) -> PlanFacts:
    """The values of a packed plan; runs in another process."""
    plan = plan_of(packed)
    problem, placement = plan.problem, plan.problem.placement
    names = None if problem.model is None else repr(problem.model.partition)
    return PlanFacts(
        plan_id=plan.plan_id,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        objective=problem.objective,
        value=plan.objective,
        units=problem.units,
        shape=f"{placement.pp_degree} ranks, {placement.chunks} stages each, placement {placement.kind}, "
        f"{problem.microbatches} microbatches",
        cut=None if names is None else hashlib.sha256(names.encode()).hexdigest(),
        schedules=tuple(baseline_names(problem)),
    )
