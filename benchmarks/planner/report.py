"""Results as text and as JSON; docs/benchmarks.md explains every column and key.

Rows have at most 120 columns and are written as instances finish. Columns without information for a suite
(peers, targets, an objective that all instances share) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zbv_solver import __version__
from zbv_solver.documents.files import number
from zbv_solver.search.options import SearchOptions

from benchmarks.planner.ablation import Contribution
from benchmarks.planner.outcome import Outcome, Standing, Tally, tally
from benchmarks.planner.suite import Instance

WIDTH = 120
_NAME_WIDTH, _PEER_WIDTH, _METHOD_WIDTH, _FIGURE_WIDTH = 28, 18, 8, 9


@dataclass(frozen=True)
class Run:
    """One run of the suites without the mechanisms ``without``; incomplete if it was interrupted."""

    without: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class Report:
    """The runs of one command; they only differ in the mechanisms that an ablation leaves out."""

    options: SearchOptions
    runs: tuple[Run, ...]
    contributions: tuple[Contribution, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether instances are missing."""
        return any(run.interrupted for run in self.runs)


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Outcome], str]
    is_left: bool = False

    def fit(self, text: str) -> str:
        """The text padded to the column's width. Words may be truncated, numbers never."""
        if self.is_left:
            return (text if len(text) <= self.width else text[: self.width - 1] + "…").ljust(self.width)
        return text.rjust(self.width)


class Table:
    """The columns for a list of instances, and their rows."""

    def __init__(self, instances: Sequence[Instance]):
        names = max(len(instance.name) for instance in instances)
        add = [_Column("instance", min(max(names, 8), _NAME_WIDTH), lambda o: o.instance.name, is_left=True)]
        if len({instance.problem.objective for instance in instances}) > 1:
            add.append(_Column("of", 8, lambda o: o.instance.problem.objective, is_left=True))
        add += [
            _Column("value", _FIGURE_WIDTH, lambda o: figure(o.value)),
            _Column("bound", _FIGURE_WIDTH, lambda o: figure(o.lower_bound)),
            _Column("gap", 6, lambda o: _gap(o.gap)),
        ]
        peers = [pair for instance in instances for pair in instance.peers.items()]
        if peers:
            longest = max((len(name) for name, peer in peers if peer.fits), default=0)
            width = min(max(longest, 9), _PEER_WIDTH)
            add += [
                _Column("best peer", width, lambda o: o.best.name if o.best else "–", is_left=True),
                _Column("its value", _FIGURE_WIDTH, lambda o: figure(o.best.value) if o.best else "–"),
                _Column("result", 12, _result, is_left=True),
            ]
        add += [
            _Column("s", 6, lambda o: _seconds(o.seconds)),
            _Column("first", 6, lambda o: _seconds(o.first_plan_seconds)),
        ]
        if any(instance.reach for instance in instances):
            add.append(_Column("target", 7, _target, is_left=True))
        left = WIDTH - sum(column.width + 1 for column in add)
        self._columns = (*add, _Column("method", max(_METHOD_WIDTH, left), _method, is_left=True))

    def header(self) -> str:
        """Two lines: titles, and a rule below them."""
        rule = " ".join("─" * column.width for column in self._columns)
        return self._line([column.title for column in self._columns]) + rule + "\n"

    def row(self, outcome: Outcome) -> str:
        """The row of an instance, with remarks below it."""
        row = self._line([column.cell(outcome) for column in self._columns])
        return row + "".join(f"  · {note}\n" for note in notes(outcome))

    def _line(self, texts: Sequence[str]) -> str:
        cells = [column.fit(text) for column, text in zip(self._columns, texts, strict=True)]
        return " ".join(cells).rstrip() + "\n"


