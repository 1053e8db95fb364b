"""A layout as the settings of its executor: flags of Megatron-LM, or a function for torchtitan.

Flags are those of ``megatron/training/arguments.py`` and of the configurations that it reads
(``megatron/core/model_parallel_config.py``, ``megatron/training/config``); those of torchtitan are explained
in :mod:`zbv_solver.export.torchtitan`. Settings that do not depend on the layout, such as the
sizes of the model, are not written.
"""

from __future__ import annotations

from zbv_solver.export.torchtitan import StepSizes

from zbv_models.estimate.model_layers import expert_degree, layers_without_backward
from zbv_models.fixed_orders.executor_cut import executor_settings
from zbv_models.fixed_orders.megatron_layout import Stages
from zbv_models.fixed_orders.schedules import Schedule
from zbv_models.layouts.executor_memory import STATES, uses_aware_optimizer
from zbv_models.layouts.executor_rules import NAMES
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.setting import Setting, keeps_scores

FLOAT8_GATHER = (
    "torchtitan gathers parameters in float8 up to version 0.2.2 only, with --model.converters "
    "quantize.linear.float8 --quantize.linear.float8.enable_fsdp_float8_all_gather "
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp. Later versions have no such setting "
    "(#3127), so zbv writes none. Choose another precision for settings of 0.3.0 and newer."
)
"""``Float8Linear`` of 0.2.2 (``torchtitan/config/job_config.py``, ``components/quantization/float8.py``)."""


WHOLE = {
    "megatron": "These flags train the whole model: Megatron-LM has none for frozen parts and adapters. "
    "Megatron-Bridge has adapters (megatron.bridge.peft.lora.LoRA, with dim and target_modules).",
    "torchtitan": "This function trains the whole model. Freeze it and add adapters with LoRAConverter of "
    "torchtitan/components/lora.py (rank, target_modules).",
}
"""What the settings of a model with frozen parts do not say, by executor."""
UNNEEDED = (
    " Stages after the first one compute the gradient of what they receive, also if nothing below them "
    "trains; the step leaves that out."
)
"""What Megatron-LM receives requires a gradient (``p2p_communication.py``)."""


def layout_settings(
    executor: str,
    layout: Layout,
    setting: Setting,
    stages: Stages | None,
    schedule: Schedule,
) -> tuple[str | None, str]:
    """The settings of a layout, and a remark that says why there are none, or what they lack.

    Parameters
    ----------
    layout
        It recomputes nothing, modules, all of every stage, or first layers of it.
    stages
        The modules of every stage; None if the executor does not name modules.
    """
    if stages is None:
        return None, f"{NAMES[executor]} has no settings of a layout."
    is_titan, has_layers = executor == "torchtitan", layout.recompute_layers is not None
    if is_titan and setting.training.state.gathered:
        return None, FLOAT8_GATHER
    settings, remark = executor_settings(
        executor,
        stages,
        schedule,
        "none" if layout.recompute == "none" else "block" if has_layers else "all",
        layout.recompute_layers,
        layout.recompute_modules,
        () if is_titan else _flags(layout, setting),
        StepSizes(setting.model.sequence, layout.microbatch_size, _global_batch(layout)),
        _keys(layout, setting) if is_titan else {},
    )
    is_frozen = bool(setting.model.frozen) or setting.model.lora_rank is not None
    if settings is None or not is_frozen:
        return settings, remark
    has_unneeded = executor == "megatron" and layers_without_backward(setting.model) > 1
    return settings, WHOLE[executor] + (UNNEEDED if has_unneeded else "")


def _global_batch(layout: Layout) -> int:
    return layout.microbatch_size * layout.microbatches * layout.data_parallel


def _flags(layout: Layout, setting: Setting) -> list[str]:
    """The flags of a layout besides those of the pipeline's cut. Replicas take the remaining devices."""
    (cluster,), state = setting.cluster.groups, setting.training.state
    flags = [f"--tensor-model-parallel-size {layout.tensor_parallel}"]
    if layout.tensor_parallel > 1:
        flags.append("--sequence-parallel")
    flags.append(f"--context-parallel-size {layout.context_parallel}")
    if expert_degree(setting.model) > 1:
        # Estimates have whole experts on every device; Megatron-LM's default divides them by tensors.
        flags += [
            f"--expert-model-parallel-size {layout.expert_parallel}",
            "--expert-tensor-parallel-size 1",
        ]
    flags += [
        f"--micro-batch-size {layout.microbatch_size}",
        f"--global-batch-size {_global_batch(layout)}",
    ]
    flags += (f"{flag} {value}".rstrip() for flag, value in STATES["megatron"].settings(state).items())
    if keeps_scores(setting.model):
        # By default, Megatron-LM chooses a backend that keeps no scores.
        flags.append("--attention-backend unfused")
    if not setting.training.fused_gradients:
        flags.append("--no-gradient-accumulation-fusion")
    if layout.zero_stage or uses_aware_optimizer(state):
        flags.append("--use-distributed-optimizer")
    if cluster.data_overlap > 0:
        flags.append("--overlap-grad-reduce")
        if layout.zero_stage:
            flags.append("--overlap-param-gather")
    if layout.placement == "tp-cp-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _keys(layout: Layout, setting: Setting) -> dict[str, int | str]:
    """The settings of torchtitan for the degrees and the states."""
    return {
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": layout.data_parallel,
        "parallelism.fsdp_reshard_after_forward": "default",
        "parallelism.tensor_parallel_degree": layout.tensor_parallel,
        "parallelism.context_parallel_degree": layout.context_parallel,
        "parallelism.expert_parallel_degree": layout.expert_parallel,
        **STATES["torchtitan"].settings(setting.training.state),
    }
