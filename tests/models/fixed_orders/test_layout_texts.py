"""What executors run: cuts, of which every spelling stands for the same stages, and valid orders."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executor_layers import PUBLISHED
from support.problems import uniform_document
from zbv_models.fixed_orders import megatron_layout
from zbv_models.fixed_orders.executor_cut import dealt, even_cut
from zbv_models.fixed_orders.megatron_layout import check_layout, layout_flags, parse_layout, write_layout
from zbv_models.fixed_orders.schedules import (
    TORCH_SCHEDULES,
    megatron_groups,
    megatron_schedule,
    torch_schedule,
)
from zbv_models.fixed_orders.user_layout import read_layout
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.problem import LETTERS
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders


def modules_of(*names: str) -> Modules:
    return Modules.of(Model(tuple(Layer(name, LayerCosts(1.0, 1.0, 1.0)) for name in names)))


def model(blocks: int, mtp: int = 0, vision: int = 0) -> Modules:
    copies = ("vision",) * vision, ("embedding",), ("block",) * blocks, ("mtp",) * mtp, ("head",)
    numbered = [f"{name}.{at}" if len(of) > 1 else name for of in copies for at, name in enumerate(of)]
    return modules_of(*numbered)


def by_patterns(text: str) -> list[str]:
    """``PipelineParallelLayerLayout.parse_str_to_list``: its two replacements, one after the other."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each["id"])
def test_published_layouts_are_read_and_written(published: dict[str, Any]) -> None:
    text, counts = published["layout_string"], published["decoder_layers_per_stage"]
    is_megatron, ranks = published["format"] == "megatron", published["pp"] or 13
    modules = model(sum(counts), mtp=text.count("m") if is_megatron else 0)
    blocks = modules.model.blocks_before
    ends = [blocks[end] for end in read_layout(text, modules, ranks).bounds]
    assert [end - begin for begin, end in pairwise(ends)] == counts
    if is_megatron:
        stages = parse_layout(text)
        assert list(stages) == by_patterns(text)
        assert check_layout(stages, ranks) * ranks == len(stages)
        assert parse_layout(write_layout(stages)) == stages
        assert len(write_layout(stages)) <= len(text) + 8
        mtp = [number for number, stage in enumerate(stages) if "m" in stage]
        assert mtp == [number for number in [published["mtp_stage"]] if number is not None]


@given(st.lists(st.text("tmEL", max_size=9), min_size=1, max_size=12), st.text("EtmL|,()*0123x", max_size=20))
def test_texts_mean_what_megatrons_patterns_say(stages: list[str], text: str) -> None:
    written = write_layout(tuple(stages))
    assert list(parse_layout(written)) == stages == by_patterns(written)
    expected = by_patterns(text)
    if set("".join(expected)) <= set("EtmL"):
        assert list(parse_layout(text)) == expected
    else:
        with pytest.raises(InvalidInput, match="layout"):
            parse_layout(text)


