"""``zbv estimate``, ``zbv cut`` and ``zbv layout``: tables, documents, settings and plans of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import executor_layers
from zbv_solver.commands.cli import main
from zbv_solver.commands.messages import flag_of
from zbv_solver.commands.model_flags import SECTIONS, add_estimate_flags, flags
from zbv_solver.commands.parser import Parser

Run = Callable[..., tuple[str, Any]]
H100 = {"nodes": 1, "gpus_per_node": 2, "device": "h100"}
SHAPE = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "sequence": 128}
CONFIG = {
    "model": SHAPE,
    "parallel": {"pp_degree": 2, "microbatches": 4},
    "device": {"achieved_tflops": 100, "link_latency": 5, "memory_limit": 1e9, "reserved": 1000},
}
layer = partial(executor_layers.layer, held=2)
LAYERS = [layer("embedding", 1), layer("block", 2, repeat=6), layer("head", 3)]
MODEL = {"pp_degree": 2, "microbatches": 4, "layers": LAYERS}
GPT = {"model": {**SHAPE, "vocabulary": 1024, "sequence": 512}, "global_batch": 8}
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "vocab_size": 1024, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on ``model.json``; returns what it printed, and ``out.json`` or that as JSON."""
    monkeypatch.chdir(tmp_path)
    # On a busy machine, some searches would print progress.
    monkeypatch.setattr("zbv_solver.commands.messages.LINE_SECONDS", 1e9)
    Path("h100.json").write_text(json.dumps(H100))

    def command(text: str, model: dict[str, Any]) -> tuple[str, Any]:
        Path("model.json").write_text(json.dumps(model))
        assert main(text.split()) == 0
        out, err = capsys.readouterr()
        if "-o out.json" in text:
            assert err == ""
            return out, json.loads(Path("out.json").read_text())
        return out + err, json.loads(out) if out.startswith("{") else None

    return command


def check(plan: Any) -> Any:
    """Return the plan, which ``zbv check`` accepts."""
    Path("plan.json").write_text(json.dumps(plan))
    assert main(["check", "plan.json"]) == 0
    return plan


def test_a_configuration_becomes_layers_and_flags_replace_its_values(run: Run) -> None:
    problem = run("estimate --config model.json -o out.json", CONFIG)[1]
    assert [each["name"] for each in problem["layers"]] == ["embedding", "block", "head"]
    assert (problem["layers"][1]["repeat"], problem["layers"][1]["output_bytes"]) == (4, 2 * 128 * 512)
    assert (problem["costs"], problem["memory"]) == ({"p2p": 5}, {"static": 1000, "limit": 1_000_000_000})
    assert (problem["pp_degree"], problem["microbatches"], problem["placement"]) == (2, 4, "auto")
    assert problem["units"] == {"time": "us", "memory": "bytes"}
    given = "--layers 6 --link-bandwidth 2 --granularity half --placement loop --chunks 3 --no-bias \
--recompute none --objective makespan"
    problem = run(f"estimate --config model.json {given}", CONFIG)[1]
    assert len(problem["layers"]) == 2 + 2 * 6
    assert problem["costs"] == {"link": {"latency": 5, "bandwidth": 2000}}
    assert (problem["placement"], problem["chunks"], problem["objective"]) == ("loop", 3, "makespan")
    assert problem["layers"][1]["parameters_bytes"] == 2 * (4 * 512**2 + 2 * 512)
    assert not any("recompute" in layer for layer in problem["layers"])
    frozen = "--frozen embedding 0-1 --table -o out.json"
    table, problem = run(f"estimate --config model.json {frozen}", CONFIG)
    backward = [each["backward_input"] > 0 for each in problem["layers"]]
    assert backward == [False, False, False, True, True, True]
    assert " M train" in table
    published = "--preset h100 --pp-degree 4 --microbatches 8 --sequence-length 2048 --prediction-layers 0"
    layers = run(f"estimate --config model.json {published}", DEEPSEEK)[1]["layers"]
    assert [(each["name"], each["repeat"]) for each in layers[1:-1]] == [("dense", 1), ("moe", 3)]


