"""What a device holds under each executor, and the settings that make it so.

An account turns the states that a program chooses into bytes per parameter: whole ones of every replica, and
divided ones of all replicas together. An executor's settings ask for exactly these states; what they cannot
express is refused, so settings and account always belong together.

A pipeline keeps the parameters of its stages whole until the last microbatch in all of these programs, with
ZeRO stage 1 or FSDP, too. Gradients in buffers are whole until then; those of FSDP exist from the first to
the last backward of a stage, which :func:`in_order` takes into account where the order is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layer import Layer
from zbv_solver.problem.problem import F, Problem

from zbv_models.estimate.states import (
    Account,
    HeldBytes,
    StateBytes,
    StaticBytes,
    by_zero,
    hosted_bytes,
    update_bytes,
)

FLOAT32 = 4.0
REMAINDER = 2.0
"""Bytes of a float32 master copy without the 16 bits that it shares with a parameter in bfloat16."""
MOMENTS = {4.0: "fp32", 2.0: "bf16", 1.0: "fp8"}
"""Types of Adam's states in Megatron-LM, by their bytes."""


def megatron(state: StateBytes, zero_stage: int, tables: bool = False) -> HeldBytes:
    """Megatron-LM: 18 bytes with ``--bf16`` and 20 with ``--fp16``; 6 + 12/d and 4 + 16/d, if distributed.

    Sources: docs/user-guide/features/dist_optimizer.md. Gradients are added up in a contiguous buffer
    (``_ParamAndGradBuffer``), in which replicas reduce them, so communication takes no other buffer. A main
    gradient of 16 bits is copied to float32 for the update (``_copy_model_grads_to_main_grads``), but not by
    the precision-aware optimizer. That keeps of the master copy of a parameter in bfloat16 only the other 16
    bits (``OptimizerConfig.store_param_remainders``), unless a part of the states is offloaded
    (``HybridDeviceOptimizer``). SGD has a momentum in any case: ``FusedSGD.get_momentums`` of
    TransformerEngine, and that of apex, make it with ``--sgd-momentum 0``, too. Megatron-FSDP divides
    gradients (ZeRO stage 2) and parameters (3), too.
    """
    if zero_stage > 1:
        return by_zero(state, zero_stage, tables)
    if state.optimizer == "sgd":
        state = replace(state, optimizer="sgd-momentum")
    is_aware, optimizer = uses_aware_optimizer(state), state.updated(tables=tables)
    is_copied = state.master and state.gradients < FLOAT32 and (state.offloaded or not is_aware)
    copied = FLOAT32 * (1 - state.offloaded) if is_copied else 0.0
    if is_aware and state.master == FLOAT32 and not state.offloaded:
        optimizer -= FLOAT32 - REMAINDER
    return HeldBytes(
        whole=StaticBytes(state.parameters, state.gradients, 0.0 if zero_stage else optimizer),
        divided=StaticBytes(optimizer=optimizer if zero_stage else 0.0),
        accumulated=state.gradients,
        reduced=state.gradients,
        gathered=state.parameters,
        updated=update_bytes(state, tables=tables),
        copied=copied,
        hosted=hosted_bytes(state, tables=tables),
    )


def uses_aware_optimizer(state: StateBytes) -> bool:
    """Whether Megatron-LM needs its precision-aware optimizer, which is distributed, for such states."""
    return 0 < state.state < FLOAT32 or 0 < state.master < FLOAT32 or state.offloaded > 0


