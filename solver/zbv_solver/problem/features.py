"""The rules of problems whose microbatches differ: of names and numbers, and of what they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np

from zbv_solver.errors import Issue
from zbv_solver.kernels.jit import BoolArray, FloatArray
from zbv_solver.problem.numeric import MAX_NUMBER, MEMORY_TOLERANCE, first_broken
from zbv_solver.problem.stages import Costs, Deltas, Feature, Kinds, Memory

FIXED = "fixed"
"""The name, in a document, of the part that does not depend on the microbatch."""
MAX_FEATURES = 16
MAX_FEATURE_NAME = 64


def feature_rules(
    features: Sequence[Feature], microbatches: int, costs: Costs, memory: Memory
) -> Iterator[Issue]:
    """The broken rules of features, and of the costs of every microbatch; pointers are into the document."""
    issues = [*_shape_rules(features, microbatches, costs)]
    yield from issues or _sum_rules(Kinds.of(microbatches, features), features, costs, memory)


def _shape_rules(features: Sequence[Feature], microbatches: int, costs: Costs) -> Iterator[Issue]:
    names = [feature.name for feature in features]
    if len(features) > MAX_FEATURES:
        yield Issue("/features", f"found {len(features)} features; must be at most {MAX_FEATURES}.")
    for feature in features:
        at = f"/features/{feature.name}"
        if feature.name == FIXED or not 1 <= len(feature.name) <= MAX_FEATURE_NAME:
            yield Issue(
                at,
                f"found the name {feature.name[:80]!r}; a feature's name has 1 to {MAX_FEATURE_NAME} "
                f"characters and is not {FIXED!r}.",
            )
        if names.count(feature.name) > 1:
            yield Issue(at, "found this name twice; names of features are unique.")
        yield from _value_rules(at, feature, microbatches)
        yield from _coefficient_rules(feature, costs)


def _value_rules(at: str, feature: Feature, microbatches: int) -> Iterator[Issue]:
    if len(feature.value) != microbatches:
        yield Issue(at, f"found {len(feature.value)} values; must be {microbatches}, one per microbatch.")
    if (broken := first_broken(feature.value)) is not None:
        yield Issue(f"{at}/{broken[0]}", broken[1])


def _coefficient_rules(feature: Feature, costs: Costs) -> Iterator[Issue]:
    if (feature.costs.backward is None) != (costs.backward is None):
        yield Issue(
            "/costs/backward", f"feature {feature.name}: a fused backward depends on all features or on none."
        )
    n_stages = len(costs.forward)
    for (section, name), values in feature.coefficients.items():
        at, length = f"/{section}/{name}/{feature.name}", n_stages - 1 if name == "p2p" else n_stages
        if len(values) != length:
            yield Issue(at, f"found {len(values)} coefficients; must be {length}.")
        if (broken := first_broken(values, signed=True)) is not None:
            yield Issue(at, broken[1])


def _sum_rules(kinds: Kinds, features: Sequence[Feature], costs: Costs, memory: Memory) -> Iterator[Issue]:
    """The rules of what a microbatch costs in all."""
    for part in fields(Costs):
        fixed = getattr(costs, part.name)
        if fixed is not None:
            table = kinds.table(fixed, [getattr(each.costs, part.name) for each in features])
            place = "boundary" if part.name == "p2p" else "stage"
            yield from _wrong_sums(f"/costs/{part.name}", place, table, kinds, is_signed=False)
    tables = {
        part.name: kinds.table(
            getattr(memory, part.name), [getattr(each.memory, part.name) for each in features]
        )
        for part in fields(Deltas)
    }
    for name, table in tables.items():
        yield from _wrong_sums(f"/memory/{name}", "stage", table, kinds, is_signed=name != "forward")
    yield from _wrong_deltas(tables, kinds)


def _wrong_sums(at: str, place: str, table: FloatArray, kinds: Kinds, is_signed: bool) -> Iterator[Issue]:
    wrong = np.abs(table) > MAX_NUMBER
    if not is_signed:
        wrong |= table < 0
    if wrong.any():
        stage, microbatch = _first(wrong, kinds)
        rule = f"of size at most {MAX_NUMBER:g}" if is_signed else f"from 0 to {MAX_NUMBER:g}"
        yield Issue(
            at,
            f"found {table[wrong][0]:.15g} for microbatch {microbatch} on {place} {stage}; the fixed part "
            f"and all coefficients times features must add up to a number {rule} for every microbatch.",
        )


def _wrong_deltas(tables: dict[str, FloatArray], kinds: Kinds) -> Iterator[Issue]:
    total = sum(tables.values(), np.zeros(()))
    size = sum((np.abs(table) for table in tables.values()), np.zeros(()))
    # Every coefficient may be rounded, and so may the sums.
    wrong = np.abs(total) > 2 * MEMORY_TOLERANCE * size
    if wrong.any():
        stage, microbatch = _first(wrong, kinds)
        yield Issue(
            "/memory",
            f"found deltas that sum to {total[wrong][0]:.15g} for microbatch {microbatch} on stage {stage}; "
            f"forward + backward_input + backward_weight must be 0, or memory would leak.",
        )
        return
    grows = tables["backward_weight"] > 0
    if grows.any():
        stage, microbatch = _first(grows, kinds)
        yield Issue(
            "/memory/backward_weight",
            f"found {tables['backward_weight'][grows][0]:.15g} for microbatch {microbatch} on stage {stage}; "
            f"must not be positive: W releases what F and I hold.",
        )


def _first(wrong: BoolArray, kinds: Kinds) -> tuple[int, int]:
    """The first stage or boundary with a wrong number, and its first microbatch."""
    stage, kind = np.argwhere(wrong)[0].tolist()
    return stage, kinds.microbatch(kind)
