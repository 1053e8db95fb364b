"""Exports that other programs read: read back, they are the plan; and settings of torchtitan."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cut_models import cut_problem
from support.orders import random_orders
from support.problems import differing_problems, problems, uniform
from support.titan_configuration import FULL, SELECTIVE, UNTOUCHED, VERSIONS, configured, rows_of
from torch.distributed.pipelining import schedules as torch_schedules
from zbv_solver.construct.baselines import order_of
from zbv_solver.export import FORMATS, export
from zbv_solver.export.torch_csv import batch_order, parse, renumbered
from zbv_solver.export.torchtitan import StepSizes, TitanSettings, module_names
from zbv_solver.problem.problem import Problem, Units, W
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import evaluate

NAMES = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
PARTS = ["embedding", "block.attention", "block.mlp", "head"]


def random_plan(problem: Problem, random: Random) -> zbv.Plan:
    problem = replace(problem, memory=replace(problem.memory, limit=None))
    return make_plan(problem, random_orders(problem, random), method="random")


def events_of(plan: zbv.Plan, phase: str) -> list[dict[str, Any]]:
    events = json.loads(export(plan, "chrome-trace"))["traceEvents"]
    return [event for event in events if event["ph"] == phase]


@given(
    problems(kinds=("v", "loop", "single"), loop_chunks=(2,)) | differing_problems(),
    st.randoms(use_true_random=True),
)
def test_every_format_for_programs_is_read_back(problem: Problem, random: Random) -> None:
    """PyTorch's formats number microbatches as the last stage runs them, which changes no time."""
    assume(problem.placement.chunks <= 2)  # torchtitan cannot describe more
    plan = random_plan(problem, random)
    timing, (same, renamed) = evaluate(plan.problem, plan.orders), renumbered(plan.problem, plan.orders)
    is_last = (renamed.stage == problem.n_stages - 1) & (renamed.letter == 0)
    assert renamed.microbatch[is_last].tolist() == list(range(problem.microbatches))
    assert np.array_equal(evaluate(same, renamed).end, timing.end)

    for form in ("torch-csv", "torch-comms-csv"):
        read = parse(export(plan, form))
        assert (read.orders, read.placement.rank_of) == (renamed, problem.placement.rank_of)
        assert (read.microbatches, read.orders.paired, read.renamed) == (problem.microbatches, None, 0)
        assert (read.communication is not None) == (form == "torch-comms-csv")
    assert [*csv.reader(io.StringIO(export(plan, "torch-csv")))] == renamed.all_text()
    settings, batch = export(plan, "torchtitan"), plan.orders.microbatch[is_last].tolist()
    assert rows_of(settings) == renamed.all_text()
    assert batch_order(plan) == (None if problem.is_equal or batch == sorted(batch) else batch)
    assert (f"#   {', '.join(map(str, batch))}\n" in settings) == (batch_order(plan) is not None)

    events = events_of(plan, "X")
    assert [event["name"] for event in events] == [*chain(*plan.orders.all_text())]
    assert [event["tid"] for event in events] == plan.orders.rank_index().tolist()
    assert [event["ts"] for event in events] == timing.start.tolist()
    assert [event["ts"] + event["dur"] for event in events] == pytest.approx(timing.end.tolist())
    for event in events:
        at = event["args"]
        assert f"{at['stage']}{at['letter']}{at['microbatch']}" == event["name"]
        assert at["chunk"] == problem.placement.chunk_of[at["stage"]]
        assert all(at[f"feature {one.name}"] == one.value[at["microbatch"]] for one in problem.features)
    held: dict[str, list[float]] = defaultdict(list)
    for event in events_of(plan, "C"):
        held[event["name"]].append(event["args"]["held"])
    for rank, values in enumerate(held.values()):
        assert max(values) == pytest.approx(plan.metrics.peak_memory[rank])
        assert (values[0], values[-1]) == pytest.approx((problem.memory.static[rank],) * 2, abs=1e-9)
    ranks = problem.pp_degree if max(plan.metrics.peak_memory) > 0 else 0
    assert list(held) == [f"memory rank {rank}" for rank in range(ranks)]