@pytest.mark.parametrize(("text", "ranks", "message"), [
    ("Et|tL|", 2, "multiple of the 2 ranks"), ("t|tL", 2, "no single E"), ("Et|t", 2, "no single L"),
    ("Em|tL", 2, "behind an m"), ("Et|m|t|L", 2, "behind an m"), ("Et|m|mL", 3, "several stages"),
    ("Et|t|m|L", 1, "last virtual stage"), ("Et|tm||L", 2, "last virtual stage"),
    ("Ex|L", 2, "found 'x'"), ("E(t|L", 2, r"found '\('"), ("(t*99999)*99999", 2, "more than"),
])  # fmt: skip
def test_layouts_that_megatron_refuses(text: str, ranks: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_layout(parse_layout(text), ranks)


FULL, SELECTIVE = "--recompute-granularity full --recompute-method", "--recompute-granularity selective"


@pytest.mark.parametrize(("recompute", "flags"), [
    # megatron/core/transformer/transformer_config.py, __post_init__: full needs a method and a number of
    # layers, selective neither, and moe_act needs grouped products.
    (("none",), ""),
    (("all",), f"{FULL} uniform --recompute-num-layers 1"),
    (("block", 3), f"{FULL} block --recompute-num-layers 3"),
    (("all", None, ("mlp", "layernorm")), f"{SELECTIVE} --recompute-modules mlp layernorm"),
    (("all", None, ("moe_act",)), f"--moe-grouped-gemm {SELECTIVE} --recompute-modules moe_act"),
])  # fmt: skip
def test_flags_of_a_layout_and_of_recomputation(recompute: tuple[Any, ...], flags: str) -> None:
    assert " ".join(megatron_layout.recompute_flags(*recompute)) == flags
    # docs/user-guide/features/pipeline_parallel_layout.md of Megatron-LM.
    assert " ".join(layout_flags(parse_layout("Et*3|(tt|)*29,m|L"), 16, 16)) == (
        "--num-layers 61 --pipeline-model-parallel-size 16 "
        '--pipeline-model-parallel-layout "Ettt|(tt|)*29m|L" '
        "--mtp-num-layers 1 --microbatch-group-size-per-virtual-pipeline-stage 16"
    )
    with pytest.raises(InvalidInput, match="all stages alike"):
        megatron_layout.recompute_flags("per-stage")


def test_layers_become_modules() -> None:
    halves = ("block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp")
    modules = modules_of("embedding", *halves, "mtp", "norm", "head")
    assert (modules.letters, modules.late) == (("E", "t", "", "t", "", "m", "", "L"), "mtp")
    assert modules.bounds(("Et", "t", "", "m", "L")) == (0, 3, 5, 5, 7, 8)
    # Models without embedding and head get them.
    alone = modules_of("a", "b")
    assert [alone.of_stage(0, 1), alone.of_stage(1, 2)] == ["Et", "tL"]
    assert alone.bounds(("E", "tt", "L")) == (0, 0, 2, 2)
    # A vision encoder belongs to the embedding: Megatron-LM's layouts have no letter for it.
    seeing = modules_of("patches", "vision.0", "vision.1", "projector", "embedding", "block", "head")
    assert seeing.of_stage(0, 6) == "vvvvEt"
    assert seeing.bounds(("Et", "L")) == (0, 6, 7) == seeing.bounds(("vvvvEt", "L"))
    assert '"Et|L"' in layout_flags(("vvvvEt", "L"), 2, None)[2]
    assert read_layout("2,2", model(4, vision=3), 2).bounds == (0, 6, 9)
    # Transformer layers of counts go between the other modules.
    assert read_layout("2,2", model(4, mtp=1), 2) == read_layout("Ett|ttmL", model(4, mtp=1), 2)
    with pytest.raises(InvalidInput, match=r"the model has EttmL"):
        modules.bounds(("Et", "mL"))
    for wrong, letters in (("head block embedding", "LtE"), ("block.0 vision embedding", "tvE")):
        with pytest.raises(InvalidInput, match=f"found layers with the letters {letters}"):
            modules_of(*wrong.split())


LATER = [f"layers.{number}" for number in range(1, 8)]


@pytest.mark.parametrize(("text", "expected"), [
    ("Et*3|t*5L", "Ettt|t*5L"),
    *((text, "Ettt|t*5L") for text in ("3,5", "[3, 5]", "3 5")),
    ("1, 2x3, 1", "Et|(tt|)*3tL"),
    (json.dumps([["embedding", *["decoder"] * 2], [*["decoder"] * 6, "loss"]]), "Ett|t*6L"),
    (json.dumps([["tok_embeddings", "layers.0"], [*LATER, "norm", "lm_head"]]), "Et|t*7L"),
    (json.dumps([["tok_embeddings"], ["layers.0", *LATER, "norm", "output"]]), "E|t*8L"),
    (json.dumps([["embedding", "block.0"], [*(f"block.{k}" for k in range(1, 8)), "head"]]), "Et|t*7L"),
    ("--decoder-first-pipeline-num-layers 3", "Ettt|t*5L"),
    ("--decoder-last-pipeline-num-layers=2", "Et*6|ttL"),
    ("--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", "Et|ttt|t|tttL"),
    ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "Etttt|ttttL"),
    ("--num-layers-per-virtual-pipeline-stage 2", "Ett|(tt|)*2ttL"),
    ('--num-layers 8 \\\n--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*3|t*5L"',
     "Ettt|t*5L"),
    ("--parallelism.pipeline_parallel_first_stage_less_layers 2", "Etttt|ttttL"),
    ("--parallelism.pipeline_parallel_last_stage_less_layers 3", "Et*5|tttL"),
])  # fmt: skip
def test_every_spelling_is_known_by_its_form(text: str, expected: str) -> None:
    modules = model(8)
    stages = tuple(modules.of_stage(*ends) for ends in pairwise(read_layout(text, modules, 2).bounds))
    assert write_layout(stages) == expected


