"""Random problem documents, with more corner cases than typical ones.

A problem only depends on a seed and its number, so every problem of a run can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.soak.pipeline import rank_of

Document = dict[str, Any]
Number = Callable[[], float]

NUMBERS = ("small integers", "ties", "decimals", "floats", "twelve decades", "mixed")
MOST_ACTIONS = 36
"""Most actions of a problem with split backwards; small enough for CP-SAT to find most optima."""
LAYERED_SHARE = 0.12
DIFFERING_SHARE = 0.3
"""Of problems by stages: those whose microbatches differ."""
PAIRED_SHARE = 0.2
"""Of the others by stages: those with pairs."""
COPIED_SHARE, MOST_CELLS = 0.2, 6
"""Of the rest by stages: those with copies; most F's of one."""
DEVICES_SHARE = 0.4
"""Of problems by layers with several ranks: those whose ranks have different devices."""


def draw(chance: Random) -> tuple[str, Document]:
    """Return a problem document, and its kind for the summary."""
    numbers = chance.choice(NUMBERS)
    draw_one = _layered if chance.random() < LAYERED_SHARE else _stages
    if draw_one is _stages and chance.random() < DIFFERING_SHARE:
        draw_one = differing_stages
    elif draw_one is _stages and chance.random() < PAIRED_SHARE:
        draw_one = paired_stages
    elif draw_one is _stages and chance.random() < COPIED_SHARE:
        draw_one = copied_stages
    document = draw_one(chance, number_source(chance, numbers))
    shape = "layers" if "layers" in document else document["placement"]
    if "features" in document:
        shape = f"differing {shape}"
    if "communication" in document["costs"]:
        shape = f"pairs {shape}"
    if "offload" in document["costs"]:
        shape = f"copies {shape}"
    if "devices" in document:
        shape = f"{shape} on devices"
    return f"{shape}, {numbers}", document


def number_source(chance: Random, kind: str) -> Number:
    """Return a function that draws positive numbers of one kind."""
    sources: dict[str, Number] = {
        "small integers": lambda: float(chance.randint(1, 20)),
        "ties": lambda: float(chance.choice((1, 1, 1, 2))),
        "decimals": lambda: round(chance.uniform(0.01, 20), chance.choice((1, 2, 2, 3))),
        "floats": lambda: chance.uniform(0.5, 2.0),
        "twelve decades": lambda: 10 ** chance.uniform(-6, 6),
    }
    if kind == "mixed":
        return lambda: chance.choice(list(sources.values()))()
    return sources[kind]


def _shape(chance: Random) -> tuple[int, int, str, int]:
    """Draw ranks, microbatches, placement and chunks."""
    while True:
        kind = chance.choice(("v", "v", "loop", "loop", "single"))
        chunks = {"v": 2, "single": 1}.get(kind) or chance.randint(1, 4)
        p = chance.choice((1, 2, 2, 3, 3, 4))
        m = chance.choice((1, 1, 2, 2, 2, 3, 3, 4, 6))
        if 3 * p * chunks * m <= MOST_ACTIONS:
            return p, m, kind, chunks


def _some_zeros(chance: Random, number: Number) -> Number:
    share = chance.choice((0.0, 0.0, 0.15, 0.5))
    return lambda: 0.0 if chance.random() < share else number()


def _values(chance: Random, number: Number, count: int) -> list[float]:
    """Draw durations; they are often equal, as in a model of equal blocks."""
    if chance.random() < 0.4:
        return [number()] * count
    return [number() for _ in range(count)]


def _stages(chance: Random, number: Number) -> Document:
    p, m, kind, chunks = _shape(chance)
    n = p * chunks
    costly = _some_zeros(chance, number)
    costs: Document = {
        key: _values(chance, costly, n) for key in ("forward", "backward_input", "backward_weight")
    }
    costs["backward"] = fused(chance, costs["backward_input"], costs["backward_weight"])
    scale = chance.choice((0.0, 0.05, 1.0, 1.0, 20.0))
    costs["p2p"] = [scale * value for value in _values(chance, number, n - 1)]
    document: Document = {
        "pp_degree": p,
        "microbatches": m,
        "placement": kind,
        "objective": chance.choice(("span", "span", "makespan")),
        "costs": costs,
    }
    if kind == "loop":
        document["chunks"] = chunks
    if chance.random() < 0.8:
        document["memory"] = _memory(chance, number, document, n)
    return document


