"""All errors that the planner raises on purpose.

::

    ZbvError
    ├── InvalidInput         a document breaks a rule (exit status 2, HTTP 422)
    ├── InfeasibleMemory     no plan can fit the memory limit (exit status 3)
    ├── NoLayoutFits         no parallel layout fits the memory of its devices (exit status 3)
    ├── InvalidPlan          an order is incomplete, deadlocks or exceeds memory, or a claim is false
    ├── ContradictedBound    a verified plan undercuts a lower bound: a bug in zbv (exit status 70)
    └── MissingDependency    an optional package is not installed

Messages state what was found, the rule, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbv_solver.numerals import exact, figure, plain

MOST_ISSUES = 100
"""Most broken rules that one error lists."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence, after a space, with the known word that is most like an unknown one; empty without one."""
    from difflib import get_close_matches

    lower = {each.lower(): each for each in known}
    close = get_close_matches(word.lower(), lower, n=1)
    return f" Did you mean {lower[close[0]]}?" if close else ""


class ZbvError(Exception):
    """Base class of all errors that the planner raises on purpose."""


@dataclass(frozen=True)
class Issue:
    """One broken rule."""

    pointer: str
    """RFC 6901 JSON pointer into the document, ``""`` for the whole document."""
    detail: str
    """What was found, the rule, and the remedy, in one or two sentences."""
    source: str = ""
    """The file or the command-line flag that the document comes from; empty if unknown."""

    def __str__(self) -> str:
        place = ": ".join(filter(None, (self.source, self.pointer)))
        return f"{place or '(document)'}: {self.detail}"


class InvalidInput(ZbvError):
    """A problem, plan or option document breaks one or more rules.

    Attributes
    ----------
    issues
        The first broken rules, at most ``MOST_ISSUES``, so that the report of a document with millions of
        mistakes stays small.
    more
        Number of broken rules that are not listed.
    is_partial
        Whether validation stopped early, so that there may be even more.
    """

    def __init__(self, issues: Sequence[Issue], more: int = 0, is_partial: bool = False):
        self.issues = tuple(issues[:MOST_ISSUES])
        self.more = more + len(issues) - len(self.issues)
        self.is_partial = is_partial
        super().__init__(self.issues, self.more, is_partial)  # pickle passes these to the constructor

    def __str__(self) -> str:
        return " ".join(filter(None, [*map(str, self.issues), self.rest]))

    @property
    def rest(self) -> str:
        """A sentence with the number of broken rules that are not listed; empty when all are listed."""
        if not self.more:
            return ""
        return f"And at least {self.more} more." if self.is_partial else f"And {self.more} more."

    @classmethod
    def at(cls, pointer: str, detail: str) -> InvalidInput:
        """An error with a single broken rule."""
        return cls([Issue(pointer, detail)])

    def below(self, prefix: str) -> InvalidInput:
        """The same error for a document that is nested at the pointer ``prefix`` of a larger one."""
        issues = [replace(issue, pointer=prefix + issue.pointer) for issue in self.issues]
        return InvalidInput(issues, self.more, self.is_partial)

    def found_in(self, source: str) -> InvalidInput:
        """The same error, naming the file or flag that holds the mistake."""
        issues = [replace(issue, source=source) for issue in self.issues]
        return InvalidInput(issues, self.more, self.is_partial)


