"""``python -m benchmarks planner``: verdicts, suites, and the report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.problems import uniform_document
from support.suites import BENCHMARKS, entry, peer, suite
from zbv_solver.bounds import lower_bound
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import PHASES, SearchOptions

from benchmarks.cli import main
from benchmarks.planner.ablation import MECHANISMS, Mechanism, contributions
from benchmarks.planner.outcome import Outcome, Point, measure, tally
from benchmarks.planner.report import WIDTH, Report, Run, Table, figure, report_json, summary
from benchmarks.planner.run import bench, generated
from benchmarks.planner.suite import Instance, parse_suite

Capture = pytest.CaptureFixture[str]

QUICK = SearchOptions(effort="quick")
TELLING = {
    "bound: few ranks": "random-4x8-0.4-makespan-1",
    "bound: ramps": "random-4x8-0.5-span-11",
    "bound: passing": "web-p8-m16-mem0.6",
    "bound: differing ramps": "web-p4-m32-mem0.6",
    "bound: away": "bimodal-p4-m16-mem0.6",
}
"""Problems that need a family of bounds."""


def instance(**changes: Any) -> Instance:
    return parse_suite(suite(entry(**changes)), "suite.json")[0]


def outcome(
    *points: tuple[float, float, float], of: Instance | None = None, method: str = "greedy-v(costs=true)"
) -> Outcome:
    """An outcome whose curve is (seconds, value, bound) per point."""
    curve = tuple(Point(s, value, bound, value / bound - 1, method) for s, value, bound in points)
    return Outcome(of or instance(), QUICK, seconds=points[-1][0], curve=curve)


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


@contextmanager
def no_spinner(_text: str) -> Iterator[Callable[[str], None]]:
    yield lambda _changed: None


# What a plan is held to


SINGLE = {"zb": peer(99, placement="single")}
MISSING = {"large": peer(50, fits=False), "failed": {"placement": "v", "error": "no"}, "null": peer(None)}
BY_MAKESPAN = {"a": {"placement": "v", "span": 50, "makespan": 100, "fits": True}}


@pytest.mark.parametrize(("ours", "peers", "verdict", "best", "below", "contradicting"), [
    # The smaller value wins, and values within a millionth tie.
    *((ours, {"a": peer(100)}, verdict, 100, [], []) for ours, verdict in (
        (99, "win"), (99.9999999, "tie"), (100, "tie"), (100.00005, "tie"), (101, "loss"))),
    # The best contender decides; those that fail or do not fit are none.
    (110, {"slow": peer(120), "best": peer(100), "loop": peer(105, placement="loop")}, "loss", 100, [], []),
    (110, MISSING, "no peer", None, [], []),
    # Of another placement, one below our bound is none, unless that is by rounding only.
    (110, {"zb": peer(99.9999999, placement="single")}, "loss", 99.9999999, [], []),
    (110, SINGLE, "no peer", None, [99], []),
    # Of the same placement, one below our bound contradicts it.
    (110, {"v": peer(95)}, "loss", 95, [], [95]),
    # A goal, which has more memory, does not.
    (110, {"v": peer(95, is_goal=True)}, "loss", 95, [], []),
])  # fmt: skip
def test_a_plan_is_compared_with_its_best_contender(
    ours: float, peers: Any, verdict: str, best: float | None, below: list[float], contradicting: list[float]
) -> None:
    found = outcome((1, ours, 100 if ours == 110 else 90), of=instance(peers=peers))
    assert (found.verdict, found.best and found.best.value) == (verdict, best)
    assert found.ratio == (best and pytest.approx(ours / best))
    assert [entry.value for entry in found.below_bound] == below
    assert [entry.value for entry in found.contradicting] == contradicting
    problem = uniform_document(2, 4, limit=4, objective="makespan")
    assert outcome((1, 90, 80), of=instance(problem=problem, peers=BY_MAKESPAN)).verdict == "win"


@pytest.mark.parametrize(("gap", "seconds", "after"), [
    *((0.02, seconds, 3) for seconds in (5, 3, 2.9, None)), (0, None, None),
])  # fmt: skip
def test_a_target_is_reached_when_the_gap_is_proven_in_time(gap: float, seconds: Any, after: Any) -> None:
    target = instance(reach={"gap": gap, "seconds": seconds})
    found = outcome((1, 110, 100), (3, 102, 100), (9, 101, 100), of=target)
    assert found.reached_after == after
    assert found.is_reached is (after is not None and seconds != 2.9)


def test_the_summary_counts_every_instance_once() -> None:
    outcomes = [
        outcome((1, 100, 100), of=instance(peers={"a": peer(125)}, reach={"gap": 0})),
        outcome((2, 110, 100), of=instance(peers={"a": peer(110)}, reach={"gap": 0.05})),
        outcome((3, 120, 100), of=instance(name="worst", peers={"a": peer(99, placement="loop")})),
        Outcome(instance(), QUICK, 0.5, infeasible="no plan fits"),
    ]
    total = tally(outcomes)
    assert (total.wins, total.ties, total.losses, total.no_peer) == (1, 1, 0, 2)
    assert (total.instances, total.infeasible, total.optimal, total.below_bound) == (4, 1, 1, 1)
    assert (total.reached, total.targets, total.seconds) == (1, 2, 6.5)
    assert total.mean_gap == pytest.approx(0.1)
    assert total.worst_gap == pytest.approx(0.2)
    assert total.worst_name == "worst"
    assert total.ratio == pytest.approx(math.sqrt(100 / 125))
    assert total.by_peer == {}  # one instance has no plan to compare


def test_plans_are_compared_with_every_peer_that_all_instances_have() -> None:
    peers = {"a": peer(125), "b": peer(200)}
    others = {"a": peer(80), "b": peer(50), "c": peer(100)}
    total = tally([outcome((1, 100, 90), of=instance(peers=each)) for each in (peers, others)])
    assert total.by_peer == pytest.approx({"a": 1.0, "b": 1.0})
    assert "a 1.0000, b 1.0000" in summary(total)


def test_the_contribution_of_a_mechanism_is_the_difference_without_it() -> None:
    full = [outcome((2, 100, 100)), outcome((2, 100, 90)), outcome((2, 101, 90))]
    without = [outcome((1, 110, 90)), outcome((1, 100, 90)), outcome((1, 100, 90))]
    (added,) = contributions("exact", full, without)
    assert (added.better, added.worse, added.tighter, added.proved) == (1, 1, 1, 1)
    assert added.log_ratio == pytest.approx(math.log(1.1) + math.log(100 / 101))
    assert added.worst == pytest.approx(math.log(1.1))
    assert added.gap == pytest.approx((110 / 90 - 1 + 0 + 100 / 90 - 101 / 90) / 3)
    assert added.seconds == 3


def test_every_suite_has_its_own_contribution() -> None:
    other = replace(instance(), suite="other.json")
    full = [outcome((1, 100, 90)), outcome((1, 100, 90), of=other)]
    without = [outcome((1, 100, 90)), outcome((1, 120, 90), of=other)]
    found = {each.suite: each.better for each in contributions("exact", full, without)}
    assert found == {"suite.json": 0, "other.json": 1}


# Measuring


def test_a_measurement_records_the_progress_of_the_search() -> None:
    found = measure(instance(), QUICK)
    seconds = [point.seconds for point in found.curve]
    values = [point.objective for point in found.curve]
    assert (found.value, found.lower_bound, found.gap) == (24, 24, 0)
    assert seconds == sorted(seconds)
    assert values == sorted(values, reverse=True)
    assert found.first_plan_seconds == seconds[0]
    assert found.seconds == seconds[-1]


def test_options_of_an_instance_override_those_of_the_command() -> None:
    own = instance(options={"effort": "quick", "time_limit": 5})
    assert own.search_options(SearchOptions(effort="thorough", seed=3)) == SearchOptions("quick", 5, seed=3)
    assert instance(options={"effort": None}).search_options(QUICK) == QUICK


def test_ctrl_c_keeps_the_results_so_far() -> None:
    @contextmanager
    def interrupting(text: str) -> Iterator[Callable[[str], None]]:
        if "second" in text:
            raise KeyboardInterrupt
        yield lambda _changed: None

    out = StringIO()
    instances = parse_suite(suite(entry("first"), entry("second"), entry("third")), "suite.json")
    report = bench(instances, QUICK, ablate=True, out=out, spinner=interrupting)
    assert report.interrupted
    assert [found.instance.name for run in report.runs for found in run.outcomes] == ["first"]
    assert "1 instances in" in out.getvalue()
    assert report_json(report)["interrupted"] is True


@pytest.mark.parametrize("without", [(), PHASES[:1]], ids=str)
def test_an_ablation_runs_the_suite_without_each_further_mechanism(without: tuple[str, ...]) -> None:
    out, options = StringIO(), SearchOptions(effort="quick", without=without)
    report = bench([instance()], options, ablate=True, out=out, spinner=no_spinner)
    names = [mechanism.name for mechanism in MECHANISMS[len(without) :]]
    assert {*PHASES} < {*without, *names}
    assert [run.without for run in report.runs] == [without, *((*without, name) for name in names)]
    assert [added.mechanism for added in report.contributions] == names
    assert all(name in out.getvalue().rpartition("what each mechanism adds")[2] for name in names)


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    random = parse_suite(json.loads((BENCHMARKS / "random.json").read_text()), "random.json")
    return {each.name: each.problem for each in (*random, *generated("unequal"))}


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_a_mechanism_is_left_out_and_comes_back(mechanism: Mechanism, problems: dict[str, Problem]) -> None:
    def parts() -> list[object]:
        pairs = (target.split(":") for target in mechanism.replaced)
        return [getattr(import_module(f"zbv_solver.{module}"), name) for module, name in pairs]

    def bound() -> float:
        return lower_bound(problems[TELLING[mechanism.name]], "thorough").value

    before = parts()
    with mechanism.left_out(QUICK) as options:
        assert options.without == ((mechanism.name,) if mechanism.name in PHASES else ())
        without = bound() if mechanism.name.startswith("bound") else 0.0
    assert parts() == before
    assert without == 0.0 or without < bound()


def test_the_problems_of_other_benchmarks_can_be_planned(tmp_path: Path, capsys: Capture) -> None:
    flags = ["--only", "web-p4-m16-mem0.6", "--effort", "quick", "--without", "anneal"]
    assert main(["planner", "unequal", "jitter", *flags]) == 0
    assert "1 instances in" in capsys.readouterr().out


# What is printed


def test_rows_fit_120_columns_and_line_up() -> None:
    public = json.loads((BENCHMARKS / "public.json").read_text(encoding="utf-8"))
    instances = parse_suite(public, "public.json")
    table = Table(instances)
    rows = [
        table.row(outcome((0.2, 14_906_864, 14_000_000), (118.25, 13_782_480, 13_000_000), of=instance))
        for instance in instances
    ]
    figures = [row.splitlines()[0] for row in rows]
    assert all(len(line) <= WIDTH for line in [*table.header().splitlines(), *figures])
    assert {line.index("13782480") for line in figures} == {figures[0].index("13782480")}
    assert {line.index("greedy-v") for line in figures} == {figures[0].index("greedy-v")}


def test_numbers_have_the_digits_that_fit() -> None:
    assert [figure(value) for value in (24, 0.1 + 0.2, 1234567.1234)] == ["24", "0.3", "1234567.1"]
    assert [figure(value) for value in (123456789, 12345678912)] == ["123456789", "1.235e+10"]
    assert [figure(value) for value in (0.000123456789, math.inf)] == ["0.0001235", "–"]


def test_a_row_names_peers_below_the_bound() -> None:
    known = instance(peers={"v": peer(110), "zb": peer(99, placement="single")})
    row, note = Table([known]).row(outcome((1, 108, 100), of=known)).splitlines()
    assert "win  -1.82%" in row
    assert "below bound: zb 99;" in note


def test_columns_without_information_are_left_out() -> None:
    plain = Table([instance()]).header()
    full = Table([instance(peers={"a": peer(1)}, reach={"gap": 0})]).header()
    assert "best peer" not in plain
    assert "target" not in plain
    assert "best peer" in full
    assert "target" in full


def test_the_command_prints_rows_and_a_summary(tmp_path: Path, capsys: Capture) -> None:
    path = write(
        tmp_path / "suite.json",
        suite(
            entry("wins", peers={"a": peer(25)}, reach={"gap": 0}),
            entry("loses", peers={"a": peer(1)}),
            entry("full", problem=uniform_document(2, 4, limit=1.5)),
        ),
    )
    assert main(["planner", path, "--effort", "quick"]) == 0
    out, err = capsys.readouterr()
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "win  -4.00%" in lines["wins"]
    assert "reached" in lines["wins"]
    assert "loss" in lines["loses"]
    assert "infeasible" in lines["full"]
    assert "no plan fits: limit of rank 0 is 1.5, needs 2" in out
    assert "win 1, tie 0, loss 1, no peer 1" in out
    assert "targets: 1 of 1 reached" in out
    assert err == ""


def test_json_on_standard_output_is_only_the_document(tmp_path: Path, capsys: Capture) -> None:
    path = write(
        tmp_path / "suite.json", suite(entry(peers={"a": peer(25)}, reach={"gap": 0, "seconds": 60}))
    )
    assert main(["planner", path, "--effort", "quick", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    (run,) = document["runs"]
    (found,) = run["instances"]
    assert (found["value"], found["lower_bound"], found["verdict"]) == (24, 24, "win")
    assert found["peer"] == {"name": "a", "placement": "v", "value": 25}
    assert found["reach"]["reached"] is True
    assert found["progress"][-1]["objective"] == 24
    assert run["sum"]["wins"] == 1
    assert "win 1" in err


def test_an_infeasible_instance_has_no_numbers_and_a_peer_that_fits_contradicts() -> None:
    impossible = instance(problem=uniform_document(2, 4, limit=1.5), peers={"v": peer(24)}, reach={"gap": 0})
    found = measure(impossible, QUICK)
    assert found.infeasible == "no plan fits: limit of rank 0 is 1.5, needs 2"
    assert (found.value, found.curve, found.verdict) == (math.inf, (), "loss")
    assert [entry.name for entry in found.contradicting] == ["v"]
    text = json.dumps(report_json(Report(QUICK, (Run((), (found,)),))), allow_nan=False)
    (row,) = json.loads(text)["runs"][0]["instances"]
    assert row["status"] == "infeasible"
    assert [row[key] for key in ("value", "lower_bound", "gap", "ratio", "method")] == [None] * 5
    assert row["reach"]["reached"] is False


def test_every_key_of_the_document_is_documented() -> None:
    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(inner)

    known = instance(peers={"a": peer(1)}, reach={"gap": 0})
    found = outcome((1, 108, 100), of=known)
    report = Report(QUICK, (Run((), (found,)),), tuple(contributions("x", [found], [found])))
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    documented = {word for span in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"\w+", span)}
    assert set(keys(report_json(report))) - documented == {"a"}  # the name of a peer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "other"], "matches none"),
        (["--without", "nothing"], "/without"),
        (["--time-limit", "0"], "/time_limit"),
        (["--json", "no/such/folder/results.json"], "no/such/folder"),
        (["missing.json"], "missing.json: No such file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_has_status_2_before_the_first_search(
    arguments: list[str], says: str, tmp_path: Path, capsys: Capture
) -> None:
    path = write(tmp_path / "suite.json", suite(entry()))
    assert main(["planner", path, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
