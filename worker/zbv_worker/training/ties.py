"""Tied parameters with several copies, for instance an embedding and a head on different ranks.

A parameter that two stages of one rank share is one parameter (:mod:`zbv_worker.execution.build_stages`). If
the stages are on different ranks, or ``fully_shard`` manages them, each has a copy:

==========================  ============================================================================
when                        what happens to the copies
==========================  ============================================================================
the start                   all get the values of the first
the end of a step           their gradients are added up, after the last W of all of them, and each copy
                            gets the sum
clipping and checkpoints    the first copy counts, the others do not
==========================  ============================================================================

So equal optimizers keep the copies equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.stage.dtensors import is_dtensor, local_of, with_local
from zbv_worker.stage.main_gradients import dtype_of_sum, gradient_of, set_gradient
from zbv_worker.transport.channels import Reduction, Transport


@dataclass(frozen=True, eq=False)
class _Tie:
    """One parameter of the model and its copies.

    Attributes
    ----------
    names
        All its names; the first one is that of the first copy.
    copies
        Those on this rank.
    positions
        The positions of the pipeline that have copies.
    is_first
        Whether the first of these copies is the model's first.
    """

    names: tuple[str, ...]
    copies: tuple[nn.Parameter, ...]
    positions: tuple[int, ...]
    is_first: bool


class Ties:
    """The tied parameters of which this rank has a copy, but not all of them as one tensor.

    Collective: all ranks create it, with the same pairs.

    Parameters
    ----------
    pairs
        Names of equal parameters, see :class:`zbv_worker.model.protocol.Tied`.
    modules
        This rank's stages.
    timeout
        Seconds to agree, to connect, and to copy the values.

    Attributes
    ----------
    names
        The sets of names of equal parameters, also of those without copies.

    Raises
    ------
    InvalidRun
        If a parameter does not exist, or copies differ in shape, dtype, division or ``requires_grad``. Every
        rank raises it.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        modules: Mapping[int, nn.Module],
        transport: Transport,
        timeout: float,
    ):
        self._transport = transport
        self.names = sets = _connected(pairs)
        self._own = own = {
            name: parameter
            for module in modules.values()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        found = [{name: _described(own[name]) for name in names if name in own} for names in sets]
        said = transport.gather(found, timeout) if sets else []
        self._ties: list[_Tie] = []
        links: set[tuple[int, ...]] = set()
        for at, names in enumerate(sets):
            owners = _owners(names, [of_rank[at] for of_rank in said], transport)
            positions = tuple(sorted(owners))
            if len(positions) > 1:
                links.add(positions)
            copies = tuple(dict.fromkeys(own[name] for name in names if name in own))
            if copies and (len(positions) > 1 or len(copies) > 1):
                self._ties.append(_Tie(names, copies, positions, names[0] in own))
        transport.link(sorted(links), timeout)
        self._further = {copy for tie in self._ties for copy in tie.copies[1 if tie.is_first else 0 :]}
        self._copy_values(timeout)

    def __bool__(self) -> bool:
        return bool(self._ties)

    def counts(self, parameter: Tensor) -> bool:
        """Whether a parameter of this rank counts; False if it is a further copy of another one."""
        return parameter not in self._further

    @property
    def further_names(self) -> set[str]:
        """The names of this rank's further copies."""
        return {name for name, parameter in self._own.items() if parameter in self._further}

    def sum(self, timeout: float) -> None:
        """Add up the gradients of all copies, once each of them is complete. Collective."""
        trained = [tie for tie in self._ties if tie.copies[0].requires_grad]
        sums = [_sum_of(tie.copies) for tie in trained]
        self._sum_over_positions(trained, sums, timeout)
        for tie, total in zip(trained, sums, strict=True):
            for copy in tie.copies:
                _set_local_gradient(copy, total)

    @torch.no_grad()
    def _copy_values(self, timeout: float) -> None:
        """Give every copy the first one's values: all others contribute zeros to a sum."""
        values = [
            local_of(tie.copies[0]).detach().clone()
            if tie.is_first
            else torch.zeros_like(local_of(tie.copies[0]))
            for tie in self._ties
        ]
        self._sum_over_positions(self._ties, values, timeout)
        for tie, value in zip(self._ties, values, strict=True):
            for copy in tie.copies:
                local_of(copy).copy_(value)

    def _sum_over_positions(self, ties: Iterable[_Tie], tensors: Iterable[Tensor], timeout: float) -> None:
        sums: list[Reduction] = [
            self._transport.sum_over_positions(tie.positions, tensor)
            for tie, tensor in zip(ties, tensors, strict=True)
            if len(tie.positions) > 1
        ]
        for each in sums:
            each.wait(timeout)


def _connected(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The sets of names that the pairs connect, each in the order of the pairs."""
    sets: list[list[str]] = []
    for pair in pairs:
        touched = [some for some in sets if set(some) & set(pair)]
        merged = list(dict.fromkeys(name for some in [*touched, list(pair)] for name in some))
        sets = [some for some in sets if some not in touched] + [merged]
    return [tuple(some) for some in sets]


def _described(parameter: nn.Parameter) -> str:
    """What must be equal for all copies, in words."""
    local = local_of(parameter)
    words = f"{list(local.shape)} of {str(local.dtype).removeprefix('torch.')}"
    if is_dtensor(parameter):
        words += f" as a part ({', '.join(map(str, parameter.placements))})"
    return words if parameter.requires_grad else f"{words}, frozen"


def _owners(names: Sequence[str], said: Sequence[Mapping[str, str]], transport: Transport) -> set[int]:
    """The positions that have some of these names; raises :class:`InvalidRun` if the copies differ."""
    found: dict[str, str] = {}
    for of_rank in said:
        found.update(of_rank)
    for name in names:
        if name not in found:
            raise InvalidRun(
                f"tied_parameters names {name!r}, which no rank has. Give names as in the model's "
                f"state dict, such as 'LAYER.weight'."
            )
    if len(set(found.values())) > 1:
        shown = "; ".join(f"{name} is {words}" for name, words in found.items())
        raise InvalidRun(f"tied parameters must be alike, but {shown}. Build and divide them equally.")
    return {transport.layout.pp_rank(rank) for rank, of_rank in enumerate(said) if of_rank}


def _sum_of(copies: Sequence[Tensor]) -> Tensor:
    """The sum of the local gradients of some copies; zero if none has a gradient."""
    found = [local_of(gradient) for copy in copies if (gradient := gradient_of(copy)) is not None]
    if not found:
        return torch.zeros_like(local_of(copies[0]), dtype=dtype_of_sum(copies[0]))
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total


def _set_local_gradient(parameter: nn.Parameter, total: Tensor) -> None:
    found = gradient_of(parameter)
    if found is None:
        own = total.clone()
        set_gradient(parameter, with_local(own, parameter) if is_dtensor(parameter) else own)
    elif (local := local_of(found)).data_ptr() != total.data_ptr():
        local.copy_(total)
