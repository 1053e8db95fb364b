"""Plan files: read and verified, and which of their claims are verified.

:mod:`zbv_solver.verify` recomputes the metrics of the orders, and the planner recomputes the baselines. A
lower bound does not follow from the orders: it needs a proof that no other order is better. By default a
bound is listed as not verified, and so is the status "optimal", which depends on the bound. With ``prove``,
zbv proves the bound again, and rejects the plan if it finds no proof.

Unlike `verify`, this is not an independent check: the proofs use the planner's own bounds and CP-SAT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.documents.files import file_label
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.kernels.jit import can_compile
from zbv_solver.numerals import exact, figure
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Baseline, Metrics, Plan, Spans, verdict
from zbv_solver.plans.reading import (
    PlanDocument,
    load_plan_document,
    parse_orders,
    parse_plan_document,
    to_baseline,
    to_plan,
)
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP, SAME_METRIC
from zbv_solver.problem.problem import Problem
from zbv_solver.verify.verifier import compare, verify, verify_orders

MOST_SIMULATED = 200_000_000
"""Largest number of scenarios times actions that is simulated again; about 30 seconds."""
PROOF_EFFORT = 16.0
"""CP-SAT's deterministic time for a proof: twice what a thorough search spends."""


@dataclass(frozen=True)
class Claim:
    """One claim of a plan file."""

    pointer: str
    """JSON pointer to the claim in the plan file."""
    text: str
    """The claim."""
    is_verified: bool
    """Whether the claim was checked and is true. A false claim raises an error instead."""
    reason: str
    """How the claim was checked, or why it was not."""


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """A plan file that passed all checks."""

    problem: Problem
    orders: Orders
    claims: tuple[Claim, ...]
    metrics: Metrics | None
    """As stated, or else computed; None if the file states none and Numba is not installed."""

    @property
    def verified(self) -> tuple[Claim, ...]:
        """The claims that were checked and are true."""
        return tuple(claim for claim in self.claims if claim.is_verified)

    @property
    def unverified(self) -> tuple[Claim, ...]:
        """The claims that were not checked."""
        return tuple(claim for claim in self.claims if not claim.is_verified)


def load_plan(path: str | Path) -> Plan:
    """Read and verify a plan file; metrics that it does not state are computed.

    Raises
    ------
    InvalidInput
        When the file is not JSON or not a plan.
    InvalidPlan
        When the orders cannot be executed, or a stated metric is wrong.
    OSError
        When the file cannot be read.
    """
    parsed = load_plan_document(path)
    try:
        if parsed.metrics is None:
            from zbv_solver.search.assemble import make_plan

            return make_plan(*parse_orders(parsed), method=parsed.provenance.method)
        plan = to_plan(parsed)
        verify(plan)
    except InvalidInput as error:
        raise error.found_in(file_label(path)) from None
    except InvalidPlan as error:
        raise InvalidPlan(f"{file_label(path)}: {error}") from None
    return plan


def check_plan(
    document: Any,
    asked: Problem | LayeredProblem | None = None,
    *,
    prove: bool = False,
    cancelled: Callable[[], bool] | None = None,
) -> CheckedPlan:
    """Check every claim of a plan.

    Parameters
    ----------
    document
        A decoded plan file, or one that is parsed already.
    asked
        The problem that the plan must be for; None accepts the plan's own problem.
    prove
        Prove the stated bounds again. This can take as long as a thorough search.
    cancelled
        Polled during a proof; once true, the proof ends without a result, and the plan is rejected.

    Raises
    ------
    InvalidInput
        When the document is not a plan, or is a plan for another problem.
    InvalidPlan
        When a claim is false, or ``prove`` finds no proof.
    """
    parsed = document if isinstance(document, PlanDocument) else parse_plan_document(document)
    plan = None if parsed.metrics is None else to_plan(parsed)
    problem, orders = parse_orders(parsed) if plan is None else (plan.problem, plan.orders)
    if asked is not None:
        require_answer(problem, asked)
    if plan is None and parsed.cut is not None:
        raise InvalidInput.at(
            "/cut", "states a bound, but the plan states no metrics. State `metrics`, or leave `cut` out."
        )
    if plan is not None:
        verify(plan)
    metrics = _recomputed_metrics(problem, orders) if plan is None else plan.metrics
    claims = [*_order_claims(parsed, problem)]
    if plan is not None:
        claims += _metric_claims(plan.metrics, plan.problem)
    claims += _baseline_claims(tuple(map(to_baseline, parsed.baselines)), problem)
    if plan is not None:
        if parsed.metrics is not None and "lower_bound" in parsed.metrics.model_fields_set:
            claims += _bound_claims(plan, prove, cancelled)
        claims += [*_cut_claims(plan, asked, prove), *_simulation_claims(plan)]
    if "provenance" in parsed.model_fields_set:
        text = f"found by zbv {parsed.provenance.version}, method {parsed.provenance.method}"
        claims.append(Claim("/provenance", text, False, "how a plan was found does not follow from it"))
    return CheckedPlan(problem, orders, tuple(claims), metrics)


