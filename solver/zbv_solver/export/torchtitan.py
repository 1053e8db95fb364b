"""A plan for torchtitan's own runtime: its settings, with the order of the actions in them.

torchtitan takes the order from ``pipeline_parallel_schedule_csv``, the CSV of
:mod:`zbv_solver.export.torch_csv`, but places the stages by ``pipeline_parallel_schedule``, so a schedule
with the plan's placement is named there.

The settings are a Python function, which changes a configuration of torchtitan 0.3.0 or newer: a
``Trainer.Config`` (``torchtitan/trainer.py``); there are no files of settings.
``torchtitan/config/README.md`` asks for functions, because the flags will be deleted. 0.3.0 counts
sequences, and the source since August 2026 counts tokens and pipeline microbatches
(``torchtitan/config/configs.py``). The function sets what it finds, so one text is for both.

The names of modules are those of ``_generate_llm_fqn_per_model_part``, ``pipeline_vlm`` and
``pipeline_muse_glimmer``; the placement of stages is that of ``_get_pp_rank_to_stage_indices_mapping``
(``torchtitan/distributed/pipeline_parallel.py``, ``torchtitan/models/muse_glimmer/parallelize.py``). A part
without modules cannot be trained, because torchtitan's optimizer needs parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zbv_solver.errors import InvalidInput
from zbv_solver.export import torch_csv
from zbv_solver.partition.modules import Modules
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.layer import DECODER, EMBEDDING, LOSS, MTP, PART, VISION
from zbv_solver.problem.problem import W

_SCHEDULES = {"v": "ZBVZeroBubble", "loop": "Interleaved1F1B", "single": "1F1B"}
"""A schedule of torchtitan with the plan's placement; its order is not used."""
HEADER = (
    "# Settings of torchtitan, 0.3.0 and newer. Save them as planned.py, add a function of your model, as",
    "#",
    "#   from torchtitan.models.llama3.config_registry import llama3_8b",
    "#",
    "#   def run():",
    "#       return planned(llama3_8b())",
    "#",
    "# and start torchtitan.train with --module planned --config run.",
)
_MODULES = {
    VISION: ("vision_encoder", "vision_adapter", "vision_projection", "perception_emb_norm"),
    EMBEDDING: ("tok_embeddings",),
    LOSS: ("norm", "lm_head"),
}
"""The modules of a letter. torchtitan ignores names that a model does not have: only Muse Glimmer has the
last three of a vision encoder."""

