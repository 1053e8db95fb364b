"""Whether a node can train: its devices, its environment, receives that wait, and one step of a pipeline.

``zbv-worker check`` prints the findings. Whatever uses a device runs in other processes with a time
limit, so that a kernel that hangs fails one check and not the command.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import identity
from zbv_solver.problem.stages import Placement
from zbv_solver.problem.writing import problem_json

from zbv_worker.host.inventory import driver_version, gpu_names, versions
from zbv_worker.host.local_ranks import LaunchError
from zbv_worker.host.process import Clock, HostClock
from zbv_worker.measure.ranks import answer, equal_stages, measure_on_ranks
from zbv_worker.model.checks import build_stage
from zbv_worker.model.layer_list import whole_name
from zbv_worker.models.gpt import gpt
from zbv_worker.pipeline.pipeline import Pipeline
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.connected import ControlPlane
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.nccl_operations import CHANNEL_OPTIONS
from zbv_worker.transport.torch_api import (
    CudaApi,
    NcclApi,
    NcclWork,
    TorchNccl,
    first_line,
    torch_cuda,
)
from zbv_worker.transport.world import Backend, World, select_device

Device = Literal["cuda", "cpu"]

KERNELS = 6
"""The most communication kernels that wait on a device at once: a middle rank of a V, with all sums
(:func:`zbv_worker.transport.nccl_operations.kernels_at_once`)."""

TOLERANCE = 1e-3
"""Relative error per parameter: a GPU sums in another order, in single precision."""

_PROCESS_SECONDS = 180.0
_WAIT_SECONDS = 60.0
_ARRIVAL_SECONDS = 15.0
_ABORT_SECONDS = 5.0
_POLL_SECONDS = 0.001
_SIDE = 512
_MICROBATCHES = 4
_STEPS = 3
_SIZES = {"width": 64, "heads": 4, "length": 64, "sequences": 2, "characters": 20_000}


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    verdict: Literal["pass", "fail", "not run"]
    text: str
    """What was found; if the check failed, also what to do."""


def check_node(device: Device, ranks: int | None = None) -> Iterator[Finding]:
    """Check this node; yields a finding as soon as it is known.

    Parameters
    ----------
    ranks
        The ranks of the pipeline; by default one per GPU, and at least 2. If there are more ranks than GPUs,
        they share them, and transfer over gloo.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    yield devices_finding(device, gpus)
    yield environment_finding(os.environ)
    if device == "cpu" or gpus < 2 or not dist.is_nccl_available():
        yield Finding("receives", "not run", "receives wait on a GPU only over NCCL, between two of them.")
    else:
        yield _measured("receives", {"device": device}, 2)
    if device == "cuda" and not gpus:
        yield Finding("step", "not run", "there is no GPU; --device cpu checks a pipeline without one.")
    else:
        ranks = ranks or max(2, gpus)
        backend = "nccl" if gpus >= ranks and dist.is_nccl_available() else "gloo"
        yield _measured("step", {"device": device, "backend": backend}, ranks)


def devices_finding(device: Device, gpus: int) -> Finding:
    """Which devices and versions the node has."""
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    if device == "cpu":
        return Finding("devices", "pass", f"only the CPU; {software}")
    if not gpus:
        text = f"found no CUDA GPU; {software}. Install the GPU's driver, and a torch that is built for CUDA."
        return Finding("devices", "fail", text)
    names = ", ".join(gpu_names() or [torch.cuda.get_device_name(index) for index in range(gpus)])
    nccl = TorchNccl().version() if dist.is_nccl_available() else "absent"
    return Finding(
        "devices",
        "pass",
        f"{names}; {software}, CUDA {torch.version.cuda}, driver {driver_version()}, NCCL {nccl}",
    )


def environment_finding(environment: Mapping[str, str]) -> Finding:
    """Which variables of CUDA and NCCL prevent a run, and which are doubtful."""
    if wrong := nccl_environment.refusals(environment):
        return Finding("variables", "fail", " ".join(wrong))
    applied = {**environment}
    doubts = nccl_environment.apply(applied)
    return Finding("variables", "pass", " ".join([nccl_environment.found(applied) + ".", *doubts]))


