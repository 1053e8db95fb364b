"""Tables of a measured step: how every rank spent its time, and durations of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from math import isfinite

from zbv_solver.export import quantities

from zbv_service.runs.measured.accounts import KindTimes, Parts, RankAccount

PARTS = (
    ("compute", "Actions", "Actions that took longer or shorter than planned"),
    ("transfer", "Transfer", "Idle while an input was being transferred"),
    ("waiting", "Waiting", "Idle before an input was computed, or before and after all work"),
    ("between", "Overhead", "From the end of an action to the start of waiting for the next one"),
)
"""The parts of a rank's step: name in :class:`Parts`, heading of the column, meaning."""
NOTICEABLE = 0.05
"""Durations that differ by more than this share are marked."""
_BAR = 200.0


@dataclass(frozen=True)
class Segment:
    """A piece of the bar of a rank; the bar is 200 wide."""

    x: float
    width: float
    style: str


@dataclass(frozen=True)
class AccountRow:
    """The time of a rank's step, measured minus planned; ``parts`` have the order of :data:`PARTS`."""

    rank: int
    parts: tuple[tuple[str, str, str], ...]
    total: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class KindCell:
    """A rank's actions of one letter; ``tone`` is slow, fast or empty."""

    planned: str
    measured: str
    ratio: str
    tone: str
    count: int


@dataclass(frozen=True)
class KindRow:
    """A rank's actions by letter; None for letters that it does not run."""

    rank: int
    cells: tuple[KindCell | None, ...]


def account_rows(ranks: Sequence[RankAccount]) -> Iterator[AccountRow]:
    """Accounts as rows; their bars share one scale."""
    reach = max((max(_gains_and_losses(row.difference)) for row in ranks), default=0.0) or 1.0
    for row in ranks:
        yield AccountRow(
            rank=row.rank,
            parts=tuple(_part(row, name) for name, _, _ in PARTS),
            total=signed(row.difference.total),
            segments=tuple(_segments(row.difference, reach)),
        )


def _part(row: RankAccount, name: str) -> tuple[str, str, str]:
    """The difference, with planned and measured values for the tooltip."""
    planned, measured = getattr(row.planned, name), getattr(row.measured, name)
    both = f"planned {quantities.figure(planned)}, measured {quantities.figure(measured)}"
    return name, signed(measured - planned), both


def _segments(parts: Parts, reach: float) -> Iterator[Segment]:
    """Slower parts to the right of the middle, faster ones to the left."""
    middle, scale = _BAR / 2, _BAR / 2 / reach
    right = left = middle
    for name, _, _ in PARTS:
        width = scale * abs(getattr(parts, name))
        if width < 0.01:
            continue
        if getattr(parts, name) > 0:
            yield Segment(round(right, 2), round(width, 2), name)
            right += width
        else:
            left -= width
            yield Segment(round(left, 2), round(width, 2), name)


def _gains_and_losses(parts: Parts) -> tuple[float, float]:
    """The sums of the positive and of the negative parts, both as positive numbers."""
    values: tuple[float, ...] = astuple(parts)
    return sum(value for value in values if value > 0), -sum(value for value in values if value < 0)


def kind_rows(kinds: Sequence[KindTimes], letters: Sequence[str]) -> Iterator[KindRow]:
    """Durations: a row per rank, a cell per letter."""
    cells = {(kind.rank, kind.letter): _kind_cell(kind) for kind in kinds}
    for rank in sorted({kind.rank for kind in kinds}):
        yield KindRow(rank, tuple(cells.get((rank, letter)) for letter in letters))


def _kind_cell(kind: KindTimes) -> KindCell:
    tone = "slow" if kind.ratio > 1 + NOTICEABLE else "fast" if kind.ratio < 1 - NOTICEABLE else ""
    return KindCell(
        planned=quantities.figure(kind.planned),
        measured=quantities.figure(kind.measured),
        ratio=f"{kind.ratio:.2f}" if isfinite(kind.ratio) else "–",
        tone=tone,
        count=kind.count,
    )


def signed(value: float) -> str:
    """A difference with its sign; 0 has none."""
    text = quantities.figure(value)
    return text if value <= 0 or text == "0" else f"+{text}"
