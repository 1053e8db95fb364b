"""Numbers in messages have all digits that matter, narrow spaces between thousands, and their unit."""

from __future__ import annotations

import re

import pytest
import zbv_solver as zbv
from hypothesis import given
from hypothesis import strategies as st
from support.problems import uniform_document
from zbv_solver.numerals import exact, plain
from zbv_solver.plans.plan import plan_json
from zbv_solver.search.claims import check_plan


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (499.999999998, "GiB", "499.999999998 GiB"),
        (499.9999999998, "bytes", "500 bytes"),
        (5909168, "us", "5\u202f909\u202f168 µs"),
        (-1234.5, None, "−1\u202f234.5"),
        (float("inf"), "s", "∞ s"),
    ],
)
def test_a_number_is_written_in_full_with_its_unit(value: float, unit: str | None, text: str) -> None:
    assert exact(value, unit) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_to_be_copied_is_the_number_as_json_reads_it(value: float) -> None:
    assert float(plain(value)) == pytest.approx(value, rel=1e-11)


def test_limits_and_claims_have_the_units_of_their_problem() -> None:
    units = {"time": "us", "memory": "bytes"}
    costs = {"forward": 1000.1, "backward_input": 1000.1, "backward_weight": 1000.1}
    memory = {"forward": 1200.1, "backward_input": 0, "backward_weight": -1200.1, "limit": 2400.1}
    document = uniform_document(2, 4) | {"costs": costs, "memory": memory, "units": units}
    with pytest.raises(zbv.InfeasibleMemory) as refused:
        zbv.plan(zbv.parse(document), "quick")
    assert "2\u202f400.1 bytes < 2\u202f400.2 bytes" in str(refused.value)
    assert "[2400.2, 2400.2] bytes" in str(refused.value)
    plan = zbv.plan(zbv.parse(document | {"memory": memory | {"limit": 9999}}), "quick")
    claims = {claim.pointer: claim.text for claim in check_plan(plan_json(plan)).claims}
    for pointer, unit in (
        ("span", "µs"),
        ("makespan", "µs"),
        ("lower_bound", "µs"),
        ("peak_memory", "bytes"),
    ):
        assert re.search(rf"\d\u202f\d{{3}}(\.\d{{1,5}})? {unit}", claims[f"/metrics/{pointer}"])
