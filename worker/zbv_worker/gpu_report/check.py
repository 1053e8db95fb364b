"""A check of the GPU report: what it measures in its processes, and the lines that it makes of it.

A check consists of two functions. ``measure`` runs in every process of the check and returns JSON. ``judge``
gets the answers by rank and yields the lines of the report; it needs no GPU.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from zbv_worker.model.spec import ModelSpec
from zbv_worker.transport.world import World

Device = Literal["cuda", "cpu"]
Verdict = Literal["pass", "fail", "not run"]
Answers = Sequence[Any]


@dataclass(frozen=True)
class ReportOptions:
    """What to report on."""

    model: ModelSpec
    device: Device = "cuda"
    ranks: int = 2
    """Ranks of the checks that transfer tensors; at least two."""
    microbatches: int = 8
    repeats: int = 10
    steps: int = 3
    """Measured training steps after the warm-up."""
    timeout: float = 60.0
    """Seconds that a rank waits for another."""


@dataclass(frozen=True)
class Place:
    """One process of a check."""

    options: ReportOptions
    world: World
    device: torch.device
    """The process's device; ranks share GPUs if there are fewer GPUs than ranks."""


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    what: str
    """What the line states or compares."""
    verdict: Verdict
    measured: str = ""
    limit: str = ""
    """For people, with units; a line without a limit passes if the value could be measured."""
    reason: str = ""
    """Why the line failed or was not run."""


@dataclass(frozen=True)
class Needs:
    """What a check cannot run without."""

    gpus: int = 0
    """The number of GPUs."""
    a_gpu_per_rank: bool = False
    """Whether every rank needs its own GPU."""
    nccl: bool = False
    """Whether torch must have been built with NCCL."""
    compiler: bool = False
    """Whether torch.compile must find its compilers."""

    def lack(self, options: ReportOptions) -> str | None:
        """Why this machine, or the chosen device, cannot run the check; None if it can."""
        return self._lacking_gpu(options) or (_lacking_compiler(options.device) if self.compiler else None)

    def _lacking_gpu(self, options: ReportOptions) -> str | None:
        wanted = max(self.gpus, options.ranks if self.a_gpu_per_rank else 0)
        if not wanted and not self.nccl:
            return None
        needed = f"needs {wanted} GPUs" if wanted > 1 else "needs a GPU"
        if options.device == "cpu":
            return f"{needed}; the report runs with --device cpu"
        found = torch.cuda.device_count()
        if found < wanted:
            return f"{needed}; found {found}"
        if self.nccl and not torch.distributed.is_nccl_available():
            return "needs NCCL; this build of torch has none"
        return None


def _lacking_compiler(device: Device) -> str | None:
    """What ``torch.compile`` needs and this machine does not have; None if it has everything."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"needs the C++ compiler {compiler}, which torch.compile calls"
    if device == "cuda" and find_spec("triton") is None:
        return "needs the package triton, which torch.compile calls"
    return None


def one_rank(options: ReportOptions) -> int:
    """One process."""
    return 1


def asked_ranks(options: ReportOptions) -> int:
    """As many processes as the report has ranks."""
    return options.ranks


@dataclass(frozen=True)
class OnRanks:
    """A check's measurement in its own processes."""

    measure: Callable[[Place], Any]
    """Runs in every process; returns JSON."""
    judge: Callable[[ReportOptions, Answers], Iterable[Line]]
    """The lines of the answers."""
    ranks: Callable[[ReportOptions], int] = one_rank
    """The number of processes."""


@dataclass(frozen=True)
class Check:
    """A check of the report."""

    name: str
    """For ``--only``."""
    title: str
    """What is checked, in a few words."""
    proves: str
    """What holds on this machine if all lines pass."""
    remedy: str
    """What to do if a line fails."""
    run: OnRanks | Callable[[ReportOptions], Iterable[Line]]
    """How to measure, or a function that measures in processes that it starts and ends itself."""
    needs: Needs = Needs()
    seconds: float = 120.0
    """How long the check may take; its processes are then ended, and it fails."""


@dataclass(frozen=True)
class Checked:
    """A check's lines and the values behind them."""

    check: Check
    lines: tuple[Line, ...]
    seconds: float = 0.0
    """How long the check took."""
    values: Answers = ()
    """The answers of its processes, as JSON."""

    @property
    def verdict(self) -> Verdict:
        """Fail if any line failed, pass if any line passed, else not run."""
        found = {line.verdict for line in self.lines}
        return "fail" if "fail" in found else "pass" if "pass" in found else "not run"


def passed(what: str, measured: str = "", limit: str = "") -> Line:
    """A line that passes."""
    return Line(what, "pass", measured, limit)


def failed(what: str, reason: str, measured: str = "", limit: str = "") -> Line:
    """A line that fails."""
    return Line(what, "fail", measured, limit, reason)


def not_run(what: str, reason: str) -> Line:
    """A line that could not be checked here."""
    return Line(what, "not run", reason=reason)


def that(what: str, holds: bool, reason: str, measured: str = "") -> Line:
    """A line that passes if a statement holds."""
    return passed(what, measured) if holds else failed(what, reason, measured)


def at_most(what: str, value: float, limit: float, unit: str = "", *, digits: int = 3) -> Line:
    """A line that passes if a value is at most a limit; a value that is not a number fails."""
    shown, bound = (f"{number:.{digits}g}{unit and ' '}{unit}" for number in (value, limit))
    if value <= limit:
        return passed(what, shown, f"at most {bound}")
    return failed(what, f"found {shown}; must be at most {bound}", shown, f"at most {bound}")


def largest(values: Iterable[float]) -> float:
    """The largest value, 0 of none; infinite if one is not a number, which ``max`` would ignore."""
    found = [*values]
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


def informative(what: str, measured: str) -> Line:
    """A line without a limit."""
    return passed(what, measured, "none")
