"""The rules between the numbers of a problem by stages; each broken rule is an :class:`Issue`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np

from zbv_solver.errors import Issue
from zbv_solver.kernels.jit import BoolArray, FloatArray
from zbv_solver.problem.numeric import (
    COMMUNICATION_ROUNDING,
    MAX_NUMBER,
    MEMORY_TOLERANCE,
    delta_rule,
    exceeds,
    first_broken,
)
from zbv_solver.problem.stages import (
    COMMUNICATION,
    FIXED,
    MAX_FEATURE_NAME,
    MAX_FEATURES,
    Communication,
    Copies,
    Costs,
    Feature,
    Kinds,
    Memory,
    Placement,
)

MAX_PAIR_FACTOR = 1e6


def number_rules(
    placement: Placement, costs: Costs, memory: Memory, *, has_features: bool
) -> Iterator[Issue]:
    """The rules of single numbers, and of the changes of memory, which must sum to 0.

    Parameters
    ----------
    has_features
        Whether the numbers are the fixed parts of costs that depend on the microbatch.
    """
    stages, ranks = placement.n_stages, placement.pp_degree
    lengths = {"p2p": stages - 1, "static": ranks, "limit": ranks}
    for section, figures in (("costs", costs), ("memory", memory)):
        for part in fields(figures):
            name, values = part.name, getattr(figures, part.name)
            if values is None:
                continue
            pointer, length = f"/{section}/{name}", lengths.get(name, stages)
            is_delta = section == "memory" and name.startswith("backward")
            # With features, only the sum for a microbatch has a sign that matters.
            is_fixed_part = has_features and name not in ("static", "limit")
            issue = _wrong_value(pointer, values, length, is_delta or is_fixed_part)
            if issue is None and length == stages:
                issue = _wrong_sum(pointer, values, placement.chunks)
            if issue is not None:
                yield issue
    if not has_features:  # otherwise they hold for every microbatch, not for the fixed part
        yield from _delta_rules(memory)


def _wrong_value(pointer: str, values: Sequence[float], length: int, signed: bool) -> Issue | None:
    if len(values) != length:
        return Issue(pointer, f"found {len(values)} values; must be {length}.")
    broken = first_broken(values, signed)
    if broken is None:
        return None
    # Equal values usually come from one scalar in the document.
    return Issue(f"{pointer}/{broken[0]}" if len(set(map(repr, values))) > 1 else pointer, broken[1])


def _wrong_sum(pointer: str, values: Sequence[float], chunks: int) -> Issue | None:
    """Sums of neighbouring stages must be valid, too: classical schedules merge a rank's worth of stages."""
    for first in range(0, len(values), chunks):
        together = sum(values[first : first + chunks])
        if abs(together) > MAX_NUMBER:
            return Issue(
                pointer,
                f"found {together:.15g} for stages {first} to {first + chunks - 1} together; the stages of "
                f"one rank must be at most {MAX_NUMBER:g} together. Use a larger unit.",
            )
    return None


def _delta_rules(memory: Memory) -> Iterator[Issue]:
    deltas = zip(memory.forward, memory.backward_input, memory.backward_weight, strict=False)
    for stage, (forward, inputs, weights) in enumerate(deltas):
        if not all(map(math.isfinite, (forward, inputs, weights))):
            return  # reported by _number_rules
        # A stage may be a sum of layers, each within the tolerance, and the sum rounds again.
        broken = delta_rule(forward, inputs, weights, tolerance=2 * MEMORY_TOLERANCE)
        if broken is not None:
            yield Issue(f"/memory{broken[0]}", f"stage {stage}: {broken[1]}")
            return


def feature_rules(
    features: Sequence[Feature], microbatches: int, costs: Costs, communication: Communication | None
) -> Iterator[Issue]:
    """The rules of features and of each of their coefficients."""
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
        if len(feature.value) != microbatches:
            yield Issue(at, f"found {len(feature.value)} values; must be {microbatches}, one per microbatch.")
        if (broken := first_broken(feature.value)) is not None:
            yield Issue(f"{at}/{broken[0]}", broken[1])
        yield from _coefficient_rules(feature, costs, communication)