def notes(outcome: Outcome) -> list[str]:
    """Remarks that do not fit into a row."""
    remarks = [outcome.infeasible] if outcome.infeasible else []
    if outcome.below_bound:
        peers = ", ".join(f"{peer.name} {figure(peer.value)}" for peer in outcome.below_bound)
        kind = outcome.instance.problem.placement.kind
        remarks.append(f"below bound: {peers}; no plan of placement {kind} gets there, so they do not count")
    remarks += [
        f"CONTRADICTION: {peer.name} {figure(peer.value)} is below our bound; one of the two is wrong"
        for peer in outcome.contradicting
    ]
    return remarks


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
    if len(total.by_peer) > 1:
        means = ", ".join(f"{peer} {ratio:.4f}" for peer, ratio in total.by_peer.items())
        lines.append(f"value / every peer that all instances have (geometric means): {means}")
    if total.below_bound:
        lines.append(f"peers of other placements below the bound: on {total.below_bound} instances")
    if total.contradicted:
        lines.append(f"CONTRADICTION: {total.contradicted} instances have a peer below our bound")
    if total.targets:
        lines.append(f"targets: {total.reached} of {total.targets} reached")
    return "".join(f"{line}\n" for line in lines)


def figure(value: float) -> str:
    """A value with the digits that fit its column; the JSON document has all of them."""
    if math.isinf(value):
        return "–"
    texts = (f"{value:.{digits}g}" for digits in range(_FIGURE_WIDTH, 0, -1))
    return next(text for text in texts if len(text) <= _FIGURE_WIDTH)


def _gap(gap: float) -> str:
    if math.isinf(gap):
        return "–"
    if gap == 0:
        return "0"
    return "<0.01%" if gap < 1e-4 else f"{gap:.2%}" if gap < 0.9999 else f"{gap:.0%}"


def _result(outcome: Outcome) -> str:
    ratio, verdict = outcome.ratio, outcome.verdict
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
    return "reached" if outcome.is_reached else "missed"


def _method(outcome: Outcome) -> str:
    """The method without its parameters; the JSON document has them."""
    return "infeasible" if outcome.method is None else outcome.method.partition("(")[0]


def report_json(report: Report) -> dict[str, Any]:
    """The report as a JSON document."""
    document = {
        "version": __version__,
        "options": _options_json(report.options),
        "interrupted": report.interrupted,
        "runs": [
            {
                "without": run.without,
                "instances": [outcome_json(outcome) for outcome in run.outcomes],
                "sum": asdict(tally(run.outcomes)),
            }
            for run in report.runs
        ],
        "ablation": [asdict(entry) for entry in report.contributions],
    }
    return {key: _plain(value) for key, value in document.items()}


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The result of a search of one instance, with its progress."""
    instance, reach = outcome.instance, outcome.instance.reach
    return {
        "suite": instance.suite,
        "name": instance.name,
        "objective": instance.problem.objective,
        "status": "infeasible" if outcome.infeasible else "done",
        "infeasible": outcome.infeasible,
        "options": _options_json(outcome.options),
        "value": outcome.value,
        "lower_bound": outcome.lower_bound,
        "gap": outcome.gap,
        "method": outcome.method,
        "seconds": outcome.seconds,
        "first_plan_seconds": outcome.first_plan_seconds,
        "cut": outcome.cut,
        "verdict": outcome.verdict,
        "peer": outcome.best,
        "ratio": outcome.ratio,
        "below_bound": outcome.below_bound,
        "contradicting": outcome.contradicting,
        "reach": reach
        and {**reach.model_dump(), "reached": outcome.is_reached, "after": outcome.reached_after},
        "progress": [asdict(point) for point in outcome.curve],
    }


def _options_json(options: SearchOptions) -> dict[str, Any]:
    names = ("effort", "time_limit", "seed", "workers", "without")
    return {name: getattr(options, name) for name in names}


def _plain(value: Any) -> Any:
    """JSON values; infinity, which JSON does not have, becomes null."""
    if isinstance(value, Standing):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else None
    return value