def _recomputed_metrics(problem: Problem, orders: Orders) -> Metrics | None:
    """The metrics of orders, which are verified; None without Numba."""
    if not can_compile():
        verify_orders(problem, orders)
        return None
    from zbv_solver.search.assemble import make_plan

    return make_plan(problem, orders, method="unknown").metrics


def require_answer(problem: Problem, asked: Problem | LayeredProblem) -> None:
    """Raise :class:`InvalidInput` when a plan is for another problem than the given one."""
    wanted = asked.as_cut_in(problem) if isinstance(asked, LayeredProblem) else asked
    if problem != wanted:
        names = Problem.__dataclass_fields__
        differing = ", ".join(name for name in names if getattr(wanted, name) != getattr(problem, name))
        raise InvalidInput.at(
            "/problem", f"the plan was made for another problem; they differ in {differing}."
        )


def _order_claims(parsed: PlanDocument, problem: Problem) -> Iterator[Claim]:
    yield Claim("/ranks", "the orders are complete and free of deadlocks", True, "verified action by action")
    if problem.memory.limit is not None:
        yield Claim("/ranks", "the orders fit the memory limit", True, "verified action by action")
    if parsed.plan_id is not None:
        yield Claim("/plan_id", f"plan_id {parsed.plan_id[:12]}…", True, "hashed again")
    for name in ("partition", "recompute"):
        if getattr(parsed, name) is not None:
            yield Claim(f"/{name}", name, True, "compared with the problem")


def _metric_claims(metrics: Metrics, problem: Problem) -> Iterator[Claim]:
    units = problem.units
    for name, value, unit in (
        ("makespan", metrics.makespan, units.time),
        ("span", metrics.span, units.time),
        ("bubble_rate", metrics.bubble_rate, None),
    ):
        yield Claim(f"/metrics/{name}", f"{name} {exact(value, unit)}", True, "recomputed from the orders")
    peak = exact(max(metrics.peak_memory, default=0.0), units.memory)
    yield Claim("/metrics/peak_memory", f"peak_memory up to {peak}", True, "recomputed from the orders")


def _baseline_claims(baselines: tuple[Baseline, ...], problem: Problem) -> Iterator[Claim]:
    """Claims about baselines. Classical schedules of the same stages are recomputed."""
    for index, stated in enumerate(baselines):
        reason = _why_not_recomputed(stated, problem)
        if reason is None:
            from zbv_solver.search import assemble

            recomputed = assemble.baseline_row(stated.name, *assemble.stated(stated, problem))
            _compare_records(f"baseline {stated.name}", stated, recomputed)
        better = "; that no cut is better for its order was not verified" if problem.model is not None else ""
        yield Claim(
            f"/baselines/{index}", f"baseline {stated.name}", reason is None, reason or f"recomputed{better}"
        )


def _why_not_recomputed(baseline: Baseline, problem: Problem) -> str | None:
    if not can_compile():
        return "recomputing baselines needs numba; install zbv[solver]"
    if baseline.name not in baseline_names(problem):
        return "not a classical schedule; it comes from another search"
    if problem.model is not None and baseline.layers_per_stage is None:
        return "its cut is not stated as layers_per_stage"
    return None


def _simulation_claims(plan: Plan) -> Iterator[Claim]:
    """The claim of a simulation, which is repeated: the draws follow from the stated seed."""
    stated = plan.simulation
    if stated is None:
        return
    text = f"simulation of {stated.scenarios} scenarios"
    is_too_long = stated.scenarios * len(plan.orders) > MOST_SIMULATED
    if is_too_long or not can_compile():
        needs = "would take too long" if is_too_long else "needs numba; install zbv[solver]"
        yield Claim("/simulation", text, False, f"simulating again {needs}")
        return
    from zbv_solver.search.jitter import simulate

    try:
        recomputed = simulate(plan, stated.jitter, scenarios=stated.scenarios, seed=stated.seed)
    except InvalidInput as error:
        raise error.below("/simulation") from None
    _compare_records("the plan in the simulation", stated.spans, recomputed.spans)
    known = {row.name: row.spans for row in recomputed.baselines}
    for row in stated.baselines:
        if row.name not in known:
            raise InvalidPlan(
                f"the stated simulation has the baseline {row.name!r}; zbv knows none of this name."
            )
        _compare_records(f"{row.name} in the simulation", row.spans, known[row.name])
    yield Claim("/simulation", text, True, "simulated again")


def _compare_records(what: str, stated: Baseline | Spans, recomputed: Baseline | Spans) -> None:
    """Raise :class:`InvalidPlan` with the first number in which a stated record differs."""
    for name, value in vars(stated).items():
        other = getattr(recomputed, name)
        if isinstance(value, float):
            compare(f"{name} of {what}", value, other)
        elif isinstance(value, bool) and value != other:
            raise InvalidPlan(f"the stated {name} of {what} is {value}; recomputed it is {other}.")
        elif name == "peak_memory":
            if len(value) != len(other):
                raise InvalidPlan(
                    f"the stated peak_memory of {what} has {len(value)} values, not {len(other)}."
                )
            for rank, (held, recomputed_held) in enumerate(zip(value, other, strict=True)):
                compare(f"peak_memory of {what} on rank {rank}", held, recomputed_held)


