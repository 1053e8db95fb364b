"""Options of a training, and the environment in which it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.execution.progress import CurrentProgress
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.protocol import PipelineModel, Weighted
from zbv_worker.model.spec import ModelSpec
from zbv_worker.stage.precision import Precision
from zbv_worker.training.checkpoint import CheckpointOptions
from zbv_worker.training.update import NonFinite
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.world import Backend


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; equal on every rank.

    Attributes
    ----------
    replicas
        The number of pipelines that train the same model on different microbatches.
    is_sharded
        Whether the replicas divide each stage's parameters among them, instead of each holding all.
    clip_norm
        The longest allowed gradient of the whole model; None for no limit.
    non_finite
        What to do if a step's loss or gradients are infinite or NaN: end the run with an error, skip the
        update on all ranks, or update the parameters anyway.
    evaluate_every
        Steps between evaluations (forward only); None for none.
    next_plan
        A file in which rank 0 looks for a plan to change to. Set on all ranks, or on none.
    trace_dir
        Where every rank writes its newest steps during the run; None for nowhere.
    """

    replicas: int = 1
    is_sharded: bool = False
    precision: Precision = "float32"
    clip_norm: float | None = None
    non_finite: NonFinite = "fail"
    evaluate_every: int | None = None
    checkpoint: CheckpointOptions | None = None
    next_plan: Path | None = None
    trace_dir: Path | None = None

    @property
    def common(self) -> tuple[tuple[str, str], ...]:
        """Names and values of everything that must be equal on all ranks."""
        return (
            ("sharding", str(self.is_sharded)),
            ("precision", self.precision),
            ("clip norm", str(self.clip_norm)),
            ("non-finite steps", self.non_finite),
            ("evaluation", str(self.evaluate_every)),
            ("checkpoints", str(self.checkpoint)),
            ("watching for a next plan", str(self.next_plan is not None)),
            ("writing traces", str(self.trace_dir is not None)),
        )


@dataclass(frozen=True)
class Setting:
    """The environment of a run's trainings: model, device, transport and limits."""

    model: ModelSpec
    backend: Backend
    device: torch.device
    transport: Transport
    steps: int
    timeout: float
    look_ahead: int = DEFAULT_LOOK_AHEAD
    is_traced: bool = False
    progress: CurrentProgress | None = None


def require_plain(options: TrainingOptions, model: PipelineModel) -> None:
    """Refuse options that PyTorch's runtime does not support."""
    if isinstance(model, Weighted):
        raise InvalidRun(
            "--runtime torch averages over microbatches, but the model weights them with loss_sum. "
            "Use --runtime zbv."
        )
    asked = {
        "--data-parallel": options.replicas > 1,
        "--shard": options.is_sharded,
        "--precision": options.precision != "float32",
        "--evaluate-every": options.evaluate_every is not None,
        "--next-plan": options.next_plan is not None,
    }
    found = [flag for flag, is_asked in asked.items() if is_asked]
    if found:
        raise InvalidRun(f"--runtime torch does not support {', '.join(found)}; use --runtime zbv.")


def require_kept_activations(plan: RankPlan) -> None:
    """Refuse plans with recomputation, which PyTorch's runtime does not support."""
    if plan.cut.recomputed:
        raise InvalidRun(
            f"--runtime torch keeps the activations of all stages, but the plan recomputes stages "
            f"{', '.join(map(str, plan.cut.recomputed))}. Use --runtime zbv, or plan without recomputation."
        )