PLACED = "--pipeline-model-parallel-layout Et*4|t*4L"


@pytest.mark.parametrize(("text", "message"), [
    ("3,4", "found 7 transformer layers on 2 stages; the model has 8, so 1 would be lost"),
    ("4,5", "the model has 8, 1 fewer. Give numbers that add up to 8"),
    ("", "found nothing; give a layout"),
    ("-1,9", "numbers of layers must be at least 0"),
    ("Et*3|t*4L", r"found the modules Et\*7L; the model has Et\*8L"),
    ("[[", "is not JSON"),
    ("[3, [4]]", "found the stage 3"),
    ('[["tok_embeddings", "layers.1"], ["layers.0", "lm_head"]]', "in this order"),
    ('[["tok_embeddings", "layers.0"], ["norm"]]', "end with the head"),
    ('[["tok_embeddings", "rope"], ["lm_head"]]', "found the module 'rope'"),
    # Megatron-LM#2718 lost 24 of 48 layers like this.
    ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3", "3 would be lost"),
    ("--decoder-first-pipeline-num-layers 0", "found 0 layers"),
    ("--decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2", "divide evenly"),
    ("--decoder-first-pipeline-num-layers 3 --account-for-loss-in-pipeline-split", "does not take both"),
    ("--account-for-loss-in-pipeline-split", "found 9 layers"),
    ("--num-layers 9", "found --num-layers 9; the problem has 8"),
    ("--pipeline-model-parallel-size 4", "found --pipeline-model-parallel-size 4; the problem has 2"),
    (f"{PLACED} --num-layers 9", "found --num-layers 9"),
    (f"{PLACED} --mtp-num-layers 1", "found --mtp-num-layers 1; the problem has 0"),
    (f"{PLACED} --num-layers-per-virtual-pipeline-stage 2", "one of them"),
    (f"{PLACED} --account-for-loss-in-pipeline-split", "give one of them"),
    ("--decoder-first-pipeline-num-layers", "without a value"),
    ("--decoder-first-pipeline-num-layers many", "must be a whole number"),
    ("--tensor-model-parallel-size 2", "found '--tensor-model-parallel-size'; the flags of a layout are"),
    ("--parallelism.pipeline_parallel_first_stage_less_layers 12", "no weight may exceed"),
    ("--recompute-method uniform --recompute-num-layers 2", "found some flags of recomputation"),
    ("--recompute-granularity selective", "found --recompute-granularity 'selective'; must be full"),
    ("--recompute-method both", "must be uniform or block"),
])  # fmt: skip
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_layout(text, model(8), 2)


@pytest.mark.parametrize(("executor", "letters", "p", "chunks", "expected", "remarks"), [
    # Megatron-LM, get_num_layers_to_build: num_layers / pp / vpp, whatever the layers are.
    ("megatron", "E" + "t" * 8 + "L", 2, 2, [2, 2, 2, 2], []),
    ("megatron", "E" + "t" * 8 + "mL", 4, 1, [2, 2, 2, 2], []),
    ("megatron", "t" * 6, 3, 1, [2, 2, 2], []),
    # DeepSeek-V3's recipe: 15 stages of four, and one for the last.
    ("megatron", "E" + "t" * 61 + "L", 16, 1, [4] * 15 + [1], ["divide 61", "fewer on the last"]),
    # As with --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.
    ("megatron", "E" + "t" * 126 + "L", 16, 1, [7, *[8] * 14, 7], ["divide 126", "one less at both"]),
    # _generate_llm_fqn_per_model_part(p, blocks) of torchtitan b5bcd76c.
    ("torchtitan", "E" + "t" * 8 + "L", 2, 1, [4, 4], []),
    ("torchtitan", "E" + "t" * 6 + "L", 4, 1, [1, 2, 2, 1], []),
    ("torchtitan", "E" + "t" * 7 + "L", 4, 1, [2, 2, 2, 1], []),
    ("torchtitan", "E" + "t" * 32 + "L", 4, 1, [8, 9, 8, 7], []),
    ("torchtitan", "E" + "t" * 3 + "L", 1, 1, [3], []),
    # PyTorch has no rule, and layers that are no modules stay with the one before.
    ("torch", ["E", "t", "", "t", "", "t", "", "", "L"], 2, 1, [2, 1], []),
])  # fmt: skip
def test_even_cuts_of_executors(
    executor: str, letters: list[str], p: int, chunks: int, expected: list[int], remarks: list[str]
) -> None:
    is_megatron = executor == "megatron"
    schedule = megatron_schedule(p, 4 * p, chunks) if is_megatron else torch_schedule("1F1B", p, 4 * p)
    found = even_cut(executor, list(letters), schedule)
    assert [list(letters[begin:end]).count("t") for begin, end in pairwise(found.bounds)] == expected
    assert all(letter for letter in (letters[begin] for begin in found.bounds[:-1]))
    assert bool(found.remark) == bool(remarks)
    assert all(word in found.remark for word in remarks)


