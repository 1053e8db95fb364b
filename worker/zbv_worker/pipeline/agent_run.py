"""A pipeline in a script that an agent runs: the plan of the run, and reports to the agent.

The agent's rank process sets variables, which are the only connection between the two. Without them nothing
here has an effect.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import Launched
from zbv_worker.failures.failures import Failures
from zbv_worker.failures.liveness import Liveness
from zbv_worker.failures.progress import CurrentProgress, ProgressFile
from zbv_worker.host.environment import FOLDER, PLAN, SERVER
from zbv_worker.host.state_files import progress_file
from zbv_worker.pipeline.connecting import PlanLike
from zbv_worker.tracing.report import RankReport, StepLine, TraceFile
from zbv_worker.transport.channels import Transport


def run_plan(otherwise: PlanLike | None = None) -> PlanLike | None:
    """The plan of the run in which an agent started this script, for :class:`zbv_worker.Pipeline`.

    Parameters
    ----------
    otherwise
        Returned outside of a run, for instance under torchrun; None lets a Pipeline plan its layers.

    Raises
    ------
    InvalidRun
        If the agent named no service.
    """
    plan_id, server = os.environ.get(PLAN), os.environ.get(SERVER)
    if not plan_id:
        return otherwise
    if not server:
        raise InvalidRun(f"found {PLAN} without {SERVER}; set both, or none outside of an agent's run.")
    return PlanSource(server, plan_id)


class RunReports:
    """Reports a pipeline's steps to the agent: its current action, and now and then times and losses.

    Creating one is collective, because the ranks compare their clocks.

    Parameters
    ----------
    folder
        The agent's folder, from which it reads the reports.
    timeout
        Seconds to wait for other ranks.
    progress, liveness
        What the rank does, and its thread, which writes it.
    """

    def __init__(
        self,
        folder: Path,
        plan: RankPlan,
        transport: Transport,
        timeout: float,
        progress: CurrentProgress,
        liveness: Liveness,
    ):
        self._plan_id = plan.plan_id
        self._file = ProgressFile(progress_file(folder, transport.rank), transport.rank, progress)
        self._file.write()
        liveness.add(self._file.write)
        self._trace = TraceFile(folder, transport, timeout)
        self._report = RankReport(plan.plan_id, transport.rank)
        self._newest: tuple[Launched, Tensor | None] | None = None

    @classmethod
    def of_environment(
        cls, plan: RankPlan, transport: Transport, timeout: float, failures: Failures
    ) -> RunReports | None:
        """The reports of a pipeline that runs the plan of an agent's run; None for all others. Collective."""
        folder = os.environ.get(FOLDER)
        if not folder or os.environ.get(PLAN) != plan.plan_id:
            return None
        return cls(Path(folder), plan, transport, timeout, failures.progress, failures.liveness)

    def add(self, launched: Launched, loss: Tensor | None) -> None:
        """Add a step. Its times are read after the next one is launched, so that a GPU need not wait."""
        self._flush()
        self._newest = (launched, loss)

    def finish(self) -> None:
        """Report the last step, and stop."""
        self._flush(is_last=True)
        self._file.write()

    def _flush(self, *, is_last: bool = False) -> None:
        if self._newest is None:
            return
        (launched, loss), self._newest = self._newest, None
        result = launched.result()
        number = None if loss is None else float(loss)
        line = StepLine(result.step, self._plan_id, number, result.seconds, result.update_seconds)
        self._report.add(line, result)
        self._trace.update(self._report, is_last=is_last)
