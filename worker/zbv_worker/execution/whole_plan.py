"""A whole plan as one rank needs it to compare what is measured with what was planned.

A training rank asks the service for its own list only; a rehearsal needs every cost, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import identity, parse_orders, parse_plan, parse_plan_document
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stage_document import problem_json
from zbv_solver.verify.verifier import verify, verify_orders

from zbv_worker.errors import InvalidRun, PeerLost
from zbv_worker.execution.rank_plan import RankPlan

SECONDS: dict[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds in one time unit of a problem, of those that say what they are."""


def seconds_per_attempt(timeout: float) -> float:
    """How long one request may take so that all attempts of a client end within ``timeout`` seconds."""
    from zbv_service.client.retries import DEFAULT_RETRIES

    return timeout / (1 + DEFAULT_RETRIES)


@dataclass(frozen=True, eq=False)
class WholePlan:
    """A verified plan, its times in its own unit.

    Attributes
    ----------
    objective_value
        The plan's span, or makespan where that is the objective.
    """

    plan_id: str
    problem: Problem
    orders: Orders
    objective_value: float

    @classmethod
    def of_document(cls, document: object) -> WholePlan:
        """Read a decoded plan document.

        Raises
        ------
        InvalidInput, InvalidPlan
            When it is not a plan, or one that cannot be executed.
        InvalidRun
            When it states no metrics, and what computes them is not installed.
        """
        parsed = parse_plan_document(document)
        problem, orders = parse_orders(parsed)
        if parsed.metrics is None:
            verify_orders(problem, orders)
            value = _objective_value(problem, orders)
        else:
            plan = parse_plan(document)
            verify(plan)  # what is stated is recomputed: measurements will be held against it
            value = plan.objective
        return cls(identity(problem_json(problem), orders.all_text()), problem, orders, value)

    @classmethod
    def of_file(cls, path: Path) -> WholePlan:
        """Read a plan file; raises :class:`InvalidRun`."""
        try:
            return cls.of_document(json.loads(path.read_text()))
        except OSError as error:
            raise InvalidRun(f"--plan-file {path}: {error.strerror}.") from error
        except ValueError as error:  # JSON, or bytes that are no text
            raise InvalidRun(f"--plan-file {path}: not JSON ({error}).") from error
        except (InvalidInput, InvalidPlan) as error:
            raise InvalidRun(f"--plan-file {path}: {error}") from error

    @classmethod
    def of_service(cls, server: str, plan_id: str, timeout: float) -> WholePlan:
        """Fetch a plan; raises :class:`InvalidRun`, and :class:`PeerLost` without an answer."""
        from zbv_service.client import Client, ClientError, ServiceUnreachable

        try:
            with Client(server, timeout=seconds_per_attempt(timeout)) as client:
                plan = cls.of_document(client.plan_document(plan_id))
        except ServiceUnreachable as error:
            raise PeerLost(f"no plan {plan_id} from {server}: {error}") from error
        except ClientError as error:
            raise InvalidRun(f"no plan {plan_id} from {server}: {error}") from error
        except (InvalidInput, InvalidPlan) as error:
            raise InvalidRun(f"the plan {plan_id} from {server}: {error}") from error
        if plan.plan_id != plan_id:
            raise InvalidRun(f"asked {server} for plan {plan_id}, and the answer is plan {plan.plan_id}.")
        return plan

    def of_rank(self, rank: int) -> RankPlan:
        """A rank's part; raises :class:`InvalidRun` when there is no such rank."""
        if rank >= self.problem.pp_degree:
            raise InvalidRun(
                f"found rank {rank}; the plan has {self.problem.pp_degree} ranks. Start as many processes, "
                f"or plan for more ranks."
            )
        return RankPlan.of(self.plan_id, self.problem, self.orders, rank)

    def busy(self, rank: int) -> float:
        """A rank's time in actions, in the plan's unit."""
        part = self.orders.slice_of(rank)
        duration = self.problem.arrays.duration
        return float(duration[self.orders.letter[part], self.orders.stage[part]].sum())


def _objective_value(problem: Problem, orders: Orders) -> float:
    try:
        from zbv_solver.timing.start_times import evaluate
    except ModuleNotFoundError as error:
        raise InvalidRun(
            f"the plan states no metrics, and {error.name}, with which they are computed, is not installed "
            f"here. Install zbv[solver], or rehearse a plan that `zbv plan` wrote."
        ) from error
    timing = evaluate(problem, orders)
    return timing.span if problem.objective == "span" else timing.makespan
