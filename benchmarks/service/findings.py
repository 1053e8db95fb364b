"""What a benchmark finds, beside what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """A number and its target.

    Attributes
    ----------
    at_most
        Whether the target is an upper limit; otherwise it is a lower one.
    target
        None for what is only told.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the target is met; what has none always does."""
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def asked(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        return f"{'≤' if self.at_most else '≥'} {self.target:,g} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or nothing where there is no target."""
        return "" if self.target is None else "met" if self.is_met else "missed"

    @property
    def document(self) -> dict[str, str | float]:
        """As JSON has it."""
        return {
            "what": self.name.strip(),
            "value": self.value,
            "unit": self.unit,
            "asked": self.asked,
            "verdict": self.verdict,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered)) - 1))]


def print_table(title: str, findings: Iterable[Finding]) -> None:
    """Print findings on standard output."""
    table = Table(title=title, title_justify="left")
    for heading, side in (("what", "left"), ("measured", "right"), ("asked", "right"), ("verdict", "left")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]  # the two literals above
    for found in findings:
        table.add_row(found.name, f"{found.value:,.4g} {found.unit}".rstrip(), found.asked, found.verdict)
    Console(soft_wrap=True).print(table)
