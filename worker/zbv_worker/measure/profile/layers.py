"""Turns measured layers into a problem that the planner divides into stages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from zbv_worker.measure.problems import layer_json, layered_document
from zbv_worker.measure.profile.links import fit
from zbv_worker.measure.profile.profile import (
    ACTION_TIMES,
    LayerProfile,
    PairProfile,
    ProfileOptions,
    RankProfile,
    Spread,
    StageProfile,
    program_of,
)
from zbv_worker.measure.stage_memory import StageMemory


def to_layered_document(
    options: ProfileOptions, ranks: Sequence[RankProfile], *, is_tied: bool = False
) -> dict[str, Any]:
    """The problem of measured layers: times in us, memory in bytes."""
    layers = as_kinds(layers_of(ranks))
    document = layered_document(
        [
            layer_json(
                layer.name,
                layer.static,
                layer.output_bytes,
                _costs(layer.kept),
                None if layer.recomputed is None else _costs(layer.recomputed),
            )
            for layer in layers
        ],
        options.pp_degree,
        options.microbatches,
        is_tied=is_tied,
        transfers=_transfers(ranks),
        time_unit="us",
    )
    document["memory"]["static"] += max(rank.static.communicators for rank in ranks)
    document["memory"]["limit"] = _limit(options, layers, document["memory"]["static"])
    program = program_of(ranks)
    conditions = _conditions(ranks) if options.ranks_per_stage == 1 else {}  # shares of layers are no layers
    document |= {"measured": program} if program else {}
    return document | ({"profile": conditions} if conditions else {})


def _costs(profile: StageProfile) -> tuple[dict[str, Any], StageMemory]:
    """Times by name, with the layer's communication if pairs hide any, and memory."""
    times, memory = profile.costs
    hidden = profile.communication
    return ({**times, "communication": hidden} if hidden else times), memory


def _conditions(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """What ``zbv layout`` wants to know; empty if the model's input is no tensor of sequences."""
    shape = next((rank.input_shape for rank in ranks if rank.input_shape), ())
    if len(shape) < 2:
        return {}
    updates: defaultdict[str, list[float]] = defaultdict(list)
    for layer in layers_of(ranks):
        if layer.update is not None:
            updates[re.sub(r"\.\d+$", "", layer.name)].append(layer.update.microseconds)
    return {
        "microbatch_size": shape[0],
        "sequence_length": shape[1],
        "tensor_parallel": 1,
        "update": {name: round(mean(some), 1) for name, some in updates.items()},
        "all_reduce": _reductions(ranks, is_sharded=False),
        "scatter_gather": _reductions(ranks, is_sharded=True),
    }


def _reductions(ranks: Sequence[RankProfile], *, is_sharded: bool) -> list[dict[str, Any]]:
    measured = next((rank.reductions for rank in ranks if rank.reductions), ())
    return [
        {
            "ranks": each.ranks,
            "latency": round(each.latency * 1e6, 1),
            "bandwidth": round(each.bandwidth / 1e6, 3),
        }
        for each in measured
        if each.bandwidth is not None and each.is_sharded == is_sharded
    ]


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
    averages = {
        kind: (_average([each.kept for each in some]), _average([each.recomputed for each in some]))
        for kind, some in kinds.items()
    }
    found = []
    for layer in layers:
        kept, recomputed = averages[_kind(layer)]
        again = None if layer.recomputed is None else replace(layer.recomputed, **recomputed)
        found.append(replace(layer, kept=replace(layer.kept, **kept), recomputed=again))
    return found


def _kind(layer: LayerProfile) -> Hashable:
    held = [None if each is None else each.memory for each in (layer.kept, layer.recomputed)]
    return layer.name.rstrip("0123456789"), *held, layer.static, layer.output_bytes


def _average(profiles: Sequence[StageProfile | None]) -> dict[str, Any]:
    """The mean times of some layers, by name; empty if they were not measured."""
    measured = [profile for profile in profiles if profile is not None]
    if not measured:
        return {}
    pairs = [profile.pairs for profile in measured if profile.pairs is not None]
    times = {name: _mean([getattr(profile, name) for profile in measured]) for name in ACTION_TIMES}
    if not pairs:
        return times
    with_input, with_backward = (
        [getattr(each, name) for each in pairs] for name in ("with_input", "with_backward")
    )
    share = mean(each.share for each in pairs)
    return {**times, "pairs": PairProfile(_mean(with_input), _mean(with_backward), share)}


def _mean(spreads: Sequence[Spread]) -> Spread:
    return Spread(mean(each.median for each in spreads), mean(each.p90 for each in spreads))


def _transfers(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """The costs of transfers of any size: a line fitted through the transfers of all links."""
    samples = [sample for rank in ranks for link in rank.links for sample in link.samples]
    if not samples:  # one rank
        return {"p2p": 0.0}
    latency, per_byte = fit([each.bytes for each in samples], [each.seconds.median for each in samples])
    latency_us = round(latency * 1e6, 1)
    if per_byte == 0:
        return {"p2p": latency_us}
    return {"link": {"latency": latency_us, "bandwidth": round(1 / (per_byte * 1e6), 3)}}


def _limit(options: ProfileOptions, layers: Sequence[LayerProfile], static: float) -> float | None:
    """Each rank's limit for equal shares of layers; see :attr:`ProfileOptions.memory_limit_fraction`."""
    fraction, p = options.memory_limit_fraction, options.pp_degree
    if fraction is None:
        return None
    static += sum(layer.static.total for layer in layers) / p + max(layer.kept.workspace for layer in layers)
    held = sum(layer.kept.held_after_forward for layer in layers) / p
    return static + fraction * min(p, options.microbatches) * held
