"""Stages whose parameters, gradients and optimizer state are divided among the replicas.

Between steps a rank holds its replica's part of parameters, gradients and optimizer state, as in ZeRO
(Rajbhandari et al. 2020, §5). During a step, a stage's parameters are whole from the stage's first action
to its last: gathering for every microbatch would cost m times the traffic.

=====================  ====================================================================================
when                   what happens to a layer's parameters
=====================  ====================================================================================
the layer before it    their gather starts, so at most one layer is gathered before its use
  is used first
first use              the layer waits until they are whole
the stage's last       their gradients' sum over the replicas starts, and the whole parameters are freed; the
  action               actions of other stages go on meanwhile
the end of the step    the sums are awaited; each replica updates its part
=====================  ====================================================================================

"Before" is the order in which the plan first uses the stages, and the order of layers within a stage. It
is the same on every replica, as collectives need.

PyTorch's ``fully_shard`` divides parameters in the same way, but it sums gradients in hooks of the backward,
before W computes them. To do it later, its runtime for pipelines calls private methods, which have changed
between versions of torch, and which make all later work wait for the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.model.layer_list import whole_name
from zbv_worker.stage.layers import calls_in_order, loss_modules
from zbv_worker.stage.main_gradients import gradient_of, use_main_gradients
from zbv_worker.training.buckets import require_dense
from zbv_worker.training.gradients import Gradients, squares
from zbv_worker.training.shards import Holders, ShardBucket, Unit, unit_of
from zbv_worker.training.ties import Ties
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connected import ConnectedTransport


class ShardedGradients(Gradients):
    """The gradients of several replicas that each hold a part of every parameter of their stages.

    Parameters
    ----------
    modules
        By stage; sharded in place. The layers of an ``nn.Sequential`` are gathered one by one, any other
        stage at once.
    group
        The replicas of this position, for the DTensors that the optimizer and checkpoints see.
    timeout
        Seconds to wait for a gather.

    Raises
    ------
    InvalidRun
        If a parameter cannot be divided.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        transport: Transport,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        *,
        has_main: bool = True,
    ):
        super().__init__(modules, has_main=has_main)
        for module in modules.values():
            require_dense(module)
        self._rank = transport.rank
        self._timeout = timeout
        mesh = DeviceMesh.from_group(group, device.type)
        self._units: list[Unit] = []
        known: dict[nn.Parameter, Unit] = {}
        holders, stages = _holders(modules.values()), _stages(modules)
        # Listed before anything is divided, because that replaces the parameters of the modules.
        parts = [part for stage, module in modules.items() for part in _parts(stage, module)]
        for part in parts:
            mine = {p: holders[p] for p in part.parameters if p not in known}
            if mine:
                used = frozenset[int]().union(*(stages[p] for p in mine))
                self._units.append(unit := unit_of(part.name, used, mine, mesh, transport))
                known.update(dict.fromkeys(mine, unit))
            units = tuple(dict.fromkeys(known[p] for p in part.parameters))
            for entry in part.entries:
                entry.register_forward_pre_hook(self._enter(units))
        self._order = list(self._units)
        self._next = 0

    def follow(self, stages: Sequence[int]) -> None:
        """See :meth:`Gradients.follow`."""
        position = {stage: at for at, stage in enumerate(stages)}
        self._order = sorted(self._units, key=lambda unit: min(position[stage] for stage in unit.stages))
        self._next = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards of the trainable parameters, each once."""
        return [each.shard for bucket in self._trainable for each in bucket.parameters]

    @property
    def _trainable(self) -> Iterator[ShardBucket]:
        return (bucket for unit in self._units for bucket in unit.trainable)

    def begin(self) -> None:
        """Discard the gradients of the last step, and start the first gather."""
        if self._has_main:
            use_main_gradients(self.stages_of)
        for bucket in self._trainable:
            bucket.forget()
        for unit in self._units:
            unit.unfinished = set(unit.stages)
        self._next = 0
        self._prefetch()

    def _enter(self, units: Sequence[Unit]) -> Callable[[nn.Module, object], None]:
        """A forward pre-hook of a module that uses these units."""

        def enter(module: nn.Module, args: object) -> None:
            for unit in units:
                if not unit.is_whole:
                    if not unit.is_started:
                        unit.gather()
                    self._complete(unit)
                    self._prefetch()

        return enter

    def _complete(self, unit: Unit) -> None:
        with naming_errors(self._rank, f"gathering the parameters of {unit.name}"):
            unit.complete(self._timeout)

    def _free(self, unit: Unit) -> None:
        if unit.is_started and not unit.is_whole:
            self._complete(unit)
        if unit.is_whole:
            unit.free()

    def _prefetch(self) -> None:
        """Start the gather that the plan needs next."""
        while self._next < len(self._order) and self._order[self._next].is_started:
            self._next += 1
        if self._next < len(self._order):
            self._order[self._next].gather()

    def stage_done(self, stage: int) -> None:
        """Start the sums of parameters that no later action adds to, and free them."""
        for unit in self._units:
            if stage in unit.unfinished:
                unit.unfinished.discard(stage)
                if not unit.unfinished:
                    for bucket in unit.trainable:
                        bucket.sum()
                    self._free(unit)

    def finish(self, timeout: float) -> None:
        """Wait for the sums."""
        unfinished = sorted(set[int]().union(*(unit.unfinished for unit in self._units)))
        if unfinished:
            raise RuntimeError(f"the step has ended, but the gradients of stages {unfinished} are incomplete")
        for bucket in self._trainable:
            bucket.finish(timeout)
        self._next = 0

    def free_parameters(self) -> None:
        """See :meth:`Gradients.free_parameters`."""
        for unit in self._units:
            self._free(unit)
        self._next = 0

    @property
    def sums_over_ranks(self) -> bool:
        """See :attr:`Gradients.sums_over_ranks`."""
        return True

    def square_sum(self, gradient: Callable[[Tensor], Tensor | None] = gradient_of) -> Tensor | None:
        """Each replica contributes the parts that it holds."""
        return squares(self._present())

    def hand_over(self, *, keep: bool = False) -> None:
        """Set the gradients of the shards; always keeps their memory."""
        for bucket in self._trainable:
            bucket.hand_over()

    def _present(self) -> list[Tensor]:
        return [part for bucket in self._trainable for part in bucket.sums]


def _holders(modules: Iterable[nn.Module]) -> dict[nn.Parameter, Holders]:
    """Everywhere that a parameter is registered."""
    found: dict[nn.Parameter, Holders] = {}
    children = {child: None for module in modules for child in module.modules()}
    for child in children:
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            found[parameter] = (*found.get(parameter, ()), (child, name))
    return found


def _stages(modules: Mapping[int, nn.Module]) -> dict[nn.Parameter, frozenset[int]]:
    """The stages that use a parameter, trainable or not."""
    found: dict[nn.Parameter, frozenset[int]] = {}
    for stage, module in modules.items():
        for parameter in module.parameters():
            found[parameter] = found.get(parameter, frozenset()) | {stage}
    return found


class _StagePart(NamedTuple):
    """A part of a stage that is gathered at once, and the modules that are called before it is used."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    entries: tuple[nn.Module, ...]


