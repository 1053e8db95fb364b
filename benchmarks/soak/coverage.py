"""What the soak test counts, and what stops it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

TOLERANCE = Fraction(1, 10**9)
"""Relative difference that float rounding may cause."""
ROUNDED_SUMS = Fraction(1, 10**14)
"""The same of a sum, relative to the largest of the sums that it is a difference of."""


class Contradiction(Exception):
    """Two results for a problem contradict each other."""

    def __init__(self, check: str, detail: str):
        super().__init__(f"{check}: {detail}")
        self.check, self.detail = check, detail


@dataclass
class Coverage:
    """Counts of checks, and the largest gaps of bounds."""

    problems: Counter[str] = field(default_factory=Counter)
    exact: Counter[str] = field(default_factory=Counter)
    """Number of problems by kind, and of those with a known exact optimum."""
    gaps: dict[tuple[str, str], float] = field(default_factory=dict)
    """Largest gap optimum / bound - 1 by kind and bound, over problems with a known exact optimum."""
    checks: Counter[str] = field(default_factory=Counter)
    """Number of times that each check was made."""

    def require(self, is_true: bool, check: str, detail: Callable[[], str]) -> None:
        """Count a check, and raise :class:`Contradiction` if it failed."""
        self.checks[check] += 1
        if not is_true:
            raise Contradiction(check, detail())
