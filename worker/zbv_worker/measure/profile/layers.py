"""Turns measured layers into a problem that the planner divides into stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from zbv_worker.measure.problems import layer_json, layered_document
from zbv_worker.measure.profile.links import fit
from zbv_worker.measure.profile.profile import LayerProfile, ProfileOptions, RankProfile, Spread, StageProfile

_MICRO = 1e6


def to_layered_document(
    options: ProfileOptions, ranks: Sequence[RankProfile], *, is_tied: bool = False
) -> dict[str, Any]:
    """The problem of measured layers: times in us, memory in bytes."""
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
    """The measured layers of all ranks, in model order."""
    return sorted((layer for rank in ranks for layer in rank.layers), key=lambda layer: layer.kept.stage)


def as_kinds(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """The same layers, with times averaged over layers of one kind.

    Layers are of one kind if their names differ only in the number (``block.3``) and they hold the same
    memory to the byte. Differences between their times are noise, which the planner would mistake for reasons
    to cut.
    """
    kinds: defaultdict[Hashable, list[LayerProfile]] = defaultdict(list)
    for layer in layers:
        kinds[_kind(layer)].append(layer)
    return [_averaged(layer, kinds[_kind(layer)]) for layer in layers]


def _kind(layer: LayerProfile) -> Hashable:
    held = [None if each is None else each.memory for each in (layer.kept, layer.recomputed)]
    return layer.name.rstrip("0123456789"), *held, layer.static, layer.output_bytes


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
    again = None if layer.recomputed is None else (_times(layer.recomputed), layer.recomputed.memory)
    return layer_json(
        layer.name, layer.static, layer.output_bytes, (_times(layer.kept), layer.kept.memory), again
    )


def _times(found: StageProfile) -> dict[str, float]:
    spreads = {
        "forward": found.forward,
        "backward_input": found.backward_input,
        "backward_weight": found.backward_weight,
        "backward": found.backward,
    }
    return {name: round(spread.median * _MICRO, 1) for name, spread in spreads.items()}


def _transfers(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """The costs of transfers of any size: a line fitted through the transfers of all links."""
    samples = [sample for rank in ranks for link in rank.links for sample in link.samples]
    if not samples:  # one rank
        return {"p2p": 0.0}
    latency, per_byte = fit([each.bytes for each in samples], [each.seconds.median for each in samples])
    latency_us = round(latency * _MICRO, 1)
    if per_byte == 0:
        return {"p2p": latency_us}
    return {"link": {"latency": latency_us, "bandwidth": round(1 / (per_byte * _MICRO), 3)}}


def _limit(options: ProfileOptions, layers: Sequence[LayerProfile], receives: float) -> float | None:
    """Each rank's limit for equal shares of layers; see :attr:`ProfileOptions.memory_limit_fraction`."""
    fraction, p = options.memory_limit_fraction, options.pp_degree
    if fraction is None:
        return None
    static = sum(layer.static.total for layer in layers) / p + max(layer.kept.workspace for layer in layers)
    held = sum(layer.kept.held_after_forward for layer in layers) / p
    return receives + static + fraction * min(p, options.microbatches) * held
