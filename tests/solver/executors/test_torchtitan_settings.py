"""torchtitan's settings: written, read back, and refused."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_solver.errors import InvalidInput
from zbv_solver.executors.schedules import torch_schedule
from zbv_solver.executors.torchtitan_settings import module_names, parse_settings, write_settings


def test_modules_are_named_like_torchtitans() -> None:
    # _generate_llm_fqn_per_model_part(2, 3, input_weight=2, output_weight=2) of torchtitan's
    # distributed/pipeline_parallel.py: 7 effective layers, of which the first stage has 4.
    assert module_names(("Ett", "tL")) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]


@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.sampled_from(["1F1B", "Interleaved1F1B"]))
def test_settings_are_read_back(sizes: list[int], name: str) -> None:
    letters = ["t" * size for size in sizes]
    stages = ("E" + letters[0], *letters[1:3], letters[3] + "L")
    schedule = torch_schedule(name, 4 if name == "1F1B" else 2, 8)
    text = write_settings(stages, schedule, "all")
    assert parse_settings(text) == (stages, schedule)
    assert tomllib.loads(text)["activation_checkpoint"] == {"mode": "full"}


SETTINGS = write_settings(("Et", "tL"), torch_schedule("1F1B", 2, 4))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[parallelism]", "[parallelism", "not TOML"),
        ("[training]", "[other]", "/training: this key is required"),
        ("degree = 2", 'degree = "x"', "pipeline_parallel_degree"),
        ("degree = 2", "degree = 3", "divide evenly"),
        ("microbatch_size = 1", "microbatch_size = 3", "divide evenly"),
        ("1F1B", "2F2B", "found schedule '2F2B'"),
        ("1F1B", "ZBVZeroBubble", "ZBVZeroBubble needs 2 stages"),
        ("layers.1", "layers.2", "in this order"),
        ("tok_embeddings", "embed", "found module 'embed'"),
    ],
)
def test_wrong_settings_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_settings(SETTINGS.replace(old, new))


def test_stages_that_torchtitan_cannot_run_are_refused() -> None:
    schedule = torch_schedule("1F1B", 2, 4)
    with pytest.raises(InvalidInput, match="stage 1 is empty"):
        write_settings(("EttL", ""), schedule)
    with pytest.raises(InvalidInput, match="found module 'm'"):
        write_settings(("Ett", "mL"), schedule)
    with pytest.raises(InvalidInput, match="all stages alike"):
        write_settings(("Et", "tL"), schedule, "per-stage")
