"""Jitter: by which factors the durations of a problem vary from iteration to iteration.

In a scenario, that is one iteration, an action takes its planned duration, times its own factor, times a
factor that all actions of its rank share; a transfer takes its planned latency times its own factor. All
factors are independent. A factor of a :class:`Spread` with a deviation is lognormal with mean 1, so that the
mean duration stays the planned one.

Draws are common random numbers: they depend on the seed, the chain, the iteration, the stage, the kind of
action and the microbatch, but not on the order. So all orders of a problem meet the same scenarios, and their
differences have little sampling error. I and B of a microbatch share their draw.

docs/formats.md describes the documents of a jitter and its short form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Discriminator, Field, Tag

from zbv_solver.documents.fields import AtMost, Document, Number
from zbv_solver.documents.files import plain
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.numeric import MAX_PP_DEGREE
from zbv_solver.problem.problem import LETTERS, B, F, I, Problem, W

MAX_DEVIATION = 10.0
"""Largest relative standard deviation."""
MAX_SAMPLES = 10_000
MAX_SEED = 2**31 - 1
MAX_FACTOR = 1e6
SHORT_FORM = "5%, or action=5%,transfer=20% (keys: action, F, I, W, B, rank, transfer)"
MAX_SHORT_FORM = 200
LEAST_QUANTILE, LARGEST_QUANTILE = 0.5, 0.99
FACTOR_BITS = 20
"""Factors are multiples of 2 ** -FACTOR_BITS. Exponential functions differ in their last bit between
processors, and rounding keeps plans equal all the same."""


@dataclass(frozen=True)
class Spread:
    """The distribution of a factor.

    Raises
    ------
    InvalidInput
        When a number is out of range.
    """

    deviation: float = 0.0
    """Relative standard deviation of a lognormal factor with mean 1; 0 for a factor that is always 1."""
    samples: tuple[float, ...] = ()
    """If there are any, the factor is one of them, all with the same probability; the deviation is then 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.deviation <= MAX_DEVIATION:
            raise InvalidInput.at(
                "",
                f"found {self.deviation:g}; a relative standard deviation must be from 0 to "
                f"{MAX_DEVIATION:g} (0.05 or 5% is five percent).",
            )
        if len(self.samples) > MAX_SAMPLES:
            raise InvalidInput.at(
                "/samples", f"found {len(self.samples)}; at most {MAX_SAMPLES} are allowed."
            )
        for index, sample in enumerate(self.samples):
            if not 0 <= sample <= MAX_FACTOR:
                raise InvalidInput.at(
                    f"/samples/{index}", f"found {sample:g}; must be a factor from 0 to {MAX_FACTOR:g}."
                )
        if self.samples and self.deviation:
            raise InvalidInput.at("", "found a deviation and samples; give one of them.")

    @property
    def is_constant(self) -> bool:
        """Whether the factor is always 1."""
        return not self.deviation and not self.samples

    def factors(self, normal: FloatArray) -> FloatArray:
        """Factors for standard normal draws of any shape."""
        if self.samples:
            ordered = np.sort(np.array(self.samples))
            rank = np.searchsorted(_normal_quantiles(len(ordered)), normal)
            found: FloatArray = ordered[rank]
        else:
            # The logarithm of a factor has this variance; its mean makes the factor's mean 1.
            variance = math.log1p(self.deviation**2)
            found = np.exp(math.sqrt(variance) * normal - variance / 2)
        rounded: FloatArray = np.rint(np.ldexp(found, FACTOR_BITS))
        return np.ldexp(rounded, -FACTOR_BITS)


NO_SPREAD = Spread()


def _normal_quantiles(n: int) -> FloatArray:
    """The bounds (n - 1,) that cut the standard normal distribution into n parts of equal probability."""
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf
    return np.array([inverse(k / n) for k in range(1, n)])


@dataclass(frozen=True)
class Jitter:
    """By how much the durations of a problem vary."""

    actions: tuple[Spread, ...] = (NO_SPREAD,) * len(LETTERS)
    """The factors of F, I, W and B, one draw per action."""
    rank: tuple[Spread, ...] = (NO_SPREAD,)
    """The factor that all actions of a rank share in an iteration: one for all ranks, or one per rank."""
    transfer: Spread = NO_SPREAD
    """The factors of transfers, one draw per transfer."""

    @classmethod
    def of(cls, action: float = 0.0, transfer: float = 0.0, rank: float = 0.0) -> Jitter:
        """Jitter from relative standard deviations of all actions, of transfers and of ranks."""
        return cls((Spread(action),) * len(LETTERS), (Spread(rank),), Spread(transfer))

    @property
    def is_constant(self) -> bool:
        """Whether no duration varies."""
        return all(spread.is_constant for spread in (*self.actions, *self.rank, self.transfer))

    def of_rank(self, rank: int) -> Spread:
        """The factor that a rank's actions share."""
        return self.rank[rank] if len(self.rank) > 1 else self.rank[0]

    def require_ranks(self, pp_degree: int) -> None:
        """Raise :class:`InvalidInput` when there are factors for another number of ranks."""
        if len(self.rank) not in (1, pp_degree):
            raise InvalidInput.at(
                "/rank", f"found {len(self.rank)} values; must be one, or one per rank ({pp_degree})."
            )


