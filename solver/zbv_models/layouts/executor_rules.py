"""Which models and layouts an executor can run, as data with their sources.

``torch`` is a program around the runtime of ``torch.distributed.pipelining``: it may form groups as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from zbv_solver.errors import InvalidInput
from zbv_solver.numerals import figure

from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import expert_degree, whole_halves
from zbv_models.estimate.state_space import GivenCosts
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.setting import Setting, has_operations

ANY, FREE = "any", "zbv"
"""All executors, and the one that runs any order."""


@dataclass(frozen=True)
class ExecutorRule:
    """What an executor requires."""

    is_kept: Callable[[Transformer, Layout], bool]
    """Whether a layout of a model is allowed. A rule of models ignores the layout."""
    text: str
    """The rule, to complete "… requires"."""
    source: str
    """Where the executor has this rule."""
    parts: tuple[str, ...] = ()
    """The parts of a layout that it is about."""


def _has_no_state_space(model: Transformer) -> bool:
    return not any(isinstance(half, GivenCosts) for half in whole_halves(model))


def _has_equal_blocks(model: Transformer) -> bool:
    """Whether blocks have one size of each kind, one residual stream, and no separate inputs."""
    is_plain = model.residual_streams == 1 and model.residual_sums is None and model.layer_inputs is None
    return is_plain and not model.variants and model.compressed is None


EQUAL = "a model with blocks of one size of each kind, and one residual stream"


def _has_replicas(layout: Layout) -> bool:
    return layout.data_parallel * layout.context_parallel > 1


def _is_alone(layout: Layout) -> bool:
    return layout.pipeline_parallel == 1


def _has_equal_replicas(model: Transformer, layout: Layout) -> bool:
    """Whether dense layers and experts have as many replicas."""
    inside = layout.tensor_parallel * layout.context_parallel
    experts = layout.expert_parallel if expert_degree(model) > 1 else layout.tensor_parallel
    return inside == experts


MEGATRON, TITAN, TORCH = "Megatron-LM", "torchtitan", "PyTorch's pipeline runtime"
_ARGUMENTS = "megatron/training/arguments.py, validate_args"
_TITAN = "torchtitan/distributed/parallel_dims.py, ParallelDims"

WIDE = "frozen blocks in the type of other parameters, without frozen_dtype"
MODEL_RULES: dict[str, tuple[ExecutorRule, ...]] = {
    "megatron": (
        ExecutorRule(
            lambda model, _: model.vision is None,
            "a model without a vision encoder",
            "megatron/core/transformer/pipeline_parallel_layer_layout.py: the letters of modules",
        ),
        ExecutorRule(
            lambda model, _: _has_equal_blocks(model),
            EQUAL,
            "megatron/core/transformer/transformer_config.py, whose sizes are those of all layers",
        ),
        ExecutorRule(
            lambda model, _: _has_no_state_space(model),
            "a model without state-space layers, because it cuts these by --hybrid-layer-pattern",
            _ARGUMENTS,
        ),
        ExecutorRule(
            lambda model, _: model.frozen_dtype is None,
            WIDE,
            "Megatron-Bridge, src/megatron/bridge/peft/lora.py, LoRA",
        ),
    ),
    "torchtitan": (
        ExecutorRule(
            lambda model, _: _has_equal_blocks(model),
            EQUAL,
            "torchtitan/models/__init__.py, _supported_models",
        ),
        ExecutorRule(
            lambda model, _: _has_no_state_space(model),
            "a model without state-space layers",
            "torchtitan/models/__init__.py, _supported_models",
        ),
        ExecutorRule(
            lambda model, _: model.frozen_dtype is None,
            WIDE,
            "torchtitan/components/lora.py, LoRAConverter",
        ),
    ),
    "torch": (),
}


def _has_selective(model: Transformer, layout: Layout) -> bool:
    return layout.recompute != "selective" or has_operations(model)


LAYOUT_RULES: dict[str, tuple[ExecutorRule, ...]] = {
    "megatron": (
        ExecutorRule(
            lambda _, layout: layout.zero_stage <= 1 or not _has_replicas(layout),
            "ZeRO stage 0, or 1 (--use-distributed-optimizer); Megatron-FSDP is not part of this search",
            f"{_ARGUMENTS}; megatron/core/optimizer/distrib_optimizer.py",
            ("zero_stage",),
        ),
        ExecutorRule(
            lambda model, layout: (
                layout.placement == "tp-cp-dp-pp" or _is_alone(layout) or _has_equal_replicas(model, layout)
            ),
            "with --use-tp-pp-dp-mapping as many replicas of experts (without experts: of tensor-parallel "
            "groups) as of the pipeline",
            "megatron/core/parallel_state.py, initialize_model_parallel",
            ("placement", "tensor_parallel", "context_parallel", "expert_parallel"),
        ),
    ),
    "torchtitan": (
        ExecutorRule(
            lambda _, layout: (
                layout.zero_stage == (3 if _is_alone(layout) else 1) or not _has_replicas(layout)
            ),
            "FSDP if there are replicas: ZeRO stage 3, or with a pipeline stage 1, because parameters and "
            "gradients are whole until the last microbatch",
            "torchtitan/distributed/fsdp.py, get_fsdp_reshard_after_forward_policy; "
            "torch/distributed/pipelining/stage.py, backward_maybe_with_nosync",
            ("zero_stage", "pipeline_parallel"),
        ),
        ExecutorRule(
            lambda _, layout: layout.placement == "tp-cp-dp-pp",
            "the placement tp-cp-dp-pp",
            f"{_TITAN}.build_mesh",
            ("placement",),
        ),
        ExecutorRule(
            lambda model, layout: layout.recompute_layers is None and _has_selective(model, layout),
            "all layers recomputed alike, and without selective recomputation blocks that it does not have "
            "(with an indexer, gated attention or latent experts)",
            "torchtitan/distributed/activation_checkpoint.py, SelectiveAC and FullAC; torchtitan/models",
            ("recompute", "recompute_layers"),
        ),
        ExecutorRule(
            lambda model, layout: (
                model.sequence
                % (
                    layout.tensor_parallel
                    * (2 * layout.context_parallel if layout.context_parallel > 1 else 1)
                )
                == 0
            ),
            "sequences that tensor parallelism divides, with context parallelism 2 * tensor * context",
            "torchtitan/trainer.py, Trainer.__init__",
            ("tensor_parallel", "context_parallel"),
        ),
        ExecutorRule(
            lambda model, layout: (
                expert_degree(model) == 1 or layout.expert_parallel > 1 or layout.tensor_parallel == 1
            ),
            "expert parallelism if there is tensor parallelism, which otherwise divides every expert",
            "torchtitan/models/common/moe_sharding.py",
            ("tensor_parallel", "expert_parallel"),
        ),
        ExecutorRule(
            lambda model, layout: not model.tied_embeddings or _is_alone(layout),
            "no pipeline if embedding and head share their table",
            "torchtitan/models/common/decoder.py, Decoder.Config.update_from_config",
            ("pipeline_parallel",),
        ),
        ExecutorRule(
            lambda model, layout: (
                not model.prediction_layers or (_is_alone(layout) and layout.context_parallel == 1)
            ),
            "neither a pipeline nor context parallelism with multi-token prediction (--prediction-layers 0 "
            "leaves it out)",
            "torchtitan/models/deepseek_v3/mtp.py, MTPDecoder.Config.update_from_config",
            ("pipeline_parallel",),
        ),
        ExecutorRule(
            lambda model, layout: model.vision is None or layout.context_parallel == 1,
            "no context parallelism with a vision encoder",
            "torchtitan/models/kimi_k2_7/parallelize.py, qwen3_5/parallelize.py, muse_glimmer/parallelize.py",
            ("context_parallel",),
        ),
    ),
    "torch": (
        ExecutorRule(
            lambda _, layout: layout.zero_stage <= 1 or _is_alone(layout) or not _has_replicas(layout),
            "with a pipeline ZeRO stage 0 (DDP) or 1 (FSDP), because parameters and gradients are whole "
            "until the last microbatch",
            "torch/distributed/pipelining/stage.py, backward_maybe_with_nosync",
            ("zero_stage", "pipeline_parallel"),
        ),
        ExecutorRule(
            lambda _, layout: layout.recompute != "selective" and layout.recompute_layers is None,
            "all layers recomputed in full, or none",
            "torch/utils/checkpoint.py",
            ("recompute", "recompute_layers"),
        ),
        ExecutorRule(
            lambda model, layout: not model.tied_embeddings or _is_alone(layout),
            "no pipeline if embedding and head share their table, because stages exchange no gradients of "
            "parameters",
            "torch/distributed/pipelining/stage.py",
            ("pipeline_parallel",),
        ),
    ),
}
NAMES = {"megatron": MEGATRON, "torchtitan": TITAN, "torch": TORCH}
"""The names of executors with fixed orders."""
LAYOUT_EXECUTORS = (FREE, *NAMES, ANY)
"""What ``--executor`` takes."""


def executors_of(name: str, setting: Setting) -> tuple[str, ...]:
    """The executors that a name stands for, and that can run a model with the states that it asks for.

    Raises
    ------
    InvalidInput
        When there is no such executor, it cannot run the model, or it cannot have these states.
    """
    if name not in LAYOUT_EXECUTORS:
        known = ", ".join(LAYOUT_EXECUTORS)
        raise InvalidInput.at("", f"found executor {name!r}; must be one of {known}.")
    if name == FREE:
        return (FREE,)
    # Rules of models ignore the layout.
    broken = {
        each: [rule.text for rule in _broken(MODEL_RULES[each], setting.model, _NO_LAYOUT)]
        + list(filter(None, [STATES[each].refusal(setting.training.state)]))
        for each in NAMES
    }
    if name == ANY:
        return (FREE, *(each for each in NAMES if not broken[each]))
    if broken[name]:
        raise InvalidInput.at("", f"{NAMES[name]} requires {broken[name][0]}.")
    return (name,)


_NO_LAYOUT = Layout(1, 1, 1, 1, 1, 1, 1, 0, "none", "tp-cp-dp-pp")


def runs_layout(executor: str, model: Transformer, layout: Layout) -> bool:
    """Whether an executor can run a layout."""
    if executor == FREE:
        return layout.recompute_layers is None
    return not _broken(LAYOUT_RULES[executor], model, layout)


def layouts_of_executors(
    executor: str, setting: Setting, layouts: Sequence[Layout], is_over: Callable[[], bool] = lambda: False
) -> list[tuple[str, Layout]]:
    """Every pair of an executor and a layout that it can run.

    Without those that were not looked at when ``is_over`` first returned True.

    Raises
    ------
    InvalidInput
        When there is no such executor, or it can run none of the layouts.
    """
    found = list(_pairs(executor, setting, layouts, is_over))
    if not found and not is_over():
        raise _without_pairs(executor, setting, layouts)
    return found


def require_runnable(executor: str, setting: Setting, layouts: Sequence[Layout]) -> None:
    """Raise :class:`InvalidInput` as :func:`layouts_of_executors`."""
    if next(_pairs(executor, setting, layouts), None) is None:
        raise _without_pairs(executor, setting, layouts)


def _pairs(
    executor: str, setting: Setting, layouts: Sequence[Layout], is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, Layout]]:
    if not isinstance(setting.cluster, Cluster):
        detail = f"found {executor!r}, but the cluster has groups of nodes; this needs equal devices."
        raise InvalidInput.at("", f"{detail} Give one group of nodes, or executor {FREE}.")
    for name in executors_of(executor, setting):
        for layout in layouts:
            if is_over():
                return
            if runs_layout(name, setting.model, layout) and not _has_other_stage(name, setting, layout):
                yield name, layout


def _without_pairs(executor: str, setting: Setting, layouts: Sequence[Layout]) -> InvalidInput:
    """The error of executors that can run none of the layouts."""
    if all(_has_other_stage(executor, setting, layout) for layout in layouts):
        state, stages = setting.training.state, sorted({layout.zero_stage for layout in layouts})
        return InvalidInput.at(
            "",
            f"{NAMES[executor]} requires ZeRO stage {STATES[executor].only_stage(state)} for these optimizer "
            f"states (found {', '.join(map(str, stages))}). Leave the stage to the search, or choose another "
            "optimizer or precision.",
        )
    return refusal(executor, setting.model, list(layouts))


def left_out(executor: str, model: Transformer, layouts: Sequence[Layout]) -> str:
    """A sentence with every rule that keeps an executor from a layout; empty if there is none."""
    others = [each for each in layouts if executor in NAMES and _broken(LAYOUT_RULES[executor], model, each)]
    rules = {rule.text: None for each in others for rule in _broken(LAYOUT_RULES[executor], model, each)}
    if not rules:
        return ""
    return (
        f"{NAMES[executor]} cannot run {figure(len(others))} other layouts; it requires {'; '.join(rules)}."
    )


def _has_other_stage(executor: str, setting: Setting, layout: Layout) -> bool:
    only = STATES[executor].only_stage(setting.training.state) if executor in NAMES else None
    return only not in (None, layout.zero_stage) and (_has_replicas(layout) or only == 0)


def refusal(executor: str, model: Transformer, layouts: list[Layout]) -> InvalidInput:
    """The error of layouts that an executor cannot run: the fewest rules of which every layout breaks one."""
    broken = [_broken(LAYOUT_RULES[executor], model, layout) for layout in layouts]
    every = list(dict.fromkeys(rule for rules in broken for rule in rules))
    sets = (chosen for size in range(1, len(every) + 1) for chosen in combinations(every, size))
    fewest = next(chosen for chosen in sets if all(not set(chosen).isdisjoint(rules) for rules in broken))
    common = [
        f"{part.replace('_', ' ')} {values.pop()}"
        for part in dict.fromkeys(part for rule in fewest for part in rule.parts)
        if len(values := {getattr(layout, part) for layout in layouts}) == 1
        and values.isdisjoint((None, "per-stage"))
    ]
    return InvalidInput.at(
        "",
        f"{NAMES[executor]} can run none of the {figure(len(layouts))} layouts. It requires "
        f"{'; '.join(rule.text for rule in fewest)}."
        + (f" All layouts have {', '.join(common)}." if common else "")
        + " Change these parts of the layout, or leave them to the search.",
    )


def _broken(rules: tuple[ExecutorRule, ...], model: Transformer, layout: Layout) -> list[ExecutorRule]:
    return [rule for rule in rules if not rule.is_kept(model, layout)]
