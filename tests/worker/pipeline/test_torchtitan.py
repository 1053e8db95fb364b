"""A model spec of torchtitan runs a plan; torchtitan itself is checked by ``make torchtitan``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import titan
from support.cut_models import cut_problem
from support.plans import searched, unit_problem
from support.rank_files import found_by
from torch import Tensor
from zbv_worker.errors import InvalidRun
from zbv_worker.stage.split_backward import Queueing

from examples.torchtitan.hook import module_names, part_of, with_plan

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
            wanted: Any = expected[name].grad
            differences.append((parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max())
    return float(torch.stack(differences).max())


def trained(plan: Path, dtype: str, dims: titan.ParallelDims) -> dict[str, Any]:
    spec = with_plan(titan.ModelSpec(), plan, timeout=TIMEOUT, startup_timeout=TIMEOUT)
    arguments = titan.pipelining_arguments(dims, spec)
    arguments["training"] = titan.TrainingConfig(mixed_precision_param=dtype)
    trainer, replica = Trainer(spec, arguments), dist.get_rank() % 2
    evaluated = sum(trainer.run("eval", 0, 0))
    tokens = {"global_valid_tokens": torch.tensor(2 * 2 * MICROBATCHES * LENGTH)}
    how = {"loss_kwargs": tokens, "return_outputs": False}
    sums = [sum(trainer.run("step", replica, step, **how)) for step in range(2)]
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


def of_rank(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    dims = titan.ParallelDims(2, 4)
    found: dict[str, Any] = {
        name: trained(folder / plan, dtype, dims) for name, (plan, dtype) in CASES.items()
    }
    found["refused"] = refused(folder / "plan.json", dims)
    dist.barrier()
    return found


Seen = list[dict[str, Any]]
NAMES = ["tok_embeddings", *(f"layers.{at}" for at in range(titan.BLOCKS)), "norm", "lm_head"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What four ranks saw: two in each of two pipelines, whose stages are divided by ``fully_shard``."""
    folder = tmp_path_factory.mktemp("titan")
    problems = {
        "plan.json": unit_problem(2, 4),
        "layers.json": cut_problem(NAMES, (3, 1, 1, 2), (False, True, True, True)),
    }
    for name, problem in problems.items():
        searched(problem).save(folder / name)
    return found_by("worker.pipeline.test_torchtitan", 4, folder)


@pytest.mark.parametrize("case", ["float32", "recomputed"])
def test_gradients_and_losses_of_two_steps_are_those_of_one_process(seen: Seen, case: str) -> None:
    for rank in seen:
        assert rank[case]["apart"] < 1e-5
        assert max(rank[case]["loss"], default=0.0) < 1e-5
        assert rank[case]["evaluated"] < 1e-5
    assert [len(rank[case]["loss"]) for rank in seen] == [2, 2, 0, 0]


def test_a_plan_made_from_layers_cuts_the_model(seen: Seen) -> None:
    blocks = [{n[7] for n in rank["recomputed"]["names"] if n.startswith("layers.")} for rank in seen]
    assert blocks == [{"0", "1"}] * 2 + [{"2", "3"}] * 2


def test_parameters_in_half_precision_sum_their_gradients_in_float32(seen: Seen) -> None:
    assert max(rank["bfloat16"]["apart"] for rank in seen) < 0.05


def test_ranks_have_their_ends_of_the_v_and_only_their_parameters(seen: Seen) -> None:
    assert [rank["float32"]["has"] for rank in seen] == [[True, True]] * 2 + [[False, False]] * 2
    ends = seen[0]["float32"]["names"]
    assert "tok_embeddings.weight" in ends
    assert "lm_head.weight" in ends
    assert not set(ends) & set(seen[2]["float32"]["names"])
    everything = {name for name, _ in titan.Decoder().named_parameters()}
    assert set(ends) | set(seen[2]["float32"]["names"]) == everything


def test_subclasses_of_linear_are_split_also_if_fully_shard_was_applied_to_them(seen: Seen) -> None:
    assert set(seen[0]["float32"]["split"]) == {"Linear", "FSDPLinear"}


def test_configurations_that_do_not_fit_the_plan_are_refused_with_the_remedy(seen: Seen) -> None:
    for rank in seen:
        refused = rank["refused"]
        assert "found 3 microbatches per step; the plan has 4" in refused["microbatches"]
        assert "Set training.local_batch_size to 4" in refused["microbatches"]
        assert "Set parallelism.num_pp_microbatches to 4" in refused["newer microbatches"]
        assert "Set parallelism.pipeline_parallel_schedule to 'ZBVZeroBubble'" in refused["schedule"]
        assert "Set compile.components to ['loss']" in refused["compiled"]
        assert "module_fqns_per_model_part has 1 stages with the modules norm;" in refused["modules"]
        assert "is outside of fully_shard" in refused["not sharded"]
    assert "Set parallelism.pipeline_parallel_degree to 2" in seen[0]["refused"]["ranks"]


def test_a_part_has_only_its_modules_with_their_names() -> None:
    model = titan.Decoder()
    assert module_names(model) == NAMES
    part: Any = part_of(model, ["layers.2", "norm"])
    weights = {name.split(".weight")[0] for name, _ in part.named_parameters() if name.endswith("weight")}
    assert weights == {"layers.2.norm", "layers.2.up", "layers.2.down", "norm"}
    assert len(model.layers) == 4


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(InvalidRun, match="without a pipelining_fn"):
        with_plan(titan.ModelSpec(pipelining_fn=None), "plan.json")
    with pytest.raises(InvalidRun, match=r"found no plan; .* Pass a plan, its file, or its id"):
        with_plan(titan.ModelSpec(), None)
    with pytest.raises(InvalidRun, match="found a Linear with 0 ModuleDicts"):
        module_names(titan.Linear(2, 2))
    model: Any = titan.Decoder()
    model.vision_encoder = titan.Linear(2, 2)
    with pytest.raises(InvalidRun, match="and a vision encoder"):
        module_names(model)
