"""A report on a node's GPUs: devices, profile, cost of the split, overlap of transfers, correct gradients.

It starts the ranks of a small pipeline: with NCCL if each rank has a GPU, else with gloo and shared GPUs. A
rank's measurement is in :mod:`zbv_worker.measure.gpu_report.rank`. All but the devices works on a CPU too.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from zbv_solver.plans.orders import Action

from zbv_worker.errors import WorkerError
from zbv_worker.execution.rank_plan import producer_of
from zbv_worker.host.inventory import versions
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.measure.profile.profile import LinkProfile, RankProfile, StageProfile, read_rank
from zbv_worker.measure.profile.report import print_report, profile_json
from zbv_worker.model.spec import ModelSpec

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
class Timed:
    """One action of a measured step; times in ns on one clock, ``received`` in bytes (0 if none)."""

    rank: int
    stage: int
    letter: str
    microbatch: int
    wait: int
    start: int
    end: int
    received: int


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
    ranks, answers = _measured(options)
    return {
        "facts": facts,
        "backend": answers[0]["backend"],
        "profile": profile_json(ranks),
        "split": [{"stage": s.stage, "ratio": split_ratio(s)} for s in _stages(ranks)],
        "overlap": [{**asdict(o), "hidden": o.hidden} for o in overlaps(_timed(answers), _links(ranks))],
        "gradients": {
            "relative_error": answers[0]["relative_error"],
            "tolerance": GRADIENT_TOLERANCE,
            "right": answers[0]["relative_error"] <= GRADIENT_TOLERANCE,
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


def _measured(options: ReportOptions) -> tuple[list[RankProfile], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="zbv-gpu-report-") as name:
        folder = Path(name)
        request = folder / "request.json"
        request.write_text(json.dumps(asdict(options)))
        command = python_command("zbv_worker.measure.gpu_report.rank", str(request))
        with LocalRanks([command] * options.ranks, folder) as started:
            started.wait(_LONGEST_SECONDS)
        answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]
        return [read_rank(json.dumps(answer["profile"])) for answer in answers], answers


def split_ratio(stage: StageProfile) -> float:
    """The time of I + W relative to the fused backward."""
    return (stage.backward_input.median + stage.backward_weight.median) / stage.backward.median


def overlaps(actions: Sequence[Timed], links: Mapping[tuple[int, int], LinkProfile]) -> Iterator[Overlap]:
    """How much of each stage's incoming transfers overlapped with compute.

    A transfer takes the time that the link's fit predicts, or longer if its receiver waited longer. The
    exposed part is the wait after the tensor was sent; an earlier wait is for the sender's compute.
    """
    made = {(a.stage, a.letter == "F", a.microbatch): a for a in actions if a.letter != "W"}
    found: dict[int, list[tuple[float, float]]] = {}
    for action in actions:
        if not action.received:
            continue
        source = made[producer_of(Action(action.stage, action.letter, action.microbatch))]
        link = links[source.rank, action.rank]
        exposed = max(0, action.start - max(action.wait, source.end)) / 1e9
        usual = link.latency + (action.received / link.bandwidth if link.bandwidth else 0.0)
        found.setdefault(action.stage, []).append((max(usual, exposed), exposed))
    for stage, transfers in sorted(found.items()):
        yield Overlap(stage, len(transfers), *map(sum, zip(*transfers, strict=True)))


def _timed(answers: Sequence[Mapping[str, Any]]) -> list[Timed]:
    return [Timed(**action) for answer in answers for action in answer["actions"]]


def _links(ranks: Sequence[RankProfile]) -> dict[tuple[int, int], LinkProfile]:
    return {(link.sender, link.receiver): link for rank in ranks for link in rank.links}


def _stages(ranks: Sequence[RankProfile]) -> list[StageProfile]:
    return sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.stage)


def print_gpu_report(report: Mapping[str, Any], out: Console) -> None:
    """Print a report as text and tables."""
    out.print(", ".join(f"{name} {value}" for name, value in report["facts"].items() if name != "gpus"))
    for gpu in report["facts"].get("gpus", []):
        out.print(f"{gpu['name']}: {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['multiprocessors']} SMs")
    ranks = [
        read_rank(json.dumps({k: v for k, v in rank.items() if k != "static_total"}))
        for rank in report["profile"]["ranks"]
    ]
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
    shown = Table(title="Split, and overlap of transfers with compute", title_justify="left")
    for column in ("stage", "(I + W) / B", "transfers in", "total ms", "hidden"):
        shown.add_column(column, justify="right")
    for entry in report["split"]:
        overlap = hidden.get(entry["stage"])
        cells = ("", "", "")
        if overlap is not None:
            cells = (
                str(overlap["count"]),
                f"{overlap['seconds'] * 1e3:.2f}",
                f"{100 * overlap['hidden']:.0f} %",
            )
        shown.add_row(str(entry["stage"]), f"{entry['ratio']:.3f}", *cells)
    return shown
