"""Tied parameters with several copies, for instance an embedding and a head on different ranks.

A parameter that two stages of one rank share is one parameter (:mod:`zbv_worker.execution.build_stages`). If
the stages are on different ranks, or ``fully_shard`` manages them, each has a copy:

==========================  ============================================================================
when                        what happens to the copies
==========================  ============================================================================
the start                   all get the values of the first
the start of a step, an     all must be treated alike and have the first one's values; rounding errors
evaluation, a checkpoint    of the optimizers are removed
the end of a step           their gradients are added up, after the last W of all of them, and each copy
                            gets the sum
clipping and checkpoints    the first copy counts, the others do not
==========================  ============================================================================

``named_parameters`` gives a copy the name of the first, so that groups and frozen parameters that are chosen
by name are equal on all ranks. Optimizers then keep the copies equal. What they did is noted after each of
their steps; copies in groups with different settings are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.treatments import Treatment, Treatments
from zbv_worker.model.layer_list import whole_name
from zbv_worker.stage.dtensors import is_dtensor, local_of, with_local
from zbv_worker.stage.weight_grads import dtype_of_sum, gradient_of, set_gradient
from zbv_worker.transport.channels import Reduction, Transport

_REPLACED = "replaced parameter"
_BLOCK = 1024
_ROUNDING = 1e-3
"""The largest difference of two copies that is removed, relative to the largest element."""


@dataclass(frozen=True, eq=False)
class _Tie:
    """One parameter of the model and its copies."""

    ranks: Mapping[str, int]
    """The rank of each name; the first name is that of the first copy."""
    copies: Mapping[str, Tensor]
    """Those on this rank, by name; several names may have one copy."""
    positions: tuple[int, ...]
    """The positions of the pipeline that have copies."""

    @property
    def first(self) -> str:
        return next(iter(self.ranks))

    @property
    def distinct(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(self.copies.values()))

    @property
    def any_copy(self) -> Tensor:
        return next(iter(self.copies.values()))


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
        The sets of names of equal parameters in the whole model, also of those without copies.

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
        self._modules = modules
        self.names = sets = _connected(pairs)
        self._places = places = {
            whole_name(name): (module, name)
            for module in modules.values()
            for name, _ in [
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ]
        }
        tensors = {
            name: tensor
            for names in sets
            for name in names
            if name in places and (tensor := _tensor_at(*places[name])) is not None
        }
        described = [{name: _described(tensors[name]) for name in names if name in tensors} for names in sets]
        gathered = transport.gather(described, timeout) if sets else []
        self._ties: list[_Tie] = []
        self._shown: dict[Tensor, str] = {}
        links: set[tuple[int, ...]] = set()
        for at, names in enumerate(sets):
            ranks = _ranks(names, [of_rank[at] for of_rank in gathered], transport)
            positions = tuple(sorted({transport.layout.pp_rank(rank) for rank in ranks.values()}))
            if len(positions) > 1:
                links.add(positions)
            tie = _Tie(ranks, {name: tensors[name] for name in names if name in tensors}, positions)
            if tie.copies:
                self._shown[tie.any_copy] = tie.first
                if len(positions) > 1 or len(tie.distinct) > 1:
                    self._ties.append(tie)
        transport.link(sorted(links), timeout)
        self._further = {copy for tie in self._ties for copy in tie.distinct[tie.first in tie.copies :]}
        for tie, values in zip(self._ties, self._first_values(self._ties, timeout), strict=True):
            _set_values(tie, values)
        self._treatments = Treatments(copy for tie in self._ties for copy in tie.distinct)

    def __bool__(self) -> bool:
        return bool(self._ties)

    def counts(self, parameter: Tensor) -> bool:
        """Whether a parameter of this rank counts; False if it is a further copy of another one."""
        return parameter not in self._further

    @property
    def further_names(self) -> set[str]:
        """The names of this rank's further copies."""
        return {name for tie in self._ties for name, copy in tie.copies.items() if copy in self._further}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once. A copy has the model's first name of the parameter.

        If a rank has several copies, only the first of them does.
        """
        seen = set[nn.Parameter]()
        for module in self._modules.values():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield self._shown.get(parameter, whole_name(name)), parameter

    def check(self, timeout: float) -> None:
        """Compare the copies, and remove differences by rounding. Collective.

        Raises
        ------
        InvalidRun
            If copies are treated differently, were replaced, or have different values.
        """
        if not self._ties:
            return
        tables = [self._table(tie) for tie in self._ties]
        self._sum_over_positions(self._ties, tables, timeout)
        unequal = []
        for tie, table in zip(self._ties, tables, strict=True):
            treatments, values = (set(column) for column in zip(*table.tolist(), strict=True))
            if len(treatments) > 1:
                self._refuse_treatments(tie, timeout)
            if len(values) > 1:
                unequal.append(tie)
        self._follow_first(unequal, timeout)

    def sum(self, timeout: float) -> None:
        """Add up the gradients of all copies, once each of them is complete. Collective."""
        trained = [tie for tie in self._ties if tie.any_copy.requires_grad]
        sums = [_sum_of(tie.distinct) for tie in trained]
        self._sum_over_positions(trained, sums, timeout)
        for tie, total in zip(trained, sums, strict=True):
            for copy in tie.distinct:
                _set_local_gradient(copy, total)

    def _treatment(self, name: str, copy: Tensor) -> Treatment:
        # fully_shard itself exchanges parameters.
        if _tensor_at(*self._places[name]) is not copy and not is_dtensor(copy):
            return {_REPLACED: f"{name} by another one"}
        return self._treatments.of(copy)

    def _table(self, tie: _Tie) -> Tensor:
        """A row per name: numbers of the treatment and of the values, 0 for copies on other ranks."""
        table = torch.zeros(len(tie.ranks), 2, dtype=torch.int64, device=local_of(tie.any_copy).device)
        for at, name in enumerate(tie.ranks):
            if name in tie.copies:
                words = json.dumps(self._treatment(name, tie.copies[name]))
                table[at, 0] = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
                table[at, 1] = _digest(local_of(tie.copies[name]))
        return table

    def _refuse_treatments(self, tie: _Tie, timeout: float) -> None:
        """Raise the error, with what differs; all ranks with copies call it."""
        notes = {name: f"treatment of {name} on rank {rank}" for name, rank in tie.ranks.items()}
        for name, copy in tie.copies.items():
            self._transport.post(notes[name], json.dumps(self._treatment(name, copy)))
        self._sum_over_positions([tie], [torch.zeros(1, device=local_of(tie.any_copy).device)], timeout)
        treatments: dict[str, Treatment] = {
            name: json.loads(self._transport.posted(note) or "{}") for name, note in notes.items()
        }
        keys = dict.fromkeys(key for treatment in treatments.values() for key in treatment)
        different = [key for key in keys if len({each.get(key) for each in treatments.values()}) > 1]
        # The first of these explains the others.
        different = next(
            ([key] for key in (_REPLACED, "requires_grad", "optimizer") if key in different), different
        )
        shown = "; ".join(
            f"{name} on rank {tie.ranks[name]} has "
            + ", ".join(f"{key}={treatment[key]}" for key in different if key in treatment)
            for name, treatment in treatments.items()
            if not treatment.keys().isdisjoint(different)
        )
        raise InvalidRun(
            f"copies of one parameter must be trained alike, but {shown}. named_parameters() names all of "
            f"them {tie.first}: choose groups and frozen parameters by that name, alike on all ranks."
        )

    @torch.no_grad()
    def _follow_first(self, ties: Sequence[_Tie], timeout: float) -> None:
        """Copy the first one's values; raises InvalidRun if a copy differs by more than rounding."""
        values = self._first_values(ties, timeout)
        tables = []
        for tie, value in zip(ties, values, strict=True):
            table = torch.zeros(len(tie.ranks), dtype=torch.float64, device=value.device)
            for at, name in enumerate(tie.ranks):
                if name in tie.copies:
                    table[at] = _distance(local_of(tie.copies[name]), value)
            tables.append(table)
        self._sum_over_positions(ties, tables, timeout)
        for tie, value, table in zip(ties, values, tables, strict=True):
            distance, name = max(zip(table.tolist(), tie.ranks, strict=True))
            if not isinstance(tie.any_copy, nn.Parameter) and distance > 0:
                raise InvalidRun(
                    f"layers on different ranks share the buffer {name}, which one of them has changed "
                    f"({tie.first} is another name of it): the others would not see that. Give each layer "
                    f"its own module, or place the layers on one rank."
                )
            if distance > max(_ROUNDING, 8 * _precision(value.dtype)):
                raise InvalidRun(
                    f"copies of one parameter must have equal values, but {name} on rank {tie.ranks[name]} "
                    f"differs from {tie.first} on rank {tie.ranks[tie.first]} by {distance:.3g} of its "
                    f"largest element. Give all copies the same values, and train all or none of them."
                )
            _set_values(tie, value)

    @torch.no_grad()
    def _first_values(self, ties: Sequence[_Tie], timeout: float) -> list[Tensor]:
        """The values of the first copies: all others contribute zeros to a sum."""
        values = [
            local_of(tie.copies[tie.first]).detach().clone()
            if tie.first in tie.copies
            else torch.zeros_like(local_of(tie.any_copy))
            for tie in ties
        ]
        values = [x if x.is_floating_point() or x.is_complex() else x.to(torch.int64) for x in values]
        self._sum_over_positions(ties, values, timeout)
        return values

    def _sum_over_positions(self, ties: Iterable[_Tie], tensors: Iterable[Tensor], timeout: float) -> None:
        sums: list[Reduction] = [
            self._transport.sum_over_positions(tie.positions, tensor)
            for tie, tensor in zip(ties, tensors, strict=True)
            if len(tie.positions) > 1
        ]
        for each in sums:
            each.wait(timeout)


