"""What a checkpoint holds of optimizers and schedules: state and settings of every parameter, by its name.

Names do not depend on the partition, so other numbers of ranks and other groups find them. A parameter that
had no state yet, because it had no gradient so far, has none after the resume either: torch's own functions
(``torch.distributed.checkpoint.state_dict``) would create one by a step with zero gradients, which counts as
a step in Adam's bias correction.

Some optimizers also have a state of no parameter, such as a common counter, or more entries in their
``state_dict``. Every rank saves these, as it saves its schedules.

The groups of an optimizer depend on the rank, and schedules keep a value per group (``base_lrs``). So every
rank saves its schedules, with the names of the parameters in each group. After a resume with other ranks or
other groups, a group gets the values of the saved groups that had its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zbv_worker.checkpoints.checkpoint_files import Reader
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.ties import Ties
from zbv_worker.model.layer_list import whole_name
from zbv_worker.stage.dtensors import is_dtensor

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


_STATE, _SETTINGS, _REST = "optimizer.state.", "optimizer.param_groups.", "optimizer.rest."
_OF_RANK = ("params", "param_names")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that torch's wrappers add; ``get_model_state_dict`` leaves them out too."""


class NamedOptimizers:
    """The optimizers of a rank whose parameters belong to a module.

    Parameters
    ----------
    names
        Those of tied parameters.

    Raises
    ------
    InvalidRun
        If an optimizer has a parameter with elements that is not of the module.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: TiedNames):
        self._optimizers, self._tied = optimizers, names
        self._names = {
            parameter: _without_wrappers(whole_name(name))
            for name, parameter in reversed([*module.named_parameters(remove_duplicate=False)])
        }
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self._names and parameter.numel():
                        raise InvalidRun(
                            f"checkpoints: the optimizer has a parameter of shape {list(parameter.shape)} "
                            f"that belongs to no layer of this pipeline. Give it an optimizer that is not "
                            f"passed to checkpoints, and save both yourself."
                        )

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters of each group; tied ones by their first name."""
        return [
            [self._tied.aliases(self._names[parameter])[0] for parameter in self._of(group)]
            for group in optimizer.param_groups
        ]

    def entries(self) -> dict[str, Any]:
        """What a checkpoint stores, by name."""
        stored: dict[str, Any] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key not in _OF_RANK}
                for parameter in self._of(group):
                    name, state = self._names[parameter], optimizer.state.get(parameter, {})
                    odd = next((key for key in state if not isinstance(key, str)), None)
                    if odd is not None:
                        raise InvalidRun(
                            f"checkpoints: the state of {name} in {type(optimizer).__name__} has the key "
                            f"{odd!r}, which is no string. Use names as the keys of an optimizer's state."
                        )
                    stored |= {f"{_SETTINGS}{name}.{key}": value for key, value in settings.items()}
                    stored |= {f"{_STATE}{name}.{key}": value for key, value in state.items()}
        return stored

    def rest(self, rank: int) -> dict[str, Any]:
        """What a rank stores of its optimizers in addition to :meth:`entries`, by name."""
        rest = ((at, self._rest_of(optimizer)) for at, optimizer in enumerate(self._optimizers))
        return {f"{_REST}{rank}.{at}": vars(each) for at, each in rest if each.values}

    def _rest_of(self, optimizer: torch.optim.Optimizer) -> ScheduleState:
        whole = optimizer.state_dict()
        values = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
        state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        if state:
            values["state"] = state
        return ScheduleState(type(optimizer).__name__, 0, self.groups(optimizer), values)

    def load(self, reader: Reader, refuse: Callable[[str], InvalidRun]) -> None:
        """Give every parameter the state and the settings that a checkpoint has of it, and no others.

        A parameter that the saved optimizers did not have, for example because it was frozen, begins without
        a state.

        Parameters
        ----------
        refuse
            Makes the error from the reason.

        Raises
        ------
        InvalidRun
            If the checkpoint is of other optimizers, or the parameters of a group had different settings.
        """
        states, settings = self._stored(reader, _STATE), self._stored(reader, _SETTINGS)
        rest = [ScheduleState(**reader.value(name)) for name in reader.names if name.startswith(_REST)]
        for optimizer in self._optimizers:
            exact: list[tuple[nn.Parameter, dict[str, Any]]] = []
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                named = [(parameter, self._names[parameter]) for parameter in self._of(group)]
                if named and not any(name.startswith(_SETTINGS) for name in reader.names):
                    raise refuse("it lacks the optimizer")
                of_group = [(name, settings[name]) for _, name in named if name in settings]
                groups.append({**group, **_settings(optimizer, group, of_group, reader, refuse)})
                exact += [
                    (parameter, {key: _read(reader, there, parameter) for key, there in found.items()})
                    for parameter, name in named
                    if (found := states.get(name))
                ]
            mine = self._rest_of(optimizer)
            is_known = any(each.kind == mine.kind for each in rest)
            _load(optimizer, groups, exact, mine.resumed(rest, refuse) if is_known else {})

    def _of(self, group: Mapping[str, Any]) -> Iterator[nn.Parameter]:
        """The parameters of a group that belong to the module: not the one of ranks without any."""
        return (parameter for parameter in group["params"] if parameter in self._names)

    def _stored(self, reader: Reader, prefix: str) -> dict[str, dict[str, str]]:
        """By parameter and key, the names of a checkpoint's entries."""
        known = {alias: name for name in self._names.values() for alias in self._tied.aliases(name)}
        stored: dict[str, dict[str, str]] = {}
        for entry in reader.names:
            if entry.startswith(prefix):
                name = whole = entry.removeprefix(prefix)
                while name and name not in known:  # keys may have dots, too
                    name = name.rpartition(".")[0]
                if name:
                    for alias in self._tied.aliases(name):
                        stored.setdefault(alias, {})[whole.removeprefix(f"{name}.")] = entry
        return stored