_CHECKPOINTS: dict[str | None, str] = {"all": "FullAC", "selective": "SelectiveAC"}
REPEATED = (
    "with split backwards, PyTorch computes a recomputed stage again in I and for every gradient of W "
    "(torch/distributed/pipelining/_backward.py, stage_backward_weight), and refuses SelectiveAC. Choose "
    "1F1B or Interleaved1F1B, or recompute nothing."
)


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step."""

    sequence: int
    """Tokens per sequence."""
    microbatch_size: int
    """Sequences per microbatch."""
    total: int
    """Sequences of a step, over all replicas."""


@dataclass(frozen=True)
class TitanSettings:
    """What torchtitan needs to know of a pipeline."""

    pp_degree: int
    schedule: str
    """A schedule of PyTorch. With ``rows``, torchtitan takes only the placement of stages from it."""
    microbatches: int
    """Per step and replica."""
    parts: Sequence[Sequence[str]] | None = None
    """The names of the modules of every stage; None leaves the cut to the configuration."""
    recompute: str | None = None
    """``none``, ``all``, ``selective`` (of operations), or None, which leaves it to the configuration."""
    is_split: bool = False
    """Whether some backwards are split into I and W, which compiled blocks cannot be."""
    batch: StepSizes | None = None
    """None leaves the sizes to the configuration."""
    keys: Mapping[str, int | str] = field(default_factory=dict)
    """Other settings by name, such as ``parallelism.tensor_parallel_degree``."""
    rows: str = ""
    """The schedule as CSV; empty if ``schedule`` is the order."""

    def text(self, notes: Sequence[str] = ()) -> str:
        """The function ``planned``, after comments.

        Raises
        ------
        InvalidInput
            When torchtitan cannot recompute like that.
        """
        if self.recompute not in (None, "none", *_CHECKPOINTS):
            raise InvalidInput.at(
                "",
                f"found recomputation {self.recompute!r}; torchtitan recomputes all stages alike, or none.",
            )
        if self.recompute == "selective" and self.is_split:
            raise InvalidInput.at("", f"found selective recomputation; {REPEATED}")
        is_piped = self.pp_degree > 1
        body = [f"config.{key} = {json.dumps(value)}" for key, value in self.keys.items()]
        body.append(f"parallelism.pipeline_parallel_degree = {self.pp_degree}")
        body += self._pipeline() if is_piped else ()
        body += self._counts(is_piped)
        if is_piped or self.keys.get("parallelism.expert_parallel_degree", 1) != 1:
            body.append("training.disable_cuda_graphs = True  # pipelines and experts cannot be captured")
        if self.is_split:
            body.append("config.compile.enable = False  # compiled blocks cannot split their backward")
        if self.recompute in _CHECKPOINTS:
            body.append(f"config.activation_checkpoint = {_CHECKPOINTS[self.recompute]}.Config()")
        elif self.recompute == "none":
            body.append("config.activation_checkpoint = None")
        return "\n".join(
            [
                *HEADER,
                *notes,
                *self._before(),
                "",
                "",
                "def planned(config):",
                "    parallelism, training = config.parallelism, config.training",
                *(f"    {line}" for line in body),
                "    return config",
                "",
            ]
        )

    def _before(self) -> list[str]:
        """What the function refers to."""
        lines = ["import atexit", "import os", "import tempfile"] if self.rows else []
        if self.recompute in _CHECKPOINTS:
            of = _CHECKPOINTS[self.recompute]
            lines.append(f"from torchtitan.distributed.activation_checkpoint import {of}")
        if self.rows:
            lines += [
                "",
                "# The order of the plan: one row per rank.",
                f'ROWS = """\\\n{self.rows.rstrip()}\n"""',
                'with tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False) as schedule:',
                "    schedule.write(ROWS)",
                "atexit.register(os.remove, schedule.name)",
            ]
        return ["", *lines] if lines else []

    def _pipeline(self) -> list[str]:
        lines = [f"parallelism.pipeline_parallel_schedule = {json.dumps(self.schedule)}"]
        if self.rows:
            lines.append("parallelism.pipeline_parallel_schedule_csv = schedule.name")
        if self.parts is not None:
            listed = [f"    {json.dumps(list(part))}," for part in self.parts]
            lines += ["parallelism.module_fqns_per_model_part = [", *listed, "]"]
        return lines

    def _counts(self, is_piped: bool) -> list[str]:
        """The numbers of microbatches, sequences and tokens, by the names of both versions."""
        newer = [f"parallelism.num_pp_microbatches = {self.microbatches}"] if is_piped else []
        older = []
        if self.batch is not None:
            size, sequence, total = self.batch.microbatch_size, self.batch.sequence, self.batch.total
            newer += [
                f"training.num_tokens_per_microbatch_per_dp_rank = {size * sequence}",
                f"training.num_tokens_per_train_step = {total * sequence}",
                f"training.max_context_length = {sequence}",
            ]
            # Without a pipeline, torchtitan accumulates the gradients of several batches.
            older = [f"parallelism.pipeline_parallel_microbatch_size = {size}"] if is_piped else []
            older += [
                f"training.local_batch_size = {size * (self.microbatches if is_piped else 1)}",
                f"training.global_batch_size = {total}",
                f"training.seq_len = {sequence}",
            ]
        elif is_piped:
            name = "parallelism.pipeline_parallel_microbatch_size"
            older = [f"training.local_batch_size = {self.microbatches} * {name}"]
        if not newer:
            return []
        return [
            'if hasattr(parallelism, "num_pp_microbatches"):  # newer than 0.3.0',
            *(f"    {line}" for line in newer),
            "else:",
            *(f"    {line}" for line in older),
        ]


def module_names(stages: Sequence[str]) -> list[list[str]]:
    """The module names of every stage.

    Raises
    ------
    InvalidInput
        When a stage is empty, or has MTP layers, which torchtitan does not put into pipelines.
    """
    parts: list[list[str]] = []
    layer = 0
    for stage, letters in enumerate(stages):
        part: list[str] = []
        for letter in letters:
            if letter == MTP:
                detail = f"found module {letter!r} in stage {stage}; torchtitan has none in pipelines."
                raise InvalidInput.at("", detail)
            if letter == DECODER:
                part.append(f"layers.{layer}")
                layer += 1
            else:
                part += (name for name in _MODULES[letter] if name not in part)
        if not part:
            raise InvalidInput.at("", f"stage {stage} is empty; torchtitan needs a module in every stage.")
        parts.append(part)
    return parts


def render(plan: Plan) -> str:
    """The settings, with the schedule's rows.

    Raises
    ------
    InvalidInput
        When there are more than two stages per rank in loops, and the plan's layers are not those of a
        language model: torchtitan counts such stages by the names of their modules.
    """
    problem, placement = plan.problem, plan.problem.placement
    model = problem.model
    parts = None if model is None else _parts(model)
    if parts is None and placement.kind == "loop" and placement.chunks != 2:
        raise InvalidInput.at(
            "/problem/chunks",
            f"found {placement.chunks} stages per rank; torchtitan makes two of a looped schedule unless "
            f"their modules are named, which the plan does not know. Export torch-csv, and set "
            f"parallelism.module_fqns_per_model_part for the {placement.n_stages} stages yourself.",
        )
    is_split = bool((plan.orders.letter == W).any())
    recompute = _recomputation(model, is_split)
    settings = TitanSettings(
        placement.pp_degree,
        _SCHEDULES[placement.kind],
        problem.microbatches,
        parts,
        recompute,
        is_split,
        rows=torch_csv.render(plan),
    )
    notes = [
        "#",
        f"# zbv plan {plan.plan_id}",
        f"# {problem.pp_degree} ranks, {problem.n_stages} stages, {problem.microbatches} microbatches",
    ]
    if is_split and recompute == "all":
        notes += [
            "# The step will take longer than planned: torch recomputes a stage again in I and for every",
            "# gradient of W. Plan without recomputation, or with fused backwards only.",
        ]
    return settings.text([*notes, *_batch_order(plan), *_cut(model, parts)])


def _recomputation(model: CutModel | None, is_split: bool) -> str | None:
    """What torchtitan recomputes. Its default, ``SelectiveAC``, does not work with split backwards."""
    recomputed = set(() if model is None else model.cut.recompute)
    if model is not None and recomputed == {True} and not _foreign(model):
        return "selective" if "op" in model.model.recompute_modules else "all"
    return "none" if recomputed or is_split else None


def _foreign(model: CutModel) -> tuple[str, ...]:
    """The modules that a plan recomputes and torchtitan cannot: those of Megatron-LM."""
    modules = model.model.recompute_modules
    return () if "op" in modules or not any(model.cut.recompute) else tuple(modules)


def _parts(model: CutModel) -> list[list[str]] | None:
    """The modules of every stage; None if the plan's layers are not those of torchtitan's models."""
    try:
        modules, bounds = Modules.of(model.model), model.cut.bounds
        divides_one = any(PART in modules.letters[begin : begin + 1] for begin in bounds[1:-1])
        if divides_one or not {EMBEDDING, LOSS} <= set(modules.letters):
            return None
        return module_names(tuple(map(modules.of_stage, bounds[:-1], bounds[1:])))
    except InvalidInput:
        return None


def _batch_order(plan: Plan) -> list[str]:
    """What a batch of microbatches that differ must look like."""
    order = torch_csv.batch_order(plan)
    if order is None:
        return []
    return [
        "#",
        "# The microbatches differ. Give the batch in this order of the plan's microbatches, because",
        "# torchtitan numbers them in the order in which they run:",
        f"#   {', '.join(map(str, order))}",
    ]


def _cut(model: CutModel | None, parts: list[list[str]] | None) -> list[str]:
    """What torchtitan does not get to know of the cut and of recomputation."""
    lines = []
    if parts is None:
        lines += [
            "#",
            "# Cut the model into the stages that the plan's costs are of, by",
            "# parallelism.module_fqns_per_model_part.",
        ]
    if model is None:
        return lines
    if parts is None:
        lines.append("# The stages by the names of the plan's layers:")
        lines += [f"#   {stage}: {json.dumps(names)}" for stage, names in enumerate(model.partition)]
    recomputed = [str(stage) for stage, is_so in enumerate(model.cut.recompute) if is_so]
    if foreign := _foreign(model):
        lines += [
            "#",
            f"# Planned to be recomputed: {', '.join(foreign)} of the stages {', '.join(recomputed)}.",
            "# torchtitan recomputes whole blocks, or its own choice of operations: wrap these modules in",
            "# torch.utils.checkpoint yourself, or they need more memory than planned.",
        ]
    elif recomputed and len(recomputed) < len(model.partition):
        lines += [
            "#",
            f"# Planned to be recomputed: {', '.join(recomputed)}.",
            "# torchtitan recomputes all stages or none: wrap modules of these stages in",
            "# torch.utils.checkpoint yourself, or they need more memory than planned.",
        ]
    return lines
