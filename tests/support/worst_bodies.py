"""The most expensive requests that we know for every address, within all limits of size.

Add new ones to :func:`worst`. The benchmark ``hostile`` lets 16 clients repeat each; a test sends each once
and expects an orderly response.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

ID = "0" * 32
RUN: dict[str, Any] = {
    "plan_id": "0" * 64,
    "model": {"factory": "a.b:c", "arguments": {"layers": 1}, "seed": 0},
    "nodes": 1,
    "steps": 1,
    "options": {"backend": "gloo", "timeout": 1.0, "checkpoint": {"directory": "/x", "every": 1}},
}
AGENT: dict[str, Any] = {
    **{"id": ID, "name": "node", "address": "127.0.0.1", "port": 1, "slots": 2, "devices": ["cpu"]},
    **{"versions": {"torch": "2"}, "allows": {"models": ["*"]}},
}
MIB = 1024**2
COUNTER = b"10203040"
"""Eight digits of a body or an address. Every repetition replaces them, so that no response is cached."""
COSTS: dict[str, Any] = {"forward": 1, "backward_input": 1, "backward_weight": 1}
VARIED: dict[str, Any] = {**COSTS, "forward": 10203040}
WEIGHTS = {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5}
_LAYER: dict[str, Any] = {"name": "a", **COSTS}
_RECOMPUTED = {**_LAYER, "recompute": {"forward": 1}, "parameters_bytes": 1, "output_bytes": 1}
_REPORTS = ("heartbeat", "ended")


@dataclass(frozen=True)
class Sizes:
    """Sizes of bodies in bytes: the limits of the default settings, or less in tests."""

    body: int = 8 * MIB
    plan: int = 64 * MIB
    trace: int = 32 * MIB


@dataclass(frozen=True)
class Worst:
    name: str
    method: str
    path: str
    make: Callable[[], bytes] | None = None
    """Makes the body; None if there is none."""
    media_type: str = "application/json"
    encoding: str = ""
    reads: bool = True
    """Whether the client reads the response; otherwise it only keeps the connection open."""
    accept: str = "*/*"
    seconds: float = 90.0
    """How long the client waits for the response, before it leaves."""


def filled(head: str, part: str, tail: str, size: int) -> bytes:
    """Return a text of about ``size`` bytes, with as many parts as fit."""
    count = max(1, (size - len(head) - len(tail)) // len(part))
    return (head + part * (count - 1) + part.removesuffix(",") + tail).encode()


def _problem_bodies(size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield bodies for every address that takes a problem."""
    layered = '{"problem":{"pp_degree":2,"microbatches":4,"layers":['
    staged = '{"problem":{"pp_degree":2,"microbatches":4,"costs":{"forward":['
    yield "empty layers", partial(filled, layered, "{},", "]}}", size)
    yield "wrong costs", partial(filled, staged, '"",', "]}}}", size)
    yield "infinite costs", partial(filled, staged, "1e999,", "]}}}", size)
    yield "long integers", partial(filled, staged, "9" * 4300 + ",", "]}}}", size)
    yield "empty lists", partial(filled, "[", "[],", "]", size)
    yield "deep lists", partial(filled, "", "[", "", size)
    yield "deep objects", partial(filled, "", '{"problem":', "", size)
    yield "one long text", partial(filled, '{"problem":"', "a", '"}', size)
    yield "one long key", partial(filled, '{"', "a", '":1}', size)
    yield "escapes", partial(filled, '{"problem":"', "\\ud800", '"}', size)
    yield "many keys", partial(_keys, size)
    yield "many keys in many layers", partial(_keyed_layers, size)
    yield "the same key", partial(filled, '{"problem":1,', '"problem":{},', '"x":1}', size)
    yield "groups of names", partial(_json, {"problem": _grouped()})
    yield "layers at their limits", partial(_json, {"problem": _most_layers()})
    few = {"pp_degree": 1024, "chunks": 64, "placement": "loop", "microbatches": 15, "costs": VARIED}
    yield "65,536 stages in 200 bytes", partial(_json, {"problem": few})
    tight = {**few, "chunks": 16, "memory": {**WEIGHTS, "limit": 10**9}}
    yield "16,384 stages in 200 bytes", partial(_json, {"problem": tight})
    yield "65,536 stages written out", partial(_written_out, size)
    large = {"pp_degree": 512, "microbatches": 1000, "costs": VARIED, "memory": {**WEIGHTS, "limit": 2048}}
    yield "many microbatches", partial(_json, {"problem": large})
    middle = {**large, "pp_degree": 128, "memory": {**WEIGHTS, "limit": 400}}
    yield "a problem that takes long", partial(_json, {"problem": middle})


