"""The Gantt chart as a static SVG for documents, without scripts and of bounded size.

It carries its own light background, so that it reads the same on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from zbv_solver.export import quantities
from zbv_solver.export.palette import (
    BACKGROUND,
    GRID,
    KIND_FILLS,
    KIND_INKS,
    MUTED,
    NAMES,
    PALETTE_SHADES,
    TEXT,
)
from zbv_solver.export.timeline import Timeline, coverage, timeline
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS

WIDTH = 1200
MAX_BARS = 60_000
"""With more actions, columns show what their rank does most of the time."""

_MARGIN = 16
_LEFT = 76
_TOP = 76
_FONT = 'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"'
_NARROWEST_COLUMN = 1.0
_GAP = 0.8
_WIDE_ENOUGH_FOR_A_GAP = 4.0


@dataclass(frozen=True)
class _Frame:
    """Maps time and ranks to pixels."""

    scale: float
    row: float

    def x(self, at: float) -> float:
        return _LEFT + at * self.scale

    def y(self, rank: int) -> float:
        return _TOP + rank * self.row


@dataclass(frozen=True)
class _Bar:
    rank: int
    kind: int
    left: float
    right: float
    label: str


def render(plan: Plan) -> str:
    """The plan's Gantt chart as an SVG document of :data:`WIDTH` pixels."""
    line = timeline(plan)
    drawn = WIDTH - _LEFT - _MARGIN
    frame = _Frame(
        scale=drawn / line.makespan if line.makespan > 0 else 0.0,
        row=min(34.0, max(4.0, 720 / line.pp_degree)),
    )
    bars = list(_bars(line, frame) if len(line) <= MAX_BARS else _merged_bars(line, frame))
    height = frame.y(line.pp_degree) + 52
    title = _title(plan)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img" {_FONT}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" rx="10" fill="{BACKGROUND}"/>',
            *_heading(plan, line, title),
            *_axis(plan, line, frame),
            *_ranks(line, frame),
            *_paths(bars, frame),
            *_labels(bars, frame),
            "</svg>\n",
        ]
    )


def _title(plan: Plan) -> str:
    metrics, problem = plan.metrics, plan.problem
    proved = (
        "proved optimal"
        if metrics.status == "optimal"
        else f"at most {quantities.percent(metrics.gap)} above the best possible"
    )
    return (
        f"{problem.pp_degree} ranks, {problem.microbatches} microbatches: {problem.objective} "
        f"{quantities.time(plan.objective, problem.units)}, "
        f"bubble {quantities.percent(metrics.bubble_rate)}, {proved}"
    )


def _heading(plan: Plan, line: Timeline, title: str) -> Iterator[str]:
    yield (
        f'<text x="{_MARGIN}" y="28" font-size="15" font-weight="600" fill="{TEXT}">{escape(title)}</text>'
    )
    used = np.unique(line.letter).tolist()
    chunked = plan.problem.placement.chunks > 1
    x = float(_MARGIN)
    for code in used:
        shades = range(PALETTE_SHADES if chunked else 1)
        for at, shade in enumerate(shades):
            colour = KIND_FILLS[PALETTE_SHADES * code + shade]
            yield f'<rect x="{x + 16 * at:.1f}" y="44" width="14" height="12" rx="2" fill="{colour}"/>'
        x += 16 * len(shades) + 5
        name = f"{LETTERS[code]} {NAMES[LETTERS[code]]}"
        yield f'<text x="{x:.1f}" y="54" font-size="12" fill="{TEXT}">{name}</text>'
        x += 6.3 * len(name) + 18
    if chunked:
        yield (f'<text x="{x:.1f}" y="54" font-size="12" fill="{MUTED}">dark: chunk 0, light: chunk 1</text>')


