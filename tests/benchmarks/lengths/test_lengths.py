"""Distributions of lengths and the problems made of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.packing.batch import parse_batch
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate

from benchmarks.cli import main
from benchmarks.lengths.distributions import LONGEST, MADE, distributions
from benchmarks.lengths.instances import instances, packing_instances
from benchmarks.lengths.model_costs import costs_and_memory


def test_the_same_seed_draws_the_same_lengths_everywhere() -> None:
    drawn = {each.name: each.lengths(1000, "0") for each in distributions()}
    digest = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "ee026267abc925e3"
    assert all(1 <= length <= LONGEST for lengths in drawn.values() for length in lengths)


def test_distributions_have_the_stated_shape() -> None:
    web, bimodal, tail = (sorted(each.lengths(10_000, "1")) for each in MADE)
    assert web[5000] == pytest.approx(600, rel=0.05)
    assert tail.count(LONGEST) / len(tail) == pytest.approx(0.025, rel=0.15)
    assert sum(1500 < length < 2500 for length in bimodal) < sum(length < 1500 for length in bimodal) / 5


def test_published_histograms_are_drawn_by_their_counts() -> None:
    published = {each.name: each for each in distributions() if each.source}
    law = published["wikipedia"].law
    assert hasattr(law, "counts")
    share = law.counts[0] / sum(law.counts)
    drawn = published["wikipedia"].lengths(10_000, "0")
    assert sum(length <= 1024 for length in drawn) / len(drawn) == pytest.approx(share, abs=0.02)
    longest = Counter(published["wikipedia-512"].lengths(10_000, "0"))[512]
    assert longest / 10_000 == pytest.approx(3815044 / 16279552, abs=0.02)


def test_there_are_120_planning_instances_and_limits_are_shares_of_1f1b() -> None:
    every = instances()
    assert len({each.name for each in every}) == 120
    assert {(each.pp_degree, each.microbatches) for each in every} >= {(4, 16), (16, 64)}
    for each in every[:9]:
        problem = parse_problem(each.document())
        assert isinstance(problem, Problem)
        assert problem.memory.limit is not None
        of, orders = baseline("1f1b", problem)
        peak = max(evaluate(without_limit(of), orders).peak_memory)
        assert problem.memory.limit[0] == pytest.approx(max(each.share * peak, *problem.smallest_limit))
    for each in every[60:69]:
        document = each.document()
        longest = max(document["sequences"], key=sum)
        of, orders = baseline("1f1b", parse_problem({**document, "sequences": [longest] * each.microbatches}))
        peak = max(evaluate(without_limit(of), orders).peak_memory)
        assert document["memory"]["limit"] == pytest.approx(each.share * peak)


def test_costs_are_those_of_the_estimate_at_other_lengths() -> None:
    """The coefficients come from three lengths; a fourth must agree."""
    from zbv_models.estimate.problem_document import estimate_layers

    from benchmarks.lengths import model_costs

    costs, memory = costs_and_memory(16)
    config = model_costs._config(5120)
    block = estimate_layers(config)[1].plain
    forward = costs["forward"]
    assert forward["tokens"][1] * 5120 + forward["tokens_squared"][1] * 5120**2 == pytest.approx(
        block.times.forward, rel=1e-5
    )
    assert memory["forward"]["tokens"][1] * 5120 == block.after_forward


def test_batches_are_valid() -> None:
    for each in packing_instances():
        assert parse_batch(each.document()).replicas == 4


def test_the_command_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lengths", "--only", "tail-p4-m16-mem*"]) == 0
    out = capsys.readouterr().out
    assert "wikipedia_token" in out
    assert out.endswith("tail-p4-m16-mem0.6\ntail-p4-m16-mem1.0\ntail-p4-m16-mem1.5\n")
    assert main(["lengths", "--only", "web-p4-m16-mem0.6", "-o", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "web-p4-m16-mem0.6.json").read_text())
    assert len(written["sequences"]) == written["microbatches"] == 16
    assert main(["lengths", "--only", "nothing"]) == 2
    assert main(["packing", "--only", "nothing"]) == 2