def _tensor_at(module: nn.Module, path: str) -> Tensor | None:
    """A parameter or buffer of a module; None if it has none of that name any more."""
    holder, _, leaf = path.rpartition(".")
    try:
        owner = module.get_submodule(holder)
    except AttributeError:
        return None
    return owner._parameters.get(leaf, owner._buffers.get(leaf))


def _digest(values: Tensor) -> Tensor:
    """A number that differs if some bits or the order of blocks differ, an int64 scalar."""
    numbers = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    flat = numbers.contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8:
        flat = nn.functional.pad(flat, (0, -len(flat) % 8)).clone()
    words = flat.view(torch.int64)  # much faster to sum than smaller integers
    whole = len(words) // _BLOCK * _BLOCK
    blocks = words[:whole].view(-1, _BLOCK).sum(1)
    numbers = torch.cat([blocks, words[whole:]])
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()


def _distance(values: Tensor, first: Tensor) -> Tensor:
    """The largest difference, relative to the largest element of ``first``; NaN counts as no difference."""
    if not values.numel():
        return torch.zeros(())
    kind = torch.complex128 if values.is_complex() else torch.float64
    apart, size = (values.to(kind) - first.to(kind)).abs().max(), first.to(kind).abs().max()
    return (apart / size.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num()


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _set_values(tie: _Tie, values: Tensor) -> None:
    with torch.no_grad():
        for copy in tie.distinct:
            local_of(copy).copy_(values)


def _connected(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The sets of names that the pairs connect, each in the order of the pairs."""
    sets: list[list[str]] = []
    for pair in (list(map(whole_name, pair)) for pair in pairs):
        touched = [some for some in sets if set(some) & set(pair)]
        merged = list(dict.fromkeys(name for some in [*touched, pair] for name in some))
        sets = [some for some in sets if some not in touched] + [merged]
    return [tuple(some) for some in sets]


def _described(parameter: Tensor) -> str:
    """What must be equal for all copies, in words."""
    local = local_of(parameter)
    words = f"{list(local.shape)} of {str(local.dtype).removeprefix('torch.')}"
    if is_dtensor(parameter):
        words += f" as a part ({', '.join(map(str, parameter.placements))})"
    return words if parameter.requires_grad else f"{words}, frozen"


def _ranks(
    names: Sequence[str], gathered: Sequence[Mapping[str, str]], transport: Transport
) -> dict[str, int]:
    """The rank of each name, in this rank's column; raises :class:`InvalidRun` if the copies differ."""
    layout, described = transport.layout, dict[str, str]()
    positions = dict[str, int]()
    for rank, of_rank in enumerate(gathered):
        described.update(of_rank)
        positions.update(dict.fromkeys(of_rank, layout.pp_rank(rank)))
    for name in names:
        if name not in positions:
            raise InvalidRun(
                f"tied_parameters names {name!r}, which no rank has. Give names as in the model's "
                f"state dict, such as 'LAYER.weight'."
            )
    if len(set(described.values())) > 1:
        shown = "; ".join(f"{name} is {words}" for name, words in described.items())
        raise InvalidRun(f"tied parameters must be alike, but {shown}. Build and divide them equally.")
    return {name: layout.global_rank(positions[name], transport.column) for name in names}


def _sum_of(copies: Sequence[Tensor]) -> Tensor:
    """The dense sum of the local gradients of some copies; zero if none has a gradient."""
    found = [local_of(gradient).to_dense() for copy in copies if (gradient := gradient_of(copy)) is not None]
    if not found:
        return torch.zeros_like(local_of(copies[0]), dtype=dtype_of_sum(copies[0]))
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total


def _set_local_gradient(parameter: Tensor, total: Tensor) -> None:
    found = gradient_of(parameter)
    if found is None or found.is_sparse:
        own = total.clone()
        set_gradient(parameter, with_local(own, parameter) if is_dtensor(parameter) else own)
    elif (local := local_of(found)).data_ptr() != total.data_ptr():
        local.copy_(total)