def _measured(name: str, request: Mapping[str, Any], ranks: int) -> Finding:
    """Run a check of this module in its own processes."""
    try:
        answers = measure_on_ranks([__name__], {"name": name, **request}, ranks, _PROCESS_SECONDS)
    except LaunchError as error:
        return Finding(name, "fail", f"{error}\nSee docs/nccl.md, and docs/without-a-gpu.md for more tests.")
    if name == "step":
        return step_finding(answers, request["backend"])
    wrong = [text for texts in answers for text in texts]
    fine = f"{KERNELS} receives that wait stop neither a new kernel nor each other, and can be aborted."
    return Finding(name, "fail" if wrong else "pass", " ".join(wrong) or fine)


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU, or a model of one."""

    cuda: CudaApi
    device: torch.device
    clock: Clock
    load_product: Callable[[], object]
    """Queues a product on the current stream whose kernel was not used before."""

    @classmethod
    def real(cls, device: torch.device) -> Gpu:
        """A GPU of this host."""

        def product() -> None:
            left = torch.ones(_SIDE, _SIDE, dtype=torch.complex128, device=device)
            torch.mm(left, left)

        return cls(torch_cuda(), device, HostClock(), product)

    def ends(self, is_done: Callable[[], bool]) -> bool:
        """Whether something ends in time."""
        deadline = self.clock.now() + _ARRIVAL_SECONDS
        while not is_done():
            if self.clock.now() > deadline:
                return False
            self.clock.pause(_POLL_SECONDS)
        return True

    def finish(self, work: NcclWork) -> None:
        """Wait on the host until an operation, and all work that is queued, has ended."""
        work.wait()
        done = self.cuda.Event(enable_timing=False)
        done.record(self.cuda.current_stream(self.device))
        done.synchronize()


def waiting_receives(api: NcclApi, control: ControlPlane, gpu: Gpu, timeout: float) -> list[str]:
    """Let receives of rank 1 wait: next to a kernel that is not loaded yet, several at once, aborted.

    Returns what is wrong on this rank, and what to do about it.
    """
    rank, wrong = control.rank, list[str]()
    made = (api.new_group([0, 1], timedelta(days=1), CHANNEL_OPTIONS, f"check {at}") for at in range(KERNELS))
    groups = [group for group in made if group is not None]
    buffers = [torch.full((_SIDE,), float(1 - rank), device=gpu.device) for _ in groups]
    for group in groups:  # a send connects another communicator than a sum; all ranks in one order
        greeting = torch.ones(1, device=gpu.device)
        gpu.finish(group.send(greeting, 1) if rank == 0 else group.receive(greeting, 0))
    works: list[NcclWork] = []
    if rank == 1:
        works = [group.receive(buffer, 0) for group, buffer in zip(groups, buffers, strict=True)]
        gpu.load_product()
        done = gpu.cuda.Event(enable_timing=False)
        done.record(gpu.cuda.current_stream(gpu.device))
        if not gpu.ends(done.query):
            wrong.append(
                f"a product whose kernel was not loaded did not end while {KERNELS} receives waited; set "
                f"CUDA_MODULE_LOADING=EAGER."
            )
    control.barrier(timeout)
    if rank == 0:  # only on the last group: the receives before it still wait
        works = [groups[-1].send(buffers[-1], 1)]
    elif not gpu.ends(works[-1].is_completed):
        wrong.append(
            f"the last of {KERNELS} receives did not arrive while those before it waited, so the device runs "
            f"fewer communication kernels at once; set CUDA_DEVICE_MAX_CONNECTIONS=32."
        )
    control.barrier(timeout)
    if rank == 0:
        works += [group.send(buffer, 1) for group, buffer in zip(groups[:-1], buffers[:-1], strict=True)]
    arrived = all(gpu.ends(work.is_completed) for work in works)
    for work in works if arrived else ():
        gpu.finish(work)
    if not arrived or any(set(buffer.tolist()) != {1.0} for buffer in buffers):
        wrong.append("a receive got no tensor or a wrong one; do not train over NCCL with these versions.")
    control.barrier(timeout)
    if rank == 1:  # nothing will ever arrive
        groups[0].receive(buffers[0], 0)
        groups[0].set_timeout(timedelta(seconds=_ABORT_SECONDS))
        try:
            groups[0].abort()
        except RuntimeError as error:
            wrong.append(
                f"abort() failed while a receive waited: {first_line(error)}. A rank could not leave after a "
                f"failure; report the versions of torch and NCCL."
            )
    return wrong


def trained_steps(
    world: World, device: torch.device, backend: Backend, plan: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Train a small pipeline; returns the relative errors of this rank's gradients, by name.

    Every rank also computes the gradients of the whole model, without a pipeline. An error that is no number
    is None. There are several steps, because in the first one tensors move through the host. Between steps
    the host does not wait.

    Parameters
    ----------
    plan
        A plan file's content, with any number of microbatches; by default all forwards, then all backwards.
    more
        Further arguments of the pipeline.
    """
    plan = plan or _plan(world.world_size)
    model = gpt(**_SIZES, layers=2 * world.world_size)
    data = [model.microbatch(0, index) for index in range(plan["problem"]["microbatches"])]
    more = {"device": device, "backend": backend, "timeout": _WAIT_SECONDS, **more}
    with Pipeline(plan, model, startup_timeout=_WAIT_SECONDS, **more) as pipe:
        for _ in range(_STEPS):
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(microbatches=data)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    module = build_stage(model, 0, 1, device)
    for input, target in data:
        loss = model.loss(module(input.to(device)), target.to(device)) / len(data)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    whole = {whole_name(name): parameter.grad for name, parameter in module.named_parameters()}
    return {
        "errors": {name: _error(found, whole[name]) for name, found in gradients.items()},
        "all": [*whole],
    }


