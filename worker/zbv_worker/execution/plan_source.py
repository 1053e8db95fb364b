"""Where a rank's action list comes from: a service, which sends each rank its own, or a plan file.

Training needs only the rank's own list; a rehearsal needs the whole plan, with its costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Orders, durations
from zbv_solver.plans.plan import identity
from zbv_solver.plans.reading import parse_orders, parse_plan, parse_plan_document
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import PLACEMENT_KINDS, Placement, PlacementKind
from zbv_solver.problem.writing import problem_json
from zbv_solver.verify.verifier import verify, verify_orders

from zbv_worker.errors import InvalidRun, PeerLost
from zbv_worker.execution.rank_plan import PlannedCut, RankPlan, by_microbatch

if TYPE_CHECKING:
    from zbv_service.client import Client

SECONDS: dict[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds per time unit of a problem, for the units with a fixed length."""


@contextmanager
def naming_plan_file(path: Path, what: str = "--plan-file") -> Iterator[None]:
    """Convert errors of reading a plan file to :class:`InvalidRun`; ``what`` begins them."""
    try:
        yield
    except (InvalidInput, InvalidPlan) as error:
        raise InvalidRun(f"{what} {path}: {error}") from error
    except OSError as error:
        raise InvalidRun(f"{what} {path}: {error.strerror}.") from error
    except ValueError as error:  # JSON, or bytes that are not text
        raise InvalidRun(f"{what} {path}: not JSON ({error}).") from error


@contextmanager
def asking_service(server: str, timeout: float, what: str) -> Iterator[Client]:
    """A client for one request, whose attempts end within ``timeout`` seconds together.

    Converts errors to :class:`InvalidRun`, or :class:`PeerLost` without an answer; ``what`` begins them.
    """
    from zbv_service.client import Client, ClientError, ServiceUnreachable
    from zbv_service.client.retries import DEFAULT_RETRIES

    try:
        with Client(server, timeout=timeout / (1 + DEFAULT_RETRIES)) as client:
            yield client
    except ServiceUnreachable as error:
        raise PeerLost(f"{what} from {server}: {error}") from error
    except (ClientError, InvalidInput, InvalidPlan) as error:
        raise InvalidRun(f"{what} from {server}: {error}") from error


def require_rank(rank: int, pp_degree: int) -> None:
    """Raise :class:`InvalidRun` if a plan of ``pp_degree`` ranks has no such rank."""
    if rank >= pp_degree:
        raise InvalidRun(
            f"found rank {rank}; the plan has {pp_degree} ranks. Start as many processes, or plan for more "
            f"ranks."
        )


@dataclass(frozen=True, eq=False)
class WholePlan:
    """A verified plan, with times in its own unit."""

    plan_id: str
    problem: Problem
    orders: Orders
    objective_value: float
    """The plan's span, or its makespan if that is the objective."""

    @classmethod
    def of_document(cls, document: object) -> WholePlan:
        """Read a decoded plan document.

        Raises
        ------
        InvalidInput, InvalidPlan
            If the document is not a plan, or the plan cannot be executed.
        InvalidRun
            If the document has no metrics, and the package that computes them is not installed.
        """
        parsed = parse_plan_document(document)
        problem, orders = parse_orders(parsed)
        if parsed.metrics is None:
            verify_orders(problem, orders)
            value = _objective_value(problem, orders)
        else:
            plan = parse_plan(document)
            verify(plan)  # recomputes the stated metrics, because measurements are compared with them
            value = plan.objective
        return cls(identity(problem_json(problem), orders.all_text()), problem, orders, value)

    @classmethod
    def of_file(cls, path: Path) -> WholePlan:
        """Read a plan file; raises :class:`InvalidRun`."""
        with naming_plan_file(path):
            return cls.of_document(json.loads(path.read_text()))

    @classmethod
    def of_service(cls, server: str, plan_id: str, timeout: float) -> WholePlan:
        """Fetch a plan; raises :class:`InvalidRun`, or :class:`PeerLost` without an answer."""
        with asking_service(server, timeout, f"no plan {plan_id}") as client:
            plan = cls.of_document(client.plan_document(plan_id))
        if plan.plan_id != plan_id:
            raise InvalidRun(f"requested plan {plan_id} from {server}, but received plan {plan.plan_id}.")
        return plan

    def of_rank(self, rank: int) -> RankPlan:
        """A rank's part of the plan; raises :class:`InvalidRun` if there is no such rank."""
        require_rank(rank, self.problem.pp_degree)
        return RankPlan.of(self.plan_id, self.problem, self.orders, rank)

    def busy(self, rank: int) -> float:
        """A rank's total time in actions, in the plan's unit."""
        return float(durations(self.problem, self.orders)[self.orders.slice_of(rank)].sum())


