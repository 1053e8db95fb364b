"""Results as text: aligned rows of at most 120 columns, written as instances finish.

Columns without information for a suite (peers, targets, an objective that all instances share) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.planner.ablation import MECHANISMS, Contribution
from benchmarks.planner.measure import Outcome
from benchmarks.planner.suite import Instance
from benchmarks.planner.tally import Tally
from benchmarks.planner.verdicts import Judgement, judge, reached

WIDTH = 120
NAME_WIDTH = 28
PEER_WIDTH = 18
METHOD_WIDTH = 8
FIGURE_WIDTH = 9

Cell = Callable[[Outcome, Judgement], str]


@dataclass(frozen=True)
class Column:
    """A column; ``cell`` returns the text of a row."""

    title: str
    width: int
    cell: Cell
    left: bool = False

    def fit(self, text: str) -> str:
        """The text padded to the column's width. Words may be truncated, numbers never."""
        if self.left:
            return (text if len(text) <= self.width else text[: self.width - 1] + "…").ljust(self.width)
        return text.rjust(self.width)


class Table:
    """The columns for a list of instances, and their rows."""

    def __init__(self, instances: Sequence[Instance]):
        columns = _columns(instances)
        left = WIDTH - sum(column.width + 1 for column in columns)
        self.columns = (*columns, Column("method", max(METHOD_WIDTH, left), _method, left=True))

    def header(self) -> str:
        """Two lines: titles, and a rule below them."""
        titles = self._line([column.title for column in self.columns])
        return titles + " ".join("─" * column.width for column in self.columns) + "\n"

    def row(self, outcome: Outcome) -> str:
        """The row of an instance, with remarks below it."""
        judgement = judge(outcome)
        row = self._line([column.cell(outcome, judgement) for column in self.columns])
        return row + "".join(f"  · {note}\n" for note in notes(outcome, judgement))

    def _line(self, texts: Sequence[str]) -> str:
        cells = [column.fit(text) for column, text in zip(self.columns, texts, strict=True)]
        return " ".join(cells).rstrip() + "\n"


def notes(outcome: Outcome, judgement: Judgement) -> list[str]:
    """Remarks that do not fit into a row."""
    found = [outcome.infeasible] if outcome.infeasible else []
    if judgement.below_bound:
        peers = ", ".join(f"{entry.peer.name} {figure(entry.value)}" for entry in judgement.below_bound)
        kind = outcome.instance.problem.placement.kind
        found.append(f"below bound: {peers}; no plan of placement {kind} gets there, so they do not count")
    found += [
        f"CONTRADICTION: {entry.peer.name} {figure(entry.value)} is below our bound; one of the two is wrong"
        for entry in judgement.contradicting
    ]
    return found


def summary(total: Tally) -> str:
    """The summary of a run, one line per subject."""
    gap = ""
    if total.mean_gap is not None and total.worst_gap is not None:
        gap = f"; gap mean {total.mean_gap:.3%}, worst {total.worst_gap:.3%} ({total.worst_name})"
    infeasible = f", {total.infeasible} infeasible" if total.infeasible else ""
    lines = [
        f"{total.instances} instances in {total.seconds:.1f} s: "
        f"{total.optimal} proved optimal{infeasible}{gap}"
    ]
    if total.wins + total.ties + total.losses:
        ratio = "" if total.ratio is None else f"; value / peer {total.ratio:.4f} (geometric mean)"
        lines.append(
            f"against the best peer: win {total.wins}, tie {total.ties}, loss {total.losses}, "
            f"no peer {total.no_peer}{ratio}"
        )
    if total.below_bound:
        lines.append(f"peers of other placements below the bound: on {total.below_bound} instances")
    if total.contradicted:
        lines.append(f"CONTRADICTION: {total.contradicted} instances have a peer below our bound")
    if total.targets:
        lines.append(f"targets: {total.reached} of {total.targets} reached")
    return "".join(f"{line}\n" for line in lines)


