"""A rank that trains a small transformer with a plan for every step, and compares with one process.

Under torchrun's environment: ``python -m support.per_step_rank FOLDER STEPS MODE``. The rank writes what it
found to ``rank-RANK.json``. ``MODE`` is "all ranks"; "data rank", with stated shapes; or "killed": then the
planner's process is killed twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import zbv_worker as zbv
from zbv_worker.pipeline.step_plans import PlanningReport

from support.packed_rank import Block, PackedBatch, loss_sum, model, shape_of

MICROBATCHES, TIMEOUT, PAUSE = 4, 30.0, 0.03
UNANNOUNCED = 3
"""The step that nobody announces."""
KILLED = (5, 10)


def problem(p: int) -> dict[str, Any]:
    """Costs by tokens; 20 tokens per microbatch are typical."""
    costs = {"tokens": 1.0, "tokens_squared": 0.05}
    return {
        "pp_degree": p,
        "microbatches": MICROBATCHES,
        "sequences": [[20]] * MICROBATCHES,
        "costs": dict.fromkeys(("forward", "backward_input", "backward_weight"), costs),
    }


def difference(pipe: zbv.Pipeline, batch: PackedBatch, given: dict[str, Any]) -> dict[str, float]:
    """A step; how far its loss and gradients are from those of one process, relatively."""
    reference = model()
    output = batch.tokens
    for layer in reference:
        more = {"cu_seqlens": batch.cu_seqlens} if isinstance(layer, Block) else {}
        output = layer(output, **more)
    expected = loss_sum(output, batch.targets)[0] / len(batch.targets)
    torch.autograd.backward(expected)
    for parameter in pipe.parameters():
        parameter.grad = None
    loss = pipe.step(**given)
    named = dict(reference.named_parameters())
    scale = max(float(p.grad.abs().max()) for p in named.values() if p.grad is not None)
    found = {"loss": 0.0 if loss is None else float(abs(loss - expected) / expected), "gradients": 0.0}
    for name, parameter in pipe.named_parameters():
        own, right = parameter.grad, named[name].grad
        assert own is not None
        assert right is not None
        found["gradients"] = max(found["gradients"], float((own - right).abs().max()) / scale)
    return found


def main(folder: Path, steps: int, mode: str) -> None:
    torch.set_num_threads(1)
    rank, p = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = [PackedBatch.random(seed, MICROBATCHES) for seed in range(steps)]
    more: dict[str, Any] = {"data_rank": p - 1, "shape_of": shape_of} if mode == "data rank" else {}
    found, plans = [], []
    pipe = zbv.Pipeline(
        "per-step",
        model(),
        loss_sum,
        problem=problem(p),
        timeout=TIMEOUT,
        startup_timeout=TIMEOUT,
        **more,
    )
    client = pipe._own.plans._client if pipe._own.plans is not None else None
    with pipe:
        for step, batch in enumerate(batches):
            if step + 1 < steps and step + 1 != UNANNOUNCED:
                following = batches[step + 1]
                pipe.announce(cu_seqlens=following.cu_seqlens, sequences=following.sequences)
            given: dict[str, Any] = {}
            if mode != "data rank" or rank == p - 1:
                given = {"inputs": batch.tokens, "targets": batch.targets}
                given |= {"cu_seqlens": batch.cu_seqlens, "sequences": batch.sequences}
            if mode == "killed" and step in KILLED and client is not None:
                os.kill(client.pid, 9)
                time.sleep(0.2)
            found.append(difference(pipe, batch, given))
            plans.append(pipe.plan_id)
            time.sleep(PAUSE)
        report = asdict(pipe.planning or PlanningReport())
    ended = client is None or client._process.poll() is not None
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"found": found, "plans": plans, "report": report, "ended": ended})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
