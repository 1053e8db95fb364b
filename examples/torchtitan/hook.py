"""torchtitan's trainer runs a plan: :func:`with_plan`.

A model spec of torchtitan has a ``pipelining_fn``. It cuts the model into stages, applies the spec's
``parallelize_fn`` to each, and returns a schedule whose ``step`` the trainer calls. The one made here cuts
the model as the plan requires, and returns a schedule that runs the plan's lists. Data, loss, parallelism
inside a stage, initialization, optimizer, checkpoints and metrics stay torchtitan's.

Nothing here imports torchtitan. Written for torchtitan 0.3.0 and its source of August 2026:
``tests/support/titan.py`` has what is used of that library, and ``make torchtitan`` compares it with the
library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from zbv_worker.adapters.split_modules import split_subclasses
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.executor import DEFAULT_STARTUP_TIMEOUT
from zbv_worker.execution.rank_plan import Partition, PlannedCut, RankPlan
from zbv_worker.pipeline.connecting import PipelineOptions, PlanLike, connected_world, rank_plan
from zbv_worker.pipeline.preparing import model_digest, open_channels, starting_together
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.world import Layout

from examples.torchtitan.schedule import PlanSchedule

_V_SCHEDULE = "ZBVZeroBubble"
"""The schedule with which torchtitan expects the loss on the first rank."""


def with_plan(
    spec: Any,
    plan: PlanLike | None,
    *,
    timeout: float = 120.0,
    startup_timeout: float = DEFAULT_STARTUP_TIMEOUT,
    service: str | None = None,
) -> Any:
    """A copy of a torchtitan ``ModelSpec`` whose pipeline runs a plan.

    ::

        config = llama3_debugmodel()
        config.model_spec = with_plan(config.model_spec, "plan.json")

    The trainer's configuration must fit the plan: ``pipeline_parallel_degree`` is the plan's number of ranks;
    ``num_pp_microbatches`` (in 0.3.0, ``local_batch_size`` over ``pipeline_parallel_microbatch_size``) is its
    number of microbatches; and ``pipeline_parallel_schedule`` is ``"ZBVZeroBubble"`` for a plan with
    placement ``v``: torchtitan uses it only to find the rank that knows the loss.

    Parameters
    ----------
    spec
        The spec of a decoder: a model whose blocks are in one ``ModuleDict``.
    plan, service
        As of :class:`~zbv_worker.pipeline.pipeline.Pipeline`, but not None. A plan's layers have the names of
        torchtitan's ``module_fqns_per_model_part``: ``tok_embeddings``, ``layers.0``, …, ``norm``,
        ``lm_head``. A plan without layers divides the blocks evenly, unless that setting divides them.
    timeout, startup_timeout
        As of :class:`~zbv_worker.pipeline.pipeline.Pipeline`.

    Raises
    ------
    InvalidRun
        If there is no plan, or torchtitan cannot pipeline the model. The trainer's constructor raises it if
        plan, model and configuration do not fit together.
    """
    if getattr(spec, "pipelining_fn", None) is None:
        raise InvalidRun(
            f"found a {type(spec).__name__} without a pipelining_fn; torchtitan cannot pipeline this model. "
            f"Pass the spec of another model."
        )
    if plan is None:
        raise InvalidRun(
            "found no plan; torchtitan's trainer needs one. Pass a plan, its file, or its id with "
            "service=URL."
        )

    def pipelining_fn(model: nn.Module, **arguments: Any) -> tuple[PlanSchedule, list[nn.Module], bool, bool]:
        degree = arguments["parallel_dims"].pp
        options = PipelineOptions(
            plan=plan,
            microbatches=None,
            example=None,
            device=arguments["device"],
            backend=None,
            precision="float32",  # the spec's parallelize_fn sets the dtypes
            is_compiled=False,
            timeout=timeout,
            startup_timeout=startup_timeout,
            service=service,
        )
        return _pipelined(options, plan, degree, model, **arguments)

    return replace(spec, pipelining_fn=pipelining_fn)


def _pipelined(
    options: PipelineOptions,
    given: PlanLike,
    degree: int,
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., Any],
) -> tuple[PlanSchedule, list[nn.Module], bool, bool]:
    """What torchtitan's trainer calls. Collective.

    Returns the schedule, this rank's stages, and whether they include the first and the last one.
    """
    columns = parallel_dims.world_size // degree
    # Ranks of a stage follow the plan in lock-step; fully_shard sums their gradients.
    transport, place = connected_world(options, layout=Layout(degree, inner=columns))
    with starting_together(transport, options.patience):
        _require_order(parallel_dims.get_mesh("pp").mesh.tolist(), transport)
        plan = rank_plan(given, transport.pp_rank, options.service, options.patience)
        _require_fit(plan, degree, training, parallelism, compile_config)
        plan = _cut(plan, model, parallelism.module_fqns_per_model_part)
        parts = {}
        for stage in sorted(plan.stages):
            part = part_of(model, (plan.cut.partition or ())[stage])
            # The chunked loss runs the head's backward in F, so W has nothing to do for it.
            split_subclasses(part, without=["lm_head"] if hasattr(loss_fn, "set_lm_head") else [])
            parts[stage] = parallelize_fn(
                part,
                parallel_dims=parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=compile_config,
                ac_config=ac_config,
                dump_folder=dump_folder,
            )
    open_channels(
        plan,
        transport,
        model=model_digest(plan),
        backend=place.backend,
        patience=options.patience,
        options=options.common,
    )
    schedule = PlanSchedule(options, plan, parts, loss_fn, transport, place)
    return schedule, list(parts.values()), 0 in parts, plan.placement.n_stages - 1 in parts


def module_names(model: nn.Module) -> list[str]:
    """The names of a decoder's modules that a stage may have or not, in the order of their use.

    Raises
    ------
    InvalidRun
        If the model is not a decoder with one ``ModuleDict`` of blocks.
    """
    found = [name for name, child in model.named_children() if isinstance(child, nn.ModuleDict)]
    if len(found) != 1 or getattr(model, "vision_encoder", None) is not None:
        raise InvalidRun(
            f"found a {type(model).__name__} with {len(found)} ModuleDicts of blocks"
            f"{' and a vision encoder' if hasattr(model, 'vision_encoder') else ''}; zbv cuts text decoders "
            f"with one. Run this model with a schedule of torchtitan."
        )
    names = []
    for name, child in model.named_children():
        inside = [f"{name}.{key}" for key in child] if isinstance(child, nn.ModuleDict) else [name]
        names.extend(inside)
    return names


def part_of(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a decoder that has only these modules; others are None, or absent from their ``ModuleDict``.

    Forwards of torchtitan's decoders skip both.
    """
    part = copy.deepcopy(model)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in list(child):
                if f"{name}.{key}" not in names:
                    del child[key]
        elif name not in names:
            setattr(part, name, None)
    return part


