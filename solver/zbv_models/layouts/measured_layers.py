"""Estimates of layers, replaced by what was measured.

A layer's costs are *measured* if a profile has the layer under the layout's conditions: sequences per
microbatch, tokens per sequence, degree of tensor parallelism, no context or expert parallelism. They are
*scaled* if a profile has the layer under other conditions: the estimate times the ratio of measured to
estimated costs under the profile's conditions. The nearest profile counts. All others are *estimated*.

A profile knows no replicas, so their exchanges are estimated in all cases, over measured links if there are
any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from zbv_solver.errors import InvalidInput, Issue

from zbv_models.estimate.device import Device, GroupLink, GroupLinks
from zbv_models.estimate.layers import LayerEstimate, ModelEstimate, Training, estimate_model
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import layer_kinds
from zbv_models.estimate.replica import Running
from zbv_models.estimate.shapes import Degrees, PerAction
from zbv_models.estimate.states import StaticBytes
from zbv_models.layouts.profile import MeasuredLayer, Profile

Origin = Literal["measured", "scaled", "estimated"]
ORIGINS: tuple[Origin, ...] = ("measured", "scaled", "estimated")


@dataclass(frozen=True)
class Origins:
    """Where the costs of a layer come from; of ``recomputed`` too, if it can be recomputed."""

    plain: Origin = "estimated"
    recomputed: Origin = "estimated"


class LayerConditions(NamedTuple):
    """What an estimate of layers depends on: the arguments of :func:`estimate_model`."""

    model: Transformer
    degrees: Degrees
    device: Device
    links: GroupLinks
    training: Training
    sequences: int

    @property
    def tokens(self) -> int:
        """Tokens per microbatch on a device."""
        return self.model.sequence * self.sequences // self.degrees.context


@dataclass(frozen=True)
class Measured:
    """All profiles of a search."""

    profiles: tuple[Profile, ...]
    tensor_link: GroupLink
    """The link of the measured tensor-parallel groups."""

    @classmethod
    def of(
        cls,
        profiles: tuple[Profile, ...],
        model: Transformer,
        tensor_link: GroupLink,
        device: str | None = None,
    ) -> Measured:
        """The profiles; raises :class:`InvalidInput` if they do not fit the model, the device or each other.

        Parameters
        ----------
        device
            The preset of the cluster's devices; None if it has no name.
        """
        names = [kind.name for kind in layer_kinds(model)]
        issues: list[Issue] = []
        seen: dict[tuple[int, int, int], Profile] = {}
        for each in profiles:
            issues += each.issues(names, model.stream.dtype_bytes, device)
            same = seen.setdefault((each.microbatch_size, each.sequence, each.tensor), each)
            if same is not each:
                detail = f"found the same conditions as in {same.source}. Give one profile of each size."
                issues.append(Issue("/profile", detail, each.source))
            for name, value in each.program:
                before = dict(profiles[0].program).get(name, value)
                if before != value:
                    detail = f"found {value!r}, but {profiles[0].source} has {before!r}. Measure both alike."
                    issues.append(Issue(f"/measured/{name}", detail, each.source))
        if issues:
            raise InvalidInput(issues)
        return cls(profiles, tensor_link)

    def pipeline_link(self) -> GroupLink | None:
        """Measured transfers inside a node."""
        return next((each.link for each in self.profiles if each.link is not None), None)

    def data_link(self, replicas: int, zero_stage: int) -> GroupLink | None:
        """Measured all-reduces inside a node, of the nearest number of ranks."""
        sharded = [pair for each in self.profiles for pair in each.scatter_gather]
        links = [pair for each in self.profiles for pair in each.all_reduce]
        if zero_stage and sharded:
            links = sharded
        return min(links, key=lambda pair: abs(math.log(pair[0] / replicas)), default=(0, None))[1]

    def applied(
        self, estimate: ModelEstimate, at: LayerConditions
    ) -> tuple[ModelEstimate, tuple[Origins, ...]]:
        """An estimate with measured costs, and where the costs of each layer come from."""
        # Layouts that differ in what replicas do share these.
        none, alone = GroupLink(), at._replace(degrees=replace(at.degrees, data=1, zero_stage=0))
        links = replace(at.links, data=none, expert_data=none, pipeline=none)
        plain = _estimate(*alone._replace(links=links))
        compute = _estimate(*alone._replace(links=GroupLinks()))
        layers, origins = [], []
        for whole, base, computed in zip(estimate.layers, plain.layers, compute.layers, strict=True):
            chosen = self._nearest(whole.name, at)
            if chosen is None:
                layers.append(whole)
                origins.append(Origins())
                continue
            profile, measured = chosen
            there = self._estimated_there(profile, at)[whole.name]
            layer, origin = _Replacement(profile, measured, there, at).of(whole, base, computed)
            layers.append(layer)
            origins.append(origin)
        return replace(estimate, layers=tuple(layers)), tuple(origins)

    def _nearest(self, name: str, at: LayerConditions) -> tuple[Profile, MeasuredLayer] | None:
        """The profile with a layer whose degree, sequence and size are nearest, in this order."""
        candidates = [
            (profile, layer) for profile in self.profiles for layer in profile.layers if layer.name == name
        ]

        def distance(of: tuple[Profile, MeasuredLayer]) -> tuple[float, float, float, bool]:
            profile, _ = of
            return (
                abs(math.log(profile.tensor / at.degrees.tensor)),
                abs(math.log(profile.sequence / at.model.sequence)),
                abs(math.log(profile.tokens / max(1, at.tokens))),
                profile.tokens > at.tokens,
            )

        return min(candidates, key=distance, default=None)

    def _estimated_there(self, profile: Profile, at: LayerConditions) -> dict[str, LayerEstimate]:
        """The estimate of all layers under a profile's conditions."""
        there = at._replace(
            model=at.model.model_copy(update={"sequence": profile.sequence}),
            degrees=Degrees(profile.tensor, profile.tensor > 1),
            links=GroupLinks(tensor=self.tensor_link),
            sequences=profile.microbatch_size,
        )
        return {layer.name: layer for layer in _estimate(*there).layers}