def _settings(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    stored: Iterable[tuple[str, Mapping[str, str]]],
    reader: Reader,
    refuse: Callable[[str], InvalidRun],
) -> dict[str, Any]:
    """The settings that the parameters of a group had when they were saved."""
    settings: dict[str, Any] = {}
    first = ""
    for name, entries in stored:
        lacking = sorted(set(getattr(optimizer, "defaults", ())) - set(entries))
        if lacking:
            raise refuse(f"it lacks {lacking[0]} of the optimizer for {name}")
        values = {key: reader.value_or_tensor(entry) for key, entry in entries.items()}
        for key, value in values.items():
            if first and not (key in settings and are_equal(settings[key], value)):
                raise refuse(
                    f"{first} and {name} are in one group, and had {key} = {settings.get(key)} and {value}"
                )
        if not first:
            first, settings = name, values
    return {
        key: value.to(own.device) if isinstance(own := group.get(key), Tensor) else value
        for key, value in settings.items()
    }


def _load(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Sequence[tuple[nn.Parameter, dict[str, Any]]],
    rest: Mapping[str, Any],
) -> None:
    parameters = [parameter for group in groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    packed = [{**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in groups]
    state = {numbers[parameter]: dict(of_parameter) for parameter, of_parameter in states}
    optimizer.load_state_dict({**rest, "state": {**state, **rest.get("state", {})}, "param_groups": packed})
    for parameter, of_parameter in states:
        loaded = optimizer.state[parameter]
        loaded |= {key: _exact(loaded[key], saved) for key, saved in of_parameter.items() if key in loaded}


def _exact(loaded: Any, saved: Any) -> Any:
    """A loaded value as it was saved: torch converts it to the parameter's dtype, which may round it."""
    leaves, structure = tree_flatten(saved)
    pairs = zip(leaves, tree_leaves(loaded), strict=True)
    return tree_unflatten([_exact_leaf(leaf, own) for leaf, own in pairs], structure)


def _exact_leaf(saved: Any, loaded: Any) -> Any:
    if not isinstance(saved, Tensor):
        return saved
    return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)


def _read(reader: Reader, entry: str, parameter: nn.Parameter) -> Any:
    """A stored value; a tensor is divided like its parameter."""
    is_divided = is_dtensor(parameter) and reader.shape(entry) == tuple(parameter.shape)
    return reader.value_or_tensor(entry, like=parameter if is_divided else None)


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


_PREFIXES = ("model.", "optimizer.state.", "optimizer.param_groups.")


class TiedNames:
    """The names under which checkpoints store tied parameters: only the first copy of each is stored.

    Whether tied parameters have copies depends on the placement, so a checkpoint may lack a name that a run
    with another placement has, or the other way round. Any name of a set of tied parameters stands for all of
    them.

    Parameters
    ----------
    ties
        None if the model has none.
    """

    def __init__(self, ties: Ties | None):
        self._sets = [] if ties is None else ties.names
        self._further = set() if ties is None else ties.further_names

    def is_further(self, name: str) -> bool:
        """Whether an entry of a checkpoint belongs to a further copy on this rank, and must not be saved."""
        found = self._parameter(name)
        return found is not None and found[1] in self._further

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, the first one first."""
        return next((tuple(some) for some in self._sets if name in some), (name,))

    def stored(self, name: str, known: Container[str]) -> str:
        """The name of an entry in a checkpoint that has the ``known`` names; its own if there is none."""
        found = None if name in known else self._parameter(name)
        if found is None:
            return name
        prefix, own, rest = found
        names = next(some for some in self._sets if own in some)
        return next((there for other in names if (there := f"{prefix}{other}{rest}") in known), name)

    def by_stored(self, tensors: Mapping[str, Tensor], known: Container[str]) -> Iterator[dict[str, Tensor]]:
        """The tensors by their names in a checkpoint, in as many parts as copies have one name there."""
        left = dict(tensors)
        while left:
            some: dict[str, Tensor] = {}
            for name in list(left):
                there = self.stored(name, known)
                if there not in some:
                    some[there] = left.pop(name)
            yield some

    def _parameter(self, name: str) -> tuple[str, str, str] | None:
        """Split the name of an entry around the name of a tied parameter; None if it is of another one."""
        for prefix in _PREFIXES:
            for some in self._sets:
                for own in some:
                    if name == f"{prefix}{own}" or name.startswith(f"{prefix}{own}."):
                        return prefix, own, name.removeprefix(f"{prefix}{own}")
        return None