def fsdp(state: StateBytes, zero_stage: int, tables: bool = False) -> HeldBytes:
    """FSDP2 with mixed precision, as torchtitan applies it: 6 + 16/d bytes in a pipeline, 16/d without one.

    Replicas divide the parameters that the optimizer updates, its states, and the reduced gradients, which
    all have the type of these parameters (``FSDPParam``: ``orig_dtype``). A pipeline gathers the parameters
    of a stage once per step (``get_fsdp_reshard_after_forward_policy``), in float8 if torchao's linear layers
    do (``enable_fsdp_float8_all_gather``), and adds up whole gradients in the type of the reduction
    (``FSDPParam.to_accumulated_grad_if_needed``), from the first backward of a stage until its last one
    reduces and frees them (``REDUCE_GRAD``, ``backward_maybe_with_nosync``). Of one layer at a time there
    are in addition the gradient before it is added, the input of a reduce-scatter (``foreach_reduce``), and
    the outputs of two all-gathers (``FSDPParamGroup``, implicit prefetching). All three count together,
    because they belong to different streams, whose memory PyTorch's allocator does not share. One replica has
    all of these tensors, too.
    """
    updated = state.master or state.parameters
    moments = state.values(tables=tables)
    is_piped = zero_stage < 3
    gathered = state.parameters if tables else state.gathered or state.parameters
    return HeldBytes(
        whole=StaticBytes(gathered, state.gradients) if is_piped else StaticBytes(),
        divided=StaticBytes(updated, updated, moments),
        accumulated=state.gradients,
        reduced=state.gradients,
        gathered=gathered,
        # Norm and update read the gradients; parameters and states are read and written; then it casts.
        updated=2 * updated + 2 * (updated + moments) + updated + gathered,
        buffers=state.parameters + state.gradients + 2 * gathered,
        passing=state.gradients if is_piped else 0.0,
    )


def torch(state: StateBytes, zero_stage: int, tables: bool = False) -> HeldBytes:
    """A program around PyTorch's pipeline runtime: FSDP2, or DDP with gradients that are views of buckets."""
    return fsdp(state, zero_stage, tables) if zero_stage else by_zero(state, 0, tables)


def worker(state: StateBytes, zero_stage: int, tables: bool = False) -> HeldBytes:
    """zbv's own runtime; with ``--shard`` (ZeRO stage 1) a replica holds its part in addition to the whole.

    A step gathers the parameters of a stage from the parts, and sums its gradients into a part after the last
    W (``zbv_worker/gradients``, torch's ``fully_shard``). Parameters in half precision add up gradients in
    float32 (``main_gradients``).
    """
    kept = by_zero(state, zero_stage, tables)
    parts = StaticBytes(state.parameters, state.gradients, state.updated(tables=tables))
    return replace(kept, divided=parts) if zero_stage == 1 else kept


@dataclass(frozen=True)
class ExecutorStates:
    """An executor's states."""

    account: Account
    """What a device holds of them."""
    refusal: Callable[[StateBytes], str] = lambda state: ""
    """Why it cannot have such states; empty if it can."""
    settings: Callable[[StateBytes], dict[str, str]] = lambda state: {}
    """What asks for them, as names and values."""
    only_stage: Callable[[StateBytes], int | None] = lambda state: None
    """The only ZeRO stage with which replicas can have them; None if any can."""
    is_autograd: bool = False
    """Whether autograd decides what is kept: separate kernels add weight gradients, and linear layers keep
    what sequence parallelism gathered for them (torch/distributed/tensor/parallel). Also, every stage has
    buffers for the inputs and output gradients of all microbatches, and keeps its outputs until their
    backward (torch/distributed/pipelining/stage.py, ``args_recv_info``, ``grad_recv_info``,
    ``fwd_cache``)."""

    def buffers(self, microbatches: int, output_bytes: int) -> int:
        """What a stage holds of its transfers all the time.

        The inputs of microbatches in flight are activations, and there are as many outputs as these.
        """
        return 2 * microbatches * output_bytes if self.is_autograd else 0


