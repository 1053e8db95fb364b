"""A report on a node's GPUs: devices, profile, cost of the split, overlap of transfers, correct gradients.

It starts the ranks of a small pipeline: with NCCL if each rank has a GPU, else with gloo and shared GPUs. A
rank's measurement is in :mod:`zbv_worker.measure.gpu_report.rank`. All but the devices works on a CPU too.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from zbv_worker.errors import WorkerError
from zbv_worker.execution.rank_plan import producer_of
from zbv_worker.host.inventory import versions
from zbv_worker.measure.profile.profile import LinkProfile, StageProfile, read_rank, stages_of
from zbv_worker.measure.profile.report import print_report, profile_json
from zbv_worker.measure.ranks import measure_on_ranks
from zbv_worker.measure.tables import table_of_numbers
from zbv_worker.model.spec import ModelSpec
from zbv_worker.tracing.merged_trace import END, START, WAIT, RankTrace

Device = Literal["cuda", "cpu"]

GRADIENT_TOLERANCE = 1e-3
"""Relative error per parameter: a GPU sums in another order, in single precision."""

_LONGEST_SECONDS = 1800.0


class NoGpu(WorkerError):
    """A report on CUDA was requested, but there is no CUDA GPU."""


@dataclass(frozen=True)
class ReportOptions:
    """What to report on.

    Attributes
    ----------
    ranks
        At least two, because the report measures transfers.
    steps
        Training steps after one warm-up step.
    """

    model: ModelSpec
    device: Device = "cuda"
    ranks: int = 2
    microbatches: int = 8
    repeats: int = 10
    steps: int = 3
    timeout: float = 120.0


@dataclass(frozen=True)
class Overlap:
    """Transfers into one stage.

    Attributes
    ----------
    seconds
        Their total time.
    exposed
        How much of it the receiver waited for, after the tensors were sent.
    """

    stage: int
    count: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The fraction of the transfer time in which the receiver computed."""
        return 1 - self.exposed / self.seconds if self.seconds > 0 else 1.0


def gpu_report(options: ReportOptions) -> dict[str, Any]:
    """Measure; returns the whole report.

    Raises
    ------
    NoGpu
        If ``cuda`` is requested but not available.
    LaunchError
        If a rank fails.
    """
    facts = device_facts(options.device)
    answers = measure_on_ranks(
        ["zbv_worker.measure.gpu_report.rank"], asdict(options), options.ranks, _LONGEST_SECONDS
    )
    ranks = [read_rank(answer["profile"]) for answer in answers]
    traces = [RankTrace.parse(answer["trace"]) for answer in answers]
    links = {(link.sender, link.receiver): link for rank in ranks for link in rank.links}
    error = answers[0]["relative_error"]
    return {
        "facts": facts,
        "backend": answers[0]["backend"],
        "profile": profile_json(ranks),
        "split": [{"stage": each.stage, "ratio": _split_ratio(each)} for each in stages_of(ranks)],
        "overlap": [{**asdict(each), "hidden": each.hidden} for each in overlaps(traces, links)],
        "gradients": {
            "relative_error": error,
            "tolerance": GRADIENT_TOLERANCE,
            "right": error <= GRADIENT_TOLERANCE,
        },
    }


def device_facts(device: Device) -> dict[str, Any]:
    """Versions and devices of this node; raises :class:`NoGpu`."""
    found: dict[str, Any] = {**versions(), "machine": platform.machine(), "device": device}
    if device == "cpu":
        return found
    if not torch.cuda.is_available():
        raise NoGpu(
            "found no CUDA GPU: the report needs at least one, its driver, and a torch built for CUDA. All "
            "other commands work without; `--device cpu` shows the report's format."
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's own
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **found,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": _driver(),
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "multiprocessors": gpu.multi_processor_count,
            }
            for gpu in gpus
        ],
    }


def _driver() -> str | None:
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0]


def _split_ratio(stage: StageProfile) -> float:
    """The time of I + W relative to the fused backward."""
    return (stage.backward_input.median + stage.backward_weight.median) / stage.backward.median


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


def print_gpu_report(report: Mapping[str, Any], out: Console) -> None:
    """Print a report as text and tables."""
    out.print(", ".join(f"{name} {value}" for name, value in report["facts"].items() if name != "gpus"))
    for gpu in report["facts"].get("gpus", []):
        out.print(f"{gpu['name']}: {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['multiprocessors']} SMs")
    ranks = [read_rank(rank) for rank in report["profile"]["ranks"]]
    print_report(ranks, out)
    out.print(_results(report))
    gradients = report["gradients"]
    verdict = "correct" if gradients["right"] else "WRONG"
    out.print(
        f"Gradients of {len(ranks)} ranks over {report['backend']} compared with one process: {verdict}, "
        f"relative error {gradients['relative_error']:.1e} (at most {gradients['tolerance']:.0e})"
    )


def _results(report: Mapping[str, Any]) -> Table:
    hidden = {entry["stage"]: entry for entry in report["overlap"]}
    shown = table_of_numbers(
        "Split, and overlap of transfers with compute",
        *("stage", "(I + W) / B", "transfers in", "total ms", "hidden"),
    )
    for entry in report["split"]:
        overlap = hidden.get(entry["stage"])
        transfers = (
            ()
            if overlap is None
            else (
                str(overlap["count"]),
                f"{overlap['seconds'] * 1e3:.2f}",
                f"{100 * overlap['hidden']:.0f} %",
            )
        )
        shown.add_row(str(entry["stage"]), f"{entry['ratio']:.3f}", *transfers)
    return shown