def _bound_claims(plan: Plan, prove: bool, cancelled: Callable[[], bool] | None) -> Iterator[Claim]:
    metrics, stated = plan.metrics, plan.metrics.lower_bound
    objective, time = plan.problem.objective, _time_of(plan)
    optimal = ", so the plan is optimal" if metrics.status == "optimal" else ""
    text = f"lower bound {time(stated)} of the {objective}{optimal}"
    if stated <= 0:
        yield Claim("/metrics/lower_bound", text, True, "no schedule takes less time than none")
    elif prove:
        from zbv_solver.timing.start_times import objective_of

        value = objective_of(plan.problem, plan.orders)
        if metrics.status == "optimal" and verdict(value, stated) == "feasible":
            raise InvalidPlan(
                f"the stated status is optimal, but the orders reach {time(value)}, above the stated "
                f"lower_bound {time(stated)}."
            )
        yield Claim("/metrics/lower_bound", text, True, prove_bound(plan, stated, cancelled))
    else:
        yield Claim("/metrics/lower_bound", text, False, "a proof is needed: zbv check --prove")
    yield Claim(
        "/metrics/gap", f"gap {figure(metrics.gap, 3)}", True, "recomputed from objective and lower bound"
    )


def prove_bound(plan: Plan, stated: float, cancelled: Callable[[], bool] | None = None) -> str:
    """Prove a stated lower bound of a plan's problem; returns a description of the proof.

    The lower bounds of :mod:`zbv_solver.bounds` are tried first, then CP-SAT if the problem is small
    enough that a thorough search would use it.

    Raises
    ------
    InvalidPlan
        When there is no proof, or when a better plan refutes the bound.
    """
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search.assemble import in_search_unit
    from zbv_solver.search.options import budgets_of

    time = _time_of(plan)
    # In the caller's unit, CP-SAT's grid may be coarser and prove less.
    problem, unit = in_search_unit(plan.problem)
    # Stricter than the tolerance of metrics, because differences of this size decide about "optimal".
    enough = stated * (1 - OPTIMAL_GAP)
    bound = lower_bound(problem, "thorough").value * unit
    if bound >= enough:
        return f"proved again: {time(bound)}, without CP-SAT"
    is_small = problem.max_actions <= budgets_of("thorough", problem)[-1].exact_actions
    if is_small and problem.communication is None and problem.copies is None:  # CP-SAT knows neither
        from zbv_solver.improve.cp_search import refine
        from zbv_solver.timing.start_times import objective_of

        refined = refine(
            problem,
            plan.orders,
            lower_bound=bound / unit,
            effort=PROOF_EFFORT,
            cancelled=cancelled,
        )
        if refined.orders is not None and (better := objective_of(plan.problem, refined.orders)) < enough:
            raise InvalidPlan(
                f"the stated lower_bound {time(stated)} is false: an order reaches {time(better)}."
            )
        bound = max(bound, refined.lower_bound * unit)
        if bound >= enough:
            return f"proved again: {time(bound)}, by CP-SAT"
    raise InvalidPlan(
        f"the stated lower_bound {time(stated)} is not supported: zbv proves {time(bound)}. State that one, "
        f"or leave lower_bound, gap and status out."
    )


def _cut_claims(plan: Plan, asked: Problem | LayeredProblem | None, prove: bool) -> Iterator[Claim]:
    """Claims about the bound over all cuts of a layered problem."""
    if plan.cut is None:
        return
    stated, value, time = plan.cut.lower_bound, plan.objective, _time_of(plan)
    if stated > value * (1 + SAME_METRIC):
        raise InvalidPlan(
            f"the stated bound {time(stated)} over all cuts is above the objective {time(value)}, so it is "
            f"not a lower bound."
        )
    if stated > 0:
        compare("gap of the cut", 1 + plan.cut.gap, value / stated)
    text = f"lower bound {time(stated)} over all cuts of the layers"
    if stated <= 0:
        yield Claim("/cut/lower_bound", text, True, "no schedule takes less time than none")
    elif not prove:
        yield Claim("/cut/lower_bound", text, False, "a proof is needed: zbv check --prove")
    elif not isinstance(asked, LayeredProblem):
        raise InvalidPlan(
            f"the stated bound {time(stated)} over all cuts cannot be proved for a problem with a given cut. "
            f"Check the plan against the problem without a partition, or leave `cut` out."
        )
    else:
        from zbv_solver.search.layered import bound_over_all_cuts

        bound = bound_over_all_cuts(asked)
        if bound < stated * (1 - OPTIMAL_GAP):
            raise InvalidPlan(
                f"the stated bound {time(stated)} over all cuts is not supported: zbv proves {time(bound)}. "
                f"State that one, or leave `cut` out."
            )
        yield Claim("/cut/lower_bound", text, True, f"proved again: {time(bound)}")


def _time_of(plan: Plan) -> Callable[[float], str]:
    """How a plan's times are written."""
    return lambda value: exact(value, plan.problem.units.time)
