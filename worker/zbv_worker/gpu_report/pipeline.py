"""The lines of a pipeline's measurements: gradients, memory, overlap, split, and profile against run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zbv_worker.execution.rank_plan import producer_of
from zbv_worker.gpu_report.check import (
    Answers,
    Line,
    ReportOptions,
    at_most,
    informative,
    largest,
    not_run,
    that,
)
from zbv_worker.measure.profile.profile import LinkProfile, StageProfile, read_rank, stages_of
from zbv_worker.tracing.merged_trace import END, START, WAIT, RankTrace

GRADIENT_TOLERANCE = 1e-3
"""Relative error per parameter: a GPU sums in another order, in single precision."""

SPLIT_LIMIT = 1.25
"""Time of I + W divided by B: the split reads some tensors twice, and starts more kernels."""

STEP_LIMIT = 1.05
"""A measured step divided by the plan's span."""

MEMORY_LIMIT = 1.05
"""A rank's memory divided by the plan's account: the allocator rounds sizes up."""


@dataclass(frozen=True)
class Overlap:
    """Transfers into one stage."""

    stage: int
    count: int
    seconds: float
    """Their total time."""
    exposed: float
    """How much of it the receiver waited for, after the tensors were sent."""

    @property
    def hidden(self) -> float:
        """The fraction of the transfer time in which the receiver computed."""
        return 1 - self.exposed / self.seconds if self.seconds > 0 else 1.0


def judge_gradients(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """Gradients, memory, waits of the host, links and overlap of ranks that transfer tensors."""
    yield _gradients(f"gradients of {len(answers)} ranks over {answers[0]['backend']}", answers)
    yield from _memory(answers)
    yield _host_waits(answers)
    links = links_of(answers)
    for link in links.values():
        speed = "no limit found" if link.bandwidth is None else f"{link.bandwidth / 1e9:.2f} GB/s"
        yield informative(
            f"transfers from rank {link.sender} to {link.receiver}", f"{link.latency * 1e6:.0f} us, {speed}"
        )
    for each in overlaps(traces_of(answers), links):
        yield informative(
            f"transfers into stage {each.stage} that overlap with compute",
            f"{100 * each.hidden:.0f} % of {each.seconds * 1e3:.2f} ms in {each.count} transfers",
        )


def _gradients(what: str, answers: Answers) -> Line:
    errors = [answer["relative_error"] for answer in answers]
    return at_most(
        f"{what} against one process: relative error",
        largest(math.inf if error is None else error for error in errors),
        GRADIENT_TOLERANCE,
    )


def judge_costs(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The cost of the split, and the measured step against the plan of the profiled costs."""
    if answers[0]["variant"] == "compiled":
        yield _gradients("gradients of compiled layers", answers)
    is_gpu = options.device == "cuda"
    for stage in stages_of([read_rank(answer["profile"]) for answer in answers]):
        what, ratio = f"stage {stage.stage}: time of I + W divided by B", split_ratio(stage)
        # A CPU run shows the format, and its small stages have no stable times.
        yield at_most(what, ratio, SPLIT_LIMIT) if is_gpu else informative(what, f"{ratio:.3g}")
    yield _step(options, answers)
    yield from _memory(answers)
    yield _host_waits(answers)


def _step(options: ReportOptions, answers: Answers) -> Line:
    what = "measured step divided by the plan's span"
    planned, lack = answers[0]["planned_seconds"], answers[0]["lack"]
    if planned is None:
        return not_run(what, str(lack))
    measured = step_seconds(traces_of(answers))
    shown = f"{measured / planned:.3g} ({measured * 1e3:.2f} ms and {planned * 1e3:.2f} ms)"
    if options.device == "cpu":
        return informative(what, shown)
    return at_most(what, measured / planned, STEP_LIMIT)


def _memory(answers: Answers) -> Iterator[Line]:
    for rank, answer in enumerate(answers):
        what = f"rank {rank}: memory of a step divided by the plan's account and all tensors passed on"
        if answer["lack"] is not None:
            yield not_run(what, answer["lack"])
        else:
            account = answer["planned_bytes"] + answer["passed_bytes"]
            yield at_most(what, answer["held_bytes"] / account, MEMORY_LIMIT)


def _host_waits(answers: Answers) -> Line:
    what = "calls in a step that make the host wait for the device"
    waits = [answer["host_waits"] for answer in answers]
    if waits[0] is None:
        return not_run(what, "needs a GPU; the report runs with --device cpu")
    found = [text for each in waits for text in each]
    return that(what, not found, f"{len(found)}; the first: {found[0] if found else ''}", str(len(found)))


def split_ratio(stage: StageProfile) -> float:
    """The time of I + W relative to the fused backward."""
    return (stage.backward_input.median + stage.backward_weight.median) / stage.backward.median


def traces_of(answers: Answers) -> list[RankTrace]:
    """The ranks' traces."""
    return [RankTrace.parse(answer["trace"]) for answer in answers]


def links_of(answers: Answers) -> dict[tuple[int, int], LinkProfile]:
    """The measured links, by sender and receiver."""
    ranks = [read_rank(answer["profile"]) for answer in answers]
    return {(link.sender, link.receiver): link for rank in ranks for link in rank.links}


def step_seconds(traces: Sequence[RankTrace]) -> float:
    """The median time from the last end of one step to the last end of the next; all ranks share a clock."""
    ends = np.max([trace.times[:, -1, END] for trace in traces], axis=0)
    return float(np.median(np.diff(ends))) / 1e9


def overlaps(traces: Sequence[RankTrace], links: Mapping[tuple[int, int], LinkProfile]) -> Iterator[Overlap]:
    """How much of each stage's incoming transfers overlapped with compute, in the traces' last step.

    A transfer takes the time that the link's fit predicts, or longer if its receiver waited longer. The
    exposed part is the wait after the tensor was sent; an earlier wait is for the sender's compute.
    """
    sent = {
        (action.stage, action.letter == "F", action.microbatch): (trace.rank, int(times[END]))
        for trace in traces
        for action, times in zip(trace.actions, trace.times[-1], strict=True)
        if action.letter != "W"
    }
    found: dict[int, list[tuple[float, float]]] = {}
    for trace in traces:
        for action, times, received in zip(trace.actions, trace.times[-1], trace.received[-1], strict=True):
            if not received:
                continue
            sender, sent_at = sent[producer_of(action)]
            link = links[sender, trace.rank]
            exposed = max(0, int(times[START]) - max(int(times[WAIT]), sent_at)) / 1e9
            usual = link.latency + (int(received) / link.bandwidth if link.bandwidth else 0.0)
            found.setdefault(action.stage, []).append((max(usual, exposed), exposed))
    for stage, transfers in sorted(found.items()):
        yield Overlap(stage, len(transfers), *map(sum, zip(*transfers, strict=True)))