class InfeasibleMemory(ZbvError):
    """No plan fits the memory limit of at least one rank.

    Attributes
    ----------
    smallest
        The smallest feasible limit of every rank, in the problem's memory unit.
    ranks
        The ranks whose limit is below ``smallest``.
    of_cut
        Whether the problem was given by layers: ``smallest`` then belongs to the cut that comes closest to
        fitting.
    is_proved
        Whether it is proved that no plan exists. False only for layers: on the loop placement, where the
        search for a fitting cut is not exhaustive, and where a time limit ended the search.
    ended_early
        Whether a time limit ended the search.
    unit
        The problem's memory unit, if it names one.
    has_copies
        Whether activations may be copied to the host.
    """

    def __init__(
        self,
        smallest: tuple[float, ...],
        limits: tuple[float, ...],
        of_cut: bool = False,
        is_proved: bool = True,
        ended_early: bool = False,
        unit: str | None = None,
        has_copies: bool = False,
    ):
        self.smallest, self.limits = smallest, limits
        self.of_cut, self.is_proved, self.ended_early, self.unit = of_cut, is_proved, ended_early, unit
        self.has_copies = has_copies
        self.ranks = tuple(r for r, (s, limit) in enumerate(zip(smallest, limits, strict=True)) if limit < s)
        super().__init__(smallest, limits, of_cut, is_proved, ended_early, unit, has_copies)

    def __str__(self) -> str:
        found = "no plan fits" if self.is_proved else "found no plan that fits"
        pairs = [f"rank {r}: {self.comparison(r, ' < ')}" for r in self.ranks[:4]]
        more = f" and {len(self.ranks) - 4} more ranks" if len(self.ranks) > 4 else ""
        need = "the smallest feasible limit per rank is"
        if self.of_cut:
            need = "the closest cut would need, per rank,"
        smallest = ", ".join(map(plain, self.smallest))
        unit = f" {self.unit}" if self.unit else ""
        end = "" if self.is_proved else " It is not proved that no other cut fits."
        if self.ended_early and not self.is_proved:
            end += " The time limit ended the search; give a longer --time-limit."
        held = "the forwards of one microbatch on all of its stages"
        if self.has_copies:
            held = "the forward of one stage, and of its other stages what is not on the host"
        return (
            f"{found} memory.limit ({', '.join(pairs)}{more}). A rank must hold its static memory and "
            f"{held}; {need} [{smallest}]{unit}.{end}"
        )

    def comparison(self, rank: int, between: str) -> str:
        """The limit of a rank, and its smallest feasible one."""
        return f"{exact(self.limits[rank], self.unit)}{between}{exact(self.smallest[rank], self.unit)}"


class NoLayoutFits(ZbvError):
    """No parallel layout of a model fits a cluster.

    Attributes
    ----------
    considered
        Number of layouts.
    memory
        Bytes of a device.
    unproved
        Of the layouts, those without a cut that fits and without a proof that there is none.
    rules
        A sentence with the rules of an executor that left out other layouts; may be empty.
    """

    def __init__(self, considered: int, memory: float, unproved: int = 0, rules: str = ""):
        self.considered, self.memory, self.unproved, self.rules = considered, memory, unproved, rules
        super().__init__(considered, memory, unproved, rules)

    def __str__(self) -> str:
        return " ".join(filter(None, (self._found(), self.rules)))

    def _found(self) -> str:
        layouts = f"{figure(self.considered)} layouts and {figure(self.memory / 1e9)} GB of memory per device"
        if self.unproved:
            return (
                f"found no layout that fits: {layouts}; it is not proved that {figure(self.unproved)} of "
                f"them do not fit. Use more devices or a higher effort, or leave more parts of the layout to "
                f"the search."
            )
        return (
            f"no layout fits: found {layouts}; every layout needs more. Use more devices, or leave more "
            f"parts of the layout to the search."
        )


class InvalidPlan(ZbvError):
    """The orders of a plan cannot be executed within the problem's rules, or the plan makes a false claim."""


class ContradictedBound(ZbvError):
    """A verified plan undercuts a lower bound by more than rounding, so one of the two is wrong.

    This is a bug in zbv, not a mistake of the caller. No plan is returned, because its certificate could be
    false.

    Attributes
    ----------
    problem
        The problem's JSON document, to attach to a report.
    objective
        The verified plan's span or makespan.
    bound
        The lower bound that it undercuts.
    source
        Where the bound comes from, such as ``"bounds"`` or ``"cp-sat"``.
    """

    def __init__(self, problem: Mapping[str, Any], objective: float, bound: float, source: str):
        self.problem, self.objective, self.bound, self.source = dict(problem), objective, bound, source
        super().__init__(self.problem, objective, bound, source)

    def __str__(self) -> str:
        return (
            f"a verified plan has the objective {self.objective:.17g}, below the lower bound "
            f"{self.bound:.17g} ({self.source}). One of the two is wrong, so zbv returns no plan. This is a "
            f"bug in zbv: please report it with the problem that you searched."
        )


class MissingDependency(ZbvError):
    """A command needs a package that is not installed."""