@pytest.mark.parametrize(("m", "group", "microbatches", "chunks"), [
    # megatron/core/model_parallel_config.py, microbatch_group_size_per_vp_stage: two examples. The second
    # has its chunks in forward_backward_pipelining_with_interleaving of schedules.py ("PP2 N3M5").
    (4, 2, [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]),
    (5, 3, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
])  # fmt: skip
def test_megatrons_examples(m: int, group: int, microbatches: list[int], chunks: list[int]) -> None:
    orders = megatron_schedule(2, m, 2, group).orders()
    for rank in (0, 1):
        part = orders.slice_of(rank)
        # Backwards use the same table with the chunks in reverse (get_model_chunk_id).
        for letter, expected in (("F", chunks), ("B", [1 - chunk for chunk in chunks])):
            own = orders.letter[part] == LETTERS.index(letter)
            assert orders.microbatch[part][own].tolist() == microbatches
            assert (orders.stage[part][own] // 2).tolist() == expected


def test_megatrons_warm_up() -> None:
    """get_pp_rank_microbatches: 2 (p - rank - 1) + (chunks - 1) group forwards, and that of 1F1B's first."""
    orders = megatron_schedule(4, 16, 3, 6).orders()
    for rank in range(4):
        letters = orders.letter[orders.slice_of(rank)].tolist()
        assert letters.index(LETTERS.index("B")) == 2 * (4 - rank - 1) + 2 * 6 + 1


@given(
    name=st.sampled_from(["megatron", *TORCH_SCHEDULES]), p=st.integers(1, 5), m=st.integers(1, 12),
    chunks=st.sampled_from([None, 1, 2, 3]), group=st.integers(1, 12),
)  # fmt: skip
def test_orders_are_valid_or_refused(name: str, p: int, m: int, chunks: int | None, group: int) -> None:
    is_offered = p > 1 and group in megatron_groups(p, m, chunks or 1)
    try:
        if name == "megatron":
            schedule = megatron_schedule(p, m, chunks or 1, group if chunks in (2, 3) else None)
        else:
            schedule = torch_schedule(name, p, m, chunks)
    except InvalidInput:
        assert name != "megatron" or not is_offered
        return
    assert name != "megatron" or chunks in (None, 1) or is_offered
    placement = schedule.placement
    loop = {"chunks": placement.chunks} if placement.kind == "loop" else {}
    document = uniform_document(placement.pp_degree, schedule.microbatches)
    problem = parse_problem(document | {"placement": placement.kind} | loop)
    verify_orders(problem, schedule.orders())
    assert evaluate(problem, schedule.orders()).span > 0


def test_unknown_names_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of GPipe"):
        torch_schedule("zbv", 2, 4)
    wrong = {(2, 4, 1, 2): "only several take", (1, 4, 2): "at least 2", (2, 5, 2, 2): "last group has 1"}
    for arguments, message in wrong.items():
        with pytest.raises(InvalidInput, match=message):
            megatron_schedule(*arguments)
    assert megatron_groups(2, 5, 2) == (3, 5)
    assert torch_schedule("interleaved1f1b", 2, 4).name == "Interleaved1F1B"


@pytest.mark.parametrize(("blocks", "stages", "expected"), [
    (32, 4, [8] * 4),
    (126, 32, [3, *[4] * 30, 3]),  # Llama 3.1 405B: embedding and head count as blocks
    (61, 16, [*[4] * 15, 1]),  # DeepSeek-V3 in Megatron-Bridge, whose last stage also predicts
    (2, 4, [0, 1, 1, 0]),
    (3, 4, [1, 1, 1, 0]),
])  # fmt: skip
def test_blocks_are_dealt_as_programs_do(blocks: int, stages: int, expected: list[int]) -> None:
    assert dealt(blocks, stages) == expected
