"""A cut as people write it: every spelling stands for the stages that the executor would build."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from support.executor_layers import PUBLISHED
from zbv_models.fixed_orders.megatron_layout import write_layout
from zbv_models.fixed_orders.user_layout import read_layout
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.layer import Layer, LayerCosts, Model

LATER = [f"layers.{number}" for number in range(1, 8)]


def model(blocks: int, mtp: int = 0, vision: int = 0) -> Modules:
    costs = LayerCosts(1.0, 1.0, 1.0)
    layers = [
        *([Layer("vision", costs, repeat=vision)] if vision else []),
        Layer("embedding", costs),
        Layer("block", costs, repeat=blocks),
        *([Layer("mtp", costs, repeat=mtp)] if mtp else []),
        Layer("head", costs),
    ]
    return Modules.of(Model(tuple(layers)))


def stages(text: str, modules: Modules, ranks: int, chunks: int | None = None) -> str:
    """What a text stands for, as a layout of Megatron-LM."""
    found = read_layout(text, modules, ranks, chunks)
    return write_layout(tuple(modules.of_stage(*ends) for ends in pairwise(found.bounds)))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each["id"])
def test_published_layouts_are_read(published: dict[str, Any]) -> None:
    text, counts = published["layout_string"], published["decoder_layers_per_stage"]
    modules = model(sum(counts), mtp=text.count("m") if published["format"] == "megatron" else 0)
    found = read_layout(text, modules, published["pp"] or 13)
    blocks = modules.model.blocks_before
    assert [blocks[end] - blocks[begin] for begin, end in pairwise(found.bounds)] == counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3|t*5L", "Ettt|t*5L"),
        ("3,5", "Ettt|t*5L"),
        ("[3, 5]", "Ettt|t*5L"),
        ("3 5", "Ettt|t*5L"),
        ("1, 2x3, 1", "Et|(tt|)*3tL"),
        ('[["embedding", "decoder", "decoder"], ["decoder", "decoder", "decoder", "decoder", "decoder", '
         '"decoder", "loss"]]', "Ett|t*6L"),
        (json.dumps([["tok_embeddings", "layers.0"], [*LATER, "norm", "lm_head"]]), "Et|t*7L"),
        (json.dumps([["tok_embeddings"], ["layers.0", *LATER, "norm", "output"]]), "E|t*8L"),
        (json.dumps([["embedding", "block.0"], [*(f"block.{k}" for k in range(1, 8)), "head"]]), "Et|t*7L"),
        ("--decoder-first-pipeline-num-layers 3", "Ettt|t*5L"),
        ("--decoder-last-pipeline-num-layers=2", "Et*6|ttL"),
        ("--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", "Et|ttt|t|tttL"),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "Etttt|ttttL"),
        ("--num-layers-per-virtual-pipeline-stage 2", "Ett|(tt|)*2ttL"),
        ("--num-layers 8 \\\n--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout \"Et*3|t*5L\"",
         "Ettt|t*5L"),
        ("--parallelism.pipeline_parallel_first_stage_less_layers 2", "Etttt|ttttL"),
        ("--parallelism.pipeline_parallel_last_stage_less_layers 3", "Et*5|tttL"),
    ],
)  # fmt: skip
def test_every_spelling_is_known_by_its_form(text: str, expected: str) -> None:
    assert stages(text, model(8), 2) == expected


def test_end_stages_have_the_other_modules() -> None:
    assert stages("2,2", model(4, mtp=1), 2) == "Ett|ttmL"
    modules = model(4, vision=3)
    found = read_layout("Ett|ttL", modules, 2)
    assert found.bounds == (0, 6, 9)
    assert found == read_layout("2,2", modules, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,4", "found 7 transformer layers on 2 stages; the model has 8, so 1 would be lost"),
        ("4,5", "the model has 8, 1 fewer. Give numbers that add up to 8"),
        ("", "found nothing; give a layout"),
        ("-1,9", "numbers of layers must be at least 0"),
        ("Et*3|t*4L", r"found the modules Et\*7L; the model has Et\*8L"),
        ("Et*3|x*5L", "found 'x'"),
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
        ("--mtp-num-layers 1", "found --mtp-num-layers 1; the problem has 0"),
        ("--pipeline-model-parallel-layout Et*4|t*4L --num-layers 9", "found --num-layers 9"),
        ("--pipeline-model-parallel-layout Et*4|t*4L --mtp-num-layers 1", "found --mtp-num-layers 1"),
        (
            "--pipeline-model-parallel-layout Et*4|t*4L --num-layers-per-virtual-pipeline-stage 2",
            "one of them",
        ),
        ("--decoder-first-pipeline-num-layers", "without a value"),
        ("--decoder-first-pipeline-num-layers many", "must be a whole number"),
        ("--tensor-model-parallel-size 2", "found '--tensor-model-parallel-size'; the flags of a layout are"),
        ("--pipeline-model-parallel-layout Et|tL --account-for-loss-in-pipeline-split", "give one of them"),
        ("--parallelism.pipeline_parallel_first_stage_less_layers 12", "no weight may exceed"),
        ("--recompute-method uniform --recompute-num-layers 2", "found some flags of recomputation"),
        ("--recompute-num-layers 2", "found some flags of recomputation"),
        ("--recompute-granularity selective", "found --recompute-granularity 'selective'; must be full"),
        ("--recompute-method both", "must be uniform or block"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_layout(text, model(8), 2)
