"""Pipelines have the gradients of one process, over gloo and over NCCL, alone and as replicas."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gradients import relative_error
from support.on_devices import Devices, Here, host_waits
from support.plans import plan_document, unit_problem
from support.selfcheck import HardModel, random_orders
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zbv_worker import Pipeline
from zbv_worker.check import step_finding, trained_steps

MICROBATCHES, REPLICAS, TIMEOUT = 5, 2, 60.0
ADVICE = (
    "Compare with the same test in tests/worker, which runs on a CPU. If only this one fails, look at "
    "tests/gpu/test_streams.py and tests/gpu/test_communicators.py first; see docs/nccl.md."
)


def plan(ranks: int, seed: int) -> dict[str, Any]:
    """A plan of a V in a random order that can be executed, with split and fused backwards."""
    problem = unit_problem(ranks, MICROBATCHES)
    return plan_document(problem, random_orders(problem, Random(seed), 0.3))


def gpt_steps(here: Here, seed: int, *, is_compiled: bool) -> dict[str, Any]:
    orders = plan(here.world.world_size, seed)
    return trained_steps(here.world, here.device, here.backend, orders, compile=is_compiled)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_pipeline_has_the_gradients_of_one_process(devices: Devices, seed: int) -> None:
    """Transfers neither overtake kernels nor each other, in any order of actions."""
    answers = devices.run(gpt_steps, devices.ranks, seed=seed, is_compiled=False)
    finding = step_finding(answers, devices.backend)
    assert finding.verdict == "pass", f"{finding.text} {ADVICE}"


def test_compiled_layers_have_the_gradients_of_others(devices: Devices) -> None:
    """F, I and W of layers that torch.compile has compiled for this device."""
    answers = devices.run(gpt_steps, devices.ranks, seed=1, is_compiled=True)
    finding = step_finding(answers, devices.backend)
    assert finding.verdict == "pass", f"{finding.text} Train without --compile. {ADVICE}"


def waits_of_a_step(here: Here) -> list[str]:
    model, document = HardModel(), plan(here.world.world_size, 1)
    data = [model.microbatch(0, index) for index in range(MICROBATCHES)]
    with Pipeline(
        document, model, device=here.device, backend=here.backend, timeout=TIMEOUT, startup_timeout=TIMEOUT
    ) as pipe:
        for _ in range(3):
            pipe.step(microbatches=data)
        return host_waits(lambda: pipe.step(microbatches=data)) if here.is_gpu else []


def test_no_call_in_a_step_makes_the_host_wait_for_the_device(devices: Devices) -> None:
    """The host queues the next step while the device computes this one."""
    waits = [text for texts in devices.run(waits_of_a_step, devices.ranks) for text in texts]
    assert not waits, "steps have gaps; find the line that torch names, in the layers or in the worker"


class Sharded(HardModel):
    """Layers whose replicas divide their parameters, if there is a mesh."""

    def __init__(self, mesh: Any):
        super().__init__()
        self._mesh = mesh

    def build_layers(self, names: Any, device: torch.device) -> nn.Sequential:
        layers = super().build_layers(names, device)
        for layer in layers if self._mesh is not None else ():
            fully_shard(layer, mesh=self._mesh)
        return layers


def replica_steps(here: Here, *, is_sharded: bool) -> dict[str, Any]:
    dist.init_process_group("gloo" if here.backend == "gloo" else "cpu:gloo,cuda:nccl")
    ranks = here.world.world_size // REPLICAS
    of_mesh = "cuda" if here.backend == "nccl" else "cpu"
    mesh = init_device_mesh(of_mesh, (ranks, REPLICAS), mesh_dim_names=("pp", "dp"))
    model = Sharded(mesh["dp"] if is_sharded else None)
    data = [model.microbatch(0, index) for index in range(REPLICAS * MICROBATCHES)]
    first = MICROBATCHES * mesh.get_local_rank("dp")
    with Pipeline(
        plan(ranks, 1),
        model,
        mesh=mesh,
        device=here.device,
        backend=here.backend,
        timeout=TIMEOUT,
        startup_timeout=TIMEOUT,
    ) as pipe:
        for _ in range(2):  # the second gathers and sums in memory that the first has used
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(microbatches=data[first : first + MICROBATCHES])
        gradients = {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
    module = HardModel().build_layers(model.layer_names(), here.device)
    losses = [model.loss(module(x.to(here.device)), y.to(here.device)) for x, y in data]
    torch.autograd.backward(torch.stack(losses).mean())
    right = {name.replace("/", "."): p.grad for name, p in module.named_parameters() if p.grad is not None}
    errors = {name: relative_error({"": found}, {"": right[name]}) for name, found in gradients.items()}
    return {"errors": errors, "all": [*right]}


def whole(gradient: Tensor) -> Tensor:
    """All of a gradient, of which this rank may have a part. Collective."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("is_sharded", [False, True])
def test_replicas_have_the_mean_gradients_of_one_process(devices: Devices, *, is_sharded: bool) -> None:
    """Sums and gathers run while other stages compute; gathered parameters are freed within the step."""
    if is_sharded and (devices.device, devices.backend) == ("cuda", "gloo"):
        pytest.skip("fully_shard sums on GPUs over NCCL only")
    ranks = 2 * REPLICAS if devices.backend == "gloo" else devices.ranks // REPLICAS * REPLICAS
    answers = devices.run(replica_steps, ranks, is_sharded=is_sharded)
    finding = step_finding(answers, devices.backend)
    assert finding.verdict == "pass", f"{finding.text} {ADVICE}"