def _objective_value(problem: Problem, orders: Orders) -> float:
    try:
        from zbv_solver.timing.start_times import evaluate
    except ModuleNotFoundError as error:
        raise InvalidRun(
            f"the plan has no metrics, and computing them needs {error.name}, which is not installed. "
            f"Install zbv[solver], or rehearse a plan that `zbv plan` wrote."
        ) from error
    timing = evaluate(problem, orders)
    return timing.span if problem.objective == "span" else timing.makespan


@dataclass(frozen=True)
class PlanSource:
    """The source of a rank's list: a service and a plan's id, or a file."""

    server: str | None = None
    plan_id: str | None = None
    file: Path | None = None

    def rank_plan(self, rank: int, timeout: float) -> RankPlan:
        """One rank's list; raises :class:`InvalidRun`, or :class:`PeerLost` without an answer."""
        if self.file is None:
            return _from_service(*self._address(), rank, timeout)
        with naming_plan_file(self.file):
            return plan_of_document(json.loads(self.file.read_text()), rank)

    def whole(self, timeout: float) -> WholePlan:
        """The whole plan; raises like :meth:`rank_plan`."""
        if self.file is None:
            return WholePlan.of_service(*self._address(), timeout)
        return WholePlan.of_file(self.file)

    def _address(self) -> tuple[str, str]:
        if self.server is None or self.plan_id is None:
            found = "no plan given" if self.plan_id is None else f"no server given that has {self.plan_id}"
            raise InvalidRun(
                f"{found}; pass --plan ID and --server URL (or set ZBV_SERVER), or --plan-file FILE."
            )
        return self.server, self.plan_id


def plan_of_document(document: object, rank: int) -> RankPlan:
    """One rank's list from a decoded plan document.

    Raises
    ------
    InvalidInput, InvalidPlan
        If the document is not a plan, or the plan cannot be executed.
    InvalidRun
        If the plan has no such rank.
    """
    problem, orders = parse_orders(parse_plan_document(document))
    verify_orders(problem, orders)
    require_rank(rank, problem.pp_degree)
    return RankPlan.of(identity(problem_json(problem), orders.all_text()), problem, orders, rank)


def _from_service(server: str, plan_id: str, rank: int, timeout: float) -> RankPlan:
    with asking_service(server, timeout, f"rank {rank}: no action list of plan {plan_id}") as client:
        answer = client.rank(plan_id, rank)
    if answer.placement not in PLACEMENT_KINDS:
        raise InvalidRun(
            f"rank {rank}: found placement {answer.placement!r}; this worker supports "
            f"{', '.join(PLACEMENT_KINDS)}. Use the same zbv version as the service."
        )
    return RankPlan(
        plan_id=answer.plan_id,
        rank=answer.rank,
        placement=Placement(cast("PlacementKind", answer.placement), answer.pp_degree, answer.chunks),
        microbatches=answer.microbatches,
        actions=answer.actions,
        channels=answer.channels,
        cut=PlannedCut.parse(answer.partition, answer.recompute),
        measured=answer.measured,
        features=by_microbatch(answer.features),
        pairs=answer.pairs,
        copies=answer.copies,
    )
