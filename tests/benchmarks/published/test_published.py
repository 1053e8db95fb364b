"""Predicted against measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.errors import InvalidInput

from benchmarks.cli import main
from benchmarks.published.judge import Judged, Throughput, findings, of_layouts, of_runs, spearman
from benchmarks.published.predict import Prediction, predict, published_step
from benchmarks.published.runs import MeasuredRun, load_runs, parse_runs

PUBLISHED = {run.id: run for run in load_runs()}
OWN: dict[str, Any] = {
    "id": "own",
    "source": "a test",
    "system": "own",
    "name": "small",
    "model": "gpt-1.5b",
    "device": "a100",
    "devices": 4,
    "sequence": 1024,
    "microbatch_size": 1,
    "global_batch": 8,
    "pipeline_parallel": 4,
}


def own(**changes: Any) -> MeasuredRun:
    (run,) = parse_runs({"runs": [{**OWN, **changes}]})
    return run


def test_every_published_run_has_a_source_and_a_result() -> None:
    assert len(PUBLISHED) > 450
    for run in PUBLISHED.values():
        assert run.source
        assert run.out_of_memory or run.memory_gb or published_step(run)


def test_a_run_of_the_zero_bubble_paper_is_near() -> None:
    run = PUBLISHED["zb-iclr-6.2B-1F1B-m64"]
    found = predict(run)
    assert found.step_time == pytest.approx(run.step_time_s, rel=0.1)
    assert found.memory == pytest.approx(39e9, rel=0.05)
    assert not found.is_too_large


@pytest.mark.parametrize(
    "name",
    [
        "mbridge-26.08-pretrain-DeepSeek-V4-Flash-GB200-128-MXFP8-tp1pp1vpNonecp1ep64-gbs2048",
        "mbridge-26.06.01-pretrain-Nemotron-3-Super-GB300-64-MXFP8-tp1pp1vpNonecp1ep64-gbs512",
        "mbridge-card-nemotron3super-64h100-mock",
    ],
)
def test_runs_with_compressed_attention_state_spaces_and_latent_experts_are_near(name: str) -> None:
    run = PUBLISHED[name]
    found = predict(run)
    assert found.step_time == pytest.approx(run.step_time_s, rel=0.1)
    if run.memory_gb is not None:
        assert found.memory == pytest.approx(run.memory_gb * 1e9, rel=0.05)


def test_what_a_run_says_changes_the_prediction_in_the_right_direction() -> None:
    plain = predict(own())
    assert predict(own(hides=["pipeline"])).step_time < plain.step_time
    between_nodes = predict(own(devices_per_node=1))
    assert between_nodes.step_time > plain.step_time
    slow = {"devices_per_node": 1, "network_gbit_s": 1.0}
    assert predict(own(**slow)).step_time > between_nodes.step_time
    in_turn = predict(own(**slow, transfers_in_turn=True)).step_time
    assert in_turn > predict(own(**slow)).step_time
    recomputed = predict(own(recompute="full"))
    assert recomputed.step_time > plain.step_time
    assert recomputed.memory < plain.memory
    assert predict(own(states={"gradients": 6.0})).memory > plain.memory
    apart = predict(own(fused_gradients=False))
    assert apart.step_time > plain.step_time
    assert predict(own(blocking_launches=True)).step_time > plain.step_time
    replicas = own(devices=16, device={"presets": ["a100"], "data_parallel_bandwidth": 1.0})
    shared = predict(replicas).step_time
    hidden = [
        predict(replicas.model_copy(update={"hides": (group,)})).step_time for group in ("data", "gradients")
    ]
    assert hidden[0] < hidden[1] < shared
    assert predict(own(memory_kind="device")).memory > plain.memory
    assert predict(own(memory_rank=-1)).memory < plain.memory
    assert predict(own(microbatch_size=32, global_batch=256)).is_too_large


def test_every_rank_of_a_zero_bubble_schedule_has_the_memory_of_the_first() -> None:
    """Qi et al. 2023, table 4: with 24 microbatches, ZB-2p takes 0.814 of the time of 1F1B, ZB-1p 0.915."""
    steps = {
        name: predict(PUBLISHED[f"zb-iclr-1.5B-{name}-m24"]).step_time for name in ("1F1B", "ZB-1p", "ZB-2p")
    }
    # Memory decides the ratio of both. 1F1B also depends on its transfers, which are predicted less well.
    assert steps["ZB-2p"] / steps["ZB-1p"] == pytest.approx(0.814 / 0.915, rel=0.02)
    assert steps["ZB-2p"] / steps["1F1B"] == pytest.approx(0.814, rel=0.025)
    assert steps["ZB-1p"] / steps["1F1B"] == pytest.approx(0.915, rel=0.035)


def test_repeated_runs_of_a_layout_count_once() -> None:
    def judged(batch: int, measured: float, predicted: float) -> Judged:
        run = own(id=f"{batch} {measured}", global_batch=batch, step_time_s=measured)
        return Judged(run, measured, Prediction(predicted, 1.0, False))

    # Per token, 8 is slowest and 32 is fastest, as predicted, except for one outlier of three repetitions.
    runs = [judged(8, 8.0, 8.0), judged(8, 8.1, 8.0), judged(8, 0.1, 8.0), judged(16, 12.0, 12.0)]
    runs.append(judged(32, 20.0, 20.0))
    found = {each.what.strip(): each.value for each in findings(runs, [])}
    assert found["rank correlation of layouts, repeated ones with their median, 1 models"] == pytest.approx(1)
    assert found["rank correlation of throughput, mean of 1 models"] < 0.9


def test_held_out_runs_are_also_counted_by_themselves() -> None:
    def judged(batch: int, ratio: float, held_out: bool) -> Judged:
        run = own(id=str(batch), global_batch=batch, step_time_s=1.0, memory_gb=1.0, held_out=held_out)
        return Judged(run, 1.0, Prediction(ratio, ratio * 1e9, False))

    # Throughput is predicted in the measured order for runs held out, and in reverse for the others.
    held_out = [judged(8, 1.1, True), judged(16, 1.1, True), judged(24, 1.1, True)]
    others = [judged(32, 3.0, False), judged(40, 6.0, False), judged(48, 12.0, False)]
    found = {each.what: each.value for each in findings(held_out + others, [])}
    assert found["held out: rank correlation of throughput, mean of 1 models"] == pytest.approx(1)
    assert found["rank correlation of throughput, mean of 1 models"] < 0.5
    assert found["held out: step time, median error of 3 runs"] == pytest.approx(10)
    assert found["held out: memory, median error of 3 runs"] == pytest.approx(10)
    assert found["held out:   within 25 %"] == 100
    assert not any("held out" in each.what for each in findings(others, []))


def test_flops_of_the_model_stand_for_a_step() -> None:
    run = own(model_tflops=100.0)
    step = published_step(run)
    assert step is not None
    assert published_step(own(model_tflops=50.0)) == pytest.approx(2 * step)
    assert published_step(own()) is None


def test_findings_count_runs_that_are_wrongly_called_too_large() -> None:
    right = Judged(own(out_of_memory=True), None, Prediction(1.0, 1.0, True))
    wrong = Judged(own(step_time_s=2.0), 2.0, Prediction(1.0, 1.0, True))
    found = {each.what.strip(): each for each in findings([right, wrong, replace(wrong)], [])}
    assert found["1 runs out of memory: predicted"].value == 100
    assert found["2 others, recomputation unknown: wrongly predicted"].value == 100
    assert found["step time, median error of 2 runs"].verdict == "missed by 35 %"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 6}, "must be a multiple"),
        ({"devices": 8, "global_batch": 7}, "must be a multiple"),
        ({"stages": [22]}, "1 stages; must be 4"),
        ({"model": "gpt-9"}, "must be one of"),
        ({"schedule": "fastest"}, "1f1b"),
        ({"colour": "red"}, "colour"),
        ({"step_time_s": -1.0}, "-1.0"),
    ],
)
def test_a_wrong_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        own(**changes)
    assert message in str(caught.value)


def test_two_runs_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be unique"):
        parse_runs({"runs": [OWN, OWN]})


def test_stages_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the model has 22"):
        predict(own(stages=[1, 2, 3, 4]))


def test_the_command_compares_own_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    measured = predict(own())
    runs = [
        {**OWN, "step_time_s": measured.step_time, "memory_gb": measured.memory / 1e9},
        {**OWN, "id": "refused", "stages": [1, 2, 3, 4]},
    ]
    path.write_text(json.dumps({"runs": runs}))
    assert main(["published", "--runs", str(path), "--each", "-o", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "own: time 1.00, memory 1.00" in printed
    assert "refused: " in printed
    found = json.loads((tmp_path / "found.json").read_text())["published"]["findings"]
    assert {each["what"]: each["value"] for each in found}["runs without a prediction"] == 1


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [('{"runs": []}', [], "/runs"), ("[", [], "JSON"), (None, ["--only", "nothing*"], "matches none of")],
)
def test_wrong_input_has_status_2(
    text: str | None, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        path = tmp_path / "runs.json"
        path.write_text(text)
        arguments = ["--runs", str(path)]
    assert main(["published", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- ranks


def runs_of(*measured: tuple[str, float]) -> list[Throughput]:
    """Runs of layouts with measured throughputs; predictions are in the order of the names."""
    return [Throughput(layout, float(ord(layout[0])), value) for layout, value in measured]


def test_ranks_correlate_with_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 0, 1.5, 1.5, 3 and 0, 2, 1, 3: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_two_runs_have_no_correlation() -> None:
    assert of_runs(runs_of(("a", 1), ("b", 2))) is None
    assert of_layouts(runs_of(("a", 1), ("b", 2), ("b", 3))) is None
    assert of_runs(runs_of(("a", 1), ("b", 2), ("c", 3))) == pytest.approx(1)