@dataclass(frozen=True)
class _Replacement:
    """A measured layer in the place of an estimated one."""

    profile: Profile
    measured: MeasuredLayer
    there: LayerEstimate
    """The estimate under the profile's conditions."""
    at: LayerConditions

    @property
    def is_exact(self) -> bool:
        """Whether the profile has the layout's conditions."""
        degrees, profile = self.at.degrees, self.profile
        given = (self.at.sequences, self.at.model.sequence, degrees.tensor)
        is_same = given == (profile.microbatch_size, profile.sequence, profile.tensor)
        return is_same and degrees.context == degrees.expert == 1

    @property
    def size(self) -> float:
        """The layout's tokens over the profile's; for costs that the estimate leaves out."""
        tensor = self.profile.tensor / self.at.degrees.tensor
        return self.at.tokens / self.profile.tokens * tensor

    def of(
        self, whole: LayerEstimate, base: LayerEstimate, computed: LayerEstimate
    ) -> tuple[LayerEstimate, Origins]:
        """The layer of a layout.

        Parameters
        ----------
        whole, base, computed
            Its estimate; without replicas; and without any exchanges.
        """
        measured, there = self.measured, self.there
        origin: Origin = "measured" if self.is_exact else "scaled"
        plain = self._running(measured.plain, there.plain, whole.plain, base.plain, computed.plain)
        full, of_full = whole.full, origin
        if there.full and whole.full and base.full and computed.full:
            if measured.recomputed is not None:
                full = self._running(measured.recomputed, there.full, whole.full, base.full, computed.full)
            else:
                full, of_full = _recomputed(plain, whole, whole.full), "scaled"
        static = measured.static / there.static.total if there.static.total else 1.0
        step = whole.step
        if measured.update is not None:
            updated = whole.static.optimizer / there.static.optimizer if there.static.optimizer else 1.0
            update = _scaled(whole.step.optimizer, measured.update, there.step.optimizer, updated)
            step = replace(step, optimizer=update)
        output = _scaled(whole.output_bytes, measured.output_bytes, there.output_bytes, 0.0)
        # A profile of one device has no exchanges, so the estimated ones were added.
        of_exchanges = 1.0
        if self.profile.tensor > 1 and whole.plain.times.total:
            of_exchanges = plain.times.total / whole.plain.times.total
        in_pairs = partial(_in_pairs, whole.plain.hidden.scaled(of_exchanges), whole.plain.pair_factor)
        layer = replace(
            whole,
            plain=in_pairs(plain),
            full=full and in_pairs(full),
            selective=whole.selective and in_pairs(_recomputed(plain, whole, whole.selective)),
            shares=whole.shares.scaled(of_exchanges),
            exchanged=whole.exchanged.scaled(of_exchanges),
            static=StaticBytes(*(round(value * static) for value in vars(whole.static).values())),
            passing=round(whole.passing * static),
            output_bytes=round(output) or whole.output_bytes,
            step=step,
        )
        return layer, Origins(origin, of_full)

    def _running(
        self, measured: Running, there: Running, whole: Running, base: Running, computed: Running
    ) -> Running:
        """Measured or scaled costs, with what replicas add."""
        times = measured.times if self.is_exact else self._times(measured.times, there.times, base, computed)
        replicas = whole.times + base.times.scaled(-1.0)
        fused = measured.fused
        if fused is not None:
            both = measured.times.backward_input + measured.times.backward_weight
            of_both = times.backward_input + times.backward_weight
            fused = fused * of_both / both if both else fused
            fused += replicas.backward_input + replicas.backward_weight

        def bytes_of(size: Callable[[Running], int]) -> int:
            if self.is_exact:
                return size(measured)
            return round(_scaled(size(base), size(measured), size(there), self.size))

        return Running(
            times + replicas,
            bytes_of(lambda of: of.after_forward),
            bytes_of(lambda of: of.after_input),
            bytes_of(lambda of: of.workspace) + whole.workspace - base.workspace,
            fused,
        )

    def _times(self, measured: PerAction, there: PerAction, base: Running, computed: Running) -> PerAction:
        """Scaled times. Exchanges are scaled only if the profile has some."""
        exchanged = base.times + computed.times.scaled(-1.0)
        if self.profile.tensor > 1:
            return _each(base.times, measured, there, self.size)
        return _each(computed.times, measured, there, self.size) + exchanged