def test_tables_go_to_the_stream_without_the_problem(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    table, problem = run("estimate --config model.json --table -o out.json", CONFIG)
    # 24 · 128 · 512² for the block's projections, and 4 · 128² · 512 / 2 for its scores
    assert "│ block     │      4 │     0.8 │" in table
    assert "0.0137 B parameters; 0.01" in table
    assert main(["estimate", "--config", "model.json", "--table"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (problem, table)
    halves = run("estimate --config model.json --table --granularity half -o out.json", CONFIG)[0]
    assert halves.count(".attention") == 3, "equal layers share a row in each table"
    assert "│ block.0.attention │      4 │" in halves
    assert "qwen3-32b " in run("estimate --list-presets", {})[0]


def test_none_undoes_every_value_that_may_be_absent(run: Run) -> None:
    """A word of a key keeps its meaning: --recompute none is no recomputation, and --no-qkv-bias is false.

    DeepSeek-V3 is trained in FP8; without that, its products have the type of activations.
    """
    parser = Parser()
    add_estimate_flags(parser)
    optional = {
        f"{section}.{key}": [flag_of(key), "none"]
        for section in SECTIONS
        for key, field in flags(section).items()
        if not field.is_required() and field.default is None and key != "qkv_bias"
    }
    given = vars(parser.parse_args([*chain(*optional.values())]))
    assert [key for key in optional if given[key] is not None] == ["parallel.recompute"]
    none, same, fp8 = (
        run(f"estimate --preset deepseek-v3 --product-dtype {dtype}", {})[1]["layers"][1]["memory"]
        for dtype in ("none", "bfloat16", "fp8")
    )
    assert none == same != fp8


def test_an_adapter_of_peft_stands_for_flags_which_replace_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [0, 1]}
    Path("adapter.json").write_text(json.dumps(adapter), encoding="utf-8")
    flags = "--lora-rank {} --target-modules q_proj --layers-to-transform 0 1"
    for command in (
        "estimate --config model.json --table",
        f"{LAYOUT} --data-parallel 2 --microbatch-size 1",
    ):
        model = CONFIG if command.startswith("estimate") else GPT
        for more, same in (("", flags.format(4)), ("--lora-rank 2", flags.format(2))):
            found, said = (
                run(f"{command} {given} -o out.json", model)[0]
                for given in (f"--adapter adapter.json {more}", same)
            )
            assert found == said
    Path("adapter.json").write_text(json.dumps({**adapter, "use_dora": True}), encoding="utf-8")
    assert main(["estimate", "--config", "model.json", "--adapter", "adapter.json"]) == 2
    assert "adapter.json: /use_dora: found true" in capsys.readouterr().err


MEGATRON = "cut model.json --effort quick --executor megatron"
GIVEN = f"{MEGATRON} --layout Et*5|tL"
AT_ONCE = f"{GIVEN} --time-limit 1e-9"
FOUR = f"{MEGATRON} --layout 1,2,1,2 --time-limit 1e-9"
ONE_STAGE = f"{MEGATRON} --no-free-order --virtual-stages 1"
TORCH = "cut model.json --executor torch --schedule 1F1B GPipe --no-free-order"
TITAN = "cut model.json --executor torchtitan"
EVEN = {"layers": [layer("block", 2, repeat=8)]}
VISION = {"layers": [layer("patches", 1), layer("vision", 1, repeat=3), layer("projector", 1), *LAYERS]}
FULL = {"layers": [executor_layers.layer("embedding", 1, held=10), LAYERS[1], layer("head", 1)]}
ENDS = {"cut": {"first": 3, "last": 3}}
THOROUGH = "cut model.json --executor megatron --no-free-order --effort thorough"
LATE = f"{THOROUGH} --time-limit 1e-9"


def test_the_best_cut_is_printed_and_is_a_plan(run: Run) -> None:
    out, plan = run(f"{MEGATRON} --json -o out.json", MODEL)
    found = json.loads(out)
    assert (found["status"], plan["partition"]) == ("optimal", found["partition"])
    assert found["lower_bound"] == found["objective"] <= found["even_cut"]
    assert "--pipeline-model-parallel-layout" in found["settings"]
    assert found["free_order"]["lower_bound"] <= found["free_order"]["objective"] <= found["objective"]
    late, whole = (json.loads(run(f"{flags} --json", MODEL)[0]) for flags in (LATE, THOROUGH))
    assert (late["status"], whole["status"]) == ("feasible", "optimal")
    assert late["lower_bound"] <= whole["objective"] < late["objective"]
    searched = [(each["searched"], each["objective"]) for each in late["schedules"]]
    assert searched == [(True, late["objective"]), *[(False, None)] * 6]
    assert check(plan)["metrics"]["span"] == found["objective"]


@pytest.mark.parametrize(
    ("changes", "command", "words", "absent"),
    [
        ({}, f"{TITAN} --virtual-stages 1 --no-free-order",
         'proved optimal for this schedule|\n        ["tok_embeddings", "layers.0"', "any order"),
        ({}, MEGATRON, "any order, placement", "inf"),
        ({}, LATE, "The search ended before 6 of 7 schedules were tried| – ", "inf"),
        ({**FULL, "memory": {"limit": 28}}, TORCH, "above the even cut, which ignores|none fits", "inf"),
        (EVEN, ONE_STAGE, "as long as the even cut", "0.0"),
        (VISION, ONE_STAGE, '--pipeline-model-parallel-layout "Ettt|tttL"', "inf"),
        (ENDS, f"{ONE_STAGE} 2", "interleaved-1F1B with 2 virtual stages has no cut: found 3 transf", "inf"),
        (ENDS, f"{ONE_STAGE} 2 --json", '"refused": [\n    {\n      "schedule": "interleaved-1F1B"', "inf"),
        ({"memory": {"limit": 18}}, AT_ONCE, "It does not fit the memory of rank 0.", "all ranks"),
        ({"memory": {"limit": 50}}, AT_ONCE, "It fits the memory of all ranks.", "not fit"),
        ({}, GIVEN, "Megatron-LM takes it.|Stage 0 is the bottleneck.|No cut under this schedule is|"
         "The best cut of all schedules (interleaved-1F1B", "not fit"),
        ({}, AT_ONCE, "The best cut under this schedule is", "of all schedules"),
        ({}, f"{MEGATRON} --layout Et*4|ttL", "It is proved that no cut under this schedule is", "gained"),
        # The schedule of a given cut is the executor's, unless flags fix it.
        ({}, FOUR, "under interleaved-1F1B, groups of 2", "inf"),
        ({}, f"{FOUR} --group-size 4", "under interleaved-1F1B, groups of 4", "inf"),
        ({}, f"{TITAN} --layout 1,2,1,2 --schedule ZBVZeroBubble", "under ZBVZeroBubble", "inf"),
    ],
)  # fmt: skip
def test_the_summary_says_what_matters(changes: Any, command: str, words: str, absent: str, run: Run) -> None:
    out, _ = run(command, MODEL | changes)
    assert all(word in out for word in words.split("|")) or words in out, out
    assert absent not in out


def test_a_given_cut_is_timed_and_compared(run: Run) -> None:
    out, plan = run(f"{GIVEN} --json -o out.json", MODEL)
    found = json.loads(out)
    assert (found["layout"], found["schedule"], found["fits"]) == ("Et*5|tL", "1F1B", True)
    assert found["lower_bound"] <= found["best_of_schedule"]["objective"] < found["objective"]
    assert found["best"]["gain"] >= found["best_of_schedule"]["gain"] > 0
    assert found["bottleneck"]["stage"] == found["bottleneck"]["rank"] == 0
    assert [rank["busy"] for rank in found["ranks"]] == [132, 60]
    assert all(rank["busy"] + rank["waiting"] == found["objective"] for rank in found["ranks"])
    assert [stage["modules"] for stage in found["stages"]] == ["Ettttt", "tL"]
    assert '"Et*5|tL"' in found["settings"]
    assert check(plan)["metrics"]["span"] == found["objective"]


LAYOUT = "layout model.json --cluster h100.json"


def test_layouts_are_listed_and_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out, found = run(f"{LAYOUT} --microbatch-size 1 --top 6 --time-limit 600 -o out.json", GPT)
    assert ("tp-cp-dp-pp" in out, "…" in out) == (True, False)
    assert "No layout has a step below" in " ".join(out.split())
    assert "The search ended" not in out, "the time limit suffices"
    steps = [each["step_time"] for each in found["layouts"]]
    assert (len(steps), steps) == (6, sorted(steps))
    assert found["considered"] >= found["pruned"] + 6
    best = found["layouts"][0]
    assert found["proof"]["no_layout_below"] <= best["lower_bound"] <= best["step_time"]
    check(best["plan"])
    peaks = [max(each["plan"]["metrics"]["peak_memory"]) for each in found["layouts"]]
    assert all(f" {peak / 1e9:.3g} GB" in out for peak in peaks)
    capsys.readouterr()
    assert main([*LAYOUT.split(), "--tensor-parallel", "2", "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert ("reserved by PyTorch" in err, len(json.loads(out)["layouts"])) == (True, 1)


def test_parts_of_the_step_and_changes_are_printed_and_a_full_search_is_not_worse(run: Run) -> None:
    out, found = run(f"{LAYOUT} --tensor-parallel 1 --sensitivity --points -o out.json", GPT)
    for words in ("the best step consists of", "backward weight", "memory x 0.9", "at most 4 pipelines are"):
        assert words in " ".join(out.split())
    assert sum(len(each["step_time"]) for each in found["points"].values()) == found["considered"]
    step = found["layouts"][0]["step_time"]
    assert found["sensitivity"]["step_time"] == step
    full = run(f"{LAYOUT} --tensor-parallel 1 --effort quick -o out.json", GPT)[1]
    assert full["layouts"][0]["step_time"] <= step
    # Of a single layout in hardly enough memory, none fits in less.
    fixed = "--data-parallel 2 --microbatch-size 4 --zero-stage 0 --recompute none"
    memory = 1.02 * run(f"{LAYOUT} {fixed} -o out.json", GPT)[1]["layouts"][0]["reserved_memory"]
    Path("tight.json").write_text(json.dumps({**H100, "memory": memory}))
    assert "none fits" in run(f"layout model.json --cluster tight.json {fixed} --sensitivity", GPT)[0]


def test_what_training_keeps_has_flags_and_a_given_cut_is_timed(run: Run) -> None:
    fixed = f"{LAYOUT} -o out.json --data-parallel 2 --microbatch-size 1 --zero-stage 0 --recompute none"
    memory = [
        run(f"{fixed} {more}", GPT)[1]["layouts"][0]["peak_memory"]
        for more in ("", "--precision mixed", "--optimizer sgd")
    ]
    assert memory[0] > max(memory[1:])
    flags = "--executor megatron --pipeline-parallel 2 --recompute selective --recompute-modules core_attn"
    assert "--recompute-modules core_attn" in run(f"{LAYOUT} {flags}", GPT)[0]
    flags = "-o out.json --global-batch 8 --sequence-length 512 --pipeline-parallel 2"
    whole, without = (
        json.dumps(run(f"{LAYOUT} {flags} {more}", DEEPSEEK)[1]["layouts"][0]["partition"])
        for more in ("", "--prediction-layers 0")
    )
    assert ("prediction" in whole, "prediction" in without) == (True, False)
    out, found = run(f"{LAYOUT} -o out.json --lora-rank 2 --target-modules mlp q_proj", GPT)
    trained = found["trained_parameters"] / 1e6, found["parameters"] / 1e6
    assert "{:.4g} M of {:.4g} M parameters train".format(*trained) in " ".join(out.split())
    flags = "--pipeline-parallel 2 --microbatch-size 1 --recompute none --executor megatron --cut 1,3"
    out, found = run(f"{LAYOUT} {flags} -o out.json", GPT)
    assert found["layout"] == "Et|tttL"
    peak, reserved = (found[name] / 1e9 for name in ("peak_memory", "reserved_memory"))
    assert f"tensors of {peak:.3g} GB" in " ".join(out.split())
    assert f"PyTorch reserves {reserved:.3g} GB of 80 GB" in " ".join(out.split())
    assert f"A step takes {found['step_time'] * 1e3:.4g} ms." in out
