"""A plan for every step: one rank of the pipeline chooses it, and sends it with the step's features.

The caller makes the plan, usually in a process of its data loader, which knows the next batches
(:class:`zbv_solver.StepPlanner`). Without one, the rank that chooses makes a constructor's plan, which takes
milliseconds. The other ranks could not begin earlier anyway, because the step's data come from that rank's
side.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from zbv_solver.errors import ZbvError
from zbv_solver.numerals import figure
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import load_problem, parse_any_problem

from zbv_worker.errors import Disagreement, InvalidRun, ModelError
from zbv_worker.execution.rank_plan import RankPlan, by_microbatch
from zbv_worker.pipeline.packed import lengths_of
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo_control import MAX_BYTES

PER_STEP = "per-step"
"""In place of a plan."""
_ORDERS = {"stage": np.int32, "letter": np.int8, "microbatch": np.int32, "offset": np.int64}

ProblemLike = Problem | Mapping[str, Any] | str | Path
"""A problem, its document, or its file."""
Values = Mapping[str, Sequence[float]]
"""One number per microbatch, by the names of features."""


class StepPlans:
    """One rank's part in choosing the plan of every step.

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
            self.initial: Plan = self._planner.first(_values_of(self.problem))
        except ModuleNotFoundError as error:
            raise InvalidRun(
                f'plan="per-step" needs {error.name}, which is not installed. Install zbv[solver].'
            ) from error
        except ZbvError as error:
            raise InvalidRun(f"problem: {error}") from error
        self._pending: list[Callable[[float], None]] = []

    def connect(self, plan: RankPlan, transport: ConnectedTransport, source: int, timeout: float) -> None:
        """Let the rank at the position ``source`` of the pipeline choose."""
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

    @property
    def is_source(self) -> bool:
        """Whether this rank chooses the plans."""
        return self._rank == self._source

    def values(
        self,
        plan: Plan | None,
        features: Values | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        sequences: Sequence[Sequence[int]] | None,
    ) -> Values | None:
        """The features of a step's microbatches: those given, of a packed batch, or of the plan; else None.

        Raises
        ------
        InvalidRun
            If the sequences do not fit together.
        """
        if features is None and cu_seqlens is not None and sequences is not None:
            lengths = lengths_of(cu_seqlens, sequences, self.problem.microbatches)
            made = {
                "tokens": [sum(own) for own in lengths],
                "tokens_squared": [sum(length**2 for length in own) for own in lengths],
            }
            names = [each.name for each in self.problem.features]
            features = {name: made[name] for name in names} if set(names) <= set(made) else None
        return _values_of(plan.problem) if features is None and plan is not None else features

    def choose(self, plan: Plan | None, values: Values | None) -> RankPlan:
        """This rank's list for the step that begins. Collective over the pipeline.

        Parameters
        ----------
        plan
            The step's plan, if the caller has made one; used on the rank that chooses.
        values
            The features of the step's microbatches, if this rank knows them. The rank that chooses must.

        Raises
        ------
        InvalidRun
            If the features are missing or wrong, a microbatch does not fit the memory limit, or the plan is
            one of another problem or batch.
        Disagreement
            If this rank has other microbatches than the rank that chooses.
        TimeoutError, ConnectionError
            If that rank does not begin its step.
        """
        if self.is_source:
            if values is None:
                raise InvalidRun(
                    f'rank {self._rank} chooses the plan of every step (plan="per-step") and needs the '
                    f"features of its microbatches. Pass plan=, cu_seqlens= and sequences=, or features=."
                )
            self._check(values)
            chosen = self._made(values) if plan is None else self._fitting(plan, values)
            plan_id, orders = chosen.plan_id, chosen.orders
            self._send(plan_id, orders, values)
        else:
            plan_id, orders, sent = self._receive()
            if values is not None and _canonical(values) != _canonical(sent):
                raise Disagreement(
                    f"the batches of ranks {self._rank} and {self._source} have different features. Load "
                    f"the same batches on all ranks of a pipeline, in the same order."
                )
            values = sent
        made = RankPlan.of(plan_id, self.problem, orders, self._base.rank)
        return replace(made, cut=self._base.cut, features=by_microbatch(values))

    def _check(self, values: Values) -> None:
        names, m = [each.name for each in self.problem.features], self.problem.microbatches
        found = {name: len(each) for name, each in values.items()}
        if sorted(found) != sorted(names) or set(found.values()) != {m}:
            shown = ", ".join(f"{name} ({count})" for name, count in found.items()) or "none"
            raise InvalidRun(
                f"features: found {shown}; must be {', '.join(names)}, each with one number for every one of "
                f"the {m} microbatches."
            )

    def _made(self, values: Values) -> Plan:
        try:
            return self._planner.first(values)
        except ZbvError as error:
            raise InvalidRun(f"no plan for this step: {error}") from error

    def _fitting(self, plan: Plan, values: Values) -> Plan:
        if _canonical(_values_of(plan.problem)) != _canonical(values):
            raise InvalidRun(
                "plan: found one for other microbatches than this step's. Pass the plan that was made for "
                "this batch."
            )
        if plan.problem != self._planner.problem_of(values):
            raise InvalidRun(
                "plan: found one of another problem; a zbv_solver.StepPlanner must have made it for the "
                "problem of this pipeline."
            )
        return plan

    def _send(self, plan_id: str, orders: Orders, values: Values) -> None:
        pending, self._pending = self._pending, []
        for wait in pending:
            wait(self._timeout)
        if not self._others:
            return
        arrays = {
            name: base64.b64encode(np.ascontiguousarray(getattr(orders, name), kind).tobytes()).decode()
            for name, kind in _ORDERS.items()
        }
        content = json.dumps({"plan_id": plan_id, "orders": arrays, "values": _canonical(values)}).encode()
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        header = torch.tensor([len(content), _hash(body)], device="cpu")
        for rank in self._others:
            self._pending += [self._control.start_send(part, rank) for part in (header, body)]

    def _receive(self) -> tuple[str, Orders, Values]:
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._control.receive(header, self._source, self._timeout)
        length, expected = header.tolist()
        if not 0 < length <= MAX_BYTES:
            raise ModelError(f"rank {self._source} sent a plan of {figure(length)} bytes.")
        body = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._control.receive(body, self._source, self._timeout)
        if _hash(body) != expected:
            raise Disagreement(
                f"rank {self._rank} received another plan than rank {self._source} sent: their hashes differ."
            )
        sent = json.loads(body.numpy().tobytes())
        arrays = (
            np.frombuffer(base64.b64decode(sent["orders"][name]), kind) for name, kind in _ORDERS.items()
        )
        return sent["plan_id"], Orders(*arrays), sent["values"]


def _canonical(values: Values) -> dict[str, list[float]]:
    """Equal for equal values, and as after a journey as JSON."""
    return {name: [*map(float, values[name])] for name in sorted(values)}


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


def _values_of(problem: Problem) -> dict[str, Sequence[float]]:
    return {each.name: each.value for each in problem.features}
