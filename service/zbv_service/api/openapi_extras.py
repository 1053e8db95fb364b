"""Tags and examples of the OpenAPI document, which cannot be derived from the routes."""

from __future__ import annotations

from typing import Any

TAGS = {
    "searches": "Searches for plans, and for the best parallel layouts of a model on a cluster: durable, "
    "resumable, followed by events or by polling.",
    "plans": "Plans, identified by the hash of problem and orders: whole, by rank, or in other formats.",
    "problems": "Checks, estimates, comparisons and packings of problems; nothing is stored.",
    "runs": "Training runs: scheduled on agents, restarted after failures, replanned from measured costs.",
    "agents": "Nodes that run ranks; used by `zbv-worker agent`.",
    "access": "Signing in.",
    "health": "Health and metrics.",
}

PROBLEM: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 16,
    "placement": "v",
    "objective": "span",
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "static": 0, "limit": 16},
    "units": {"time": "us", "memory": "bytes"},
}
_AGENT = "5f0c4a1e9d2b4c7a8e3f6b1d0c9a8e7f"
_RUN = "0d6f2b8a4c1e4f7b9a3d5e8c7f1b2a6d"
_PLAN = "3b9ac9ff" * 8
EXAMPLES: dict[str, Any] = {
    "submit_layouts": {
        "model": {"presets": ["llama-3.1-8b"]},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "device": "h100"},
        "global_batch": 64,
        "fixed": {"context_parallel": 1},
        "top": 3,
    },
    "submit_search": {"problem": PROBLEM, "options": {"effort": "quick", "time_limit": 10, "seed": 0}},
    "compare_problem": {"problem": PROBLEM},
    "check_problem": {
        "problem": {**PROBLEM, "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1}},
        "limit_fraction": 0.75,
    },
    "estimate_problem": {"problem": PROBLEM},
    "pack_batch": {
        "batch": {
            "sequences": [812, 30144, 655, 1020, 2048, 77, 4096, 940],
            "max_tokens": 32768,
            "replicas": 2,
            "problem": {
                "pp_degree": 4,
                "costs": {
                    "forward": {"tokens": 3.0, "tokens_squared": 5.5e-5},
                    "backward_input": {"tokens": 3.1, "tokens_squared": 1.4e-4},
                    "backward_weight": {"fixed": 400, "tokens": 2.7},
                },
            },
        }
    },
    "import_plan": {
        "problem": {"pp_degree": 1, "microbatches": 1, "costs": PROBLEM["costs"]},
        "ranks": [["0F0", "1F0", "1B0", "0B0"]],
    },
    "submit_run": {
        "problem": PROBLEM,
        "model": {"factory": "mypackage.models:gpt", "arguments": {"layers": 8}, "seed": 0},
        "nodes": 2,
        "steps": 1000,
        "options": {"backend": "nccl", "checkpoint": {"directory": "/shared/run", "every": 100}},
    },
    "change_plan": {"plan_id": _PLAN},
    "register_agent": {
        "id": _AGENT,
        "name": "node-1",
        "address": "10.0.0.1",
        "port": 29500,
        "slots": 2,
        "devices": ["cuda:0", "cuda:1"],
        "allows": {"models": ["mypackage.models.*"]},
    },
    "beat": {"run_id": _RUN, "ranks": [{"rank": 0, "step": 12, "action": "7I3"}]},
    "report_end": {"run_id": _RUN, "generation": 0, "outcome": "succeeded"},
}
"""An example body for each operation that takes one."""


def enrich(document: dict[str, Any]) -> None:
    """Add tags and examples to a document."""
    used = {tag for operation in _operations(document) for tag in operation.get("tags", ())}
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items() if name in used]
    for operation in _operations(document):
        name = operation["operationId"]
        for content in operation.get("requestBody", {}).get("content", {}).values():
            if name in EXAMPLES:
                content["example"] = EXAMPLES[name]


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]
