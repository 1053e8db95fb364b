"""Jitter from documents and from its short form, and back to documents (docs/formats.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from zbv_solver.documents.fields import AtMost, Document, Number
from zbv_solver.documents.text import number
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.jitter.noise import MAX_SAMPLES, NO_SPREAD, Jitter, Spread
from zbv_solver.problem.limits import MAX_PP_DEGREE
from zbv_solver.problem.problem import LETTERS

SHORT_FORM = "5%, or action=5%,transfer=20% (keys: action, F, I, W, B, rank, transfer)"
MAX_SHORT_FORM = 200


class SamplesDocument(Document):
    """A factor that is drawn from samples, such as those of traces."""

    samples: Annotated[list[Number], AtMost(MAX_SAMPLES), Field(min_length=1)]


def _kind(value: Any) -> str:
    return "samples" if isinstance(value, dict | SamplesDocument) else "number"


def _kind_of_actions(value: Any) -> str:
    is_by_letter = isinstance(value, ActionsDocument) or (isinstance(value, dict) and "samples" not in value)
    return "by letter" if is_by_letter else _kind(value)


def _kind_of_rank(value: Any) -> str:
    return "list" if isinstance(value, list) else _kind(value)


SpreadDocument = Annotated[
    Annotated[Number, Tag("number")] | Annotated[SamplesDocument, Tag("samples")], Discriminator(_kind)
]
"""A relative standard deviation, or samples of the factor."""


class ActionsDocument(Document):
    """A spread for every kind of action."""

    F: SpreadDocument = 0.0
    I: SpreadDocument = 0.0  # noqa: E741 - the field's own letter
    W: SpreadDocument = 0.0
    B: SpreadDocument = 0.0


class JitterDocument(Document):
    """By how much durations vary: relative standard deviations, or samples of factors."""

    action: Annotated[
        Annotated[Number, Tag("number")]
        | Annotated[SamplesDocument, Tag("samples")]
        | Annotated[ActionsDocument, Tag("by letter")],
        Discriminator(_kind_of_actions),
    ] = Field(0.0, description="Of every action: one spread, or one for each of F, I, W and B.")
    rank: Annotated[
        Annotated[Number, Tag("number")]
        | Annotated[SamplesDocument, Tag("samples")]
        | Annotated[list[SpreadDocument], AtMost(MAX_PP_DEGREE), Field(min_length=1), Tag("list")],
        Discriminator(_kind_of_rank),
    ] = Field(0.0, description="Of a factor that a rank's actions share in an iteration: one, or per rank.")
    transfer: SpreadDocument = Field(0.0, description="Of every transfer.")


def parse_jitter(document: Any) -> Jitter:
    """Jitter from a decoded document, or from its short form such as ``action=5%,transfer=20%``.

    Raises :class:`InvalidInput`.
    """
    if isinstance(document, str):
        return _parse_short_form(document)
    parsed = document if isinstance(document, JitterDocument) else validated(JitterDocument, document)
    if isinstance(parsed.action, ActionsDocument):
        actions = [_spread(getattr(parsed.action, each), f"/action/{each}") for each in LETTERS]
    else:
        actions = [_spread(parsed.action, "/action")] * len(LETTERS)
    if isinstance(parsed.rank, list):
        rank = tuple(_spread(each, f"/rank/{index}") for index, each in enumerate(parsed.rank))
    else:
        rank = (_spread(parsed.rank, "/rank"),)
    return Jitter.by_letter(actions, rank, _spread(parsed.transfer, "/transfer"))


def jitter_json(jitter: Jitter) -> dict[str, Any]:
    """The document of a jitter."""
    actions = [_plain(spread) for spread in jitter.actions]
    by_letter = dict(zip(LETTERS, actions, strict=True))
    ranks = [_plain(spread) for spread in jitter.rank]
    return {
        "action": actions[0] if all(each == actions[0] for each in actions) else by_letter,
        "rank": ranks[0] if len(ranks) == 1 else ranks,
        "transfer": _plain(jitter.transfer),
    }


def _spread(document: float | SamplesDocument, pointer: str) -> Spread:
    try:
        if isinstance(document, SamplesDocument):
            return Spread(samples=tuple(document.samples))
        return Spread(document)
    except InvalidInput as error:
        raise error.below(pointer) from None


def _plain(spread: Spread) -> Any:
    if spread.samples:
        return {"samples": [number(sample) for sample in spread.samples]}
    return number(spread.deviation)


def _parse_short_form(text: str) -> Jitter:
    found: dict[str, Spread] = {}
    parts = [part.strip() for part in text.split(",")] if len(text) <= MAX_SHORT_FORM else [""]
    for part in parts:
        name, equals, value = part.rpartition("=")
        names = [name.strip()] if equals else ["action", "transfer"]
        spread = _of_text(value.strip())
        if spread is None or not all(each in (*LETTERS, "action", "rank", "transfer") for each in names):
            raise InvalidInput.at("", f"found {text[:60]!r}; jitter is written as {SHORT_FORM}.")
        for each in names:
            if each in found:
                raise InvalidInput.at("", f"found {each} twice in {text[:60]!r}; give it once.")
            found[each] = spread
    every = found.get("action", NO_SPREAD)
    actions = [found.get(letter, every) for letter in LETTERS]
    return Jitter.by_letter(actions, (found.get("rank", NO_SPREAD),), found.get("transfer", NO_SPREAD))


def _of_text(text: str) -> Spread | None:
    """The spread of a share or percentage; None if the text is neither."""
    digits = text.removesuffix("%")
    try:
        value = float(digits)
    except ValueError:
        return None
    return Spread(value / 100 if text.endswith("%") else value)
