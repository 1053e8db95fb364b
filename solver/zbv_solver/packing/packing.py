"""Packings: for every replica its microbatches and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

from zbv_solver._version import __version__
from zbv_solver.documents.text import number
from zbv_solver.packing.batch import Batch
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.problem import F


@dataclass(frozen=True)
class ReplicaPlan:
    """What one replica runs.

    Attributes
    ----------
    microbatches
        Indices of the batch's sequences, for every microbatch as the plan numbers them.
    """

    microbatches: tuple[tuple[int, ...], ...]
    plan: Plan

    @property
    def entry_order(self) -> tuple[int, ...]:
        """The microbatches in the order in which they enter the pipeline."""
        orders = self.plan.orders
        enters = (orders.stage == 0) & (orders.letter == F)
        return tuple(orders.microbatch[enters].tolist())


@dataclass(frozen=True)
class RivalPacking:
    """What another way to pack achieves.

    Attributes
    ----------
    microbatches
        Of all replicas together.
    estimate
        Of the step, by the same estimate as the packing's own.
    step_time
        Of plans by the same search; None if they were not asked for.
    """

    name: str
    microbatches: int
    estimate: float
    step_time: float | None


@dataclass(frozen=True)
class Packing:
    """A batch as microbatches of replicas, with their plans.

    Attributes
    ----------
    estimate
        The estimate of the step that the microbatches were chosen by.
    lower_bound
        A proven bound: no packing of the batch into microbatches of at most ``max_tokens`` tokens has plans
        with a smaller step time.
    gap
        step_time / lower_bound - 1.
    """

    batch: Batch
    replicas: tuple[ReplicaPlan, ...]
    estimate: float
    lower_bound: float
    gap: float
    rivals: tuple[RivalPacking, ...]
    effort: str
    seed: int
    seconds: float

    @property
    def step_time(self) -> float:
        """The objective of the slowest replica's plan: all replicas wait for it."""
        return max(each.plan.objective for each in self.replicas)


def packing_json(packing: Packing) -> dict[str, Any]:
    """A packing as a JSON document."""
    batch = packing.batch
    return {
        "objective": batch.problem.objective,
        "step_time": number(packing.step_time),
        "lower_bound": number(packing.lower_bound),
        "gap": packing.gap if isfinite(packing.gap) else None,
        "estimate": number(packing.estimate),
        "replicas": [
            {
                "microbatches": [list(contents) for contents in each.microbatches],
                "sequences": [
                    [batch.sequences[index] for index in contents] for contents in each.microbatches
                ],
                "entry_order": list(each.entry_order),
                "step_time": number(each.plan.objective),
                "plan": plan_json(each.plan),
            }
            for each in packing.replicas
        ],
        "baselines": [
            {
                "name": each.name,
                "microbatches": each.microbatches,
                "estimate": number(each.estimate),
                "step_time": None if each.step_time is None else number(each.step_time),
            }
            for each in packing.rivals
        ],
        "provenance": {
            "version": __version__,
            "effort": packing.effort,
            "seed": packing.seed,
            "seconds": packing.seconds,
        },
    }
