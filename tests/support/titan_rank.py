"""A rank that does with a plan what torchtitan's trainer does, on the stand-ins of :mod:`support.titan`.

A program of :mod:`support.rank_files` for two ranks in each of two pipelines. The folder has the plans.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zbv_worker.errors import InvalidRun
from zbv_worker.stage.split_backward import Queueing

from examples.torchtitan.hook import with_plan
from support import titan

MICROBATCHES, LENGTH, TIMEOUT = 4, 6, 60.0
CASES = {
    "float32": ("plan.json", "float32"),
    "bfloat16": ("plan.json", "bfloat16"),
    "recomputed": ("layers.json", "float32"),
}
"""The plan, and the dtype in which the parameters compute."""


def microbatches(replica: int, step: int) -> list[tuple[Tensor, dict[str, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    found = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(titan.WORDS, (2, LENGTH + 1), generator=generator)
        found.append((tokens[:, :-1], {"positions": positions}, tokens[:, 1:]))
    return found


def alone() -> tuple[titan.Decoder, list[float], float]:
    """Two steps' gradients, added up, on the whole batch, with the replicas' losses; the evaluation's."""
    model = titan.Decoder()
    model.initialize()
    tokens = torch.tensor(2 * 2 * MICROBATCHES * LENGTH)
    losses = []
    for step in range(2):
        for replica in range(2):
            total = torch.stack(
                [titan.loss_fn(model(x, **k), y, tokens)[0] for x, k, y in microbatches(replica, step)]
            ).sum()
            total.backward()  # type: ignore[no-untyped-call]  # torch's own
            losses.append(float(total))
    with torch.no_grad():
        evaluated = sum(float(titan.loss_fn(model(x, **k), y)[0]) for x, k, y in microbatches(0, 0))
    return model, losses, evaluated


class Trainer:
    """The calls of torchtitan's trainer."""

    def __init__(self, spec: Any, arguments: dict[str, Any]):
        with torch.device("meta"):
            model = titan.Decoder()
        self.schedule, self.parts, self.has_first, self.has_last = spec.pipelining_fn(model, **arguments)
        for part in self.parts:
            part.to_empty(device="cpu")
            part.initialize()

    def run(self, method: str, replica: int, step: int, **more: Any) -> list[float]:
        data = microbatches(replica, step)
        losses: list[Tensor] = []
        getattr(self.schedule, method)(
            arg_mbs=[(x,) for x, _, _ in data] if self.has_first else None,
            kwarg_mbs=[keywords for _, keywords, _ in data],
            target_mbs=[y for _, _, y in data] if self.has_last else None,
            losses=losses if self.has_last else None,
            **more,
        )
        return [float(loss) for loss in losses]


def gradients_apart(parts: list[Any], reference: titan.Decoder) -> float:
    """The largest difference of a gradient, relative to the largest element of the reference's."""
    expected = dict(reference.named_parameters())
    differences = []
    for part in parts:
        for name, parameter in part.named_parameters():
            wanted = expected[name].grad
            assert wanted is not None
            differences.append((parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max())
    return float(torch.stack(differences).max())


def trained(plan: Path, dtype: str, dims: titan.ParallelDims) -> dict[str, Any]:
    spec = with_plan(titan.ModelSpec(), plan, timeout=TIMEOUT, startup_timeout=TIMEOUT)
    arguments = titan.pipelining_arguments(dims, spec)
    arguments["training"] = titan.TrainingConfig(mixed_precision_param=dtype)
    trainer, replica = Trainer(spec, arguments), dist.get_rank() % 2
    evaluated = sum(trainer.run("eval", 0, 0))
    tokens = {"global_valid_tokens": torch.tensor(2 * 2 * MICROBATCHES * LENGTH)}
    sums = [
        sum(trainer.run("step", replica, step, loss_kwargs=tokens, return_outputs=False)) for step in range(2)
    ]
    reference, losses, expected = alone()
    pairs = zip(sums, losses[replica::2], strict=True)
    modules = [module for part in trainer.parts for module in part.modules()]
    return {
        "has": [trainer.has_first, trainer.has_last],
        "names": [name for part in trainer.parts for name, _ in part.named_parameters()],
        "apart": gradients_apart(trainer.parts, reference),
        "loss": [abs(a - b) for a, b in pairs] if trainer.has_last else [],
        "evaluated": abs(evaluated - expected) / expected if trainer.has_last else 0.0,
        "split": sorted({type(module).__name__ for module in modules if isinstance(module, Queueing)}),
    }


def refused(plan: Path, dims: titan.ParallelDims) -> dict[str, str]:
    """What the trainer's constructor raises for configurations that do not fit the plan."""
    changes: dict[str, dict[str, Any]] = {
        "microbatches": {"training": titan.TrainingConfig(local_batch_size=3)},
        "newer microbatches": {"parallelism": titan.NewerParallelismConfig(num_pp_microbatches=3)},
        "schedule": {"parallelism": titan.ParallelismConfig(pipeline_parallel_schedule="1F1B")},
        "ranks": {"parallel_dims": titan.ParallelDims(4, 4)},
        "compiled": {"compile_config": titan.CompileConfig(enable=True)},
        "modules": {"parallelism": titan.ParallelismConfig(module_fqns_per_model_part=[["norm"]])},
    }
    spec = with_plan(titan.ModelSpec(), plan, timeout=TIMEOUT, startup_timeout=TIMEOUT)
    found = {}
    for name, change in changes.items():
        try:
            Trainer(spec, {**titan.pipelining_arguments(dims, spec), **change})
        except InvalidRun as error:
            found[name] = str(error)
    plain = replace(spec, parallelize_fn=lambda part, **_: part)
    try:
        Trainer(plain, titan.pipelining_arguments(dims, plain)).run("step", 0, 0)
    except InvalidRun as error:
        found["not sharded"] = str(error)
    return found


def found(folder: Path) -> dict[str, Any]:
    """What this rank saw, by case."""
    dist.init_process_group("gloo")
    dims = titan.ParallelDims(2, 4)
    found: dict[str, Any] = {
        name: trained(folder / plan, dtype, dims) for name, (plan, dtype) in CASES.items()
    }
    found["refused"] = refused(folder / "plan.json", dims)
    dist.barrier()
    return found