def _recomputed(plain: Running, whole: LayerEstimate, estimated: Running) -> Running:
    """Recomputation that was not measured: what it adds to the estimate, scaled as F is."""
    ratio = plain.times.forward / whole.plain.times.forward if whole.plain.times.forward else 1.0
    added = (estimated.times + whole.plain.times.scaled(-1.0)).scaled(ratio)

    def bytes_of(size: Callable[[Running], int]) -> int:
        return round(_scaled(size(estimated), size(plain), size(whole.plain), 1.0))

    return Running(
        plain.times + added,
        bytes_of(lambda of: of.after_forward),
        bytes_of(lambda of: of.after_input),
        bytes_of(lambda of: of.workspace),
        None if plain.fused is None else plain.fused + added.backward_input + added.backward_weight,
    )


def _in_pairs(hidden: PerAction, pair_factor: float, running: Running) -> Running:
    """Costs with what pairs hide of them, which is no more than the actions take."""
    times, inputs = running.times, running.times.backward_input
    most = inputs if running.fused is None else min(inputs, running.fused)
    within = PerAction(min(hidden.forward, times.forward), min(hidden.backward_input, most))
    return replace(running, hidden=within, pair_factor=pair_factor)


def _each(here: PerAction, measured: PerAction, there: PerAction, size: float) -> PerAction:
    of_actions = zip(*(vars(times).values() for times in (here, measured, there)), strict=True)
    return PerAction(*(_scaled(one, other, third, size) for one, other, third in of_actions))


def _scaled(here: float, measured: float, there: float, size: float) -> float:
    """An estimate times measured / estimated; without an estimate, in proportion to the size."""
    return here * measured / there if there else measured * size


_estimate = lru_cache(maxsize=4096)(estimate_model)
