"""The profiler writes a problem that describes the stages, and measures links between ranks."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.forked_ranks import fork_module
from support.processes import DEADLINE, wait_until
from support.thread_transport import ThreadHub, ThreadTransport
from torch import nn
from zbv_solver.problem.reading import parse_problem
from zbv_worker.commands.cli import main
from zbv_worker.measure.profile import profile
from zbv_worker.measure.profile.links import ROUND_TRIPS, SIZES, LinkProfiler, fit, link_of, one_way
from zbv_worker.measure.profile.profile import (
    LinkProfile,
    PairProfile,
    ProfileOptions,
    RankProfile,
    Spread,
    StageProfile,
    rank_json,
    read_rank,
    to_problem,
)
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.measure.stage_memory import StaticBytes
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.tiny import Tiny
from zbv_worker.stage.recorder import SplitShare
from zbv_worker.transport.channels import ChannelKey

MODEL = {"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
TENSOR = 2 * 32 * 32 * 4  # bytes of a tensor at a boundary


def ranks_of(p: int) -> list[RankProfile]:
    def stage(index: int) -> StageProfile:
        forward, *others = (Spread(t, 2 * t) for t in (1e-3 * (index + 1), 2e-3, 3e-3, 4e-3))
        return StageProfile(
            index, forward, others[0], others[1], others[2], 100 + index, 60, 0, 7, SplitShare(1.0, ())
        )

    return [
        RankProfile(
            rank,
            (stage(rank), stage(2 * p - 1 - rank)),
            StaticBytes(
                600 * (rank + 1),
                receives=300 * (rank + 1),
                workspace=70 * (rank + 1),
                communicators=30 * (rank + 1),
            ),
            {rank: Spread(5e-5, 9e-5)} if rank < p - 1 else {},
        )
        for rank in range(p)
    ]


def options_of(p: int, fraction: float | None = None) -> ProfileOptions:
    return ProfileOptions(ModelSpec("a:b"), p, microbatches=8, memory_limit_fraction=fraction)


def test_the_memory_of_communicators_is_static() -> None:
    transport = ThreadHub(1).transport(0)
    transport.communicator_bytes = 123_456_789
    options = ProfileOptions(ModelSpec("zbv_worker.models.tiny:tiny"), 1, microbatches=1, repeats=1)
    static = RankProfiler(options, transport, torch.device("cpu")).measure().static
    assert static.communicators == 123_456_789
    assert static.total > static.communicators


def test_measurements_become_a_problem_in_microseconds_and_bytes() -> None:
    problem = to_problem(options_of(2), ranks_of(2))
    assert problem.costs.forward == (1000.0, 2000.0, 3000.0, 4000.0)
    assert problem.costs.backward == (4000.0,) * 4
    assert problem.costs.p2p == (50.0, 0.0, 0.0)
    assert problem.memory.forward == (100.0, 101.0, 102.0, 103.0)
    assert problem.memory.backward_input == (-40.0, -41.0, -42.0, -43.0)
    assert problem.memory.backward_weight == (-60.0,) * 4
    assert problem.memory.static == (1000.0, 2000.0)
    assert problem.memory.limit is None
    assert (problem.units.time, problem.units.memory) == ("us", "bytes")


def test_the_memory_limit_is_a_fraction_of_what_1f1b_needs() -> None:
    problem = to_problem(options_of(2, 0.5), ranks_of(2))
    in_flight = 2 * (100 + 101)  # rank 0 of 1F1B: two microbatches of stages 0 and 1
    assert problem.memory.limit == (1000 + in_flight / 2, 2000 + in_flight / 2)


@pytest.mark.parametrize(
    ("is_split", "saved", "hidden"),
    [
        (True, (900e-6, 1000e-6), (300, 600, 700)),
        (False, (900e-6, 600e-6), (200, 400, 400)),
        (True, (-1e-6, -2e-6), (0, 0, 0)),
        (True, (12e-3, 12e-3), (1000, 2000, 4000)),
    ],
    ids=["split", "not split", "slower", "more than there is"],
)
def test_what_pairs_save_is_the_communication_of_a_problem(
    is_split: bool, saved: tuple[float, float], hidden: tuple[float, float, float]
) -> None:
    """Of 12 ms saved, F's third and the others' two thirds exceed their times."""
    rank = ranks_of(1)[0]
    with_input, with_backward = (Spread(time, time) for time in saved)
    pairs = PairProfile(with_input, with_backward, share=1 / 3)
    stage = replace(rank.stages[0], pairs=pairs, split=SplitShare(1.0 if is_split else 0.0, ()))
    problem = to_problem(options_of(1), [replace(rank, stages=(stage, rank.stages[1]))])
    assert problem.communication is not None
    assert [part[0] for part in vars(problem.communication).values()] == list(hidden)
    assert [part[1] for part in vars(problem.communication).values()] == [0, 0, 0]


def test_pairs_of_layers_that_exchange_tokens_are_measured(tmp_path: Path) -> None:
    """Blocks exchange for half of their time, so a pair takes half as long as its halves."""
    block, path = 0.1, tmp_path / "problem.json"
    model = ["--model", "support.expert_model:experts"]
    model += ["--model-args", json.dumps({"blocks": 2, "seconds": block})]
    # The median of three ignores a round in which the machine was busy.
    numbers = ["--pp", "2", "--microbatches", "4", "--repeats", "3", "--ranks-per-stage", "2", "--pairs"]
    assert main(["profile", *model, *numbers, "-o", str(path)]) == 0
    problem = json.loads(path.read_text())
    assert "profile" not in problem  # shares of layers are no layers
    assert [layer["name"] for layer in problem["layers"] if "communication" in layer] == ["block"]
    for hidden in problem["layers"][1]["communication"].values():
        assert hidden == pytest.approx(1e6 * block / 2, rel=0.3)


def test_a_ranks_measurements_survive_their_file() -> None:
    for found in ranks_of(2):
        assert read_rank(rank_json(found)) == found


def test_a_spread_is_the_median_and_the_90th_percentile() -> None:
    assert Spread.of([float(x) for x in range(20, 0, -1)]) == Spread(10.5, 19.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0)


GPT = ["profile", "--model", "zbv_worker.models.gpt:gpt", "--model-args", json.dumps(MODEL)]


def test_profile_measures_a_real_models_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "LEAST_WEIGHT_SHARE", 0.0)  # a busy machine may hide how long W takes
    path = tmp_path / "problem.json"
    report_path = tmp_path / "report.json"
    numbers = ["--by-stage", "--pp", "2", "--microbatches", "4", "--repeats", "3", "--timeout", "60"]
    assert main([*GPT, *numbers, "--copies", "--pairs", "--report", str(report_path), "-o", str(path)]) == 0
    problem = parse_problem(json.loads(path.read_text()))
    assert (problem.pp_degree, problem.microbatches, problem.n_stages) == (2, 4, 4)
    costs, memory = problem.costs, problem.memory
    assert costs.backward is not None
    assert all(0 < cost < 1e6 for part in vars(costs).values() for cost in part if part is not costs.p2p)

    # A stage is one block, which keeps more than ten tensors of that size; W's queue, the inputs and
    # gradients of the Linears.
    assert all(10 * TENSOR < held < 40 * TENSOR for held in memory.forward)
    assert all(0 < -freed < 40 * TENSOR for freed in memory.backward_weight)
    assert problem.copies is not None
    for moved, held in zip(problem.copies.offloadable, memory.forward, strict=True):
        assert 0.95 * held <= moved <= held
    assert all(0 < time < 1e6 for time in problem.copies.offload + problem.copies.reload)
    parameters = 2 * 12 * 32**2 * 4  # bytes of the blocks' matrices on a rank
    assert all(4 * parameters < static < 10 * parameters for static in memory.static)

    ranks = json.loads(report_path.read_text())["ranks"]
    p2p = {int(at): 1e6 * found["median"] for rank in ranks for at, found in rank["p2p"].items()}
    assert p2p.keys() == {0, 2}  # the boundaries between two ranks
    assert costs.p2p == pytest.approx([p2p.get(at, 0.0) for at in range(3)], abs=0.1)
    assert [rank["static_total"] for rank in ranks] == list(memory.static)
    for rank in ranks:
        static = rank["static"]
        assert static["parameters"] == static["gradients"] <= static["optimizer"] / 2  # Adam's two moments
        assert static["receives"] == 3 * TENSOR  # three ahead on one channel
        for stage in rank["stages"]:
            assert stage["held_after_weight"] == 0  # W frees everything
            assert TENSOR <= stage["workspace"] < stage["held_after_forward"]
            assert 0 < stage["forward"]["median"] <= stage["forward"]["p90"]
    links = [link for rank in ranks for link in rank["links"]]
    assert [(link["sender"], link["receiver"]) for link in links] == [(0, 1), (1, 0)]
    assert all(TENSOR in [sample["bytes"] for sample in link["samples"]] for link in links)
    said = capsys.readouterr().err
    assert "One-way transfers" in said
    assert "Static memory" in said
    assert "Copies to the host" in said
    assert "so there are no pairs" in said
    assert problem.communication is None


class Broken(Tiny):
    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        raise RuntimeError("this model never builds a stage")


def test_a_failing_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "profile",
        "--model",
        "worker.measure.test_profile:Broken",
        "--model-args",
        '{"width": 8, "rows": 4}',
    ]
    assert main([*arguments, "--pp", "1", "--microbatches", "4", "-o", str(tmp_path / "p.json")]) == 1
    assert "this model never builds a stage" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_terminated_profile_ends_its_rank_and_removes_its_files(tmp_path: Path) -> None:
    output = ["-o", str(tmp_path / "problem.json")]
    arguments = ["--model", "zbv_worker.models.gpt:gpt", "--model-args", json.dumps(MODEL), *output]
    numbers = ["--pp", "1", "--microbatches", "4", "--repeats", "1000000"]
    folder, said = tmp_path / "temporary", tmp_path / "log"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    profiler = fork_module("support.forking_worker", ["profile", *arguments, *numbers], environment, said)
    logs = "*/rank-0.log"
    wait_until(lambda: any("measured" in log.read_text() for log in folder.glob(logs)), "it measures")
    children = Path(f"/proc/{profiler.pid}/task/{profiler.pid}/children").read_text().split()
    profiler.send_signal(signal.SIGTERM)
    assert profiler.wait(DEADLINE) == 130
    assert said.read_text().splitlines()[-1] == "zbv-worker: interrupted."
    assert [*folder.glob("zbv-*")] == []
    (child,) = children
    assert not Path(f"/proc/{child}").exists()


def test_actions_are_measured_while_their_outputs_are_sent_as_in_a_pipeline() -> None:
    hub = ThreadHub(2)
    options = ProfileOptions(ModelSpec("zbv_worker.models.tiny:tiny"), 2, microbatches=2, timeout=60.0)
    profilers = [RankProfiler(options, hub.transport(rank), torch.device("cpu")) for rank in range(2)]

    def sent_in_a_round(profiler: RankProfiler) -> list[str]:
        captured = profiler.capture()
        transport = profiler._transport
        transport.barrier(20.0)
        before = {key: queue.sent for (_, key), queue in hub.queues.items()}
        transport.barrier(20.0)
        profiler.round(captured)
        transport.barrier(20.0)
        return [f"{key}: {queue.sent - before[key]}" for (_, key), queue in sorted(hub.queues.items())]

    with ThreadPoolExecutor(2) as threads:
        sent = list(threads.map(sent_in_a_round, profilers))
    # 0F and 3F's successor cross to rank 1, 2F and 1I back to rank 0; each letter runs for two microbatches,
    # F with a split and a fused backward.
    assert sent == [["0→1: 8", "1→0: 8"]] * 2
    assert all(not queue.waiting and queue.posted == queue.sent for queue in hub.queues.values())


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_latency_and_bandwidth_are_recovered_from_exact_times(latency: float, per_byte: float) -> None:
    sizes = [1e3, 1e5, 1e7]
    assert fit(sizes, [latency + size * per_byte for size in sizes]) == pytest.approx(
        (latency, per_byte), rel=1e-3, abs=1e-15
    )


@pytest.mark.parametrize("seconds", [[3e-5, 2e-5, 1e-5], [1e-6, 2e-4, 4e-2]])
def test_neither_latency_nor_time_per_byte_is_negative(seconds: list[float]) -> None:
    latency, per_byte = fit([1e3, 1e5, 1e7], seconds)
    assert latency >= 0
    assert per_byte >= 0
    assert latency + per_byte > 0


def test_a_transfer_whose_time_was_hidden_by_a_disturbance_does_not_count() -> None:
    assert fit([8192, 1e3, 1e5], [0.0, 1e-4, 2e-4]) == fit([1e3, 1e5], [1e-4, 2e-4])
    assert fit([1e3], [0.0]) == (0.0, 0.0)


def test_a_link_whose_large_transfers_take_no_longer_has_no_bandwidth() -> None:
    assert link_of(0, 1, {1000: [1e-4], 1_000_000: [0.9e-4]}).bandwidth is None


def test_the_time_of_the_answer_is_subtracted() -> None:
    assert one_way([5.0, 7.0, 0.5], tiny=[2.0, 2.0, 9.0]) == [4.0, 6.0, 0.0]


def test_both_directions_are_measured_by_the_first_rank_and_answered_by_the_other() -> None:
    def links(transport: ThreadTransport) -> list[LinkProfile]:
        transport.open([ChannelKey(0, 1), ChannelKey(1, 0)], 60)
        return list(LinkProfiler(transport, torch.device("cpu"), 60, lambda: None).links(0, 1, 12_000))

    found = ThreadHub(3).run(links)
    assert [(link.sender, link.receiver) for link in found[0]] == [(0, 1), (1, 0)]
    assert found[1] == found[2] == []
    for link in found[0]:
        assert [sample.bytes for sample in link.samples] == sorted((*SIZES, 12_000))
    assert ROUND_TRIPS > 1