def _axis(plan: Plan, line: Timeline, frame: _Frame) -> Iterator[str]:
    bottom = frame.y(line.pp_degree)
    for at in quantities.ticks(0.0, line.makespan, 10):
        x = frame.x(at)
        yield f'<path d="M{x:.1f} {_TOP - 4}V{bottom + 5:.1f}" stroke="{GRID}"/>'
        yield (
            f'<text x="{x:.1f}" y="{bottom + 19:.1f}" font-size="11" text-anchor="middle" '
            f'fill="{MUTED}">{quantities.figure(at)}</text>'
        )
    unit = quantities.titled("time", quantities.time_unit(plan.problem.units))
    middle = (_LEFT + WIDTH - _MARGIN) / 2
    yield (
        f'<text x="{middle:.1f}" y="{bottom + 38:.1f}" font-size="12" text-anchor="middle" '
        f'fill="{MUTED}">{escape(unit)}</text>'
    )


def _ranks(line: Timeline, frame: _Frame) -> Iterator[str]:
    every = max(1, int(np.ceil(13 / frame.row)))
    for rank in range(0, line.pp_degree, every):
        y = frame.y(rank) + frame.row / 2 + 4
        yield (
            f'<text x="{_LEFT - 10}" y="{y:.1f}" font-size="12" text-anchor="end" '
            f'fill="{TEXT}">rank {rank}</text>'
        )


def _bars(line: Timeline, frame: _Frame) -> Iterator[_Bar]:
    columns = (line.rank, line.kind, line.start, line.end, line.microbatch)
    for rank, kind, start, end, microbatch in zip(*(column.tolist() for column in columns), strict=True):
        yield _Bar(rank, kind, frame.x(start), frame.x(end), str(microbatch))


def _merged_bars(line: Timeline, frame: _Frame) -> Iterator[_Bar]:
    """Runs of pixel columns with the same most frequent kind; columns that are mostly idle stay empty."""
    columns = max(1, min(int((WIDTH - _LEFT - _MARGIN) / _NARROWEST_COLUMN), 2 * MAX_BARS // line.pp_degree))
    shares = coverage(line, columns)
    winner = np.where(shares.sum(axis=2) >= 0.5, shares.argmax(axis=2), -1)
    width = line.makespan * frame.scale / columns
    for rank in range(line.pp_degree):
        edges = np.flatnonzero(np.diff(winner[rank], prepend=-2, append=-2))
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if (kind := int(winner[rank, first])) >= 0:
                yield _Bar(rank, kind, _LEFT + first * width, _LEFT + stop * width, "")


def _paths(bars: list[_Bar], frame: _Frame) -> Iterator[str]:
    """One path per fill: far smaller than one element per bar."""
    inset = 1.0 if frame.row >= 8 else 0.25
    outlines: dict[int, list[str]] = {}
    for bar in bars:
        width = bar.right - bar.left
        if width >= _WIDE_ENOUGH_FOR_A_GAP:
            width -= _GAP
        outlines.setdefault(bar.kind, []).append(
            f"M{bar.left:.2f} {frame.y(bar.rank) + inset:.2f}h{width:.2f}"
            f"v{frame.row - 2 * inset:.2f}h{-width:.2f}z"
        )
    for kind in sorted(outlines):
        yield f'<path fill="{KIND_FILLS[kind]}" d="{"".join(outlines[kind])}"/>'


def _labels(bars: list[_Bar], frame: _Frame) -> Iterator[str]:
    size = min(12.0, frame.row * 0.55)
    if size < 7:
        return
    yield f'<g font-size="{size:.1f}" text-anchor="middle">'
    for bar in bars:
        if bar.label and bar.right - bar.left >= 0.62 * size * len(bar.label) + 3:
            x, y = (bar.left + bar.right) / 2, frame.y(bar.rank) + frame.row / 2 + 0.35 * size
            yield f'<text x="{x:.1f}" y="{y:.1f}" fill="{KIND_INKS[bar.kind]}">{bar.label}</text>'
    yield "</g>"
