"""A layout as the settings of its executor: flags of Megatron-LM, or TOML of torchtitan.

Flags are those of ``megatron/training/arguments.py`` and of the configurations that it reads
(``megatron/core/model_parallel_config.py``, ``megatron/training/config``); TOML has the keys of
``torchtitan/config/job_config.py`` of version 0.2. Settings that do not depend on the layout, such as the
sizes of the model, are not written.
"""

from __future__ import annotations

from zbv_solver.errors import InvalidInput
from zbv_solver.estimate.transformer import Transformer
from zbv_solver.executors.megatron_layout import Stages, layout_flags, recompute_flags
from zbv_solver.executors.schedules import Schedule
from zbv_solver.executors.torchtitan_settings import write_settings
from zbv_solver.layouts.cluster import Cluster
from zbv_solver.layouts.executor_rules import NAMES
from zbv_solver.layouts.layout import Layout


def layout_settings(
    executor: str,
    layout: Layout,
    model: Transformer,
    cluster: Cluster,
    stages: Stages | None,
    schedule: Schedule,
) -> tuple[str | None, str]:
    """The settings of a layout, and a remark that says why there are none.

    Parameters
    ----------
    layout
        It recomputes nothing, modules, all of every stage, or first layers of it.
    stages
        The modules of every stage; None if the executor does not name modules.
    """
    if stages is None:
        return None, f"{NAMES[executor]} has no settings of a layout."
    try:
        has_layers = layout.recompute_layers is not None
        recompute = "none" if layout.recompute == "none" else "block" if has_layers else "all"
        if executor == "torchtitan":
            return _toml(layout, model, stages, schedule, recompute), ""
        flags = [
            *_flags(layout, model, cluster),
            *layout_flags(stages, layout.pipeline_parallel, schedule.group),
            *recompute_flags(recompute, layout.recompute_layers, layout.recompute_modules),
        ]
        return " \\\n".join(flags) + "\n", ""
    except InvalidInput as error:
        return None, str(error.issues[0].detail)


def _flags(layout: Layout, model: Transformer, cluster: Cluster) -> list[str]:
    """The flags of a layout besides those of the pipeline's cut. Replicas take the remaining devices."""
    flags = [f"--tensor-model-parallel-size {layout.tensor_parallel}"]
    if layout.tensor_parallel > 1:
        flags.append("--sequence-parallel")
    flags.append(f"--context-parallel-size {layout.context_parallel}")
    if model.experts > 1:
        # Estimates have whole experts on every device; Megatron-LM's default divides them by tensors.
        flags += [
            f"--expert-model-parallel-size {layout.expert_parallel}",
            "--expert-tensor-parallel-size 1",
        ]
    flags += [
        f"--micro-batch-size {layout.microbatch_size}",
        f"--global-batch-size {layout.microbatch_size * layout.microbatches * layout.data_parallel}",
    ]
    if layout.zero_stage:
        flags.append("--use-distributed-optimizer")
    if cluster.data_overlap > 0:
        flags.append("--overlap-grad-reduce")
        if layout.zero_stage:
            flags.append("--overlap-param-gather")
    if layout.placement == "tp-cp-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _toml(layout: Layout, model: Transformer, stages: Stages, schedule: Schedule, recompute: str) -> str:
    degrees = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": layout.data_parallel,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": layout.tensor_parallel,
        "context_parallel_degree": layout.context_parallel,
    }
    if model.experts > 1:
        degrees |= {
            "expert_parallel_degree": layout.expert_parallel,
            "expert_tensor_parallel_degree": 1,
        }
    batch = layout.microbatch_size * layout.microbatches * layout.data_parallel
    return write_settings(
        stages,
        schedule,
        recompute,
        microbatch_size=layout.microbatch_size,
        parallelism=degrees,
        training={"global_batch_size": batch, "seq_len": model.sequence},
    )