def check_quantile(quantile: float | None, jitter: Jitter | None) -> None:
    """Raise :class:`InvalidInput` when a quantile of simulated times is out of range, or has no jitter."""
    if quantile is None:
        return
    if jitter is None:
        raise InvalidInput.at(
            "/quantile", "is of the times when durations vary; give jitter too, or remove it."
        )
    if not LEAST_QUANTILE <= quantile <= LARGEST_QUANTILE:
        raise InvalidInput.at(
            "/quantile", f"found {quantile:g}; must be from {LEAST_QUANTILE} to {LARGEST_QUANTILE}."
        )


class Draws(NamedTuple):
    """Factors of one iteration in L chains, for a problem with S stages, p ranks and m microbatches."""

    action: FloatArray
    """(4 S m, L) by letter code, stage and microbatch."""
    rank: FloatArray
    """(p, L)."""
    transfer: FloatArray
    """(2 S m, L): of the input of F by stage and microbatch, then of the input of I or B."""


MOST_KEPT = 1 << 14
"""Most numbers of a kind of draw that is kept for the next schedule, which needs the same ones."""


@lru_cache(maxsize=256)
def _normal(seed: int, chains: tuple[int, ...], iteration: int, kind: int, size: int) -> FloatArray:
    """Normal draws (size, L) of an iteration in L chains."""
    found = np.empty((len(chains), size))
    for lane, chain in enumerate(chains):
        # One stream for every kind of draw: none depends on which others are needed.
        bits = np.random.Philox(key=[seed, chain << 32 | iteration], counter=[0, 0, 0, kind])
        np.random.Generator(bits).standard_normal(out=found[lane])
    found.flags.writeable = False
    return found.T


_PLANES = {F: 0, I: 1, W: 2, B: 1}
"""The stream that the draws of a letter come from."""
_RANKS, _DOWN, _UP = 3, 4, 5


def draw(jitter: Jitter, problem: Problem, seed: int, chains: Sequence[int], iteration: int) -> Draws:
    """The factors of one iteration in some chains of iterations.

    Raises :class:`InvalidInput` when the jitter is for another number of ranks.
    """
    jitter.require_ranks(problem.pp_degree)
    cells = problem.n_stages * problem.microbatches

    def normal(kind: int, size: int) -> FloatArray:
        is_small = size * len(chains) <= MOST_KEPT
        return (_normal if is_small else _normal.__wrapped__)(seed, tuple(chains), iteration, kind, size)

    action = np.ones((len(LETTERS), cells, len(chains)))
    planes: dict[int, FloatArray] = {}
    for letter, spread in enumerate(jitter.actions):
        if not spread.is_constant:
            plane = _PLANES[letter]
            if plane not in planes:
                planes[plane] = normal(plane, cells)
            action[letter] = spread.factors(planes[plane])
    rank = np.ones((problem.pp_degree, len(chains)))
    if not all(spread.is_constant for spread in jitter.rank):
        drawn = normal(_RANKS, problem.pp_degree)
        rank = np.array([jitter.of_rank(r).factors(drawn[r]) for r in range(problem.pp_degree)])
    transfer = np.ones((2, cells, len(chains)))
    if not jitter.transfer.is_constant:
        for way, kind in enumerate((_DOWN, _UP)):
            transfer[way] = jitter.transfer.factors(normal(kind, cells))
    return Draws(action.reshape(-1, len(chains)), rank, transfer.reshape(-1, len(chains)))


def drawn_costs(problem: Problem, draws: Draws) -> tuple[FloatArray, FloatArray]:
    """What actions and their inputs take in an iteration, in the problem's time unit.

    Returns the durations of actions (4, S, m, L) by letter code, stage and microbatch, and the latencies
    (2, S, m, L) of the input of F, and of the input of I or B.
    """
    arrays, stages, m = problem.arrays, problem.n_stages, problem.microbatches
    shared = draws.rank[np.array(problem.placement.rank_of)]
    action = draws.action.reshape(len(LETTERS), stages, m, -1)
    duration: FloatArray = arrays.duration[:, :, arrays.kind_of, None] * action * shared[None, :, None, :]
    planned = np.zeros((2, stages, m))
    planned[0, 1:] = planned[1, :-1] = arrays.latency[:, arrays.kind_of]
    latency: FloatArray = planned[..., None] * draws.transfer.reshape(2, stages, m, -1)
    return duration, latency


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
        actions = tuple(_spread(getattr(parsed.action, each), f"/action/{each}") for each in LETTERS)
    else:
        actions = (_spread(parsed.action, "/action"),) * len(LETTERS)
    if isinstance(parsed.rank, list):
        rank = tuple(_spread(each, f"/rank/{index}") for index, each in enumerate(parsed.rank))
    else:
        rank = (_spread(parsed.rank, "/rank"),)
    return Jitter(actions, rank, _spread(parsed.transfer, "/transfer"))


def jitter_json(jitter: Jitter) -> dict[str, Any]:
    """The document of a jitter."""
    actions = [_plain(spread) for spread in jitter.actions]
    ranks = [_plain(spread) for spread in jitter.rank]
    return {
        "action": actions[0]
        if actions == actions[:1] * len(LETTERS)
        else dict(zip(LETTERS, actions, strict=True)),
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
    return {"samples": plain(spread.samples)} if spread.samples else plain(spread.deviation)


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
    actions = tuple(found.get(letter, every) for letter in LETTERS)
    return Jitter(actions, (found.get("rank", NO_SPREAD),), found.get("transfer", NO_SPREAD))


def _of_text(text: str) -> Spread | None:
    """The spread of a share or percentage; None if the text is neither."""
    digits = text.removesuffix("%")
    try:
        value = float(digits)
    except ValueError:
        return None
    return Spread(value / 100 if text.endswith("%") else value)
