"""All checks of the GPU report, in the order in which they run: the cheapest and most basic first."""

from __future__ import annotations

from functools import partial

from zbv_worker.gpu_report import (
    communicator,
    facts,
    lost_rank,
    memory,
    pipeline,
    rank,
    replicas,
    streams,
)
from zbv_worker.gpu_report.check import Check, Needs, OnRanks, asked_ranks

_ONE_GPU = Needs(gpus=1)
_MANY_GPUS = Needs(gpus=2, a_gpu_per_rank=True, nccl=True)

_COST_NEEDS = {"tf32": Needs(gpus=1), "compiled": Needs(compiler=True)}

_FACTS = (
    Check(
        "facts",
        "methods, options and variables of torch and NCCL",
        "This build of torch has everything that the worker calls.",
        "Install a version of torch that the project's tests run with.",
        OnRanks(facts.measure_facts, facts.judge_facts),
    ),
)

_STREAMS = (
    Check(
        "events",
        "order and times of CUDA's streams and events",
        "The executor's order of work, and the times in traces, rest on events that behave as the tests' "
        "model of CUDA does.",
        "Report the torch, CUDA and driver versions; do not trust traces of this machine.",
        OnRanks(streams.measure_events, streams.judge_events),
        _ONE_GPU,
    ),
    Check(
        "clock",
        "events on the host's clock",
        "Times of different ranks can be compared to a fraction of a millisecond.",
        "Close other work on the host and the GPU, then repeat.",
        OnRanks(streams.measure_clock, streams.judge_clock),
        _ONE_GPU,
    ),
    Check(
        "copies",
        "copies through pinned memory",
        "Transfers over gloo, and the data of the first stage, neither overtake kernels nor stop the host.",
        "Use --backend nccl, which needs no copies; report the line.",
        OnRanks(streams.measure_copies, streams.judge_copies),
        _ONE_GPU,
    ),
    Check(
        "exit",
        "the end of a process with a busy GPU",
        "A rank that fails can leave its node although its kernels never end.",
        "Update the driver: it does not stop kernels of a process that has ended.",
        OnRanks(streams.measure_exit, streams.judge_exit),
        _ONE_GPU,
        seconds=60.0,
    ),
)

_COMMUNICATORS = (
    Check(
        "nccl-one-rank",
        "a communicator of one rank",
        "Works, timeouts and aborts of torch's NCCL behave as the transport and the tests' model of NCCL "
        "assume.",
        "Report the torch and NCCL versions; do not train over NCCL with them.",
        OnRanks(communicator.measure_one_rank, communicator.judge_one_rank),
        Needs(gpus=1, nccl=True),
        seconds=60.0,
    ),
    Check(
        "nccl-shared-gpu",
        "a communicator of two ranks on one GPU",
        "Whether more can be checked with one GPU; NCCL usually refuses.",
        "Nothing: ranks that share a GPU use gloo.",
        OnRanks(communicator.measure_shared_gpu, communicator.judge_shared_gpu, ranks=lambda options: 2),
        Needs(gpus=1, nccl=True),
        seconds=60.0,
    ),
    Check(
        "nccl-receives",
        "receives that wait on the device",
        "Waiting receives stop neither compute, nor the loading of kernels, nor other communicators.",
        "Unset the variables of CUDA and NCCL that the check facts shows; see docs/nccl.md.",
        OnRanks(communicator.measure_receives, communicator.judge_receives, ranks=lambda options: 2),
        Needs(gpus=2, nccl=True),
    ),
)

_PIPELINES = (
    Check(
        "pipeline-gloo",
        "training steps of several ranks over gloo",
        "The executor computes the gradients of one process. Ranks share GPUs if there are too few.",
        "Compare with `--device cpu`. If only those on the GPU are wrong, run events and copies.",
        OnRanks(
            partial(rank.measure_pipeline, backend="gloo", variant="float32"),
            pipeline.judge_gradients,
            ranks=asked_ranks,
        ),
        seconds=180.0,
    ),
    Check(
        "pipeline-nccl",
        "training steps of several ranks over NCCL",
        "The NCCL transport trains: right gradients, transfers behind compute, no wait of the host.",
        "Run the checks nccl-one-rank and nccl-receives; see docs/nccl.md.",
        OnRanks(
            partial(rank.measure_pipeline, backend="nccl", variant="float32"),
            pipeline.judge_gradients,
            ranks=asked_ranks,
        ),
        _MANY_GPUS,
        seconds=180.0,
    ),
    Check(
        "replicas-gloo",
        "training steps of two replicas over gloo, with and without --shard",
        "Replicas add up the gradients of one process. Ranks share GPUs if there are too few.",
        "Compare with `--device cpu`. If only those on the GPU are wrong, run events and copies.",
        OnRanks(
            partial(replicas.measure_replicas, backend="gloo"),
            replicas.judge_replicas,
            ranks=lambda options: 2 * replicas.REPLICAS,
        ),
        seconds=180.0,
    ),
    Check(
        "replicas-nccl",
        "training steps of two replicas over NCCL, with and without --shard",
        "Sums and gathers over NCCL run while other stages compute, and give the gradients of one process.",
        "Run replicas-gloo, pipeline-nccl and nccl-receives; see docs/nccl.md.",
        OnRanks(
            partial(replicas.measure_replicas, backend="nccl"),
            replicas.judge_replicas,
            ranks=replicas.ranks_for_gpus,
        ),
        Needs(gpus=2, nccl=True),
        seconds=180.0,
    ),
    Check(
        "lost-rank-gloo",
        "a rank is killed during training over gloo",
        "Ranks over gloo end, and name the rank that was lost.",
        "See the ranks' messages in the report; without a bounded end, an agent cannot restart the run.",
        partial(lost_rank.lose_a_rank, backend="gloo"),
        seconds=180.0,
    ),
    Check(
        "lost-rank-nccl",
        "a rank is killed during training over NCCL",
        "Ranks over NCCL end although their kernels wait forever, and name the rank that was lost.",
        "See the ranks' messages in the report; without a bounded end, an agent cannot restart the run.",
        partial(lost_rank.lose_a_rank, backend="nccl"),
        _MANY_GPUS,
        seconds=180.0,
    ),
)

_COSTS = tuple(
    check
    for numbers in ("float32", "bfloat16")
    for check in (
        Check(
            f"memory-{numbers}",
            f"memory of stages in {numbers} after F, I and W",
            "The memory that plans and estimates state is the memory that stages hold.",
            "Plan with measured memory (`zbv-worker profile`), and report the difference.",
            OnRanks(partial(memory.measure_memory, precision=numbers), memory.judge_memory),
        ),
    )
) + tuple(
    Check(
        f"costs-{variant}",
        f"split, profile and step of one rank, {variant}",
        "Splitting the backward costs little, and a plan's step takes as long as the plan states. Compiled "
        "layers have the gradients of others.",
        "If the split is expensive, plan with fused backwards. If the step is longer than planned, compare "
        "a trace (`zbv-worker run --trace`) with the plan.",
        OnRanks(partial(rank.measure_pipeline, backend="gloo", variant=variant), pipeline.judge_costs),
        _COST_NEEDS.get(variant, Needs()),
        seconds=180.0,
    )
    for variant in rank.PROGRAMS
)

CHECKS: dict[str, Check] = {
    check.name: check for check in (*_FACTS, *_STREAMS, *_COMMUNICATORS, *_COSTS, *_PIPELINES)
}
"""The checks by name."""
