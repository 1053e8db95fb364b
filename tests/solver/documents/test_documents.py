"""Files are replaced completely or not at all; refusing a document costs the same whatever its mistakes."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from pydantic import AfterValidator, BaseModel, Field
from zbv_solver.documents.fields import BATCH
from zbv_solver.documents.files import output, write
from zbv_solver.documents.validation import validated
from zbv_solver.errors import MOST_ISSUES, InvalidInput, Issue
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.reading import parse_any_problem


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a content and a mode that its owner chose."""
    made = tmp_path / "plan.json"
    made.write_text("old")
    made.chmod(0o640)
    return made


def test_an_error_leaves_the_file_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = path.parent / "missing" / "plan.json"
    for wrong, error in ((missing, FileNotFoundError), (path.parent, IsADirectoryError)):
        with pytest.raises(error) as refused, output(wrong):
            pytest.fail("the work began")
        assert refused.value.filename == str(wrong)
    full_disk = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(KeyboardInterrupt), output(path):
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("private", "mode"), [(False, 0o640), (True, 0o600)])
def test_the_content_is_replaced_at_once(path: Path, private: bool, mode: int) -> None:
    with output(path, private=private) as write_text:
        (partial,) = {*path.parent.iterdir()} - {path}
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600 or not private
        assert path.read_text() == "old"
        write_text("first")
        write_text("second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_links_devices_and_pipes_stay_what_they_are(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    write(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reader, writer = os.pipe()
    write(f"/dev/fd/{writer}", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    os.close(writer)


COSTS = {"forward": 1, "backward_input": 1, "backward_weight": 1}
PROBLEM: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "costs": COSTS}
LAYER = {"name": "a", **COSTS}
LAYERED: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "layers": [LAYER] * 4}
PLAN: dict[str, Any] = {"problem": PROBLEM, "ranks": [[], []]}
STEP = {"step": 0, "seconds": 1.0, "actions": []}
TRACE = {"rank": 0, "pp_rank": 0, "plan_id": "0" * 64, "steps": [STEP]}


def unknown(n: int) -> dict[str, int]:
    return {f"k{i}": 0 for i in range(n)}


def refusal_of(document: dict[str, Any]) -> InvalidInput:
    read: Any = parse_plan if "ranks" in document else parse_any_problem
    with pytest.raises(InvalidInput) as caught:
        (parse_rank_trace if "steps" in document else read)(document)
    return caught.value


def peak_of(document: dict[str, Any]) -> int:
    refusal_of(document)  # whatever is loaded or kept at the first use
    tracemalloc.start()
    refusal_of(document)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


REPEATED: dict[str, Callable[[int], dict[str, Any]]] = {
    "empty layers": lambda n: {**LAYERED, "layers": [{}] * n},
    "unknown keys": lambda n: {**PROBLEM, **unknown(n)},
    "unknown keys of a layer": lambda n: {**LAYERED, "layers": [{**LAYER, **unknown(n)}]},
    "costs": lambda n: {**PROBLEM, "costs": {**COSTS, "forward": [None] * n}},
    "late costs": lambda n: {**PROBLEM, "costs": {**COSTS, "forward": [1.0] * (2 * BATCH) + [None] * n}},
    "groups": lambda n: {**LAYERED, "cut": {"together": [[None]] * n}},
    "names of a group": lambda n: {**LAYERED, "cut": {"together": [[None] * n]}},
    "stages": lambda n: {**LAYERED, "partition": [None] * n},
    "recomputed": lambda n: {**LAYERED, "partition": [["a"]], "recompute": [None] * n},
    "ranks": lambda n: {**PLAN, "ranks": [None] * n},
    "actions": lambda n: {**PLAN, "ranks": [[None] * n, []]},
    "too many actions": lambda n: {**PLAN, "ranks": [["0F0"] * n, []]},
    "baselines": lambda n: {**PLAN, "baselines": [{}] * n},
    "steps": lambda n: {**TRACE, "steps": [{}] * n},
    "records": lambda n: {**TRACE, "steps": [{**STEP, "actions": [[]] * n}]},
    "a long key": lambda n: {**PROBLEM, "x" * n: 1},
    "a long text": lambda n: {**PROBLEM, "placement": "x" * n},
    "lists": lambda n: {**PROBLEM, "placement": [[list(range(1000))] * 1000] * n},
    "an object": lambda n: {**PROBLEM, "units": {"time": {"a": ["x"] * n}}},
    "a long action": lambda n: {**PLAN, "ranks": [["0F0" * n], []]},
    "a long plan id": lambda n: {**PLAN, "plan_id": "x" * n},
    "a long layer name": lambda n: {**LAYERED, "partition": [["x" * n]]},
}


@pytest.mark.parametrize("name", REPEATED)
def test_ten_times_as_many_mistakes_need_no_more_memory_and_no_longer_message(name: str) -> None:
    few, many = REPEATED[name](4 * BATCH), REPEATED[name](40 * BATCH)
    # Valid entries before the mistake are copied, 8 bytes each; a mistake takes several hundred bytes.
    assert peak_of(many) <= 1.5 * peak_of(few) + 16 * 36 * BATCH
    error = refusal_of(many)
    assert 1 <= len(error.issues) <= MOST_ISSUES
    assert len(str(error)) <= 500 + 200 * len(error.issues)


def test_an_error_counts_the_mistakes_that_it_does_not_list() -> None:
    exact = refusal_of({**LAYERED, "layers": [{**LAYER, "name": i} for i in range(300)]})
    assert (len(exact.issues), exact.more, exact.is_partial) == (100, 200, False)
    assert str(exact).endswith(" And 200 more.")
    costs = {**COSTS, "forward": [1.0] * 1500 + [None] * (3 * BATCH)}
    partial = refusal_of({**PROBLEM, "costs": costs})
    assert (partial.more, partial.is_partial) == (BATCH // 2 - MOST_ISSUES, True)
    assert str(partial).endswith(f" And at least {partial.more} more.")
    assert [issue.pointer for issue in partial.issues[:2]] == ["/costs/forward/1500", "/costs/forward/1501"]
    error = InvalidInput([Issue("/x", "y")] * 150, more=7, is_partial=True)
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error)), error.below("/problem")):
        assert (len(same.issues), same.more, same.is_partial) == (100, 57, True)


def test_a_rule_of_our_own_comes_without_the_words_of_the_library() -> None:
    def refuse(name: str) -> str:
        raise ValueError("must be a name")

    class Named(BaseModel):
        name: Annotated[str, AfterValidator(refuse)]

    with pytest.raises(InvalidInput, match=r"/name: found '1'; must be a name\.$"):
        validated(Named, {"name": "1"})


def test_the_description_of_a_key_ends_with_one_full_stop() -> None:
    class Described(BaseModel):
        sentence: float = Field(0.0, description="A sentence.")
        words: float = Field(0.0, description="words")

    for key, said in (("sentence", "A sentence"), ("words", "words")):
        with pytest.raises(InvalidInput, match=rf"The key is: {said}\.$"):
            validated(Described, {key: "x"})
