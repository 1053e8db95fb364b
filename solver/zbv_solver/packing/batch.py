"""Batches to pack: what ``zbv pack`` reads (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from zbv_solver.documents.fields import AtMost, Count, Document
from zbv_solver.documents.files import load
from zbv_solver.documents.validation import require_kind, validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.packing.step_costs import FEATURES
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem

MAX_SEQUENCES = 16_384
MAX_TOKENS = 1 << 30
"""Longest sequence: the square of a longer one has more digits than a float holds exactly."""
_CHOSEN = ("microbatches", "features", "sequences")
"""Keys of a problem that a packing chooses."""


class BatchDocument(Document):
    """A global batch to pack, and the pipeline that runs it."""

    sequences: Annotated[
        list[Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]],
        AtMost(MAX_SEQUENCES),
        Field(min_length=1, description="Lengths of the batch's sequences, in tokens."),
    ]
    max_tokens: Count = Field(description="Most tokens of a microbatch.")
    replicas: Count = Field(1, description="Pipelines that share the batch; all wait for the slowest.")
    problem: dict[str, Any] = Field(
        description="A problem by stages without microbatches, features and sequences. Its costs may depend "
        "on tokens and tokens_squared."
    )


@dataclass(frozen=True)
class Batch:
    """A global batch to pack.

    Raises
    ------
    InvalidInput
        When a rule is broken; pointers are into the document.
    """

    sequences: tuple[int, ...]
    """Lengths in tokens."""
    max_tokens: int
    """Most tokens of a microbatch."""
    replicas: int
    """Pipelines that share the batch."""
    problem: Problem
    """The pipeline, with one microbatch: the longest sequence alone."""

    def __post_init__(self) -> None:
        issues = [*_size_rules(self), *_problem_rules(self.problem)]
        if issues:
            raise InvalidInput(issues)

    def problem_of(self, microbatches: Sequence[Sequence[int]]) -> Problem:
        """The problem of a replica with these microbatches, given as indices of sequences."""
        lengths = [[self.sequences[index] for index in contents] for contents in microbatches]
        values = {
            name: tuple(float(sum(length**power for length in each)) for each in lengths)
            for name, power in zip(FEATURES, (1, 2), strict=True)
        }
        features = tuple(replace(each, value=values[each.name]) for each in self.problem.features)
        return replace(self.problem, microbatches=len(lengths), features=features)


def load_batch(path: str | Path) -> Batch:
    """Read a batch file; ``-`` is standard input.

    Raises
    ------
    InvalidInput
        When the file is not JSON or breaks a rule.
    InfeasibleMemory
        When the longest sequence alone does not fit.
    OSError
        When the file cannot be read.
    """
    return load(path, parse_batch)


def parse_batch(document: Any) -> Batch:
    """A decoded JSON document as a batch.

    Raises
    ------
    InvalidInput
        With one issue per broken rule; pointers are into the document.
    InfeasibleMemory
        When the longest sequence alone does not fit the memory limit.
    """
    require_kind(document, "batch")
    return to_batch(validated(BatchDocument, document))


def to_batch(parsed: BatchDocument) -> Batch:
    """A parsed document as a batch; raises like :func:`parse_batch`."""
    issues = [
        Issue(f"/problem/{key}", "a packing chooses this; remove the key.")
        for key in _CHOSEN
        if key in parsed.problem
    ]
    if "layers" in parsed.problem:
        issues.append(
            Issue(
                "/problem/layers", "a batch needs the costs of stages. Cut the layers first, with zbv plan."
            )
        )
    if issues:
        raise InvalidInput(issues)
    longest = max(parsed.sequences)
    try:
        problem = parse_problem({**parsed.problem, "microbatches": 1, "sequences": [[longest]]})
    except InvalidInput as error:
        raise InvalidInput(
            [replace(issue, pointer=f"/problem{issue.pointer}") for issue in error.issues],
            error.more,
            error.is_partial,
        ) from None
    batch = Batch(tuple(parsed.sequences), parsed.max_tokens, parsed.replicas, problem)
    problem.require_feasible()
    return batch


def _size_rules(batch: Batch) -> Iterator[Issue]:
    longest = max(batch.sequences, default=0)
    if longest > batch.max_tokens:
        place = batch.sequences.index(longest)
        yield Issue(
            f"/sequences/{place}",
            f"found {longest} tokens, more than the largest microbatch (max_tokens {batch.max_tokens}). "
            f"Sequences are not cut: raise max_tokens, or cut the sequence.",
        )
    if len(batch.sequences) < batch.replicas:
        yield Issue(
            "/replicas",
            f"found {batch.replicas} replicas for {len(batch.sequences)} sequences; every replica needs at "
            f"least one sequence.",
        )


def _problem_rules(problem: Problem) -> Iterator[Issue]:
    """What the bounds of a packing rely on: actions run alone, and cost no less when a microbatch grows."""
    if problem.communication is not None:
        yield Issue("/problem/costs/communication", "a packing orders single actions; remove the key.")
    for feature in problem.features:
        for (section, name), values in feature.coefficients.items():
            if (section, name) in (("memory", "backward_input"), ("memory", "backward_weight")):
                continue
            if min(values, default=0.0) < 0:
                yield Issue(
                    f"/problem/{section}/{name}/{feature.name}",
                    f"found {min(values):.15g}; must not be negative: a batch is packed on the assumption "
                    f"that longer sequences cost more.",
                )