def _batches(size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Batches at their limits, or fewer sequences if the size of the body does not allow as many."""
    for name, length, replicas in (("short sequences, many replicas", 1, 64), ("full microbatches", 4096, 1)):
        batch = {
            "sequences": [length] * min(2048, size // 1024),
            "max_tokens": 4096,
            "replicas": replicas,
            "problem": {"pp_degree": 16, "costs": {**VARIED, "forward": {"tokens": 10203040}}},
        }
        yield f"packing {name}", partial(_json, {"batch": batch})
    wide = {"sequences": [1], "max_tokens": 1, "problem": {"pp_degree": 32_768, "costs": VARIED}}
    yield "packing for 65,536 stages", partial(_json, {"batch": wide})


def _layouts(size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The largest cluster and batch, without a layout that divides them, and wrong sections."""
    cluster = {"nodes": 8192, "gpus_per_node": 8, "device": "h100"}
    body = {"model": {"presets": ["deepseek-v3"]}, "cluster": cluster, "global_batch": 65_536}
    yield "a large cluster", partial(_json, {**body, "fixed": {"microbatch_size": 65_535}})
    yield "many unknown parts", partial(filled, '{"cluster":{},"model":{"x":[', "{},", "]}}", size)
    yield "many presets", partial(filled, '{"cluster":{},"model":{"presets":[', '"h100",', "]}}", size)


def worst(trace_path: str, sizes: Sizes = Sizes()) -> Iterator[Worst]:
    """Yield all requests with bodies. ``trace_path`` is the address of a trace."""
    for path in ("/v1/searches", "/v1/problems/check", "/v1/problems/estimate", "/v1/problems/compare"):
        for name, make in _problem_bodies(sizes.body):
            yield Worst(name, "POST", path, make)
    for name, make in _batches(sizes.body):
        yield Worst(name, "POST", "/v1/problems/pack", make)
    for name, make in _layouts(min(MIB, sizes.body)):
        yield Worst(name, "POST", "/v1/layouts", make)
    for name, make in _problem_bodies(min(MIB, sizes.body)):
        yield Worst(f"run of {name}", "POST", "/v1/runs", partial(_run_of, make, sizes.body))
    arguments = {**RUN, "model": {**RUN["model"], "arguments": {"a": [[]] * 200_000}}}
    yield Worst("arguments of a run", "POST", "/v1/runs", partial(_json, arguments))
    unknown = partial(_unknown, min(MIB, sizes.body))
    of_agent = (f"/v1/agents/{ID}/{report}" for report in _REPORTS)
    for path in ("/v1/runs", f"/v1/runs/{ID}/plan", "/v1/agents", *of_agent):
        yield Worst("unknown keys", "POST", path, unknown)
    yield from _agent_bodies(trace_path, sizes)
    plan = '{"problem":{"pp_degree":1,"microbatches":4,"costs":{}},"ranks":[['
    for name, part in (("wrong", "0,"), ("empty", '"",'), ("many", '"0F0",')):
        yield Worst(f"{name} actions", "POST", "/v1/plans", partial(filled, plan, part, "]]}", sizes.plan))
    yield Worst("plan: empty objects", "POST", "/v1/plans", partial(filled, "[", "{},", "]", sizes.plan))
    yield Worst("plan: spaces", "POST", "/v1/plans", partial(filled, "[", " ", "]", sizes.plan))
    yield Worst("plan that is right", "POST", "/v1/plans", partial(_right_plan, sizes.plan))


def _agent_bodies(trace_path: str, sizes: Sizes) -> Iterator[Worst]:
    devices = {**AGENT, "id": "1" * 32, "devices": ["x" * 200] * 1024}
    yield Worst("devices", "POST", "/v1/agents", partial(_json, devices))
    empty = partial(filled, '{"devices":[', "{},", "]}", min(MIB, sizes.body))
    yield Worst("agent: empty devices", "POST", "/v1/agents", empty)
    beat = {"run_id": ID, "ranks": [{"rank": rank, "step": 1, "action": "0F0"} for rank in range(256)]}
    yield Worst("heartbeat", "POST", f"/v1/agents/{ID}/heartbeat", partial(_json, beat))
    failure = {"kind": "error", "detail": "x," * 400, "rank": 0}
    end = {"run_id": ID, "generation": 10203040, "outcome": "failed", "failures": [failure] * 1024}
    yield Worst("failures", "POST", f"/v1/agents/{ID}/ended", partial(_json, end))
    trace = '{"rank":0,"pp_rank":0,"plan_id":"' + "0" * 64 + '","steps":[{"step":0,"seconds":1,"actions":['
    for name, part in (("wrong records", "[],"), ("right records", '["0F0",0,0,1,0],')):
        packed = partial(_packed, partial(filled, trace, part, "]}]}", sizes.trace))
        yield Worst(f"trace: {name}", "PUT", trace_path, packed, encoding="gzip")
    bomb = partial(_packed, partial(bytes, 8 * sizes.trace))
    yield Worst("trace: bomb", "PUT", trace_path, bomb, encoding="gzip")
    log_path = trace_path.removesuffix("trace") + "log"
    yield Worst("log: bomb", "PUT", log_path, bomb, "text/plain", "gzip")


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _keys(size: int) -> bytes:
    keys = ",".join(f'"k{number}":0' for number in range(size // 14))
    return f'{{"problem":{{{keys}}}}}'.encode()


def _unknown(size: int) -> bytes:
    return _json({f"k{number}": 0 for number in range(size // 14)})


def _keyed_layers(size: int) -> bytes:
    layer = "{" + ",".join(f'"k{number}":0' for number in range(95)) + "}"
    layers = ",".join([layer] * min(512, size // (len(layer) + 1)))
    return f'{{"problem":{{"pp_degree":2,"microbatches":4,"layers":[{layers}]}}}}'.encode()


def _grouped() -> dict[str, Any]:
    names = [f"a.{number}" for number in range(512)]
    layer = {**_LAYER, "repeat": 512}
    return {"pp_degree": 2, "microbatches": 4, "layers": [layer], "cut": {"together": [names] * 512}}


def _most_layers() -> dict[str, Any]:
    layers = [{**_RECOMPUTED, "name": f"{number}", "forward": 10203040 + number} for number in range(512)]
    shape = {"pp_degree": 64, "microbatches": 128, "placement": "auto"}
    return {**shape, "layers": layers, "memory": {"limit": 10**12}}


def _written_out(size: int) -> bytes:
    stages = 65_536
    each = "1.25," if size >= 10 * 5 * stages else "1,"
    values = "[" + (each * stages)[:-1] + "]"
    boundaries = "[" + (each * (stages - 1))[:-1] + "]"
    zeros = "[" + ("0," * stages)[:-1] + "]"
    return (
        f'{{"problem":{{"pp_degree":1024,"chunks":64,"placement":"loop","microbatches":15,"costs":{{'
        f'"forward":{values},"backward_input":{values},"backward_weight":{values},"backward":{values},'
        f'"p2p":{boundaries}}},"memory":{{"forward":{zeros},"backward_input":{zeros},"backward_weight":{zeros}'
        f"}}}}}}"
    ).encode()


def _run_of(make: Callable[[], bytes], size: int) -> bytes:
    body = make()
    rest = _json({**RUN, "plan_id": None})
    if not body.startswith(b'{"problem"') or len(body) + len(rest) > size:
        return body
    return body.removesuffix(b"}") + b"," + rest.removeprefix(b"{")


def _right_plan(size: int) -> bytes:
    """Return a serial plan, which passes all checks."""
    most = size // 60
    p = 16
    m = max(1, min(4000, most // p))
    ranks = []
    for rank in range(p):
        late = 2 * p - 1 - rank
        up, down = (f"{rank}F{{j}}", f"{late}F{{j}}"), (f"{late}B{{j}}", f"{rank}B{{j}}")
        ranks.append([text.format(j=j) for j in range(m) for text in (*up, *down)])
    problem = {"pp_degree": p, "microbatches": m, "costs": VARIED}
    return _json({"problem": problem, "ranks": ranks})


def _packed(make: Callable[[], bytes]) -> bytes:
    return gzip.compress(make(), 1, mtime=0)
