"""What a checkpoint holds of optimizers: the state and the settings of every parameter, by its name.

Names do not depend on the partition, so other numbers of ranks and other groups find them. A parameter that
had no state yet, because it had no gradient so far, has none after the resume either: torch's own functions
(``torch.distributed.checkpoint.state_dict``) would create one by a step with zero gradients, which counts as
a step in Adam's bias correction.

Some optimizers also have a state of no parameter, such as a common counter, or more entries in their
``state_dict``. Every rank saves these, as it saves its schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zbv_worker.checkpoints.checkpoint_files import Reader
from zbv_worker.checkpoints.schedule_state import ScheduleState, are_equal
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.tied_names import TiedNames
from zbv_worker.model.layer_list import whole_name
from zbv_worker.stage.dtensors import is_dtensor

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
