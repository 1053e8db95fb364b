"""A plan for every step: made while the step before runs, agreed on before the step, never waited for.

One rank of the pipeline, the first or the data rank, knows the lengths of the next steps when the caller
announces them, and passes them to a process next to it. When a step begins, this rank takes what that process
has answered by then: the plan of a search, or a constructor's plan if the search is late. Without an answer
or an announcement it makes a constructor's plan itself, which takes milliseconds. Then it sends plan and hash
to the other ranks. These could not begin earlier anyway, because the step's data come from that rank's side.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zbv_solver.errors import ZbvError
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import load_problem, parse_any_problem
from zbv_solver.problem.writing import problem_json

from zbv_worker.errors import Disagreement, InvalidRun, ModelError
from zbv_worker.execution.rank_plan import RankPlan, by_microbatch
from zbv_worker.pipeline.packed import lengths_of
from zbv_worker.pipeline.planner_client import PlannerClient
from zbv_worker.pipeline.step_plan import StepPlan, Values, answer_of, key_of_values
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.messages import MAX_BYTES

PER_STEP = "per-step"
"""In place of a plan."""
_SHARES, _AFTER_LATE, _AFTER_PLANNED = (0.1, 0.5), 0.7, 1.1
"""The smallest and the largest share of a step's time that a search gets, and how a step changes it."""
_SECONDS = (0.02, 0.2, 2.0)
"""The shortest time of a search, the one before any step was timed, and the longest."""
_WAIT_SECONDS = 0.01
"""A step has waited if it blocked while it read the planner's answers, and that took longer."""
_START_SECONDS = 30.0
"""The longest wait of a starting pipeline for its planner, which on a new machine compiles kernels."""
_AHEAD = 16
"""Announced steps that are remembered."""

ProblemLike = Problem | Mapping[str, Any] | str | Path
"""A problem, its document, or its file."""


@dataclass(frozen=True)
class PlanningReport:
    """How the steps so far got their plans."""

    planned: int = 0
    """Steps with the plan of a search that ended in time."""
    late: int = 0
    """Announced steps whose search had not ended, with a constructor's plan."""
    constructed: int = 0
    """Steps without an announcement or without the process, with a constructor's plan."""
    waited: int = 0
    """Steps that waited for the planner's process, for instance to start it again; on ranks that are sent
    the plans always 0."""
    agreed: int = 0
    """Plans whose hash this rank has compared with that of the rank that chose them."""
    restarts: int = 0
    """How often the planner's process was started again."""
    planning_seconds: float = 0.0
    """Seconds of the searches whose plans were used, all together."""
    longest_choice: float = 0.0
    """The longest time in seconds between the call of a step and its plan, on the rank that chooses."""


