"""Validation of documents; pydantic's errors become :class:`~zbv_solver.errors.InvalidInput`."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from zbv_solver.documents.fields import BATCH, MAX_NAME, TOO_MANY
from zbv_solver.errors import MOST_ISSUES, InvalidInput, Issue, did_you_mean

Model = TypeVar("Model", bound=BaseModel)

_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
_NO_OBJECT = ("model_type", "dataclass_type")
"""Types of pydantic's errors, of models and of dataclasses."""
_SHOWN = 60
"""Most characters of a value that a message quotes."""


class _Text(reprlib.Repr):
    """Values as a JSON document has them."""

    def repr_NoneType(self, x: None, level: int) -> str:
        """JSON has null."""
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        """JSON has true and false."""
        return "true" if x else "false"

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an integer of thousands of digits."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return "a number too long to print"


_REMEDIES = {
    "plan": "Its problem is under the key `problem`.",
    "packing": "The plan of replica 0 is under /replicas/0/plan, and so on.",
    "batch": "`zbv pack` packs it.",
    "problem": "`zbv plan` makes a plan of it.",
    "list of layouts": "The plan of the best one is under /layouts/0/plan.",
    "model's configuration": "`zbv estimate --config` makes a problem of it; `zbv layout` searches a layout.",
    "cluster": "`zbv layout --cluster` takes it.",
}
"""What to do with a document of each kind where another kind is expected."""

_TEXT = _Text()
_TEXT.maxlevel, _TEXT.maxlist, _TEXT.maxdict, _TEXT.maxtuple = 3, 20, 20, 20
_TEXT.maxstring = _TEXT.maxother = _TEXT.maxlong = 2 * _SHOWN


def validated(model: type[Model], document: Any) -> Model:
    """A decoded JSON document as a pydantic model; raises :class:`InvalidInput`."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        refused = refusal(error, document)
        issues = [_with_meaning(issue, model) for issue in refused.issues]
        raise InvalidInput(issues, refused.more, refused.is_partial) from None


def _with_meaning(issue: Issue, model: Any) -> Issue:
    """An issue of a number also says what the key means, because that names the unit."""
    description = None
    for key in issue.pointer.split("/")[1:]:
        kinds = [model, *get_args(model)]
        fields: dict[str, Any] = next(
            (each.model_fields for each in kinds if hasattr(each, "model_fields")), {}
        )
        if key not in fields:
            return replace(issue, detail=f"{issue.detail}{did_you_mean(key, fields)}")
        model, description = fields[key].annotation, fields[key].description
    if description is None or not issue.detail.startswith("found ") or "should be" not in issue.detail:
        return issue
    return replace(issue, detail=f"{issue.detail} The key is: {description.rstrip('.')}.")


def require_kind(document: Any, expected: str) -> None:
    """Raise :class:`InvalidInput` for a document of another kind of ``_REMEDIES``, as far as its keys show.

    Without this, a file of the wrong kind would be reported key by key.
    """
    found = _kind_of(document) if isinstance(document, dict) else None
    if found is not None and found != expected:
        raise InvalidInput.at("", f"this is a {found}, not a {expected}. {_REMEDIES[found]}")


def _kind_of(document: dict[str, Any]) -> str | None:
    if "ranks" in document:
        return "plan"
    if "replicas" in document and "step_time" in document:
        return "packing"
    if "max_tokens" in document:
        return "batch"
    if "layouts" in document and "considered" in document:
        return "list of layouts"
    if "pp_degree" in document:
        return "problem"
    if {"model", "model_type"} & document.keys():
        return "model's configuration"
    return "cluster" if {"gpus_per_node", "groups"} & document.keys() else None


def refusal(error: ValidationError, document: Any) -> InvalidInput:
    """The error for a document that pydantic rejected; pointers name keys of the document, not our types."""
    entries = error.errors(include_url=False, include_context=False)
    located = [_located(entry["loc"], entry["type"], document) for entry in entries]
    is_partial = any(is_in_long_list for _, is_in_long_list in located)
    issues = []
    for entry, (path, _) in zip(entries[:MOST_ISSUES], located, strict=False):
        pointer = "".join(f"/{_key(key).replace('~', '~0').replace('/', '~1')}" for key in path)
        says_all = entry["type"] in ("missing", *_UNKNOWN_KEY, TOO_MANY)
        found = "" if says_all else f"found {quoted(entry['input'])}; "
        said = entry["msg"].removeprefix("Value error, ").partition(" after validation")[0]
        rule = {
            "missing": "this key is required and absent.",
            **dict.fromkeys(_UNKNOWN_KEY, "unknown key; remove it or correct its spelling."),
            **dict.fromkeys(_NO_OBJECT, "must be a JSON object."),
        }.get(entry["type"], f"{said[0].lower()}{said[1:]}.")
        issues.append(Issue(pointer, found + rule))
    return InvalidInput(issues, len(entries) - len(issues), is_partial)


def quoted(value: Any) -> str:
    """The beginning of a value, as messages quote it."""
    text = _TEXT.repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _key(key: int | str) -> str:
    """A key of a pointer, shortened where it is longer than any valid name."""
    text = str(key)
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


def _located(loc: tuple[int | str, ...], kind: str, document: Any) -> tuple[list[int | str], bool]:
    """The path of a mistake, and whether it is in a list that was not validated to its end.

    The parts of the location that pydantic adds for unions and tags are dropped.
    """
    path: list[int | str] = []
    current, is_partial = document, False
    for position, key in enumerate(loc):
        is_missing = kind == "missing" and position == len(loc) - 1
        if isinstance(current, dict) and (key in current or is_missing):
            current = current.get(key)
        elif isinstance(current, list) and isinstance(key, int) and key < len(current):
            is_partial = is_partial or len(current) > BATCH
            current = current[key]
        else:
            continue
        path.append(key)
    return path, is_partial
