"""All cuts of a layered problem, each as a document of stages; written only from docs/formats.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise, product
from typing import Any

from benchmarks.soak.pipeline import Pipeline, rank_of, read

Document = dict[str, Any]
MEMORY = ("forward", "backward_input", "backward_weight", "static", "workspace")


def every_cut(document: Document) -> Iterator[Pipeline]:
    """Yield every contiguous cut on every requested placement, with every choice of recomputed stages."""
    for kind, chunks in _placements(document):
        p = document["pp_degree"]
        for bounds in _bounds(document, p * chunks):
            stages = [document["layers"][begin:end] for begin, end in pairwise(bounds)]
            able = [any("recompute" in layer for layer in stage) for stage in stages]
            for again in product(*((False, True) if can else (False,) for can in able)):
                yield read(_as_stages(document, kind, chunks, bounds, again))


def _placements(document: Document) -> list[tuple[str, int]]:
    kind = document["placement"]
    if kind == "auto" and document["pp_degree"] == 1:
        return [("single", 1)]
    if kind == "auto":
        return [("v", 2), ("loop", 2), ("loop", 3), ("loop", 4), ("single", 1)]
    return [(kind, {"v": 2, "single": 1}.get(kind) or document.get("chunks", 2))]


def _bounds(document: Document, stages: int) -> Iterator[tuple[int, ...]]:
    rules, n = document["cut"], len(document["layers"])
    names = [layer["name"] for layer in document["layers"]]
    inside: set[int] = set()
    for group in rules.get("together", ()):
        places = [names.index(name) for name in group]
        inside |= set(range(min(places) + 1, max(places) + 1))
    if rules["allow_empty"]:
        choices: Iterator[tuple[int, ...]] = combinations_with_replacement(range(n + 1), stages - 1)
    else:
        choices = combinations(range(1, n), stages - 1)
    for middle in choices:
        bounds = (0, *middle, n)
        first, last = rules.get("first"), rules.get("last")
        is_kept = (first is None or bounds[1] == first) and (last is None or n - bounds[-2] == last)
        if is_kept and not inside & set(bounds):
            yield bounds


def _costs_of(layer: Document, again: bool) -> Document:
    """Return a layer's costs; keys that ``recompute`` lacks keep their values."""
    split = layer["backward_input"] + layer["backward_weight"]
    whole = split if layer["backward"] is None else layer["backward"]
    costs = {key: layer[key] for key in ("forward", "backward_input", "backward_weight")}
    costs |= {"backward": whole, "memory": layer["memory"]}
    if again and "recompute" in layer:
        other = layer["recompute"]
        costs |= {key: other[key] for key in ("forward", "backward_input", "backward_weight") if key in other}
        grown = costs["backward_input"] + costs["backward_weight"] - split
        costs["backward"] = other.get("backward", whole + grown)
        costs["memory"] = {**layer["memory"], **other.get("memory", {})}
    return costs


def _as_stages(
    document: Document, kind: str, chunks: int, bounds: tuple[int, ...], again: tuple[bool, ...]
) -> Document:
    p, layers = document["pp_degree"], document["layers"]
    devices = document.get("devices", [""] * p)
    ranks = [rank_of(stage, p, kind) for stage in range(len(again))]
    parts = [
        [
            _costs_of({**layer, **layer.get("on", {}).get(devices[rank], {})}, recomputed)
            for layer in layers[begin:end]
        ]
        for (begin, end), rank, recomputed in zip(pairwise(bounds), ranks, again, strict=True)
    ]
    costs: Document = {
        key: [float(sum(costs[key] for costs in part)) for part in parts]
        for key in ("forward", "backward_input", "backward_weight", "backward")
    }
    links = _links(document, ranks, kind)
    costs["p2p"] = [
        document["costs"]["p2p"]
        if link is None
        else link["latency"] + (layers[bound - 1]["output_bytes"] if bound else 0.0) / link["bandwidth"]
        for bound, link in zip(bounds[1:-1], links, strict=True)
    ]
    stages: Document = {"pp_degree": p, "microbatches": document["microbatches"], "placement": kind}
    stages |= {"chunks": chunks, "objective": document["objective"], "costs": costs}
    if "memory" in document:
        stages["memory"] = _memory(document["memory"], parts, p, kind)
    return stages


def _links(document: Document, ranks: list[int], kind: str) -> list[Document | None]:
    """The link of every boundary. A list has one from each rank to the next; a V also uses it backwards."""
    link = document["costs"].get("link")
    if not isinstance(link, list):
        return [link] * (len(ranks) - 1)
    return [link[min(pair) if kind == "v" else pair[0]] for pair in pairwise(ranks)]


def _memory(asked: Document, parts: list[list[Document]], p: int, kind: str) -> Document:
    memory: Document = {
        key: [float(sum(costs["memory"][key] for costs in part)) for part in parts] for key in MEMORY[:3]
    }
    static = []
    for rank in range(p):
        mine = [
            costs["memory"]
            for stage, part in enumerate(parts)
            for costs in part
            if rank == rank_of(stage, p, kind)
        ]
        workspace = max((held["workspace"] for held in mine), default=0.0)
        static.append(asked["static"] + sum(held["static"] for held in mine) + workspace)
    limit = asked["limit"]
    if isinstance(limit, float):
        limit = [limit] * p
    return {**memory, "static": static, "limit": limit}