def _parts(stage: int, module: nn.Module) -> list[_StagePart]:
    """A stage's parts: its layers if it certainly calls one after the other, otherwise all of it."""
    children = tuple(module.named_children()) if isinstance(module, nn.Sequential) else ()
    own = list(module.parameters(recurse=False))
    if calls_in_order(module) and not own and not loss_modules(module):
        return [
            _StagePart(f"stage {stage}, {whole_name(name)}", tuple(child.parameters()), (child,))
            for name, child in children
        ]
    # Recomputation calls the layers, not the module.
    entries = (module, *(child for _, child in children))
    return [_StagePart(f"stage {stage}, all layers", tuple(module.parameters()), entries)]


def sharded_gradients_of(
    modules: Mapping[int, nn.Module],
    transport: Transport,
    device: torch.device,
    timeout: float,
    *,
    has_main: bool,
    ties: Ties,
) -> ShardedGradients:
    """The gradients of replicas that divide their parameters; raises :class:`InvalidRun` if they cannot."""
    if ties:
        raise InvalidRun(
            "--shard: found tied parameters on different ranks. Use placement v, which has the first and the "
            "last stage on one rank, or omit --shard."
        )
    if not isinstance(transport, ConnectedTransport) or transport.replica_group is None:
        raise InvalidRun(
            "--shard: found one replica; parameters are divided among several. Pass --data-parallel."
        )
    return ShardedGradients(modules, transport, transport.replica_group, device, timeout, has_main=has_main)