def paired_stages(chance: Random, number: Number) -> Document:
    """Draw a problem whose actions communicate; none takes no time."""
    while True:
        document = _stages(chance, number)
        costs = document["costs"]
        shown = [costs[key] for key in ("forward", "backward_input", "backward_weight", "backward")]
        if document["microbatches"] > 1 and all(min(values or [1]) > 0 for values in shown):
            break
    forward, inputs, weights, whole = shown
    whole = whole or [sum(both) for both in zip(inputs, weights, strict=True)]
    share = chance.choice((0.2, 0.5, 1.0))
    costs["communication"] = {
        name: [value * chance.choice((0.0, 0.5, share, share)) for value in values]
        for name, values in (("forward", forward), ("backward_input", inputs), ("backward", whole))
    }
    costs["pair_factor"] = chance.choice((1.0, 1.0, 1.25))
    return document


def copied_stages(chance: Random, number: Number) -> Document:
    """Draw a problem with copies to the host, and perhaps pairs; no action and no copy takes no time.

    Amounts of memory are small integers, most often, because CP-SAT must round others.
    """
    while True:
        document = paired_stages(chance, number)
        costs = document["costs"]
        memory = _memory(chance, number_source(chance, "ties"), document, len(costs["forward"]))
        if memory["limit"] is not None and document["microbatches"] * len(costs["forward"]) <= MOST_CELLS:
            break
    document["memory"] = memory
    if chance.random() < 0.6:
        del costs["communication"], costs["pair_factor"]
    scale = chance.choice((0.2, 1.0, 1.0, 5.0))
    for name in ("offload", "reload"):
        costs[name] = [scale * value for value in _values(chance, number, len(costs["forward"]))]
    memory["offloadable"] = [value * chance.choice((1.0, 1.0, 0.5, 0.0)) for value in memory["forward"]]
    return document


def differing_stages(chance: Random, number: Number) -> Document:
    """Draw a problem with a feature in every number: some microbatches are far larger than others."""
    document = _stages(chance, number)
    m = document["microbatches"]
    size = [chance.choice((0.0, 1.0, 1.0, chance.uniform(0, 3), 7.0, 30.0)) for _ in range(m)]

    def by_size(fixed: list[float], slope: list[float]) -> Document:
        return {"fixed": fixed, "size": slope}

    def times(values: list[float]) -> Document:
        factor = chance.choice((0.0, 0.5, 1.0, 1.0, 2.0))
        return by_size(values, [value * factor for value in values])

    costs = {key: values if values is None else times(values) for key, values in document["costs"].items()}
    document = {**document, "features": {"size": size}, "costs": costs}
    memory = document.get("memory")
    if memory is None:
        return document
    n, p = len(memory["forward"]), document["pp_degree"]
    slope = [list(row) for row in zip(*(deltas(chance, number) for _ in range(n)), strict=True)]
    names = ("forward", "backward_input", "backward_weight")
    memory = {**memory, **{name: by_size(memory[name], row) for name, row in zip(names, slope, strict=True)}}
    if memory["limit"] is not None:
        fixed = memory["forward"]["fixed"]
        for rank in range(p):
            mine = [s for s in range(n) if rank_of(s, p, document["placement"]) == rank]
            held = [[fixed[s] + slope[0][s] * size[j] for s in mine] for j in range(m)]
            room = _headroom(chance, chance.choice(held))
            memory["limit"][rank] = memory["static"][rank] + max(map(sum, held)) + max(0.0, room)
    return {**document, "memory": memory}


