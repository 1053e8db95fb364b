"""What a checkpoint holds of learning-rate schedules, and of optimizers without their parameters.

The groups of an optimizer depend on the rank, and schedules keep a value per group (``base_lrs``). So every
rank saves its schedules, with the names of the parameters in each group. After a resume with other ranks or
other groups, a group gets the values of the saved groups that had its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from zbv_worker.errors import InvalidRun

_NOT_OF_GROUPS = ("milestones", "_milestones", "_schedule_phases")
"""Lists of torch's schedules that may be as long as the groups, and are not about them."""


@dataclass(frozen=True)
class ScheduleState:
    """The state of one schedule, or of one optimizer without that of its parameters."""

    kind: str
    """The class."""
    place: int
    """Which of the rank's schedules of the same optimizer it is; 0 for an optimizer."""
    groups: list[list[str]]
    """The names of the parameters in each group of its optimizer."""
    values: dict[str, Any]
    """Its ``state_dict``."""

    def resumed(self, saved: Iterable[ScheduleState], refuse: Callable[[str], InvalidRun]) -> dict[str, Any]:
        """The state that this schedule has after a resume; raises the error that ``refuse`` makes.

        Parameters
        ----------
        saved
            Those of all ranks.
        """
        alike = [each for each in saved if (each.kind, each.place) == (self.kind, self.place)]
        if not alike:
            raise refuse(f"it lacks the {self.kind}")
        same = next((each for each in alike if each.groups == self.groups), None)
        if same is not None:
            return same.values
        homes = {name: (each, at) for each in alike for at, names in enumerate(each.groups) for name in names}
        sources = [[homes[name] for name in names if name in homes] for names in self.groups]
        used = [each for each in alike if any(each is home for source in sources for home, _ in source)]
        return _merged(self, used or alike[:1], sources, refuse)


def _merged(
    own: ScheduleState,
    saved: Sequence[ScheduleState],
    sources: Sequence[Sequence[tuple[ScheduleState, int]]],
    refuse: Callable[[str], InvalidRun],
) -> dict[str, Any]:
    def one(values: Sequence[Any], key: str) -> Any:
        if not all(are_equal(value, values[0]) for value in values):
            raise refuse(f"{key} of {own.kind} was {values[0]} and {values[-1]} for what is one group now")
        return values[0]

    def merge(mine: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        by_schedule = {id(each): state for each, state in zip(saved, states, strict=True)}
        merged: dict[str, Any] = {}
        for key, value in states[0].items():
            values = [state[key] for state in states if key in state]
            if key == "_schedulers":
                inner = zip(mine[key], *values, strict=True)
                merged[key] = [merge(first, rest) for first, *rest in inner]
            elif _is_of_groups(key, mine.get(key), own) and all(
                _is_of_groups(key, each, home) for each, home in zip(values, saved, strict=True)
            ):
                merged[key] = [
                    one([by_schedule[id(home)][key][at] for home, at in source], key) if source else initial
                    for initial, source in zip(mine[key], sources, strict=True)
                ]
            else:
                merged[key] = one(values, key) if value is not None else None
        return merged

    return merge(own.values, [each.values for each in saved])


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, also with tensors in containers."""
    (left, structure), (right, like) = tree_flatten(one), tree_flatten(other)
    return structure == like and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(left, right, strict=True)
    )


def _is_of_groups(key: str, value: Any, schedule: ScheduleState) -> bool:
    is_list = isinstance(value, list) and len(value) == len(schedule.groups)
    return is_list and key not in _NOT_OF_GROUPS