class StepPlans:
    """One rank's part in planning every step.

    Parameters
    ----------
    problem
        What all steps have in common; its own features are those of a typical step.

    Attributes
    ----------
    initial
        The plan with which the pipeline starts, equal on all ranks.

    Raises
    ------
    InvalidRun
        If the problem has no features, is not feasible, or the planner is not installed.
    """

    def __init__(self, problem: ProblemLike | None):
        self.problem = _problem_of(problem)
        try:
            from zbv_solver.search.step_planner import StepPlanner

            self._planner = StepPlanner(self.problem)
            self.initial: Plan = self._planner.first(_own_values(self.problem))
        except ModuleNotFoundError as error:
            raise InvalidRun(
                f'plan="per-step" needs {error.name}, which is not installed. Install zbv[solver].'
            ) from error
        except ZbvError as error:
            raise InvalidRun(f"problem: {error}") from error
        self._report = PlanningReport()
        self._client: PlannerClient | None = None
        self._announced: OrderedDict[str, StepPlan | None] = OrderedDict()
        self._pending: list[Callable[[float], None]] = []
        self._began: float | None = None
        self._search_seconds, self._share = _SECONDS[1], _SHARES[1]

    def connect(self, plan: RankPlan, transport: ConnectedTransport, source: int, timeout: float) -> None:
        """Start the process on the rank at the position ``source`` of the pipeline."""
        layout = transport.layout
        if layout.columns > 1:
            raise InvalidRun(
                f'found {layout.columns} pipelines or several processes per rank; plan="per-step" needs one '
                f"pipeline, because all of them would have to run the same plan. Pass a plan."
            )
        self._base, self._control, self._timeout = plan, transport.control, timeout
        ranks = [layout.global_rank(at, transport.column) for at in range(layout.pp_degree)]
        self._source, self._rank = ranks[source], transport.rank
        self._others = [rank for rank in ranks if rank != self._source]
        if self.is_source:
            self._client = PlannerClient(problem_json(self.problem))
            self._client.wait_until_ready(_START_SECONDS)

    @property
    def is_source(self) -> bool:
        """Whether this rank chooses the plans."""
        return self._rank == self._source

    @property
    def report(self) -> PlanningReport:
        """The steps so far."""
        restarts = 0 if self._client is None else self._client.restarts
        return replace(self._report, restarts=restarts)

    def values(
        self,
        features: Values | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        sequences: Sequence[Sequence[int]] | None,
    ) -> Values | None:
        """The features of a step's microbatches: those given, or of a packed batch; None if not known.

        Raises
        ------
        InvalidRun
            If the sequences do not fit together.
        """
        if features is not None or cu_seqlens is None or sequences is None:
            return features
        lengths = lengths_of(cu_seqlens, sequences, self.problem.microbatches)
        made = {
            "tokens": [sum(own) for own in lengths],
            "tokens_squared": [sum(length**2 for length in own) for own in lengths],
        }
        names = [each.name for each in self.problem.features]
        return {name: made[name] for name in names} if set(names) <= set(made) else None

    def announce(self, values: Values | None) -> None:
        """Have a step planned that follows; without effect on ranks that do not choose."""
        if self._client is None:
            return
        if values is None:
            raise InvalidRun(
                "found no features of the microbatches to announce. Pass cu_seqlens= and sequences=, or "
                "features=."
            )
        key = key_of_values(self._checked(values))
        if key not in self._announced:
            self._announced[key] = None
            if len(self._announced) > _AHEAD:
                self._announced.popitem(last=False)
            values = {name: [*map(float, each)] for name, each in values.items()}
            self._client.ask({"key": key, "values": values, "seconds": self._search_seconds})

    def choose(self, values: Values | None) -> RankPlan:
        """This rank's list for the step that begins. Collective over the pipeline.

        Parameters
        ----------
        values
            The features of the step's microbatches, if this rank knows them. The rank that chooses must.

        Raises
        ------
        InvalidRun
            If the features are missing or wrong, or a microbatch does not fit the memory limit.
        Disagreement
            If this rank has other microbatches than the rank that chooses.
        TimeoutError, ConnectionError
            If that rank does not begin its step.
        """
        if self.is_source:
            if values is None:
                raise InvalidRun(
                    f'rank {self._rank} chooses the plan of every step (plan="per-step") and needs the '
                    f"features of its microbatches. Pass cu_seqlens= and sequences=, or features=."
                )
            how, plan = self._chosen(self._checked(values))
            self._send(how, plan, values)
        else:
            how, plan, own = self._receive()
            if values is not None and key_of_values(values) != key_of_values(own):
                raise Disagreement(
                    f"the batches of ranks {self._rank} and {self._source} have different features. Load "
                    f"the same batches on all ranks of a pipeline, in the same order."
                )
            values = own
        self._count(how, plan)
        orders = plan.decoded()
        made = RankPlan.of(plan.plan_id, self.problem, orders, self._base.rank)
        return replace(made, cut=self._base.cut, features=by_microbatch(values))

    def close(self) -> None:
        """End the process."""
        if self._client is not None:
            self._client.close()

    def _checked(self, values: Values) -> Values:
        names, m = [each.name for each in self.problem.features], self.problem.microbatches
        found = {name: len(each) for name, each in values.items()}
        if sorted(found) != sorted(names) or set(found.values()) != {m}:
            shown = ", ".join(f"{name} ({count})" for name, count in found.items()) or "none"
            raise InvalidRun(
                f"features: found {shown}; must be {', '.join(names)}, each with one number for every one of "
                f"the {m} microbatches."
            )
        return values

    def _take_answers(self) -> None:
        """Keep the newest answer for every announced step."""
        for answer in [] if self._client is None else self._client.answers():
            if answer["key"] in self._announced and "error" not in answer:
                self._announced[answer["key"]] = StepPlan.of(answer)

    def _chosen(self, values: Values) -> tuple[str, StepPlan]:
        """How the step gets its plan, and the plan; does not wait for the process."""
        began = time.perf_counter()
        if self._began is not None:
            shortest, _, longest = _SECONDS
            self._search_seconds = min(longest, max(shortest, self._share * (began - self._began)))
        self._began = began
        waits = _waits()
        self._take_answers()
        waited = _waits() > waits and time.perf_counter() - began > _WAIT_SECONDS
        key = key_of_values(values)
        is_known = key in self._announced and self._client is not None and self._client.is_alive
        found = self._announced.pop(key, None)
        if self._client is not None and is_known:
            self._client.take_back(key)
        how = "planned" if found is not None and found.is_searched else "late" if is_known else "constructed"
        if found is None:
            try:
                found = StepPlan.of(answer_of(self._planner.first(values), 0.0))
            except ZbvError as error:
                raise InvalidRun(f"no plan for this step: {error}") from error
        if how != "constructed":
            share = self._share * (_AFTER_LATE if how == "late" else _AFTER_PLANNED)
            self._share = min(max(share, _SHARES[0]), _SHARES[1])
        report, longest_choice = self._report, time.perf_counter() - began
        self._report = replace(
            report,
            waited=report.waited + waited,
            longest_choice=max(report.longest_choice, longest_choice),
        )
        return how, found

    def _count(self, how: str, plan: StepPlan) -> None:
        report = self._report
        self._report = replace(
            report,
            **{how: getattr(report, how) + 1},
            agreed=report.agreed + 1,
            planning_seconds=report.planning_seconds + plan.seconds,
        )

    def _send(self, how: str, plan: StepPlan, values: Values) -> None:
        pending, self._pending = self._pending, []
        for wait in pending:
            wait(self._timeout)
        if not self._others:
            return
        given = {name: [*map(float, each)] for name, each in values.items()}
        content = json.dumps(
            {"how": how, "plan_id": plan.plan_id, "orders": plan.orders, "seconds": plan.seconds}
            | {"values": given}
        ).encode()
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        header = torch.tensor([len(content), _hash(body)], device="cpu")
        for rank in self._others:
            self._pending += [self._control.start_send(part, rank) for part in (header, body)]

    def _receive(self) -> tuple[str, StepPlan, Values]:
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._control.receive(header, self._source, self._timeout)
        length, expected = header.tolist()
        if not 0 < length <= MAX_BYTES:
            raise ModelError(f"rank {self._source} sent a plan of {length:,} bytes.")
        body = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._control.receive(body, self._source, self._timeout)
        if _hash(body) != expected:
            raise Disagreement(
                f"rank {self._rank} received another plan than rank {self._source} sent: their hashes differ."
            )
        said = json.loads(body.numpy().tobytes())
        return said["how"], StepPlan.of(said), said["values"]


def _waits() -> int:
    """How often this thread has given up its core to wait; not how often the system took the core away."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _hash(body: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(body.numpy().tobytes()).digest()[:7])


def _problem_of(given: ProblemLike | None) -> Problem:
    if given is None:
        raise InvalidRun(
            'plan="per-step" needs problem=: a problem with features, whose costs all steps share. See '
            "zbv_solver.StepPlanner."
        )
    try:
        found = load_problem(given) if isinstance(given, str | Path) else given
        found = found if isinstance(found, Problem) else parse_any_problem(found)
    except (ZbvError, OSError) as error:
        raise InvalidRun(f"problem: {error}") from error
    if not isinstance(found, Problem):
        raise InvalidRun('plan="per-step" needs a problem with costs of stages; found one with layers.')
    return found


def _own_values(problem: Problem) -> dict[str, Sequence[float]]:
    return {each.name: each.value for each in problem.features}