def _error(found: Tensor | None, right: Tensor | None) -> float | None:
    if found is None or right is None:
        return None
    error = float((found - right).norm() / right.norm().clamp_min(1e-12))
    return error if math.isfinite(error) else None  # JSON has no infinity


def _plan(ranks: int) -> dict[str, Any]:
    """All forwards of a V, then all backwards, split: a plan that needs no planner on the node."""
    problem = equal_stages(Placement.of("v", ranks), _MICROBATCHES)
    microbatches = range(_MICROBATCHES)
    ranks_actions = []
    for stages in problem.placement.stages_of:
        forwards = [Action(stage, "F", index) for stage in sorted(stages) for index in microbatches]
        backwards = [(stage, index) for stage in sorted(stages, reverse=True) for index in microbatches]
        ranks_actions.append(forwards + [Action(stage, x, index) for stage, index in backwards for x in "IW"])
    orders = Orders.from_actions(ranks_actions)
    document, lists = problem_json(problem), orders.all_text()
    return {"problem": document, "ranks": lists, "plan_id": identity(document, lists)}


def step_finding(answers: list[Any], backend: str) -> Finding:
    """Judge the answers of :func:`trained_steps` by rank."""
    errors = {name: error for each in answers for name, error in each["errors"].items()}
    what = f"the gradients of {len(answers)} ranks over {backend}"
    if absent := sorted({*answers[0]["all"]} - {*errors}):
        return Finding("step", "fail", f"{what} lack {absent[0]} and {len(absent) - 1} others.")
    name, worst = max(
        ((name, math.inf if error is None else error) for name, error in errors.items()),
        key=lambda pair: pair[1],
    )
    text = f"{what} differ from those of one process by {worst:.1g}, at most {TOLERANCE:g}"
    if worst <= TOLERANCE:
        return Finding("step", "pass", f"{text}.")
    return Finding(
        "step",
        "fail",
        f"{text} is right; the worst is that of {name}. See docs/without-a-gpu.md for more tests.",
    )


def _measure(request: dict[str, Any], world: World) -> Any:
    """One rank of a check."""
    device = torch.device("cpu")
    if request["device"] == "cuda":
        # Also sets the variables of CUDA and NCCL. Ranks share GPUs if there are too few.
        device = select_device("nccl", world.local_rank % torch.cuda.device_count())
    if request["name"] == "step":
        return trained_steps(world, device, request["backend"])
    control = GlooControl(world, _WAIT_SECONDS)
    return waiting_receives(TorchNccl(), control, Gpu.real(device), _WAIT_SECONDS)


if __name__ == "__main__":
    answer(_measure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of a process must not wait for kernels that a check left behind