def _coefficient_rules(
    feature: Feature, costs: Costs, communication: Communication | None
) -> Iterator[Issue]:
    if (feature.costs.backward is None) != (costs.backward is None):
        yield Issue(
            "/costs/backward", f"feature {feature.name}: a fused backward depends on all features or on none."
        )
    if (feature.communication is None) != (communication is None):
        yield Issue(
            f"/{COMMUNICATION}", f"feature {feature.name}: communication depends on all features or on none."
        )
    n_stages = len(costs.forward)
    for (section, name), values in feature.coefficients.items():
        at, length = f"/{section}/{name}/{feature.name}", n_stages - 1 if name == "p2p" else n_stages
        if len(values) != length:
            yield Issue(at, f"found {len(values)} coefficients; must be {length}.")
        if (broken := first_broken(values, signed=True)) is not None:
            yield Issue(at, broken[1])


def sum_rules(kinds: Kinds, costs: Costs, memory: Memory) -> Iterator[Issue]:
    """The rules of what a microbatch costs in all."""
    for name, table in kinds.tables("costs", costs).items():
        place = "boundary" if name == "p2p" else "stage"
        yield from _wrong_sums(f"/costs/{name}", place, table, kinds, is_signed=False)
    deltas = kinds.tables("memory", memory)
    for name, table in deltas.items():
        yield from _wrong_sums(f"/memory/{name}", "stage", table, kinds, is_signed=name != "forward")
    yield from _wrong_deltas(deltas, kinds)


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
            f"found changes of memory that sum to {total[wrong][0]:.15g} for microbatch {microbatch} on "
            f"stage {stage}; forward + backward_input + backward_weight must be 0, or memory would leak.",
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


def pair_rules(
    kinds: Kinds, costs: Costs, communication: Communication, pair_factor: float
) -> Iterator[Issue]:
    """The rules of what pairs take."""
    if not 1 <= pair_factor <= MAX_PAIR_FACTOR:
        yield Issue(
            "/costs/pair_factor", f"found {pair_factor:.15g}; must be a number from 1 to {MAX_PAIR_FACTOR:g}."
        )
    for name, values in vars(communication).items():
        # With features, only the sum for a microbatch has a sign that matters.
        issue = _wrong_value(f"/{COMMUNICATION}/{name}", values, len(costs.forward), bool(kinds.features))
        if issue is not None:
            yield issue
            return
    whole = kinds.tables("costs", costs)
    whole.setdefault("backward", whole["backward_input"] + whole["backward_weight"])
    for name, table in kinds.tables(COMMUNICATION, communication).items():
        wrong = (table < 0) | (table > whole[name] * (1 + COMMUNICATION_ROUNDING))
        if wrong.any():
            stage, microbatch = _first(wrong, kinds)
            yield Issue(
                f"/{COMMUNICATION}/{name}",
                f"found {table[wrong][0]:.15g} for microbatch {microbatch} on stage {stage}, where the "
                f"action takes {whole[name][wrong][0]:.15g}. Communication is a part of an action: it must "
                f"not be negative or longer than the action.",
            )


def copy_rules(placement: Placement, copies: Copies, memory: Memory, has_features: bool) -> Iterator[Issue]:
    """The rules of copies to the host."""
    if has_features:
        yield Issue("/costs/offload", "found together with features; copies need equal microbatches.")
        return
    for name, values in vars(copies).items():
        if values is None:
            continue
        is_of_ranks = name == "host_limit"
        at = f"/memory/{name}" if is_of_ranks or name == "offloadable" else f"/costs/{name}"
        length = placement.pp_degree if is_of_ranks else placement.n_stages
        if (issue := _wrong_value(at, values, length, False)) is not None:
            yield issue
            return
    for stage, (amount, held) in enumerate(zip(copies.offloadable, memory.forward, strict=True)):
        if exceeds(amount, held):
            yield Issue(
                "/memory/offloadable",
                f"found {amount:.15g} on stage {stage}, where an F keeps {held:.15g}; must be at most that.",
            )
            return


def _first(wrong: BoolArray, kinds: Kinds) -> tuple[int, int]:
    """The first stage or boundary with a wrong number, and its first microbatch."""
    stage, kind = np.argwhere(wrong)[0].tolist()
    return stage, kinds.microbatch(kind)
