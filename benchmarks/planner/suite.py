"""Reads benchmark files: problems, results of other planners, and targets (docs/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from zbv_solver.documents.validation import refusal
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.documents import ProblemDocument
from zbv_solver.problem.problem import Objective, Problem
from zbv_solver.problem.reading import to_problem
from zbv_solver.problem.stages import PlacementKind
from zbv_solver.search.options import Effort, SearchOptions

from benchmarks.findings import matching

Name = Annotated[str, Field(strict=True, min_length=1, max_length=64, pattern=r"^\S+$")]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Peer(BaseModel):
    """The result of another planner on an instance. Other keys are allowed."""

    model_config = ConfigDict(extra="allow", frozen=True)

    placement: PlacementKind
    """The peer's placement, which may differ from the problem's."""
    span: NotNegative | None = None
    makespan: NotNegative | None = None
    """In the problem's time unit; None if the peer failed."""
    fits: Annotated[bool, Field(strict=True)] | None = None
    """Whether its peak memory is within the problem's limit."""
    is_goal: Annotated[bool, Field(strict=True)] = False
    """Whether it is a plan for more memory, which plans come close to: no bound contradicts it."""

    def value(self, objective: Objective) -> float | None:
        """The metric that the instance's problem minimises."""
        return self.span if objective == "span" else self.makespan


class Reach(_Strict):
    """A target: a gap to prove, and its time limit in seconds, or None."""

    gap: NotNegative
    seconds: Positive | None = None


class Options(_Strict):
    """Options of one instance; those of the command apply if they are absent or null."""

    effort: Effort | None = None
    time_limit: Positive | None = None


NO_OPTIONS = Options()


class _InstanceDocument(_Strict):
    name: Name
    problem: ProblemDocument
    peers: dict[Name, Peer] = {}
    reach: Reach | None = None
    options: Options = NO_OPTIONS


class _SuiteDocument(_Strict):
    about: str = ""
    peers: dict[str, str] = {}
    instances: Annotated[list[_InstanceDocument], Field(min_length=1)]


@dataclass(frozen=True)
class Instance:
    """A problem of a benchmark file."""

    suite: str
    """The name of the file, as the user gave it."""
    name: str
    problem: Problem
    peers: dict[str, Peer]
    reach: Reach | None = None
    options: Options = NO_OPTIONS

    def search_options(self, of_command: SearchOptions) -> SearchOptions:
        """The options of the command, overridden by those of the instance."""
        return replace(
            of_command,
            effort=self.options.effort or of_command.effort,
            time_limit=self.options.time_limit or of_command.time_limit,
        )


def parse_suite(document: Any, name: str) -> tuple[Instance, ...]:
    """Return the instances of a decoded benchmark file; ``name`` is the user's name for the file.

    Raises
    ------
    InvalidInput
        With one issue per broken rule; pointers start with ``name#/``.
    """
    try:
        parsed = _SuiteDocument.model_validate(document)
    except ValidationError as error:
        raise refusal(error, document).below(f"{name}#") from None
    issues: list[Issue] = []
    instances: list[Instance] = []
    for position, entry in enumerate(parsed.instances):
        pointer = f"{name}#/instances/{position}"
        issues += _peer_issues(entry, pointer)
        try:
            problem = to_problem(entry.problem)
        except InvalidInput as error:
            issues += error.below(f"{pointer}/problem").issues
        else:
            instances.append(Instance(name, entry.name, problem, entry.peers, entry.reach, entry.options))
    if issues:
        raise InvalidInput(issues)
    return tuple(instances)


def select(suites: Iterable[tuple[Instance, ...]], only: str | None = None) -> tuple[Instance, ...]:
    """Return all instances with a name that matches the glob ``only``, in the order of their files.

    Raises
    ------
    InvalidInput
        When two instances share a name, in one file or across files.
    WrongInput
        When no name matches.
    """
    instances = [instance for suite in suites for instance in suite]
    first: dict[str, Instance] = {}
    for instance in instances:
        other = first.setdefault(instance.name, instance)
        if other is not instance:
            where = "twice" if instance.suite == other.suite else f"also in {other.suite}"
            raise InvalidInput.at(
                f"{instance.suite}#/instances",
                f"found the name {instance.name} {where}. Names must differ: rename the instances, and give "
                "each file once.",
            )
    return matching(instances, only, lambda instance: instance.name)


def _peer_issues(entry: _InstanceDocument, pointer: str) -> list[Issue]:
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
