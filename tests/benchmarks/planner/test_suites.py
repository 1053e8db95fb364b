"""Benchmark files: their rules, and the files of the repository."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.problems import uniform_document
from support.suites import BENCHMARKS, entry, peer, suite
from zbv_solver.errors import InvalidInput

from benchmarks.planner.suite import parse_suite, select

PROBLEM = uniform_document(2, 4)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (3, r"s#: found 3; must be a JSON object"),
        ({"instances": []}, r"s#/instances: "),
        (suite({"problem": {}}), r"s#/instances/0/name: this key is required"),
        (suite(entry("two words")), r"s#/instances/0/name: found 'two words'"),
        (suite(entry(reach={"gap": -1})), r"s#/instances/0/reach/gap: found -1"),
        (suite(entry(reach={"seconds": 1})), r"s#/instances/0/reach/gap: this key is required"),
        (suite(entry(options={"efort": "quick"})), r"s#/instances/0/options/efort: unknown key"),
        (suite(entry(options={"effort": "all"})), r"s#/instances/0/options/effort: found 'all'"),
        (suite(entry(options={"time_limit": 0})), r"s#/instances/0/options/time_limit: found 0"),
        (suite(entry(peers={"a": peer(math.nan)})), r"s#/instances/0/peers/a/span: found nan"),
        (suite(entry(peers={"a": {"span": 1}})), r"s#/instances/0/peers/a/placement: this key is required"),
        (suite(entry(peers={"a/b": peer(1, fits=None)})), r"s#/instances/0/peers/a~1b/fits: .* required"),
        (suite(entry(), entry("x", problem=PROBLEM | {"microbatches": 0})), r"s#/instances/1/"),
        (suite(entry(problem=PROBLEM | {"costs": {"forward": [1]}})), r"s#/instances/0/problem/costs/backw"),
        (suite(entry(), entry("x", problem=uniform_document(2, 4, p2p=[1, 2]))), r"/costs/p2p: found"),
    ],
    ids=range(15),
)
def test_a_wrong_suite_is_refused_with_a_pointer_and_the_rule(document: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_suite(document, "s")


def test_names_are_distinct_within_and_across_files() -> None:
    once = parse_suite(suite(entry()), "one.json")
    twice = parse_suite(suite(entry(), entry()), "two.json")
    with pytest.raises(InvalidInput, match=r"two.json#/instances: found the name small twice"):
        select([twice])
    with pytest.raises(InvalidInput, match=r"two.json#/instances: found the name small also in one.json"):
        select([once, twice])


def test_only_selects_by_name() -> None:
    instances = parse_suite(suite(entry("a1"), entry("a2"), entry("b1")), "s")
    assert [found.name for found in select([instances], "a*")] == ["a1", "a2"]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.json")), ids=lambda path: path.name)
def test_the_suites_of_the_repository_can_be_read(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert len(select([parse_suite(document, path.name)])) == len(document["instances"])
