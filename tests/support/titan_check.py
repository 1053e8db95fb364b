"""Checks torchtitan with zbv: ``make torchtitan``. It is not part of the test suite.

``python -m support.titan_check``, with the repository's root and ``tests`` on the PYTHONPATH:

1. What zbv uses of torchtitan is there, as the stand-ins of the test suite say (``tests/support/titan.py``).
2. torchtitan makes of zbv's settings what was planned (``tests/support/titan_settings.py``).
3. Blocks save what zbv counts (``tests/support/titan_operations.py``).
4. Losses and gradients of ``examples/torchtitan/train.py`` are those of one process, with 2 ranks, and with 2
   data-parallel ranks per stage.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

# Before other parts of torchtitan: it replaces some of their names.
import examples.torchtitan.train as example
from support import titan
from support.titan_operations import operations
from support.titan_settings import settings

STEPS, TIMEOUT, TOLERANCE = 2, 900, 1e-5


def main() -> int:
    failures = [*interface(), *settings(), *operations()]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            failures += training(ranks, Path(folder))
    for failure in failures:
        _say(f"FAILED: {failure}")
    _say("torchtitan runs plans" if not failures else f"{len(failures)} checks failed")
    return 1 if failures else 0


def interface() -> Iterator[str]:
    """Differences between torchtitan and what zbv expects of it."""
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    from examples.torchtitan.schedule import PlanSchedule

    is_newer = "num_pp_microbatches" in ParallelismConfig.__dataclass_fields__
    pairs: list[tuple[Any, Any]] = [
        (titan.NewerParallelismConfig if is_newer else titan.ParallelismConfig, ParallelismConfig),
        (titan.TrainingConfig, TrainingConfig),
        (titan.CompileConfig, CompileConfig),
        (titan.ModelSpec, ModelSpec),
    ]
    for ours, theirs in pairs:
        absent = {"local_batch_size"} if is_newer else set()
        for name in sorted(set(ours.__dataclass_fields__) - set(theirs.__dataclass_fields__) - absent):
            yield f"{theirs.__name__} has no {name}"
    for name in ("pp", "world_size"):
        if name not in ParallelDims.__dataclass_fields__:
            yield f"ParallelDims has no {name}"
    given = re.findall(r'"(\w+)":', inspect.getsource(titan.pipelining_arguments))
    for what, function, expected in (
        ("pipelining_fn", pipeline_llm, {"model", *given}),
        ("parallelize_fn", parallelize_llama, set(inspect.signature(titan.parallelize).parameters)),
    ):
        found = set(inspect.signature(function).parameters)
        if found != expected:
            yield f"{what} takes {sorted(found)}; zbv expects {sorted(expected)}"
    for method, source in (
        ("step", inspect.getsource(Trainer.pp_forward_backward_step)),
        ("eval", inspect.getsource(Validator.validate)),
    ):
        call = re.search(rf"pp_schedule\.{method}\((.*?)\n +\)", source, re.DOTALL)
        passed = set(re.findall(r"(\w+)=", call[1])) if call else {"nothing"}
        unknown = passed - set(inspect.signature(getattr(PlanSchedule, method)).parameters)
        if unknown:
            yield f"torchtitan passes {sorted(unknown)} to {method}"


def training(ranks: int, folder: Path) -> Iterator[str]:
    """Differences between ranks with the plan and one process without."""
    replicas = ranks // 2
    for count in (1, ranks):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "REPLICAS": str(replicas)}
        log = folder / f"{ranks}-{count}.log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, *launcher, "-m", "support.titan_check", str(folder / f"{ranks}-{count}")],
                env=environment,
                stdout=output,
                stderr=output,
                timeout=TIMEOUT,
            )
        if done.returncode:
            yield f"{count} processes ended with status {done.returncode}:\n{log.read_text()[-3000:]}"
            return
    (alone,) = (torch.load(path) for path in folder.glob(f"{ranks}-1.rank*"))
    seen: set[str] = set()
    worst = 0.0
    for path in sorted(folder.glob(f"{ranks}-{ranks}.rank*")):
        found = torch.load(path)
        for name, gradient in found["gradients"].items():
            expected = alone["gradients"][name]
            seen.add(name)
            worst = max(worst, float((gradient - expected).abs().max() / expected.abs().max()))
        if found["losses"][0] >= 0:  # torchtitan has -1 on ranks without the loss
            apart = max(abs(a / b - 1) for a, b in zip(found["losses"], alone["losses"], strict=True))
            _say(f"{ranks} ranks: losses differ by at most {apart:.1e}, relative")
            if not apart < TOLERANCE:
                yield f"{ranks} ranks: the losses are {found['losses']}, and {alone['losses']} in one process"
    _say(f"{ranks} ranks: gradients of the first step differ by at most {worst:.1e}, relative")
    if not worst < TOLERANCE:
        yield f"{ranks} ranks: gradients differ by {worst:.1e}"
    if seen != set(alone["gradients"]):
        yield f"{ranks} ranks: no gradient of {sorted(set(alone['gradients']) - seen)}"


def rank(path: str) -> None:
    """Train; writes the first step's gradients, before clipping, and all losses."""
    is_alone = os.environ["WORLD_SIZE"] == "1"
    config = example.configuration(None if is_alone else example.PLAN)
    config.training.steps, config.training.mixed_precision_param = STEPS, "float32"
    config.training.max_norm = 1e9
    if is_alone:
        # The sequences of all data-parallel ranks, with accumulated gradients.
        total, training = example.MICROBATCHES * int(os.environ["REPLICAS"]), config.training
        if hasattr(training, "num_tokens_per_train_step"):
            training.num_tokens_per_train_step = total * example.LENGTH
        else:
            training.local_batch_size, training.global_batch_size = 1, total
    trainer = config.build()
    for name, parameter in parameters(trainer):  # torchtitan draws others for every stage
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = 0.05 * torch.randn(parameter.shape, generator=generator) + ("norm" in name)
        with torch.no_grad():
            parameter.copy_(
                distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else whole
            )
    gradients: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    step, log = trainer.optimizers.step, trainer.metrics_processor.log

    def stepping(*arguments: Any, **keywords: Any) -> None:
        for name, parameter in parameters(trainer) if not gradients else ():
            gradient = parameter.grad
            gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        step(*arguments, **keywords)

    def logging(number: int, loss: float, *arguments: Any, **keywords: Any) -> None:
        losses.append(loss)
        log(number, loss, *arguments, **keywords)

    trainer.optimizers.step, trainer.metrics_processor.log = stepping, logging
    trainer.train()
    torch.save({"gradients": gradients, "losses": losses}, f"{path}.rank{os.environ['RANK']}")
    trainer.close()
    torch.distributed.destroy_process_group()


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - output of a command


def parameters(trainer: Any) -> Iterator[tuple[str, Any]]:
    for part in trainer.model_parts:
        yield from part.named_parameters()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(sys.argv[1])
    else:
        sys.exit(main())
