"""Options of a run and of its training, and the rank that it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, DEFAULT_STARTUP_TIMEOUT
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run.update import NonFinite
from zbv_worker.stage.program import Precision, Program
from zbv_worker.transport.nccl_operations import NCCL_LOOK_AHEAD
from zbv_worker.transport.world import Backend


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; equal on every rank."""

    replicas: int = 1
    """The number of pipelines that train the same model on different microbatches."""
    is_sharded: bool = False
    """Whether the replicas divide each stage's parameters among them, instead of each holding all."""
    precision: Precision = "float32"
    is_compiled: bool = False
    """Whether ``torch.compile`` compiles the layers."""
    has_main_gradients: bool = True
    """Whether parameters in half precision sum their gradients in float32."""
    parts: int = 1
    """How often a step runs the plan, each time on other microbatches, before the optimizer's step."""
    clip_norm: float | None = None
    """The longest allowed gradient of the whole model; None for no limit."""
    non_finite: NonFinite = "fail"
    """What to do if a step's loss or gradients are infinite or NaN: end the run with an error, skip the
    update on all ranks, or update the parameters anyway."""
    evaluate_every: int | None = None
    """Steps between evaluations (forward only); None for none."""
    checkpoint: CheckpointOptions | None = None
    next_plan: Path | None = None
    """A file in which rank 0 looks for a plan to change to. Set on all ranks, or on none."""
    trace_dir: Path | None = None
    """Where every rank writes its newest steps during the run; None for nowhere."""

    @property
    def needs_sums_over_ranks(self) -> bool:
        """Whether the updates need sums over all ranks."""
        return self.clip_norm is not None or self.non_finite == "skip" or self.precision == "float16"

    @property
    def program(self) -> Program:
        """The program that the stages run."""
        return Program(self.precision, self.is_compiled, self.has_main_gradients)

    @property
    def common(self) -> tuple[tuple[str, str], ...]:
        """Names and values of everything that must be equal on all ranks."""
        return (
            ("sharding", str(self.is_sharded)),
            ("precision", self.precision),
            ("compiling", str(self.is_compiled)),
            ("main gradients", str(self.has_main_gradients)),
            ("runs of the plan per step", str(self.parts)),
            ("clip norm", str(self.clip_norm)),
            ("non-finite steps", self.non_finite),
            ("evaluation", str(self.evaluate_every)),
            ("checkpoints", str(self.checkpoint)),
            ("watching for a next plan", str(self.next_plan is not None)),
            ("writing traces", str(self.trace_dir is not None)),
        )


@dataclass(frozen=True)
class RunOptions:
    """How to run a plan, or several in turns."""

    sources: tuple[PlanSource, ...]
    """Usually one. Several plans with equal ranks take turns step by step, each training its own copy of
    the model, so that disturbances of the machine affect all plans alike and their times are comparable."""
    model: ModelSpec
    steps: int
    backend: Backend = "gloo"
    timeout: float = 120.0
    """Seconds that a rank waits for any one tensor within a step, and for the other ranks after the last."""
    startup_timeout: float = DEFAULT_STARTUP_TIMEOUT
    """The same for meeting and connecting the other ranks, and for the first step of each plan, in which
    ranks may compile their stages. If smaller than ``timeout``, that one counts."""
    look_ahead: int | None = None
    """Receives kept posted ahead per channel; None for the backend's number."""
    threads: int | None = None
    """Compute threads per rank on CPU. None divides the host's cores among its ranks, unless
    ``OMP_NUM_THREADS`` is set."""
    result_dir: Path | None = None
    """Where reports go; with several plans, into one folder per plan id."""
    trace: Path | None = None
    """Where rank 0 writes the times of all ranks' actions, on one clock."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    @property
    def startup_patience(self) -> float:
        """Seconds to wait for other ranks while they start."""
        return max(self.timeout, self.startup_timeout)

    @property
    def receives_ahead(self) -> int:
        """Receives kept posted ahead per channel."""
        if self.look_ahead is not None:
            return self.look_ahead
        return NCCL_LOOK_AHEAD if self.backend == "nccl" else DEFAULT_LOOK_AHEAD


def require_compilable(options: TrainingOptions) -> None:
    """Refuse ``--compile`` together with options that it does not support."""
    if options.is_compiled and options.is_sharded:
        raise InvalidRun(
            "--compile does not support --shard: compiled layers cannot wait until a stage's parameters are "
            "gathered. Omit one of them."
        )