def in_order(problem: Problem, orders: Orders, passing: Mapping[str, float]) -> Problem:
    """The stages of a cut, with only those passing gradients that a rank holds at once in this order.

    Before the order is known, a rank counts the gradients of all of its stages, which is never too little.
    Every layer keeps the share of its gradients that all ranks hold at least, and a rank the difference to
    its own most, as static memory.

    Parameters
    ----------
    passing
        By the name of a layer, gradients that exist from the first to the last backward of its stage; part of
        the layer's static memory.
    """
    cut = problem.model
    if cut is None or not any(passing.values()):
        return problem
    stages = [
        sum(passing.get(layer.name, 0.0) for layer in cut.model.each[begin:end])
        for begin, end in pairwise(cut.cut.bounds)
    ]
    hosted = problem.placement.stages_of
    totals = [sum(stages[stage] for stage in own) for own in hosted]
    most = [_most_at_once(orders, rank, np.array(stages)) for rank in range(problem.pp_degree)]
    share = min((of / total for of, total in zip(most, totals, strict=True) if total), default=1.0)

    def lighter(layer: Layer) -> Layer:
        freed = (1 - share) * passing.get(layer.name, 0.0)
        return layer.with_costs(
            lambda costs: replace(costs, memory=replace(costs.memory, static=costs.memory.static - freed))
        )

    own = zip(cut.static, most, totals, strict=True)
    cut = replace(
        cut,
        model=replace(cut.model, layers=tuple(map(lighter, cut.model.layers))),
        static=tuple(static + max(0.0, of - share * total) for static, of, total in own),
    )
    return replace(problem, model=cut, memory=replace(problem.memory, static=cut.static_of(hosted)))


def _most_at_once(orders: Orders, rank: int, stages: FloatArray) -> float:
    """The largest sum over stages between their first and their last backward; ``stages`` has their sizes."""
    own = slice(orders.offset[rank], orders.offset[rank + 1])
    stage, is_backward = orders.stage[own], orders.letter[own] != F
    change = np.zeros(len(stage) + 1)
    for each in np.unique(stage):
        places = np.flatnonzero(is_backward & (stage == each))
        change[places[0]] += stages[each]
        change[places[-1] + 1] -= stages[each]
    return float(change.cumsum().max())


def _gather_refusal(state: StateBytes) -> str:
    """Of executors that gather parameters in the type that the model computes with."""
    return f"parameters that are gathered as they are held (found {_sizes(state)})" if state.gathered else ""


def _megatron_refusal(state: StateBytes) -> str:
    if refusal := _gather_refusal(state):
        return refusal
    if state.dtype == "float32":
        if state.offloaded:
            return "bfloat16 for offloaded states (found float32)"
        if (state.parameters, state.gradients, state.master, state.state) != (4, 4, 0, 4):
            return f"the precision single (found {_sizes(state)}), because the model has the type float32"
        return ""
    if state.parameters != 2 or state.master not in (2, 4) or state.gradients not in (2, 4):
        return (
            "parameters of 2 bytes, gradients of 2 or 4, and a master copy of 4 or 2 (found "
            f"{_sizes(state)}), because its optimizers update a master copy"
        )
    if state.state not in MOMENTS:
        return f"optimizer states of 4, 2 or 1 bytes (found {state.state:g})"
    if uses_aware_optimizer(state):
        if (state.optimizer, state.dtype) != ("adam", "bfloat16"):
            return (
                "adam and bfloat16 for offloaded states, and for states or a master copy below 4 bytes "
                f"(found {state.optimizer} and {state.dtype})"
            )
        if state.offloaded and (state.master, state.state) != (4, 4):
            return f"a master copy and states of 4 bytes if some are offloaded (found {_sizes(state)})"
    if state.dtype == "float16" and state.optimizer in ("muon", "lion"):
        return f"bfloat16 or float32 for {state.optimizer} (found float16)"
    return ""


def _megatron_stage(state: StateBytes) -> int | None:
    """``get_megatron_optimizer``, and ``DistributedOptimizer``, which has no SGD."""
    return 1 if uses_aware_optimizer(state) else 0 if state.optimizer.startswith("sgd") else None


