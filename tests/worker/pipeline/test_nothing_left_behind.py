"""A pipeline that is closed, fails or is dropped leaves nothing behind in the process."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zbv_worker as zbv
from support.gradients import train_plainly
from support.processes import DEADLINE, wait_until
from torch import nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import World


def join() -> None:
    """Make a default process group, as the user may."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()
    assert "sends to" not in str(threading.enumerate())


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4), torch.ones(4, 2, dtype=dtype)


def require_plain(layers: nn.Sequential) -> None:
    """The modules have torch's classes, can be copied and saved, and accumulate into ``.grad``."""
    assert [type(layer) for layer in layers] == [nn.Embedding, nn.Linear, nn.Linear]
    assert vars(layers[1]).keys() == vars(nn.Linear(1, 1)).keys()
    torch.save(copy.deepcopy(layers), io.BytesIO())
    layers.zero_grad()
    train_plainly(layers, nnf.mse_loss, batch(layers.get_parameter("1.weight").dtype))
    for parameter in layers.parameters():
        assert parameter.grad is not None
        assert not vars(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_a_closed_pipeline_are_ordinary_modules(plan: Plan, dtype: torch.dtype) -> None:
    layers = model(dtype)
    with zbv.Pipeline(plan, layers, loss=nnf.mse_loss) as pipe:
        pipe.step(*batch(dtype))
    require_plain(layers)


def test_layers_of_a_failed_pipeline_are_ordinary_modules(plan: Plan) -> None:
    layers = model()
    pipe = zbv.Pipeline(plan, layers, loss=mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*batch())
    require_plain(layers)


def test_an_error_after_close_is_only_raised(plan: Plan) -> None:
    def closed(pipe: zbv.Pipeline) -> Exception:
        pipe.close()
        return ZeroDivisionError()

    with pytest.raises(ZeroDivisionError), zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
        raise closed(pipe)


def test_a_dropped_pipeline_is_freed(plan: Plan) -> None:
    """A cell of a notebook makes the same pipeline twice."""
    layers = model()
    pipe = zbv.Pipeline(plan, layers, loss=nnf.mse_loss)
    pipe.step(*batch())
    first = weakref.ref(pipe)
    pipe = zbv.Pipeline(plan, model(), loss=nnf.mse_loss)
    gc.collect()
    assert first() is None
    require_plain(layers)
    pipe.step(*batch())
    pipe.close()


def threads() -> int:
    """The threads of this process, those of torch included."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_threads_of_torch_end_with_the_pipeline(plan: Plan) -> None:
    """Not only when the garbage collector finds the pipeline."""
    with zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
        pipe.step(*batch())
        before = threads()
    wait_until(lambda: threads() < before, "torch's threads end")


@pytest.mark.usefixtures("no_collection")
def test_threads_of_torch_end_where_the_user_has_destroyed_all_groups_before() -> None:
    before = threads()
    join()
    transport = connect(World(0, 1, 0), "gloo", torch.device("cpu"), 60.0)
    dist.destroy_process_group()
    transport.close()
    wait_until(lambda: threads() == before, "torch's threads end")


@pytest.mark.usefixtures("no_collection")
def test_a_process_of_a_data_loader_outlives_the_garbage_of_a_pipeline(plan: Plan) -> None:
    with zbv.Pipeline(plan, model(), loss=nnf.mse_loss):
        garbage: list[Any] = [dist.group.WORLD]
        garbage.append(garbage)
    del garbage
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(timeout=DEADLINE)
    child.kill()
    assert child.exitcode == 0


def test_pipelines_close_in_any_order(plan: Plan) -> None:
    first, second = (zbv.Pipeline(plan, model(), loss=nnf.mse_loss) for _ in range(2))
    first.close()
    second.step(*batch())
    third = zbv.Pipeline(plan, model(), loss=nnf.mse_loss)
    second.close()
    third.step(*batch())
    assert third.clip_grad_norm_(1.0) > 0
    third.close()


def test_the_default_group_of_the_user_outlives_pipelines(plan: Plan) -> None:
    join()
    for _ in range(2):
        with zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
            pipe.step(*batch())
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
