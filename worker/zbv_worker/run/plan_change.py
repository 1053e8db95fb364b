"""Changes the plan of a run between two steps, at the same step on every rank.

Rank 0 watches a file. When a plan appears there, it publishes every rank's list and, before its step n, the
note "from step n + 1 on, use that plan". Every other rank looks for such a note before each of its steps. It
cannot miss one: its step n needs data that rank 0 computed in step n, after the note, so it starts step n + 1
later. With replicas, the sums of step n order each replica after rank 0's in the same way. So no step waits
for a message, and the service is not needed.

On GPUs, a rank's host may begin step n + 1 before its device has the data of step n, but not step n + 2. So
there the note says "from step n + 2 on".
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.plan import identity
from zbv_solver.plans.reading import parse_orders, parse_plan_document
from zbv_solver.problem.writing import problem_json
from zbv_solver.verify.verifier import verify_orders

from zbv_worker.execution.rank_plan import PlannedCut, RankPlan
from zbv_worker.host.process import say
from zbv_worker.transport.channels import Transport

_LOOK_SECONDS = 0.5
_RANK_PLAN = TypeAdapter(RankPlan)


@dataclass(frozen=True)
class NextPlan:
    """A new plan, as the lists of all ranks."""

    plan_id: str
    parts: tuple[RankPlan, ...]


class PlanFile:
    """Watches a file for a plan that can replace the current one, in its own thread.

    Verifying a large plan takes seconds; a step must not wait for it.
    """

    def __init__(self, path: Path, current: RankPlan):
        self._path = path
        self._current = current
        self._seen: tuple[int, int, int] | None = None
        self._obstacle = ""
        # One thread finds plans, another takes them; the lock keeps _found and _taken consistent.
        self._lock = threading.Lock()
        self._found: NextPlan | None = None
        self._taken = current.plan_id
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zbv-next-plan", daemon=True)
        self._thread.start()

    def take(self) -> NextPlan | None:
        """The newest plan found since the last call; None if there is none, or if it is the current one."""
        with self._lock:
            found, self._found = self._found, None
            if found is None or found.plan_id == self._taken:
                return None
            self._taken = found.plan_id
            return found

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Read the file if it has changed; a new plan replaces one that was not taken yet."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version == self._seen:
            return
        try:
            found = self._read()
        except OSError as error:  # a busy file system: the next attempt may succeed
            if str(error) != self._obstacle:  # report each error once
                say(f"zbv-worker: {self._path}: the plan is unchanged: {error}")
            self._obstacle = str(error)
            return
        except (ValueError, InvalidInput, InvalidPlan) as error:
            say(f"zbv-worker: {self._path}: the plan is unchanged: {error}")
        else:
            with self._lock:
                self._found = found
        self._seen = version

    def _read(self) -> NextPlan:
        try:
            document = json.loads(self._path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"found no JSON ({error}); the file must be a plan, written as a whole."
            ) from error
        problem, orders = parse_orders(parse_plan_document(document))
        verify_orders(problem, orders)
        ours = (self._current.placement, self._current.microbatches)
        if (problem.placement, problem.microbatches) != ours:
            raise ValueError(
                f"found a plan with {problem.pp_degree} ranks, placement {problem.placement.kind} and "
                f"{problem.microbatches} microbatches; a run can only change to a plan with "
                f"{self._current.placement.pp_degree} ranks, placement {self._current.placement.kind} and "
                f"{self._current.microbatches} microbatches."
            )
        if PlannedCut.of(problem).partition != self._current.cut.partition:
            raise ValueError(
                "found a plan with another partition; a run can only change to a plan with the same layers "
                "on every stage. Restart the run from a checkpoint instead: checkpoints fit every partition."
            )
        plan_id = identity(problem_json(problem), orders.all_text())
        parts = [RankPlan.of(plan_id, problem, orders, rank) for rank in range(problem.pp_degree)]
        return NextPlan(plan_id, tuple(parts))


class Swaps:
    """One rank's part in changing plans.

    Parameters
    ----------
    path
        Where a next plan may appear; only rank 0 looks there. Set on all ranks, or on none.
    is_late
        Whether hosts begin steps before their devices have completed the step before. Equal on all ranks.
    """

    def __init__(self, transport: Transport, path: Path, current: RankPlan, *, is_late: bool = False):
        self._transport = transport
        self._steps_ahead = 2 if is_late else 1
        self._file = PlanFile(path, current) if transport.rank == 0 else None

    def before(self, step: int) -> RankPlan | None:
        """This rank's list of the plan to use from this step on, if the plan changes; does not wait.

        Raises
        ------
        ConnectionError
            If the ranks' common store is gone.
        """
        plan_id = self._transport.posted(f"swap/{step}")
        found = None if self._file is None else self._file.take()
        if found is not None:
            for part in found.parts:
                document = _RANK_PLAN.dump_json(part).decode()
                self._transport.post(f"plan/{found.plan_id}/{part.rank}", document)
            self._transport.post(f"swap/{step + self._steps_ahead}", found.plan_id)
        if plan_id is None:
            return None
        text = self._transport.posted(f"plan/{plan_id}/{self._transport.pp_rank}")
        if text is None:
            raise ConnectionError(f"the list of plan {plan_id} was not published")
        return _RANK_PLAN.validate_json(text)

    def close(self) -> None:
        """Stop watching."""
        if self._file is not None:
            self._file.close()