def test_trace_times_are_microseconds_and_threads_are_ranks() -> None:
    for unit, length in {"ns": 0.001, "us": 1, "ms": 1000, "s": 1e6, "ticks": 1, None: 1}.items():
        plan = random_plan(replace(uniform(2, 2), units=Units(time=unit)), Random(1))
        event = events_of(plan, "X")[0]
        assert (event["name"][:2], event["cat"], event["dur"]) == ("0F", "forward", pytest.approx(length))
    threads = [each for each in events_of(plan, "M") if each["name"] == "thread_name"]
    assert {each["tid"]: each["args"]["name"] for each in threads} == {0: "rank 0", 1: "rank 1"}


def test_formats_say_how_to_save_and_serve_them_and_others_are_refused() -> None:
    for name, form in FORMATS.items():
        assert (form.name, form.suffix[0], "/" in form.media_type) == (name, ".", True)
    with pytest.raises(zbv.InvalidInput, match=r"'pdf'.*torch-csv, .*chrome-trace, svg, html"):
        export(random_plan(uniform(1, 1), Random(1)), "pdf")


@given(problems(kinds=("v", "loop", "single"), loop_chunks=(2, 3)), st.randoms(use_true_random=True))
def test_the_settings_fit_the_plan(problem: Problem, random: Random) -> None:
    plan = random_plan(problem, random)
    if problem.placement.chunks == 3:  # torchtitan counts such stages by the names of their modules
        with pytest.raises(zbv.InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
            export(plan, "torchtitan")
        return
    text = export(plan, "torchtitan")
    config = configured(text, "newer")
    own, is_split = config.parallelism, bool((plan.orders.letter == W).any())
    assert config.compile.enable == (False if is_split else UNTOUCHED)
    assert config.activation_checkpoint == (None if is_split else UNTOUCHED)
    assert own.pipeline_parallel_degree == problem.pp_degree
    if problem.pp_degree == 1:
        assert own.pipeline_parallel_schedule_csv is None
        return
    assert Path(own.pipeline_parallel_schedule_csv).read_text() == export(plan, "torch-csv")
    assert own.num_pp_microbatches == problem.microbatches
    assert configured(text, "0.3.0").training.local_batch_size == problem.microbatches
    cut_by = torch_schedules.get_schedule_class(own.pipeline_parallel_schedule)
    assert (cut_by is torch_schedules.ScheduleZBVZeroBubble) == (problem.placement.kind == "v")
    assert issubclass(cut_by, torch_schedules.PipelineScheduleSingle) == (problem.placement.chunks == 1)


@pytest.mark.parametrize(
    ("names", "recomputed", "modules", "checkpoint", "note"),
    [
        (NAMES, (False,) * 4, (), None, ""),
        (NAMES, (True,) * 4, (), FULL, ""),
        (NAMES, (False, True, False, True), (), None, "# Planned to be recomputed: 1, 3."),
        (PARTS, (False,) * 4, (), None, '#   2: ["block.mlp"]'),
        # Of a block, torchtitan recomputes its own choice of operations. A whole one would take longer.
        (NAMES, (True,) * 2, ("op",), SELECTIVE, ""),
        (NAMES, (True,) * 2, ("mlp", "moe_act"), None,
         "# Planned to be recomputed: mlp, moe_act of the stages 0, 1."),
    ],
)  # fmt: skip
def test_what_torchtitan_lacks_is_listed(
    names: list[str], recomputed: tuple[bool, ...], modules: Any, checkpoint: str | None, note: str
) -> None:
    kind, stages = ("v", 4) if len(recomputed) == 4 else ("single", 2)
    problem: Any = cut_problem(names, (len(names) // stages,) * stages, recomputed, placement=kind)
    model = replace(problem.model.model, recompute_modules=modules)
    problem = replace(problem, model=replace(problem.model, model=model))
    orders = order_of("1f1b", problem.placement, 4) if stages == 2 else random_orders(problem, Random(1))
    text = export(make_plan(problem, orders, method="by hand"), "torchtitan")
    config = configured(text, "newer")
    cut = {4: ("Et", "tt", "tt", "tL"), 2: ("Ettt", "tttL")}[stages]
    assert config.parallelism.module_fqns_per_model_part == (module_names(cut) if names is NAMES else None)
    assert config.activation_checkpoint == checkpoint
    assert note in text.splitlines()
    assert ("checkpoint yourself" in text) == ("recomputed" in note)
    assert ("#   2: " in text) == (names is PARTS)


def test_modules_are_named_like_torchtitans() -> None:
    # _generate_llm_fqn_per_model_part(2, 3, input_weight=2, output_weight=2) of torchtitan's
    # distributed/pipeline_parallel.py: 7 effective layers, of which the first stage has 4.
    ends = ["tok_embeddings", "layers.0"]
    assert module_names(("Ett", "tL")) == [[*ends, "layers.1"], ["layers.2", "norm", "lm_head"]]
    first, last = module_names(("vvEt", "tL"))
    assert (first[0], first[-2:], last) == ("vision_encoder", ends, ["layers.1", "norm", "lm_head"])
    assert len(set(first)) == len(first), "a vision encoder is in the first stage once"


@pytest.mark.parametrize(
    ("recompute", "checkpoint"),
    [("none", None), ("all", FULL), ("selective", SELECTIVE), (None, UNTOUCHED), ("split", UNTOUCHED)],
)
@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_every_version_gets_its_own_units(ranks: int, experts: int, recompute: Any, checkpoint: Any) -> None:
    """Graphs need a single rank without experts. What is split is not recomputed."""
    sizes, is_piped = StepSizes(sequence=128, microbatch_size=2, total=24), ranks > 1
    is_split, recompute = recompute == "split", None if recompute == "split" else recompute
    keys = {"parallelism.expert_parallel_degree": experts} if experts > 1 else {}
    parts = None if is_split else module_names(("Ett", "tL"))
    text = TitanSettings(ranks, "1F1B", 4, parts, recompute, is_split, batch=sizes, keys=keys).text()
    older, newer = (configured(text, version) for version in VERSIONS)
    # Without a pipeline, a batch is a microbatch, and torchtitan accumulates gradients.
    assert older.training.local_batch_size == (8 if is_piped else 2)
    assert older.parallelism.pipeline_parallel_microbatch_size == (2 if is_piped else 1)
    assert (older.training.global_batch_size, older.training.seq_len) == (24, 128)
    assert newer.training.num_tokens_per_microbatch_per_dp_rank == 256
    assert (newer.training.num_tokens_per_train_step, newer.training.max_context_length) == (24 * 128, 128)
    assert newer.parallelism.num_pp_microbatches == (4 if is_piped else None)
    for config in (older, newer):
        own = config.parallelism
        assert (own.pipeline_parallel_degree, own.expert_parallel_degree or 1) == (ranks, experts)
        assert own.pipeline_parallel_schedule == ("1F1B" if is_piped else None)
        assert own.module_fqns_per_model_part == (parts if is_piped else None)
        assert config.training.disable_cuda_graphs == (True if is_piped or experts > 1 else None)
        assert config.activation_checkpoint == checkpoint
        assert config.compile.enable == (False if is_split else UNTOUCHED)


def test_what_torchtitan_cannot_run_is_refused() -> None:
    refused: dict[str, Callable[[], Any]] = {
        "stage 1 is empty": lambda: module_names(("EttL", "")),
        "module 'm' in stage 1": lambda: module_names(("Ett", "mL")),
        "all stages alike": TitanSettings(2, "1F1B", 4, recompute="per-stage").text,
        "refuses SelectiveAC": TitanSettings(2, "1F1B", 4, recompute="selective", is_split=True).text,
    }
    for rule, text in refused.items():
        with pytest.raises(zbv.InvalidInput, match=rule):
            text()
