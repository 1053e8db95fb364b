"""Layouts of Megatron-LM: the published ones, a parser by its own two patterns, and what it refuses."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executor_layers import PUBLISHED
from zbv_models.fixed_orders.megatron_layout import (
    check_layout,
    layout_flags,
    parse_layout,
    recompute_flags,
    write_layout,
)
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.layer import Layer, LayerCosts, Model

LAYOUTS = [each for each in PUBLISHED if each["format"] == "megatron"]


def by_patterns(text: str) -> list[str]:
    """``PipelineParallelLayerLayout.parse_str_to_list``: its two replacements, one after the other."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@pytest.mark.parametrize("published", LAYOUTS, ids=lambda each: each["id"])
def test_published_layouts(published: dict[str, Any]) -> None:
    stages = parse_layout(published["layout_string"])
    assert [stage.count("t") for stage in stages] == published["decoder_layers_per_stage"]
    assert list(stages) == by_patterns(published["layout_string"])
    mtp = [number for number, stage in enumerate(stages) if "m" in stage]
    assert mtp == [] if published["mtp_stage"] is None else mtp == [published["mtp_stage"]]
    ranks = published["pp"] or 13
    assert check_layout(stages, ranks) * ranks == len(stages)
    written = write_layout(stages)
    assert parse_layout(written) == stages
    assert len(written) <= len(published["layout_string"]) + 8


@given(st.lists(st.text("tmEL", max_size=9), min_size=1, max_size=12))
def test_written_layouts_are_read_back(stages: list[str]) -> None:
    text = write_layout(tuple(stages))
    assert list(parse_layout(text)) == stages == by_patterns(text)


@given(st.text("EtmL|,()*0123x", max_size=20))
def test_texts_mean_what_megatrons_patterns_say(text: str) -> None:
    expected = by_patterns(text)
    if set("".join(expected)) <= set("EtmL"):
        assert list(parse_layout(text)) == expected
    else:
        with pytest.raises(InvalidInput, match="layout"):
            parse_layout(text)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("Et|tL|", 2, "multiple of the 2 ranks"),
        ("t|tL", 2, "no single E"),
        ("Et|t", 2, "no single L"),
        ("Em|tL", 2, "behind an m"),
        ("Et|m|mL", 3, "several stages"),
        ("Et|t|m|L", 1, "last virtual stage"),
        ("Et|m|t|L", 2, "behind an m"),
        ("Et|tm||L", 2, "last virtual stage"),
    ],
)
def test_layouts_that_megatron_refuses(text: str, ranks: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_layout(parse_layout(text), ranks)


def test_wrong_characters_and_endless_layouts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="found 'x'"):
        parse_layout("Ex|L")
    with pytest.raises(InvalidInput, match="found '\\('"):
        parse_layout("E(t|L")
    with pytest.raises(InvalidInput, match="more than"):
        parse_layout("(t*99999)*99999")


def test_flags() -> None:
    # docs/user-guide/features/pipeline_parallel_layout.md of Megatron-LM.
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    flags = shlex.split(" ".join(layout_flags(stages, 16, 16)))
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given == {
        "--num-layers": "61",
        "--pipeline-model-parallel-size": "16",
        "--pipeline-model-parallel-layout": "Ettt|(tt|)*29m|L",
        "--mtp-num-layers": "1",
        "--microbatch-group-size-per-virtual-pipeline-stage": "16",
    }


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        (("none",), ""),
        (("all",), "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (("block", 3), "--recompute-granularity full --recompute-method block --recompute-num-layers 3"),
        (
            ("all", None, ("mlp", "layernorm")),
            "--recompute-granularity selective --recompute-modules mlp layernorm",
        ),
        (
            ("all", None, ("moe_act",)),
            "--moe-grouped-gemm --recompute-granularity selective --recompute-modules moe_act",
        ),
    ],
)
def test_flags_of_recomputation(asked: tuple[Any, ...], flags: str) -> None:
    # megatron/core/transformer/transformer_config.py, __post_init__: full needs a method and a number of
    # layers, selective neither, and moe_act needs grouped products.
    assert " ".join(recompute_flags(*asked)) == flags


def test_megatron_recomputes_all_stages_alike() -> None:
    with pytest.raises(InvalidInput, match="all stages alike"):
        recompute_flags("per-stage")


def model(*names: str) -> Model:
    return Model(tuple(Layer(name, LayerCosts(1.0, 1.0, 1.0)) for name in names))


def test_layers_become_modules() -> None:
    halves = ("block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp")
    modules = Modules.of(model("embedding", *halves, "mtp", "norm", "head"))
    assert modules.letters == ("E", "t", "", "t", "", "m", "", "L")
    assert modules.late == "mtp"
    assert modules.bounds(("Et", "t", "mL")) == (0, 3, 5, 8)
    assert modules.bounds(("Et", "t", "", "m", "L")) == (0, 3, 5, 5, 7, 8)
    with pytest.raises(InvalidInput, match=r"the model has EttmL"):
        modules.bounds(("Et", "mL"))


def test_models_without_embedding_and_head_get_them() -> None:
    modules = Modules.of(model("a", "b"))
    assert [modules.of_stage(0, 1), modules.of_stage(1, 2)] == ["Et", "tL"]
    assert modules.bounds(("Et", "tL")) == (0, 1, 2)
    assert modules.bounds(("E", "tt", "L")) == (0, 0, 2, 2)


def test_models_that_executors_do_not_have_are_refused() -> None:
    with pytest.raises(InvalidInput, match="found layers with the letters LtE"):
        Modules.of(model("head", "block", "embedding"))
    with pytest.raises(InvalidInput, match="found layers with the letters tvEt"):
        Modules.of(model("block.0", "vision", "embedding", "block.1"))


def test_a_vision_encoder_belongs_to_the_embedding() -> None:
    """Megatron-LM's layouts have no letter for it."""
    modules = Modules.of(model("patches", "vision.0", "vision.1", "projector", "embedding", "block", "head"))
    assert modules.of_stage(0, 6) == "vvvvEt"
    assert modules.bounds(("Et", "L")) == (0, 6, 7) == modules.bounds(("vvvvEt", "L"))
    assert write_layout(("vvvvEt", "L")) == "Et|L"
    assert check_layout(("vvvvEt", "L"), 2) == 1
    assert '"Et|L"' in layout_flags(("vvvvEt", "L"), 2, None)[2]