def fused(chance: Random, inputs: list[float], weights: list[float]) -> list[float] | None:
    """Draw durations of B: absent, cheaper than I and W, or sometimes more expensive."""
    if chance.random() < 0.55:
        return None
    shares = [chance.choice((0.0, 0.5, 0.8, 0.95, 1.0, 1.0, 1.2, 1e7)) for _ in inputs]
    if chance.random() < 0.5:
        shares = shares[:1] * len(shares)
    return [(i + w) * share for i, w, share in zip(inputs, weights, shares, strict=True)]


def deltas(chance: Random, number: Number) -> tuple[float, float, float]:
    """Draw the memory that F allocates, that I releases or allocates, and W, which releases the rest."""
    forward = chance.choice((0.0, number(), number(), number()))
    share = chance.choice((0.0, 0.0, 0.5, 0.5, 1.0, chance.random()))
    inputs = -share * forward
    if chance.random() < 0.15:
        inputs = number()
    weights = -(forward + inputs)
    return forward, inputs, weights


def _memory(chance: Random, number: Number, document: Document, n: int) -> Document:
    p = document["pp_degree"]
    each = (
        [deltas(chance, number)] * n if chance.random() < 0.4 else [deltas(chance, number) for _ in range(n)]
    )
    if chance.random() < 0.15:
        # One stage holds far more than the others.
        large = chance.randrange(n)
        held, freed = (round(1e7 * amount, 1) for amount in each[large][:2])
        each = [*each[:large], (held, freed, -(held + freed)), *each[large + 1 :]]
    forward, inputs, weights = (list(row) for row in zip(*each, strict=True))
    static = _values(chance, lambda: chance.choice((0.0, 0.0, number())), p)
    limit = None
    if chance.random() < 0.9:
        limit = []
        for rank in range(p):
            mine = [forward[s] for s in range(n) if rank_of(s, p, document["placement"]) == rank]
            limit.append(static[rank] + sum(mine) + _headroom(chance, mine))
    memory = {"forward": forward, "backward_input": inputs, "backward_weight": weights}
    return {**memory, "static": static, "limit": limit}


def _headroom(chance: Random, held: list[float]) -> float:
    """Draw memory above the minimum: none, whole activations, a part of one, or an amount within rounding."""
    choice = chance.choice(("none", "none", "whole", "whole", "part", "any", "rounding"))
    if choice == "whole":
        return sum(value * chance.randint(0, 2) for value in held)
    if choice == "part":
        return chance.choice(held) * chance.choice((0.5, 0.999999999, 0.25))
    if choice == "any":
        return sum(held) * chance.uniform(0, 3)
    if choice == "rounding":
        return sum(value * chance.randint(0, 1) for value in held) - sum(held) * 2e-10
    return 0.0


def _layered(chance: Random, number: Number) -> Document:
    """Draw few layers on few ranks, because every cut is enumerated and solved."""
    p, m = chance.choice((1, 2, 2, 3)), chance.choice((1, 1, 2, 3))
    kind = chance.choice(("v", "loop", "single", "auto")) if m * p < 4 else "single"
    chunks = chance.choice((1, 2, 3)) if p < 3 else 2
    stages = p * (chunks if kind == "loop" else 2 if kind == "v" else 1)
    allow_empty = chance.random() < 0.2
    count = chance.randint(max(1, stages - 1) if allow_empty else stages, stages + 2)
    costly = _some_zeros(chance, number)
    layers = [_layer(chance, number, costly, f"l{at}") for at in range(count)]
    if chance.random() < 0.4:
        layers = [{**layers[0], "name": f"l{at}"} for at in range(count)]
    document: Document = {
        "pp_degree": p,
        "microbatches": m,
        "placement": kind,
        "objective": chance.choice(("span", "makespan")),
        "layers": layers,
        "cut": _cut_rules(chance, count, stages, allow_empty),
        "costs": {"link": {"latency": costly(), "bandwidth": 1.0}}
        if chance.random() < 0.3
        else {"p2p": costly()},
    }
    if kind == "loop":
        document["chunks"] = chunks
    if chance.random() < 0.7:
        document["memory"] = {
            "static": chance.choice((0.0, number())),
            "limit": _layered_limit(chance, layers, p),
        }
    return _on_devices(chance, number, costly, document) if chance.random() < DEVICES_SHARE else document


