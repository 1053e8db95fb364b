"""A number, what was asked of it, and the verdict; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

Rule = Literal["at most", "at most within noise", "below beyond noise"]
"""How a target is read: of the number itself, of the low end of its interval, or of the high end."""

Unit = Literal["", "us", "%"]


@dataclass(frozen=True)
class Target:
    """What is asked of a number."""

    limit: float
    rule: Rule = "at most"


@dataclass(frozen=True)
class Finding:
    """One measured number.

    Attributes
    ----------
    value
        A ratio where ``unit`` is empty, else in microseconds or percent.
    interval
        Where the value lies with 95 % confidence, where that is known.
    target
        None for what is only told.
    """

    what: str
    value: float
    unit: Unit = ""
    interval: tuple[float, float] | None = None
    target: Target | None = None

    @property
    def excess(self) -> float:
        """By how much the target is missed, in the number's own unit; 0 when met or where there is none."""
        if self.target is None:
            return 0.0
        low, high = self.interval or (self.value, self.value)
        limit, rule = self.target.limit, self.target.rule
        if rule == "below beyond noise":
            return max(0.0, high - limit)
        judged = self.value if rule == "at most" else low
        return self.value - limit if judged > limit else 0.0

    @property
    def verdict(self) -> str:
        """``met``, ``missed by …``, or nothing where nothing is asked."""
        if self.target is None:
            return ""
        if self.excess > 0:
            return f"missed by {_shown(self.excess, self.unit)}"
        within = self.target.rule == "at most within noise" and self.value > self.target.limit
        return "met within noise" if within else "met"

    @property
    def asked(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        sign = "<" if self.target.rule == "below beyond noise" else "≤"
        return f"{sign} {_shown(self.target.limit, self.unit)}"

    @property
    def measured(self) -> str:
        """The value, with its interval."""
        if self.interval is None:
            return _shown(self.value, self.unit)
        low, high = (_shown(end, self.unit) for end in self.interval)
        return f"{_shown(self.value, self.unit)} ({low} … {high})"


def table(title: str, findings: Iterable[Finding]) -> Table:
    """One row per number."""
    shown = Table(title=title, title_justify="left")
    for column in ("", "asked", "measured", "verdict"):
        shown.add_column(column, justify="left" if not column else "right")
    for finding in findings:
        style = "red" if finding.excess > 0 else None
        shown.add_row(finding.what, finding.asked, finding.measured, finding.verdict, style=style)
    return shown


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Everything, verdicts included."""
    return [{**asdict(f), "verdict": f.verdict, "missed_by": f.excess} for f in findings]


def missed(findings: Sequence[Finding]) -> list[str]:
    """A sentence per missed target."""
    return [
        f"{finding.what}: asked {finding.asked}, measured {finding.measured}, {finding.verdict}"
        for finding in findings
        if finding.excess > 0
    ]


def _shown(value: float, unit: Unit) -> str:
    if unit == "us":
        return f"{value:.1f} us"
    return f"{value:.2f} %" if unit == "%" else f"{value:.3f}"
