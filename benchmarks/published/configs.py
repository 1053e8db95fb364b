"""A table of ``config.json`` files: read or refused, and parameters in billions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import parameters_of
from zbv_models.estimate.transformers_config import read_config
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput

COLUMNS = ("file", "type", "by", "total", "active", "active without the embedding", "predictions", "encoder")
SEQUENCE = 4096
"""Tokens of a sequence, which do not change parameters."""


def configs_table(files: Iterable[Path]) -> Table:
    """One row per file, with the reason where it is refused.

    Raises
    ------
    OSError, ValueError
        A file cannot be read, or is not JSON.
    """
    table = Table(*COLUMNS, title="Parameters of config.json files, in billions")
    for path in files:
        document = json.loads(path.read_text(encoding="utf-8"))
        name = str(document.get("model_type")) if isinstance(document, dict) else ""
        try:
            table.add_row(path.name, name, *_counts(document))
        except InvalidInput as error:
            table.add_row(path.name, name, "refused", str(error.issues[0]))
    return table


def _counts(document: object) -> list[str]:
    read = read_config(document, SEQUENCE) if isinstance(document, dict) else {}
    model = validated(Transformer, {"sequence": SEQUENCE, **read})
    by = "module tree" if model.origin is not None and model.origin.measured else "formulas"
    text = model.model_copy(update={"vision": None})
    alone = parameters_of(text, with_predictions=False)
    embedding = model.vocabulary * model.hidden
    counts = (
        alone.total,
        alone.active,
        alone.active - embedding,
        parameters_of(text).total - alone.total,
        parameters_of(model).total - parameters_of(text).total,
    )
    return [by, *(f"{count / 1e9:.3f}" for count in counts)]