def _on_devices(chance: Random, number: Number, costly: Number, document: Document) -> Document:
    """Give some ranks another device, where most layers have other costs; draw links and limits of ranks."""
    p = document["pp_degree"]
    devices = [chance.choice("ab") for _ in range(p)]
    if "b" not in devices or p == 1:
        return document
    layers, known = [], {}
    for layer in document["layers"]:
        same = repr({**layer, "name": ""})  # equal layers stay equal
        if same not in known:
            known[same] = _costs_on_device(chance, number, costly, layer)
        layers.append({**layer, **known[same]})
    document = {**document, "layers": layers, "devices": devices}
    if "link" in document["costs"]:
        links = [{"latency": costly(), "bandwidth": chance.choice((0.5, 1.0, 4.0))} for _ in range(p)]
        document["costs"] = {"link": links}
    if "memory" in document:
        limit = document["memory"]["limit"]
        limits = [limit * chance.choice((0.6, 1.0, 1.0, 2.0)) for _ in range(p)]
        document["memory"] = {**document["memory"], "limit": limits}
    return document


def _costs_on_device(chance: Random, number: Number, costly: Number, layer: Document) -> Document:
    if chance.random() < 0.2:
        return {}
    while True:
        drawn = _layer(chance, number, costly, layer["name"])
        if ("recompute" in drawn) == ("recompute" in layer):
            break
    costs = {key: value for key, value in drawn.items() if key not in ("name", "output_bytes")}
    if costs["backward"] is None:  # absent, it would keep the layer's value
        costs["backward"] = costs["backward_input"] + costs["backward_weight"]
    return {"on": {"b": costs}}


def _layer(chance: Random, number: Number, costly: Number, name: str) -> Document:
    inputs, weights = costly(), costly()
    own_fused = fused(chance, [inputs], [weights])
    forward, freed, rest = deltas(chance, number)
    memory = {"forward": forward, "backward_input": freed, "backward_weight": rest}
    memory["static"] = chance.choice((0.0, number()))
    memory["workspace"] = chance.choice((0.0, 0.0, number()))
    layer: Document = {
        "name": name,
        "forward": costly(),
        "backward_input": inputs,
        "backward_weight": weights,
        "backward": own_fused and own_fused[0],
        "memory": memory,
        "output_bytes": chance.choice((0.0, costly())),
    }
    if chance.random() < 0.4:
        share = chance.choice((0.0, 0.1, 0.5))
        kept = forward * share
        again = {"forward": kept, "backward_input": -freed - kept if freed > 0 else freed + forward - kept}
        again["backward_weight"] = -(again["forward"] + again["backward_input"])
        if again["backward_weight"] > 0:
            again = {"forward": kept, "backward_input": -kept, "backward_weight": 0.0}
        layer["recompute"] = {
            "backward_input": inputs + layer["forward"],
            "memory": {**again, "static": memory["static"], "workspace": memory["workspace"] + number()},
        }
    return layer


def _cut_rules(chance: Random, count: int, stages: int, allow_empty: bool) -> Document:
    rules: Document = {"allow_empty": allow_empty}
    if count > stages and chance.random() < 0.3:
        at = chance.randrange(count - 1)
        rules["together"] = [[f"l{at}", f"l{at + 1}"]]
    elif stages > 1 and chance.random() < 0.2:
        rules["first"] = 1
    return rules


def _layered_limit(chance: Random, layers: list[Document], p: int) -> float:
    held: float = sum(layer["memory"]["forward"] + layer["memory"]["static"] for layer in layers)
    return held * chance.choice((0.3, 0.6, 1.0, 2.0)) / p + chance.choice((0.0, held))
