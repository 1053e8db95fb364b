"""Reads benchmark files: problems, results of other planners, and targets (docs/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from zbv_solver.documents.validation import refusal
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.documents import ProblemDocument
from zbv_solver.problem.problem import Objective, Problem
from zbv_solver.problem.reading import parse_problem, to_problem
from zbv_solver.problem.stages import PlacementKind
from zbv_solver.search.options import Effort, SearchOptions

Name = Annotated[str, Field(strict=True, min_length=1, max_length=64, pattern=r"^\S+$")]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Peer:
    """The result of another planner on an instance."""

    name: str
    placement: PlacementKind
    """The peer's placement, which may differ from the problem's."""
    span: float | None
    makespan: float | None
    """In the problem's time unit; None if the peer failed."""
    fits: bool
    """Whether its peak memory is within the problem's limit."""

    def value(self, objective: Objective) -> float | None:
        """The metric that the instance's problem minimises."""
        return self.span if objective == "span" else self.makespan


@dataclass(frozen=True)
class Reach:
    """A target: a proven gap, and its time limit in seconds, or None."""

    gap: float
    seconds: float | None


@dataclass(frozen=True)
class Instance:
    """A problem of a benchmark file."""

    suite: str
    """The name of the file, as the user gave it."""
    name: str
    problem: Problem
    peers: tuple[Peer, ...] = ()
    reach: Reach | None = None
    effort: Effort | None = None
    time_limit: float | None = None
    """The instance's own; None means those of the command."""

    def options(self, of_command: SearchOptions) -> SearchOptions:
        """The options of the command, overridden by those of the instance."""
        return replace(
            of_command,
            effort=self.effort or of_command.effort,
            time_limit=of_command.time_limit if self.time_limit is None else self.time_limit,
        )


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PeerDocument(BaseModel):
    """Metrics of a peer's plan. Other keys are allowed; a peer that failed has no metrics."""

    model_config = ConfigDict(extra="allow")

    placement: PlacementKind
    span: NotNegative | None = None
    makespan: NotNegative | None = None
    fits: Annotated[bool, Field(strict=True)] | None = None


class ReachDocument(_Document):
    """A target."""

    gap: NotNegative
    seconds: Positive | None = None


class OptionsDocument(_Document):
    """Options of one instance; those of the command apply if they are absent or null."""

    effort: Effort | None = None
    time_limit: Positive | None = None


class InstanceDocument(_Document):
    """A problem, with peers and targets for its plan."""

    name: Name
    problem: ProblemDocument
    peers: dict[Name, PeerDocument] = {}
    reach: ReachDocument | None = None
    options: OptionsDocument = OptionsDocument()


class SuiteDocument(_Document):
    """A benchmark file."""

    about: str = ""
    peers: dict[str, str] = {}
    instances: Annotated[list[InstanceDocument], Field(min_length=1)]


def parse_suite(document: Any, name: str) -> tuple[Instance, ...]:
    """Return the instances of a decoded benchmark file; ``name`` is the user's name for the file.

    Raises
    ------
    InvalidInput
        With one issue per broken rule; pointers start with ``name#/``.
    """
    try:
        parsed = SuiteDocument.model_validate(document)
    except ValidationError as error:
        raise refusal(error, document).below(f"{name}#") from None
    issues: list[Issue] = []
    instances: list[Instance] = []
    for position, entry in enumerate(parsed.instances):
        pointer = f"{name}#/instances/{position}"
        issues += _peer_issues(entry, pointer)
        try:
            instances.append(_instance(entry, name))
        except InvalidInput as error:
            issues += error.below(f"{pointer}/problem").issues
    if issues:
        raise InvalidInput(issues)
    return tuple(instances)


GENERATED = ("unequal", "jitter")
"""Benchmarks whose problems are made by a program."""


def generated(name: str) -> tuple[Instance, ...]:
    """The problems of a benchmark of :data:`GENERATED`, without its other schedules."""
    from benchmarks.planner import jitter, unequal

    if name == "jitter":
        return tuple(Instance(name, *each) for each in jitter.instances())
    return tuple(Instance(name, each.name, parse_problem(each.document())) for each in unequal.instances())


def select(suites: Iterable[tuple[Instance, ...]], only: str | None = None) -> tuple[Instance, ...]:
    """Return all instances with a name that matches the glob ``only``, in the order of their files.

    Raises
    ------
    InvalidInput
        When two instances share a name, in one file or across files, or when none matches.
    """
    instances = [instance for suite in suites for instance in suite]
    _require_distinct(instances)
    if only is None:
        return tuple(instances)
    chosen = tuple(instance for instance in instances if fnmatchcase(instance.name, only))
    if not chosen:
        known = ", ".join(instance.name for instance in instances[:5])
        more = ", …" if len(instances) > 5 else ""
        raise InvalidInput.at(
            "--only",
            f"found {only!r}, which matches none of the {len(instances)} instances ({known}{more}). "
            "Give a name or a pattern with * and ?.",
        )
    return chosen


def _instance(entry: InstanceDocument, suite: str) -> Instance:
    return Instance(
        suite=suite,
        name=entry.name,
        problem=to_problem(entry.problem),
        peers=tuple(
            Peer(name, peer.placement, peer.span, peer.makespan, bool(peer.fits))
            for name, peer in entry.peers.items()
        ),
        reach=None if entry.reach is None else Reach(entry.reach.gap, entry.reach.seconds),
        effort=entry.options.effort,
        time_limit=entry.options.time_limit,
    )


def _peer_issues(entry: InstanceDocument, pointer: str) -> list[Issue]:
    """A peer without ``fits`` would never count, so it is refused."""
    return [
        Issue(
            f"{pointer}/peers/{name.replace('~', '~0').replace('/', '~1')}/fits",
            "this key is required where the peer has a span or a makespan: whether its peak memory is "
            "within the problem's limit.",
        )
        for name, peer in entry.peers.items()
        if peer.fits is None and (peer.span is not None or peer.makespan is not None)
    ]


def _require_distinct(instances: Iterable[Instance]) -> None:
    first: dict[str, Instance] = {}
    clashes: dict[tuple[str, str], list[str]] = {}
    for instance in instances:
        other = first.setdefault(instance.name, instance)
        if other is not instance:
            clashes.setdefault((instance.suite, other.suite), []).append(instance.name)
    if clashes:
        raise InvalidInput([_clash(*suites, names) for suites, names in clashes.items()])


def _clash(suite: str, other: str, names: list[str]) -> Issue:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    where = "twice" if suite == other else f"also in {other}"
    return Issue(
        f"{suite}#/instances",
        f"found {len(names)} {'name' if len(names) == 1 else 'names'} {where}: {shown}. Names must differ: "
        "rename the instances, and give each file once.",
    )