def _megatron_settings(state: StateBytes) -> dict[str, str]:
    """Flags of ``megatron/training/arguments.py``; a flag without a value has an empty one."""
    flags = {"bfloat16": {"--bf16": ""}, "float16": {"--fp16": ""}}.get(state.dtype, {})
    if state.dtype == "float16" and state.gradients == FLOAT32:
        flags |= {"--accumulate-allreduce-grads-in-fp32": ""}
    if uses_aware_optimizer(state):
        moments = MOMENTS[state.state]
        flags |= {
            "--use-precision-aware-optimizer": "",
            "--main-grads-dtype": MOMENTS[state.gradients],
            "--main-params-dtype": "fp32" if state.master == FLOAT32 else "fp16",
            "--exp-avg-dtype": moments,
            "--exp-avg-sq-dtype": moments,
        }
        if state.offloaded:
            flags |= {
                "--optimizer-cpu-offload": "",
                "--optimizer-offload-fraction": f"{state.offloaded:g}",
            }
    elif state.dtype == "bfloat16" and state.gradients < FLOAT32:
        flags |= {"--grad-reduce-in-bf16": ""}
    if state.optimizer != "adam":
        flags |= {"--optimizer": state.optimizer.removesuffix("-momentum")}
    if state.optimizer == "sgd":
        flags |= {"--sgd-momentum": "0"}
    return flags


def _torch_refusal(state: StateBytes) -> str:
    if not state.offloaded:
        return ""
    return "no offloaded states, because FSDP offloads parameters and gradients with them"


def _titan_refusal(state: StateBytes) -> str:
    if state.optimizer != "adam":
        return f"adam (found {state.optimizer}), because its settings name no other optimizer"
    if state.dtype == "float16":
        return "bfloat16 or float32 (found float16)"
    if refusal := _torch_refusal(state):
        return refusal
    parameters = 2.0 if state.dtype == "bfloat16" else 4.0
    if state.parameters != parameters or state.gradients != FLOAT32:
        return (
            f"parameters of {parameters:g} bytes and gradients of 4 with {state.dtype} (found "
            f"{_sizes(state)}), because it reduces gradients in float32"
        )
    allowed = ((4, 4), (4, 2), (0, 2)) if state.dtype == "bfloat16" else ((0, 4), (0, 2))
    if state.gathered not in (0, 1) or (state.gathered and state.dtype == "float32"):
        rule = "parameters that are gathered as they are held or, with bfloat16, in 1 byte"
        return f"{rule} (found {_sizes(state)})"
    if (state.master, state.state) not in allowed:
        return f"another master copy and other optimizer states (found {_sizes(state)})"
    return ""


def _titan_settings(state: StateBytes) -> dict[str, str]:
    """Keys of ``torchtitan/config`` and of ``components/optimizer`` with values that are not the defaults."""
    if state.dtype == "float32":
        keys = {"training.mixed_precision_param": "float32"}
    else:
        keys = {} if state.master else {"training.dtype": "bfloat16"}
    if (state.master or state.parameters) == FLOAT32 and state.state < FLOAT32:
        keys |= {"optimizer.implementation": "fused_opt_states_bf16"}
    return keys


def _sizes(state: StateBytes) -> str:
    return (
        f"parameters {state.parameters:g}, gradients {state.gradients:g}, master copy {state.master:g}, "
        f"optimizer states {state.state:g}{f', gathered {state.gathered:g}' if state.gathered else ''}"
    )


STATES = {
    "zbv": ExecutorStates(worker, _gather_refusal),
    "megatron": ExecutorStates(megatron, _megatron_refusal, _megatron_settings, _megatron_stage),
    "torchtitan": ExecutorStates(fsdp, _titan_refusal, _titan_settings, is_autograd=True),
    "torch": ExecutorStates(torch, _torch_refusal, is_autograd=True),
}
"""The states of every executor."""
