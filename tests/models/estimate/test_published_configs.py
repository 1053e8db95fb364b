"""Settings of published models against their published parameters.

Most are the keys that count of a ``config.json`` as published. Those from ``dbrx-base`` on are put together
from published sizes with the keys that their types write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import expert_degree, parameters_of
from zbv_models.estimate.model_rules import model_issues
from zbv_models.estimate.transformers_config import from_transformers

PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
BILLION = 1e9


def within(figure: float) -> float:
    """Half of the last digit of a printed figure, or 1 % of it if that is more."""
    digits = len(str(figure).partition(".")[2])
    return max(0.5 * 10.0**-digits, 0.01 * figure)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters(name: str) -> None:
    """Publishers count active parameters with both tables of the vocabulary, the output's, or none."""
    published = PUBLISHED[name]
    model = Transformer.model_validate({"sequence": 4096, **from_transformers(published["config"])})
    assert list(model_issues(model)) == []
    count = parameters_of(model, with_predictions=False)
    assert count.total / BILLION == pytest.approx(published["total"], rel=0, abs=within(published["total"]))
    assert (count.active < count.total) == (expert_degree(model) > 1)
    if "active" in published:
        table = model.vocabulary * model.hidden
        without = {"both": 0, "output": table, "none": 2 * table}[published["tables"]]
        active = (count.active - without) / BILLION
        assert active == pytest.approx(published["active"], rel=0, abs=within(published["active"]))
