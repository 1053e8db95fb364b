"""What a rank reports while it trains: lines in its log, events, and files for the agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zbv_worker.errors import NotFinite
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import StepResult
from zbv_worker.host.process import say
from zbv_worker.host.state_files import events_file, write_json
from zbv_worker.stage.program import Program, differences
from zbv_worker.stage.recorder import SplitShare
from zbv_worker.tracing.report import RankReport, StepLine, TraceFile, Updated
from zbv_worker.transport.channels import Transport

_KNOWN = ("non_finite", "checkpoint_skipped")
"""The events that an agent sends to the service."""
_MOST_EVENTS = 100
_LONGEST_REASON = 200


class Reporting:
    """Reports the steps of one rank. Creating one is collective if there is a folder for traces.

    Parameters
    ----------
    folder
        Where the agent expects events and traces; None without an agent.
    label
        Prefix of the lines printed for each step.
    timeout
        Seconds to wait for a peer.
    """

    def __init__(self, plan: RankPlan, transport: Transport, folder: Path | None, label: str, timeout: float):
        self._rank = transport.rank
        # All columns have the same losses and stages.
        self._is_speaker = transport.column == 0
        self._folder = folder
        self._label = label
        self._unsplit: set[int] = set()
        self._plan = plan
        self.report = RankReport(plan.plan_id, transport.rank)
        self._trace = None if folder is None else TraceFile(folder, transport, timeout)

    def step(self, line: StepLine, result: StepResult) -> None:
        """Report a step; raises :class:`NotFinite` if the run must fail."""
        self.report.add(line, result)
        self._say_loss(f"step {line.step}:", line.loss, f", {line.seconds:.3f} s{_outcome(line.updated)}")
        if line.auxiliary_loss is not None and self._is_speaker:
            of_rank = f"auxiliary loss {line.auxiliary_loss:.4g} of rank {self._rank}'s stages"
            say(f"step {line.step}: {self._label}{of_rank}")
        self._non_finite(line.step, line.updated)

    def evaluation(self, step: int, loss: float | None) -> None:
        """Report the loss of an evaluation before a step; None on ranks that do not know it."""
        if loss is not None:
            self.report.evaluations[step] = loss
        self._say_loss(f"before step {step}: evaluation", loss)

    def plan_changed(self, step: int, plan: RankPlan) -> None:
        """Report a change to another plan."""
        if self._rank == 0:
            say(f"step {step}: changing from plan {self._plan.plan_id[:12]} to {plan.plan_id[:12]}")
        self._plan = plan
        self._unsplit.clear()  # a plan may rely on the W of other stages

    def checkpoint_skipped(self, step: int, why: str) -> None:
        """Report that the checkpoint of a step could not be written."""
        self._note("checkpoint_skipped", step, reason=why[:_LONGEST_REASON])

    def unsplit(self, step: int, shares: Mapping[int, SplitShare | None]) -> None:
        """Report, once, stages whose W computes little although the plan splits them: bubbles stay."""
        split = {action.stage for action in self._plan.actions if action.letter == "I"} - self._unsplit
        for index in sorted(split):
            found = shares.get(index)
            if found is not None and found.is_small and self._is_speaker:
                self._unsplit.add(index)
                share, modules = round(found.share, 3), list(found.unsplit[:20])
                self._note("little_to_split", step, stage=index, share=share, modules=modules)
                say(
                    f"{self._label}stage {index}: {found}. The plan relies on W: measure the costs with "
                    f"zbv-worker profile, or use plain nn.Linear and nn.Embedding there."
                )

    def update_trace(self, *, is_last: bool = False) -> None:
        """Write the newest steps for the agent if it is time, or if the run ends."""
        if self._trace is not None:
            self._trace.update(self.report, is_last=is_last)

    def _non_finite(self, step: int, updated: Updated) -> None:
        for what, value in updated.non_finite:
            if what != "loss" or self._is_speaker:
                self._note("non_finite", step, what=what, value=str(value))
                say(f"step {step}: {self._label}the {what} is {value}")
        if updated.is_failed:
            said = " and ".join(f"the {what} is {value}" for what, value in updated.non_finite)
            raise NotFinite(
                f"rank {self._rank}, step {step}: {said or 'the loss or the gradient norm is not finite'}. "
                f"Check the data and the learning rate, or pass --non-finite skip to skip such steps."
            )

    def _note(self, kind: str, step: int, **more: object) -> None:
        """Record an event in the report, and in a file if the service knows its kind."""
        event = {"kind": kind, "step": step, **more}
        self.report.events.append(event)
        if self._folder is not None and kind in _KNOWN:
            known = [event for event in self.report.events if event["kind"] in _KNOWN][-_MOST_EVENTS:]
            write_json(events_file(self._folder, self._rank), {"rank": self._rank, "events": known})

    def _say_loss(self, begin: str, loss: float | None, end: str = "") -> None:
        if loss is not None and self._is_speaker:
            say(f"{begin} {self._label}loss {loss:.4f}{end}")


def _outcome(updated: Updated) -> str:
    """What became of a step whose numbers are not finite, for its line."""
    if updated.is_failed:
        return ", not finite"
    return ", not finite: skipped" if updated.is_skipped else ""


def warn_of_another_program(plan: RankPlan, program: Program, device: torch.device) -> None:
    """Report every difference between the program that was profiled for the plan, and this run's."""
    found = list(differences(plan.measured, program.described(device)))
    if found:
        say(
            f"plan {plan.plan_id[:12]}: its costs were measured with {', '.join(found)}. The step may take "
            f"longer than planned: measure this program with zbv-worker profile, and plan again."
        )
