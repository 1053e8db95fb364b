"""Measured layers as a problem whose cut is left to the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from zbv_worker.measure.estimate.document import layered_document
from zbv_worker.measure.profile.links import fit
from zbv_worker.measure.profile.profile import LayerProfile, ProfileOptions, RankProfile, Spread, StageProfile

_MICRO = 1e6
_TIMES = ("forward", "backward_input", "backward_weight", "backward")


def to_layered_document(
    options: ProfileOptions, ranks: Sequence[RankProfile], *, is_tied: bool = False
) -> dict[str, Any]:
    """The problem that the measurements of layers describe: times in us, memory in bytes."""
    layers = as_kinds(layers_of(ranks))
    document = layered_document(
        [_layer_json(layer) for layer in layers],
        options.pp_degree,
        options.microbatches,
        is_tied=is_tied,
        transfers=_transfers(ranks),
        time_unit="us",
    )
    document["memory"]["limit"] = _limit(options, layers, document["memory"]["static"])
    return document


def layers_of(ranks: Sequence[RankProfile]) -> list[LayerProfile]:
    """All layers in model order."""
    return sorted((layer for rank in ranks for layer in rank.layers), key=lambda layer: layer.kept.stage)


def as_kinds(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """The same layers, those of one kind with the mean of their times.

    Of one kind are layers whose names differ in their number only (``block.3``) and that hold the same to the
    byte. What their times differ by is noise, which a planner would take for a reason to cut somewhere.
    """
    kinds: defaultdict[Hashable, list[LayerProfile]] = defaultdict(list)
    for layer in layers:
        kinds[_kind(layer)].append(layer)
    return [_averaged(layer, kinds[_kind(layer)]) for layer in layers]


def _kind(layer: LayerProfile) -> Hashable:
    held = [None if each is None else _held(each) for each in (layer.kept, layer.recomputed)]
    return layer.name.rstrip("0123456789"), *held, layer.static, layer.output_bytes


def _held(found: StageProfile) -> tuple[int, ...]:
    return found.held_after_forward, found.held_after_input, found.held_after_weight, found.workspace


def _averaged(layer: LayerProfile, kind: Sequence[LayerProfile]) -> LayerProfile:
    again = [each.recomputed for each in kind if each.recomputed is not None]
    return replace(
        layer,
        kept=_with_times(layer.kept, [each.kept for each in kind]),
        recomputed=None if layer.recomputed is None else _with_times(layer.recomputed, again),
    )


def _with_times(own: StageProfile, kind: Sequence[StageProfile]) -> StageProfile:
    return replace(
        own,
        forward=_mean([each.forward for each in kind]),
        backward_input=_mean([each.backward_input for each in kind]),
        backward_weight=_mean([each.backward_weight for each in kind]),
        backward=_mean([each.backward for each in kind]),
    )


def _mean(spreads: Sequence[Spread]) -> Spread:
    return Spread(mean(each.median for each in spreads), mean(each.p90 for each in spreads))


def _layer_json(layer: LayerProfile) -> dict[str, Any]:
    found = {
        "name": layer.name,
        **_measured_json(layer.kept, layer.static.total),
        "parameters_bytes": layer.static.parameters,
        "output_bytes": layer.output_bytes,
    }
    again = layer.recomputed
    if again is not None and again.held_after_forward < layer.kept.held_after_forward:
        found["recompute"] = _measured_json(again, layer.static.total)
    return found


def _measured_json(found: StageProfile, static: int) -> dict[str, Any]:
    return {
        **{name: round(getattr(found, name).median * _MICRO, 1) for name in _TIMES},
        "memory": {
            "forward": found.held_after_forward,
            "backward_input": found.held_after_input - found.held_after_forward,
            "backward_weight": -found.held_after_input,
            "static": static,
            "workspace": found.workspace,
        },
    }


def _transfers(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """What a transfer costs, whatever its size: one line through the transfers of all links."""
    samples = [sample for rank in ranks for link in rank.links for sample in link.samples]
    if not samples:  # one rank
        return {"p2p": 0.0}
    latency, per_byte = fit([each.bytes for each in samples], [each.seconds.median for each in samples])
    latency_us = round(latency * _MICRO, 1)
    if per_byte == 0:
        return {"p2p": latency_us}
    return {"link": {"latency": latency_us, "bandwidth": round(1 / (per_byte * _MICRO), 3)}}


def _limit(options: ProfileOptions, layers: Sequence[LayerProfile], receives: float) -> float | None:
    """As if every rank had an even share of the layers: see :attr:`ProfileOptions.memory_limit_fraction`."""
    fraction, p = options.memory_limit_fraction, options.pp_degree
    if fraction is None:
        return None
    static = sum(layer.static.total for layer in layers) / p + max(layer.kept.workspace for layer in layers)
    held = sum(layer.kept.held_after_forward for layer in layers) / p
    return receives + static + fraction * min(p, options.microbatches) * held