def _cut(plan: RankPlan, model: nn.Module, given: list[list[str]] | None) -> RankPlan:
    """The plan with the modules of every stage: its own, the configuration's, or evenly divided blocks."""
    names, stages = module_names(model), plan.placement.n_stages
    planned = plan.cut.partition
    source = "the plan's partition" if planned is not None else "module_fqns_per_model_part"
    if planned is None:
        planned = _even(names, stages) if given is None else tuple(map(tuple, given))
    found = [name for stage in planned for name in stage]
    if len(planned) != stages or found != names:
        raise InvalidRun(
            f"{source} has {len(planned)} stages with the modules {', '.join(found)}; must divide the "
            f"model's modules, in this order, among the plan's {stages} stages: {', '.join(names)}."
        )
    return replace(plan, cut=PlannedCut(planned, plan.cut.recompute))


def _even(names: Sequence[str], stages: int) -> Partition:
    """Divide blocks evenly. The modules before them count as one, and so do those after them."""
    blocks = [at for at, name in enumerate(names) if "." in name]
    starts = [0, *blocks, blocks[-1] + 1]
    if len(starts) < stages:
        raise InvalidRun(
            f"found {len(blocks)} blocks; the plan has {stages} stages, and every one needs a module. Plan "
            f"for fewer ranks, or use a deeper model."
        )
    chosen = [starts[stage * len(starts) // stages] for stage in range(stages)]
    return tuple(tuple(names[begin:end]) for begin, end in pairwise([*chosen, len(names)]))


def _require_order(own: list[int], transport: ConnectedTransport) -> None:
    """Check that torchtitan's mesh has the ranks of a pipeline where the channels connect them."""
    layout, column = transport.layout, transport.column
    expected = [layout.global_rank(place, column) for place in range(layout.pp_degree)]
    if own != expected:
        raise InvalidRun(
            f"rank {transport.rank}: torchtitan's mesh has a pipeline of the ranks {own}; zbv expects "
            f"{expected}, as torchtitan 0.3.0 numbers them. Install that version."
        )


def _require_fit(plan: RankPlan, degree: int, training: Any, parallelism: Any, compile_config: Any) -> None:
    """Check torchtitan's configuration; raises :class:`InvalidRun`."""
    planned = plan.placement.pp_degree
    if planned != degree:
        raise InvalidRun(
            f"found pipeline_parallel_degree {degree}; the plan is for {planned} ranks. Set "
            f"parallelism.pipeline_parallel_degree to {planned}, or plan for {degree}."
        )
    microbatches, change = _microbatches(plan.microbatches, training, parallelism)
    if microbatches != plan.microbatches:
        raise InvalidRun(
            f"found {microbatches} microbatches per step; the plan has {plan.microbatches}. Set {change}, or "
            f"plan for {microbatches}."
        )
    if compile_config.enable and "model" in compile_config.components:
        raise InvalidRun(
            "found compile.enable with the model among compile.components; compiled blocks cannot split "
            "their backward into I and W. Set compile.components to ['loss'], or compile.enable to False."
        )
    last = plan.placement.n_stages - 1
    of_loss = next(at for at, stages in enumerate(plan.placement.stages_of) if last in stages)
    schedule = parallelism.pipeline_parallel_schedule
    expected = 0 if schedule == _V_SCHEDULE else plan.placement.pp_degree - 1
    if of_loss != expected:
        change = repr(_V_SCHEDULE) if of_loss == 0 else f"any other than {_V_SCHEDULE!r}"
        raise InvalidRun(
            f"found pipeline_parallel_schedule {schedule!r}, with which torchtitan reads the loss from rank "
            f"{expected} of the pipeline; the plan has it on rank {of_loss}. Set "
            f"parallelism.pipeline_parallel_schedule to {change}."
        )


def _microbatches(planned: int, training: Any, parallelism: Any) -> tuple[int, str]:
    """The configuration's microbatches per step, and what to set instead for the plan's."""
    if hasattr(parallelism, "num_pp_microbatches"):
        return parallelism.num_pp_microbatches, f"parallelism.num_pp_microbatches to {planned}"
    size = parallelism.pipeline_parallel_microbatch_size  # of torchtitan 0.3.0
    return training.local_batch_size // size, f"training.local_batch_size to {planned * size}"
