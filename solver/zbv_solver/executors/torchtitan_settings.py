"""torchtitan's settings of a cut: ``module_fqns_per_model_part`` as TOML, written and read.

The names and rules are those of ``_generate_llm_fqn_per_model_part`` and of
``_get_pp_rank_to_stage_indices_mapping`` in ``torchtitan/distributed/pipeline_parallel.py``. It cannot train
a part without modules, because its optimizer needs parameters.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping

from pydantic import BaseModel, Field

from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.executors.letters import DECODER, EMBEDDING, LOSS
from zbv_solver.executors.megatron_layout import Stages
from zbv_solver.executors.schedules import Schedule, torch_schedule


class ParallelismDocument(BaseModel):
    """The section ``parallelism``; other keys are ignored."""

    pipeline_parallel_degree: int = Field(ge=1)
    pipeline_parallel_schedule: str
    pipeline_parallel_microbatch_size: int = Field(default=1, ge=1)
    module_fqns_per_model_part: list[list[str]] = Field(min_length=1)


class TrainingDocument(BaseModel):
    """The section ``training``; other keys are ignored."""

    local_batch_size: int = Field(ge=1)


class SettingsDocument(BaseModel):
    """The sections that a pipeline needs."""

    parallelism: ParallelismDocument
    training: TrainingDocument


EMBEDDING_MODULES, LOSS_MODULES = ("tok_embeddings",), ("norm", "lm_head")


def module_names(stages: Stages) -> list[list[str]]:
    """The module names of every stage.

    Raises
    ------
    InvalidInput
        When a stage is empty, or has MTP layers, which torchtitan's models do not have.
    """
    parts: list[list[str]] = []
    layer = 0
    for stage, letters in enumerate(stages):
        part: list[str] = []
        for letter in letters:
            if letter == DECODER:
                part.append(f"layers.{layer}")
                layer += 1
            elif letter in (EMBEDDING, LOSS):
                part += EMBEDDING_MODULES if letter == EMBEDDING else LOSS_MODULES
            else:
                raise InvalidInput.at("", f"found module {letter!r} in stage {stage}; torchtitan has none.")
        if not part:
            raise InvalidInput.at("", f"stage {stage} is empty; torchtitan needs a module in every stage.")
        parts.append(part)
    return parts


def write_settings(
    stages: Stages,
    schedule: Schedule,
    recompute: str = "none",
    *,
    microbatch_size: int = 1,
    parallelism: Mapping[str, object] | None = None,
    training: Mapping[str, object] | None = None,
    optimizer: Mapping[str, object] | None = None,
) -> str:
    """The settings as TOML.

    Parameters
    ----------
    microbatch_size
        Sequences per microbatch.
    parallelism, training, optimizer
        Further keys of these sections.

    Raises
    ------
    InvalidInput
        When torchtitan cannot run such stages, or cannot recompute like that.
    """
    if recompute not in ("none", "all"):
        raise InvalidInput.at(
            "", f"found recomputation {recompute!r}; torchtitan recomputes all stages alike, or none."
        )
    parts = module_names(stages)
    listed = ",\n".join(f"    {json.dumps(part)}" for part in parts)
    is_piped = schedule.placement.pp_degree > 1
    # Without a pipeline, torchtitan accumulates the gradients of several batches.
    batch = microbatch_size * (schedule.microbatches if is_piped else 1)
    piped = [
        f'pipeline_parallel_schedule = "{schedule.name}"',
        f"pipeline_parallel_microbatch_size = {microbatch_size}",
        f"module_fqns_per_model_part = [\n{listed},\n]",
    ]
    return "\n".join(
        [
            "[parallelism]",
            *_keys(parallelism),
            f"pipeline_parallel_degree = {schedule.placement.pp_degree}",
            *(piped if is_piped else ()),
            "",
            "[training]",
            f"local_batch_size = {batch}",
            *_keys(training),
            *(("", "[optimizer]", *_keys(optimizer)) if optimizer else ()),
            "",
            "[activation_checkpoint]",
            f'mode = "{"full" if recompute == "all" else "none"}"',
            "",
        ]
    )


def _keys(values: Mapping[str, object] | None) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in (values or {}).items()]


def parse_settings(text: str) -> tuple[Stages, Schedule]:
    """The stages and the schedule of settings.

    Raises
    ------
    InvalidInput
        When the text is not TOML, a setting is absent, or torchtitan would refuse the settings.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput.at("", f"the settings are not TOML: {error}.") from None
    settings = validated(SettingsDocument, document)
    own = settings.parallelism
    ranks, parts = own.pipeline_parallel_degree, own.module_fqns_per_model_part
    microbatches, rest = divmod(settings.training.local_batch_size, own.pipeline_parallel_microbatch_size)
    batch = settings.training.local_batch_size
    if len(parts) % ranks or rest:
        raise InvalidInput.at(
            "/parallelism",
            f"found {len(parts)} parts on {ranks} ranks, and a batch of {batch} in "
            f"microbatches of {own.pipeline_parallel_microbatch_size}; both must divide evenly.",
        )
    stages = tuple(map(_letters, parts))
    if module_names(stages) != parts:
        raise InvalidInput.at(
            "/parallelism/module_fqns_per_model_part",
            "the modules are not tok_embeddings, layers.0, layers.1, … in this order, then norm and lm_head.",
        )
    return stages, torch_schedule(own.pipeline_parallel_schedule, ranks, microbatches, len(parts) // ranks)


def _letters(part: list[str]) -> str:
    letters = ""
    for name in part:
        if name in EMBEDDING_MODULES:
            letters += EMBEDDING
        elif name == LOSS_MODULES[-1]:
            letters += LOSS
        elif name.startswith("layers."):
            letters += DECODER
        elif name not in LOSS_MODULES:
            raise InvalidInput.at("", f"found module {name!r}, which no language model of torchtitan has.")
    return letters
