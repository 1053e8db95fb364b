"""Measured numbers, their targets and verdicts; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from rich.table import Table

Rule = Literal["at most", "at least", "at most within noise", "below beyond noise"]
"""How a target is compared: with the value, or with the low or the high end of its interval."""


@dataclass(frozen=True)
class Target:
    """The target of a number."""

    limit: float
    rule: Rule = "at most"

    @property
    def sign(self) -> str:
        """The comparison as a sign."""
        return {"at least": "≥", "below beyond noise": "<"}.get(self.rule, "≤")


@dataclass(frozen=True)
class Finding:
    """One measured number."""

    what: str
    value: float
    unit: str = ""
    target: Target | None = None
    """None for a number that is only reported."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the value, or None if it is unknown."""

    @property
    def excess(self) -> float:
        """By how much the target is missed, in the number's unit; 0 if it is met or there is none."""
        if self.target is None:
            return 0.0
        low, high = self.interval or (self.value, self.value)
        limit, rule = self.target.limit, self.target.rule
        if rule == "at least":
            return max(0.0, limit - self.value)
        if rule == "below beyond noise":
            return max(0.0, high - limit)
        judged = self.value if rule == "at most" else low
        return self.value - limit if judged > limit else 0.0

    @property
    def verdict(self) -> str:
        """``met``, ``met within noise``, ``missed by …``, or an empty string without a target."""
        if self.target is None:
            return ""
        if self.excess > 0:
            return f"missed by {self._shown(self.excess)}"
        within = self.target.rule == "at most within noise" and self.value > self.target.limit
        return "met within noise" if within else "met"

    @property
    def asked(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"{self.target.sign} {self._shown(self.target.limit)}"

    @property
    def measured(self) -> str:
        """The value, with its interval."""
        if self.interval is None:
            return self._shown(self.value)
        low, high = (self._shown(end) for end in self.interval)
        return f"{self._shown(self.value)} ({low} … {high})"

    def _shown(self, value: float) -> str:
        return f"{value:,.4g} {self.unit}".rstrip()


def at_most(limit: float | None) -> Target | None:
    """Return an upper limit as a target; None if there is no limit."""
    return None if limit is None else Target(limit)


def at_least(limit: float) -> Target:
    """Return a lower limit as a target."""
    return Target(limit, "at least")


def table(title: str, findings: Iterable[Finding]) -> Table:
    """Return a table with one row per number."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for column in ("target", "measured", "verdict"):
        shown.add_column(column, justify="right")
    for finding in findings:
        style = "red" if finding.excess > 0 else None
        shown.add_row(finding.what, finding.asked, finding.measured, finding.verdict, style=style)
    return shown


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return all facts and verdicts as JSON values."""
    return [
        {**asdict(each), "what": each.what.strip(), "verdict": each.verdict, "missed_by": each.excess}
        for each in findings
    ]


def missed(findings: Sequence[Finding]) -> list[str]:
    """Return a sentence per missed target."""
    return [
        f"{each.what.strip()}: target {each.asked}, measured {each.measured}, {each.verdict}"
        for each in findings
        if each.excess > 0
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    rank = ceil(share * len(ordered) - 1e-9)  # 0.07 of 100 is 7.000000000000001
    return ordered[min(len(ordered), max(1, rank)) - 1]
