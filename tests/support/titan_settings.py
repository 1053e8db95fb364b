"""zbv's settings in the installed torchtitan, as part of ``make torchtitan``.

Each text goes through torchtitan's own ``ConfigManager``, and the model through the ``pipelining_fn`` of its
spec, on every rank of a pipeline without communication. The parts of all ranks must have every parameter of
the model once, and the schedule must have the planned order.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from zbv_models.estimate.states import StateBytes
from zbv_models.fixed_orders.executor_cut import cut_for_executor
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_models.layouts.executor_settings import layout_settings
from zbv_models.layouts.layout import Layout, Recompute
from zbv_solver.export import export
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.run import search

MODELS = {
    "llama3": "debugmodel",
    "deepseek_v3": "debugmodel",
    "qwen3": "debugmodel_moe",  # the smaller one has tied embeddings, which torchtitan does not pipeline
    "muse_glimmer": "debugmodel_mm",  # with a vision encoder
}
OF_TWO = ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (("1F1B", 4, 1), ("Interleaved1F1B", 2, 3), *((name, 2, 2) for name in OF_TWO))
MICROBATCHES = 8


def settings() -> Iterator[str]:
    """What torchtitan does other than planned."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name in MODELS:
            for each in SCHEDULES:
                yield from _of_cut(Path(folder), name, *each)
            yield from _of_plan(Path(folder), name)
        yield from _of_layout(Path(folder), "full", "FullAC")
        yield from _of_layout(Path(folder), "selective", "SelectiveAC")


def _problem(name: str, ranks: int) -> LayeredProblem:
    """Layers of unequal costs, so the cut is uneven."""
    blocks = len(_model(name).model.layers)
    vision = [_layer("vision", 1, repeat=2)] if name == "muse_glimmer" else []
    layers = [*vision, _layer("embedding", 2), _layer("block", 10, repeat=blocks), _layer("head", 17)]
    document = {"pp_degree": ranks, "microbatches": MICROBATCHES, "placement": "v", "layers": layers}
    problem = parse_any_problem({**document, "costs": {"link": {"latency": 1, "bandwidth": 1}}})
    assert isinstance(problem, LayeredProblem)
    return problem


def _layer(name: str, cost: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "forward": cost, "backward_input": cost, "backward_weight": cost, **more}


def _model(name: str) -> Any:
    return import_module(f"torchtitan.models.{name}").model_registry(MODELS[name])


def _of_cut(folder: Path, name: str, schedule: str, ranks: int, chunks: int) -> Iterator[str]:
    found = cut_for_executor(
        _problem(name, ranks),
        "torchtitan",
        schedules=[schedule],
        virtual_stages=[chunks],
        effort="quick",
        time_limit=2,
    )
    what = f"{name}, {schedule} on {ranks} ranks with {chunks} stages each"
    # torch's 1F1B has no list of actions before it runs.
    orders = found.best.orders if chunks > 1 else None
    yield from _differences(folder, what, name, found.settings or found.remark, ranks, orders)


def _of_plan(folder: Path, name: str) -> Iterator[str]:
    plan = search(_problem(name, 2))
    orders = relabelled(plan.orders, plan.problem.n_stages)
    yield from _differences(folder, f"{name}, a plan", name, export(plan, "torchtitan"), 2, orders)


def _of_layout(folder: Path, recompute: Recompute, policy: str) -> Iterator[str]:
    modules = ("op",) if recompute == "selective" else ()
    layout = Layout(2, 1, 2, 2, 2, 1, MICROBATCHES, 1, recompute, "tp-cp-dp-pp", recompute_modules=modules)
    training = SimpleNamespace(state=StateBytes())
    setting: Any = SimpleNamespace(model=SimpleNamespace(sequence=64), training=training)
    schedule = torch_schedule("1F1B", 2, MICROBATCHES)
    stages = "E" + "t" * 4, "ttL"
    text, remark = layout_settings("torchtitan", layout, setting, stages, schedule)
    config = _configuration(folder, "deepseek_v3", text or remark)
    own = config.parallelism
    degrees = own.data_parallel_shard_degree, own.tensor_parallel_degree, own.expert_parallel_degree
    if degrees != (2, 2, 2) or type(config.activation_checkpoint).__qualname__ != f"{policy}.Config":
        yield f"layout: found degrees {degrees} and {config.activation_checkpoint}"
    if hasattr(own, "num_pp_microbatches"):
        training = config.training
        found = own.num_pp_microbatches * training.num_tokens_per_microbatch_per_dp_rank * 2
        if (found, training.num_tokens_per_train_step) != (1024, 1024):
            yield f"layout: found {found} tokens of {training.num_tokens_per_train_step}"
    elif config.training.local_batch_size * 2 != config.training.global_batch_size:
        yield f"layout: found {config.training}"


def _configuration(folder: Path, name: str, text: str) -> Any:
    """What torchtitan makes of settings, with a model, as a user gives them."""
    from torchtitan.config import ConfigManager

    module = f"planned_{len(list(folder.glob('*.py')))}"
    (folder / f"{module}.py").write_text(
        f"{text}\n\nfrom torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        f"from torchtitan.models.{name} import model_registry\n\n\n"
        f"def run():\n    config = llama3_debugmodel()\n"
        f"    config.model_spec = model_registry({MODELS[name]!r})\n    return planned(config)\n"
    )
    config = ConfigManager().parse_args(["--module", module, "--config", "run"])
    config.model_spec.model.update_from_config(config=config)
    return config


def _differences(
    folder: Path, what: str, name: str, text: str, ranks: int, orders: Orders | None
) -> Iterator[str]:
    config = _configuration(folder, name, text)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    found: list[str] = []
    for rank in range(ranks):
        schedule, parts = _pipelined(config, model, rank, ranks)
        found += [key for part in parts for key, _ in part.named_parameters()]
        if schedule._n_microbatches != MICROBATCHES:
            yield f"{what}: rank {rank} has {schedule._n_microbatches} microbatches"
        if orders is not None and _actions(schedule, rank) != orders.text(rank):
            yield f"{what}: rank {rank} runs {_actions(schedule, rank)}; planned is {orders.text(rank)}"
    whole = [key for key, _ in model.named_parameters()]
    if sorted(found) != sorted(whole):
        yield f"{what}: the parts differ from the model by {sorted(set(found) ^ set(whole))}"


def _pipelined(config: Any, model: Any, rank: int, ranks: int) -> tuple[Any, Sequence[Any]]:
    """The schedule and the parts that torchtitan makes on a rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        schedule, parts, _, _ = config.model_spec.pipelining_fn(
            model,
            parallel_dims=SimpleNamespace(pp=ranks, get_mesh=lambda _: mesh),
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
            device=torch.device("cpu"),
            model_config=config.model_spec.model,
            parallelize_fn=lambda part, **_: part,
            loss_fn=lambda *_: None,
        )
        return schedule, parts
    finally:
        dist.destroy_process_group()


def _actions(schedule: Any, rank: int) -> list[str]:
    """The computations of a rank; overlapped ones one after the other."""
    rows = getattr(schedule, "pipeline_order", None) or schedule.pipeline_order_with_comms
    actions = [each for action in rows[rank] if action for each in action.sub_actions or (action,)]
    return [str(each) for each in actions if re.fullmatch(r"\d+[FBIW]\d+", str(each))]
