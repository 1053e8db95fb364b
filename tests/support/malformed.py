"""Valid bodies for every address that takes one, and malformed ones: valid ones, broken in many ways.

The functions only depend on a random generator, so a seed reproduces a run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

ID = "0" * 32
RUN_ID = "d" * 32
"""Placeholder for the id of the run, which the service chooses."""
PLAN_ID = "0" * 64
HUGE = ("1e400", "-1e400", "9" * 400, "9" * 5000, "1e-400", "NaN", "Infinity", "-Infinity", "-0", "01")
SURROGATES = ("\\ud800", "\\udfff\\ud800", "\\u0000", "\ufeff")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    -1e308,
    2**31,
    2**63,
    2**64,
    "",
    "x",
    "1",
    "\u0000",
    [],
    {},
    [[]],
    [None],
    {"": {}},
    ["0F0"],
    "../../etc/passwd",
    "9" * 300,
    [0] * 100,
)


@dataclass(frozen=True)
class Route:
    """An address that takes a body, and a valid body; if ``is_packed``, the body may be gzip."""

    method: str
    path: str
    body: Any
    media_type: str = "application/json"
    is_packed: bool = False


@dataclass(frozen=True)
class Malformed:
    """A request to send."""

    route: Route
    content: bytes
    headers: dict[str, str]


_PROBLEM: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "placement": "v",
    "objective": "span",
    "costs": {"forward": [1, 1, 1, 1], "backward_input": 1, "backward_weight": 1, "backward": None, "p2p": 0},
    "memory": {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "static": 0, "limit": 8},
    "units": {"time": "us", "memory": "bytes"},
}
_LAYER = {"name": "block", "forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "repeat": 4}
_LAYERS: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "layers": [_LAYER], "costs": {"p2p": 0}}
_BATCH = {
    "sequences": [3, 1, 2],
    "max_tokens": 4,
    "replicas": 1,
    "problem": {key: value for key, value in _PROBLEM.items() if key != "microbatches"},
}
_OPTIONS = {"effort": "quick", "time_limit": 0.001, "seed": 0}
_DOWN, _UP = ("0F{j}", "1F{j}", "2F{j}", "3F{j}"), ("3B{j}", "2B{j}", "1B{j}", "0B{j}")
_RANKS = [
    [text.format(j=j) for j in range(4) for text in (*_DOWN, *_UP) if text[0] in stages]
    for stages in ("03", "12")
]
PLAN = {"problem": _PROBLEM, "ranks": _RANKS}
"""A valid plan: one microbatch after another."""
RUN: dict[str, Any] = {
    "plan_id": PLAN_ID,
    "model": {"factory": "a.b:c", "arguments": {"layers": 1}, "seed": 0},
    "nodes": 1,
    "steps": 1,
    "options": {"backend": "gloo", "timeout": 1.0, "checkpoint": {"directory": "/x", "every": 1}},
}
AGENT: dict[str, Any] = {
    "id": ID,
    "name": "node",
    "address": "127.0.0.1",
    "port": 1,
    "slots": 2,
    "devices": ["cpu"],
    "versions": {"torch": "2"},
    "allows": {"models": ["*"]},
}
_LAYOUTS = {
    "model": {"presets": ["llama-3.1-8b"], "model": {"hidden": 1024}},
    "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h100", "memory": 8e10, "reserve": 1e9},
    "global_batch": 2,
    "fixed": {"tensor_parallel": 2},
    "top": 1,
    "options": {"effort": None, "time_limit": 0.01},
}
_HEARTBEAT = {"port": 1, "run_id": RUN_ID, "ranks": [{"rank": 0, "step": 1, "action": "0F0"}]}
_END = {
    "run_id": RUN_ID,
    "generation": 0,
    "outcome": "failed",
    "failures": [{"kind": "error", "detail": "x", "rank": 0}],
}
_TRACE = {
    "rank": 0,
    "pp_rank": 0,
    "replica": 0,
    "plan_id": PLAN_ID,
    "clock_offset_ns": 0,
    "uncertainty_ns": 0,
    "steps": [{"step": 0, "loss": 1.0, "seconds": 1.0, "actions": [["0F0", 0, 0, 1, 0]]}],
}
_EVENTS = {"rank": 0, "events": [{"kind": "non_finite", "step": 1, "what": "loss", "value": "nan"}]}
_PART = f"/v1/agents/{ID}/runs/{RUN_ID}/generations/0/ranks/0"

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/searches", {"problem": _PROBLEM, "options": _OPTIONS}),
    Route("POST", "/v1/searches", {"problem": _LAYERS, "options": _OPTIONS}),
    Route("POST", "/v1/layouts", _LAYOUTS),
    Route("POST", "/v1/problems/compare", {"problem": _PROBLEM}),
    Route("POST", "/v1/problems/check", {"problem": _PROBLEM}),
    Route("POST", "/v1/problems/estimate", {"problem": _PROBLEM}),
    Route("POST", "/v1/problems/pack", {"batch": _BATCH}),
    Route("POST", "/v1/plans", PLAN),
    Route("POST", "/v1/runs", RUN),
    Route(
        "POST",
        "/v1/runs",
        {**RUN, "plan_id": None, "problem": _PROBLEM, "search_options": _OPTIONS},
    ),
    Route("POST", f"/v1/runs/{RUN_ID}/plan", {"plan_id": PLAN_ID}),
    Route("POST", "/v1/agents", AGENT),
    Route("POST", f"/v1/agents/{ID}/heartbeat", _HEARTBEAT),
    Route("POST", f"/v1/agents/{ID}/ended", _END),
    Route("PUT", f"{_PART}/trace", _TRACE, is_packed=True),
    Route("PUT", f"{_PART}/events", _EVENTS, is_packed=True),
    Route("PUT", f"{_PART}/log", "text", media_type="text/plain", is_packed=True),
)


MOST_BRACKETS = 200
"""In documents whose parts are changed."""
CLOSED = 0
"""Stands for the status if the service closed the connection while a refused body was still being sent."""
_NO_ANSWER = 599
_WORK_SECONDS = 30.0


async def prepare(http: httpx.AsyncClient) -> str:
    """Create a run with a plan and an agent, so that bodies about them are read; returns its id."""
    plan_id = (await http.post("/v1/plans", json=PLAN)).raise_for_status().json()["plan_id"]
    (await http.post("/v1/agents", json=AGENT)).raise_for_status()
    run = (await http.post("/v1/runs", json={**RUN, "plan_id": plan_id})).raise_for_status().json()
    work = await http.get(f"/v1/agents/{ID}/work", params={"wait": _WORK_SECONDS})
    if work.status_code != 200:
        raise RuntimeError(f"the run got no agent: {work.status_code} {work.text}")
    return str(run["id"])


async def send(http: httpx.AsyncClient, request: Malformed, run_id: str) -> tuple[int, str]:
    """Send a request; returns status and text of the response."""
    route = request.route
    path = route.path.replace(RUN_ID, run_id)
    content = request.content.replace(RUN_ID.encode(), run_id.encode())
    try:
        answer = await http.request(route.method, path, content=content, headers=request.headers)
    except httpx.TransportError as error:
        # The service may close a connection instead of reading a refused body to its end.
        return (CLOSED if len(request.content) > 2**20 else _NO_ANSWER), f"{route}: {error!r}"
    return answer.status_code, answer.text


def malformed(random: Random) -> Malformed:
    """Return a request with a body that is almost certainly wrong."""
    route = random.choice(ROUTES)
    text = json.dumps(route.body)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        text = random.choice(_OF_TEXT)(random, text) if random.random() < 0.3 else _of_value(random, text)
    content = text.encode(errors="surrogatepass")
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        content = random.choice(_OF_BYTES)(random, content)
    headers = {"Content-Type": route.media_type}
    if route.is_packed and random.random() < 0.5:
        content, headers = (
            random.choice(_OF_PACKING)(random, content),
            {**headers, "Content-Encoding": "gzip"},
        )
    if random.random() < 0.05:
        headers["Content-Type"] = random.choice(
            ("text/html", "", "application/json; charset=utf-16", ";;;", "a/b")
        )
    return Malformed(route, content, headers)


def _of_value(random: Random, text: str) -> str:
    """Replace, remove or repeat a part of the document."""
    # Whether a parser gives up must not depend on the recursion limit, or the seed alone decides no more.
    if text.count("[") + text.count("{") > MOST_BRACKETS:
        return text
    try:
        document = json.loads(text)
    except ValueError:
        return text
    places = list(_places(document))
    if not places:
        return json.dumps(random.choice(VALUES))
    holder, key = random.choice(places)
    what = random.randrange(4)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[random.choice(("x", "", "__proto__", "pp_degree", "costs"))] = random.choice(VALUES)
    elif what == 2 and isinstance(holder, list):
        holder.extend(holder * random.choice((1, 7)))
    else:
        holder[key] = random.choice(VALUES)
    return json.dumps(document)


def _places(node: Any) -> list[tuple[Any, Any]]:
    keys: list[Any] = []
    if isinstance(node, dict):
        keys = list(node)
    elif isinstance(node, list):
        keys = list(range(len(node)))
    return [found for key in keys for found in ((node, key), *_places(node[key]))]


def _number(random: Random, text: str) -> str:
    at = [index for index, letter in enumerate(text) if letter.isdigit()]
    return text if not at else text[: (index := random.choice(at))] + random.choice(HUGE) + text[index + 1 :]


def _surrogate(random: Random, text: str) -> str:
    at = [index for index, letter in enumerate(text) if letter == '"']
    return (
        text
        if not at
        else text[: (index := random.choice(at)) + 1] + random.choice(SURROGATES) + text[index + 1 :]
    )


def _nested(random: Random, text: str) -> str:
    depth = random.choice((10, 1000, 20_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    end = closing * depth if random.random() < 0.5 else ""
    return opening * depth + text + end


def _twice(random: Random, text: str) -> str:
    return text.replace("{", '{"problem": 1, "pp_degree": 3, "id": "x", ', 1)


def _junk(random: Random, text: str) -> str:
    at = random.randrange(len(text) + 1)
    return (
        text[:at] + random.choice(("}", "]", ",", "//", "'", "\\", "\x00", "\u2028", text[:20])) + text[at:]
    )


def _flipped(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 3, 10))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncated(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _noise(random: Random, content: bytes) -> bytes:
    return random.randbytes(random.choice((0, 1, 16, 1000)))


def _packed(random: Random, content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def _bomb(random: Random, content: bytes) -> bytes:
    return gzip.compress(bytes(random.choice((1, 64)) * 1024 * 1024), 9, mtime=0)


def _packed_wrong(random: Random, content: bytes) -> bytes:
    return random.choice((_flipped, _truncated))(random, gzip.compress(content, 1, mtime=0)) + random.choice(
        (b"", b"x")
    )


_OF_TEXT: tuple[Callable[[Random, str], str], ...] = (_number, _surrogate, _nested, _twice, _junk)
_OF_BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (_flipped, _truncated, _noise)
_OF_PACKING: tuple[Callable[[Random, bytes], bytes], ...] = (_packed, _bomb, _packed_wrong)
