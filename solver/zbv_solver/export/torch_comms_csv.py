"""CSV with communication for PyTorch's ``torch.distributed.pipelining``.

Like :mod:`zbv_solver.export.torch_csv`, plus the actions that the runtime otherwise adds: sends and receives,
and per stage UNSHARD, REDUCE_GRAD and RESHARD. Read by ``_PipelineScheduleRuntime._load_csv(path,
format="compute_comms")``, which adds nothing: without REDUCE_GRAD, for one, gradients would stay sums over
the microbatches, and no error would say so.

**The order of transfers.** The plan is executed once at its own costs. Every transfer has one place in that
history, the end of the action that produces it, and both of its ranks list it there. So any two ranks list
the transfers between them, in both directions, in one and the same order: a transport that matches messages
by nothing else (one communicator per pair of ranks) carries them right. And no rank waits forever, not even
where a send waits for its receive: the history is an order that everybody can follow.
:mod:`zbv_solver.verify.communication` checks it, and shares no code with this module.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from zbv_solver.errors import InvalidPlan
from zbv_solver.export.torch_csv import renumbered
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, Problem
from zbv_solver.verify.communication import verify_comms


def render(plan: Plan) -> str:
    """The plan as CSV with communication; microbatches are numbered as in ``torch-csv``."""
    problem, orders = renumbered(plan.problem, plan.orders.without_pairs())
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    return "".join(",".join(actions) + "\n" for actions in lists)


def lowered(problem: Problem, orders: Orders) -> list[list[str]]:
    """The actions of every rank, with communication, in PyTorch's spelling.

    Raises
    ------
    InvalidPlan
        When the orders deadlock.
    """
    return _History(problem, orders).run()


class _Input(NamedTuple):
    """The input of an action: an activation (F) or a gradient (B), at a stage, of a microbatch."""

    kind: str
    stage: int
    microbatch: int


class _History:
    """One execution of a plan: actions in the order of their ends, each followed by its transfer."""

    def __init__(self, problem: Problem, orders: Orders):
        self._problem = problem
        self._rank_of: Sequence[int] = problem.placement.rank_of
        self._kind_of: list[int] = problem.arrays.kind_of.tolist()
        self._duration: list[list[list[float]]] = problem.arrays.duration.tolist()
        self._transfer: list[list[float]] = problem.arrays.latency.tolist()
        self._actions = [orders.actions(rank) for rank in range(problem.pp_degree)]
        self._next = [0] * problem.pp_degree
        self._clock = [0.0] * problem.pp_degree
        self._arrived: dict[_Input, float] = {}
        self._waiting: dict[_Input, int] = {}
        self._ending: list[tuple[float, int]] = []
        self._backwards_left = [problem.microbatches] * problem.n_stages
        self._lists = [
            [f"{stage}UNSHARD" for stage in dict.fromkeys(action.stage for action in actions)]
            for actions in self._actions
        ]

    def run(self) -> list[list[str]]:
        for rank in range(self._problem.pp_degree):
            self._start_next(rank)
        while self._ending:
            end, rank = heapq.heappop(self._ending)
            action = self._actions[rank][self._next[rank]]
            self._next[rank] += 1
            self._clock[rank] = end
            self._lists[rank].append(str(action))
            self._pass_on(rank, action, end)
            self._finish_stage(rank, action)
            self._start_next(rank)
        for rank, (actions, done) in enumerate(zip(self._actions, self._next, strict=True)):
            if done < len(actions):
                raise InvalidPlan(
                    f"rank {rank} waits forever at {actions[done]}: the orders deadlock. Check the plan "
                    f"with `zbv check`."
                )
        return self._lists

    def _start_next(self, rank: int) -> None:
        """Start a rank's next action if its input is there; otherwise its input's arrival will."""
        if self._next[rank] == len(self._actions[rank]):
            return
        action = self._actions[rank][self._next[rank]]
        needed = self._input_of(action)
        if needed is not None and needed not in self._arrived:
            self._waiting[needed] = rank
            return
        ready = self._arrived.pop(needed) if needed is not None else 0.0
        kind = self._kind_of[action.microbatch]
        duration = self._duration[LETTERS.index(action.letter)][action.stage][kind]
        heapq.heappush(self._ending, (max(self._clock[rank], ready) + duration, rank))

    def _input_of(self, action: Action) -> _Input | None:
        if action.letter == "F" and action.stage > 0:
            return _Input("F", action.stage, action.microbatch)
        if action.letter in "IB" and action.stage < self._problem.n_stages - 1:
            return _Input("B", action.stage, action.microbatch)
        return None

    def _pass_on(self, rank: int, action: Action, end: float) -> None:
        """Send an action's output to the stage that uses it; inside a rank, only hand it over."""
        if action.letter == "W":
            return
        kind = "F" if action.letter == "F" else "B"
        target = action.stage + (1 if kind == "F" else -1)
        if not 0 <= target < self._problem.n_stages:
            return
        receiver = self._rank_of[target]
        if receiver != rank:
            self._lists[rank].append(f"{action.stage}SEND_{kind}{action.microbatch}")
            self._lists[receiver].append(f"{target}RECV_{kind}{action.microbatch}")
        output = _Input(kind, target, action.microbatch)
        latency = self._transfer[min(action.stage, target)][self._kind_of[action.microbatch]]
        self._arrived[output] = end + latency
        # The rank itself starts its next action in any case; only others need waking.
        waiting = self._waiting.pop(output, rank)
        if waiting != rank:
            self._start_next(waiting)

    def _finish_stage(self, rank: int, action: Action) -> None:
        """After a stage's last weight gradient: divide and reduce its gradients, release its parameters."""
        if action.letter not in "WB":
            return
        self._backwards_left[action.stage] -= 1
        if self._backwards_left[action.stage] == 0:
            self._lists[rank] += [f"{action.stage}REDUCE_GRAD", f"{action.stage}RESHARD"]