def ablation_table(contributions: Sequence[Contribution]) -> str:
    """The contribution of each mechanism, one row per mechanism and suite."""
    heads = (
        "mechanism",
        "suite",
        "better",
        "worse",
        "mean",
        "worst",
        "bounds",
        "gap",
        "proved",
        "s",
        "lines",
    )
    lines_of = {mechanism.name: mechanism.lines for mechanism in MECHANISMS}
    rows = [
        (
            c.mechanism,
            c.suite.rpartition("/")[2],
            f"{c.better} of {c.instances}",
            f"{c.worse}",
            f"{math.expm1(c.log_ratio / c.instances):+.2%}" if c.instances else "–",
            f"{math.expm1(c.worst):+.2%}",
            f"{c.tighter}",
            f"{100 * c.gap:+.2f}",
            f"{c.proved:+d}",
            f"{c.seconds:+.0f}",
            f"{lines_of[c.mechanism]}",
        )
        for c in contributions
    ]
    widths = [max(len(row[k]) for row in (heads, *rows)) for k in range(len(heads))]
    lines = [
        "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, tuple("─" * width for width in widths), *rows)
    ]
    return "".join(f"{line}\n" for line in lines)


def figure(value: float) -> str:
    """A value with the digits that fit its column; the JSON document has all of them."""
    if math.isinf(value):
        return "–"
    texts = (f"{value:.{digits}g}" for digits in range(FIGURE_WIDTH, 0, -1))
    return next(text for text in texts if len(text) <= FIGURE_WIDTH)


def _columns(instances: Sequence[Instance]) -> list[Column]:
    """All columns except the last, which takes the rest of the width."""
    names = max(len(instance.name) for instance in instances)
    columns = [Column("instance", min(max(names, 8), NAME_WIDTH), lambda o, _: o.instance.name, left=True)]
    if len({instance.problem.objective for instance in instances}) > 1:
        columns.append(Column("of", 8, lambda o, _: o.instance.problem.objective, left=True))
    columns += [
        Column("value", FIGURE_WIDTH, lambda o, _: figure(o.value)),
        Column("bound", FIGURE_WIDTH, lambda o, _: figure(o.lower_bound)),
        Column("gap", 6, lambda o, _: _gap(o.gap)),
    ]
    peers = [peer for instance in instances for peer in instance.peers]
    if peers:
        longest = max((len(peer.name) for peer in peers if peer.fits), default=0)
        width = min(max(longest, 9), PEER_WIDTH)
        columns += [
            Column("best peer", width, lambda _, j: j.best.peer.name if j.best else "–", left=True),
            Column("its value", FIGURE_WIDTH, lambda _, j: figure(j.best.value) if j.best else "–"),
            Column("result", 12, lambda _, j: _result(j), left=True),
        ]
    columns += [
        Column("s", 6, lambda o, _: _seconds(o.seconds)),
        Column("first", 6, lambda o, _: _seconds(o.first_plan_seconds)),
    ]
    if any(instance.reach for instance in instances):
        columns.append(Column("target", 7, lambda o, _: _target(o), left=True))
    return columns


def _gap(gap: float) -> str:
    if math.isinf(gap):
        return "–"
    if gap == 0:
        return "0"
    return "<0.01%" if gap < 1e-4 else f"{gap:.2%}" if gap < 0.9999 else f"{gap:.0%}"


def _result(judgement: Judgement) -> str:
    ratio, verdict = judgement.ratio, judgement.verdict
    if ratio is None or math.isinf(ratio) or verdict in ("tie", "no peer"):
        return verdict
    return f"{verdict:4} {ratio - 1:+.2%}" if 0.5 < ratio < 1.9999 else f"{verdict:4} ×{ratio:.3g}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.3f}" if seconds < 9.999 else f"{seconds:.1f}" if seconds < 9999 else f"{seconds:.0f}"


def _target(outcome: Outcome) -> str:
    if outcome.instance.reach is None:
        return "–"
    return "reached" if reached(outcome) else "missed"


def _method(outcome: Outcome, _: Judgement) -> str:
    """The method without its parameters; the JSON document has them."""
    return "infeasible" if outcome.method is None else outcome.method.partition("(")[0]
