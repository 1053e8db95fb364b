"""What ``zbv layout`` is asked: a model and its global batch, a cluster, and fixed parts of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pydantic import Field
from zbv_solver.documents.validation import quoted, validated
from zbv_solver.errors import InvalidInput
from zbv_solver.numerals import figure

from zbv_models.estimate.config import EstimateConfig, host_link, parse_config
from zbv_models.estimate.model import FrozenDtype, FrozenWord, LayerWord, TargetModule, Transformer
from zbv_models.estimate.sections import ConfigSection, Count, Size, presets_of, with_presets
from zbv_models.estimate.transformers_config import from_transformers, is_transformers_config
from zbv_models.layouts.cluster import AnyCluster, Cluster
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.layout import (
    MOST_LAYOUTS,
    MOST_LISTED,
    Fixed,
    Layout,
    LayoutFamily,
    enumerate_layouts,
)
from zbv_models.layouts.measured_layers import Measured
from zbv_models.layouts.profile import Profile
from zbv_models.layouts.setting import OP, Modules, Setting, cheap_modules, droppable, module_sets

KEPT = (
    *("optimizer", "precision", "offloaded_states"),
    *("context_exchange", "fused_gradients", "recompute_modules", "pairs", "copies"),
)
"""Keys of the section ``parallel`` that layouts share; the search chooses the others."""
NARROWING = ("tensor_parallel", "expert_parallel", "microbatch_size", "zero_stage", "placement")
"""Parts whose choice leaves few layouts."""
Document = dict[str, Any]


OF_MODEL = (
    *("prediction_layers", "frozen", "frozen_dtype"),
    *("lora_rank", "target_modules", "layers_to_transform"),
)
"""Keys of :class:`BatchConfig` that replace those of the section ``model``."""


class BatchConfig(ConfigSection):
    """Keys of ``model.json`` besides those of ``zbv estimate``."""

    global_batch: Size = Field(description="sequences per step")
    sequence_length: Size | None = Field(None, description="tokens per sequence; null: model.sequence")
    prediction_layers: Count | None = Field(
        None, description="modules of multi-token prediction, 0 for none; null: model.prediction_layers"
    )
    frozen: tuple[FrozenWord, ...] | None = Field(
        None, description=f"{Transformer.model_fields['frozen'].description}; null: model.frozen"
    )
    frozen_dtype: FrozenDtype | None = Field(
        None, description="type in which frozen blocks keep their matrices; null: model.frozen_dtype"
    )
    lora_rank: Size | None = Field(
        None, description="rank r of LoRA adapters in frozen layers; null: model.lora_rank"
    )
    target_modules: tuple[TargetModule, ...] | None = Field(
        None, description="matrices with adapters, by their names or in groups; null: model.target_modules"
    )
    layers_to_transform: tuple[LayerWord, ...] | None = Field(
        None, description="layers with adapters, as in 0-15; null: model.layers_to_transform"
    )


@dataclass(frozen=True)
class Request:
    """A valid question."""

    config: EstimateConfig
    cluster: AnyCluster
    global_batch: int
    """Sequences per step."""
    fixed: Fixed
    profiles: tuple[Profile, ...] = ()
    """Measured layers, which replace estimates."""
    executor: str = FREE
    """The program that runs the pipeline."""

    @property
    def setting(self) -> Setting:
        """What all layouts have in common; raises :class:`InvalidInput` if the profiles do not fit."""
        model, cluster = self.config.model, self.cluster
        measured = None
        if self.profiles:
            if not isinstance(cluster, Cluster):
                detail = "found groups of nodes; profiles are of one device. Leave out either."
                raise InvalidInput.at("/groups", detail)
            measured = Measured.of(self.profiles, model, cluster.in_node, cluster.preset)
        # Layouts with and without selective recomputation share their estimates.
        training = replace(self.config.training, modules=frozenset(self._modules))
        copies = self.config.parallel.copies
        found = Setting(model, training, cluster, measured, copies, module_sets=self._module_sets)
        return found.of_executor(FREE)

    @property
    def _module_sets(self) -> tuple[Modules, ...]:
        """What selective recomputation may repeat: as the document says, or sets of the model's modules."""
        model, given = self.config.model, self.config.parallel.recompute_modules
        is_titan = self.executor == "torchtitan"
        if "recompute_modules" not in self.config.parallel.model_fields_set:
            return (OP,) if is_titan else module_sets(model)
        able = frozenset(OP) if is_titan else droppable(model)
        kept = tuple(module for module in given if module in able)
        return (kept,) if kept else ()

    @property
    def _modules(self) -> Modules:
        """What selective recomputation repeats if it is another choice, or asked for."""
        sets = self._module_sets
        if self.executor != FREE or "recompute_modules" in self.config.parallel.model_fields_set:
            return sets[0] if sets else ()
        cheap = cheap_modules(self.config.model)
        return cheap or (sets[0] if sets and self.fixed.recompute == "selective" else ())

    @property
    def layouts(self) -> list[Layout]:
        """Every layout; raises :class:`InvalidInput` as :meth:`every`."""
        return list(self.every())

    def every(self) -> Iterator[Layout]:
        """Every layout, one by one.

        Raises :class:`InvalidInput` as :meth:`families`, and if there are more than `MOST_LISTED`.
        """
        return chain.from_iterable(self.families(MOST_LISTED))

    def families(self, most: int = MOST_LAYOUTS) -> Iterator[LayoutFamily]:
        """Every layout, in families; a large cluster takes seconds.

        Parameters
        ----------
        most
            Layouts, at most.

        Raises
        ------
        InvalidInput
            When there is no layout, or at the first one beyond ``most``; at ``/fixed`` if the fixed parts
            are the reason.
        """
        model, modules = self.setting.model, self._modules
        if self.fixed.recompute == "selective" and not modules:
            given = ", ".join(self.config.parallel.recompute_modules)
            raise InvalidInput.at(
                "/parallel/recompute_modules",
                f"found {given}; torchtitan has op alone. Leave them out."
                if self.executor == "torchtitan"
                else f"found {given}; no layer of this model has them. Name others, or leave them out.",
            )
        self._check_layers()
        count = 0
        for family in enumerate_layouts(model, self.cluster, self.global_batch, self.fixed, modules):
            count += len(family)
            if count > most:
                raise self._too_many(most)
            yield family
        if not count:
            raise self._without_layouts()

    def _too_many(self, most: int) -> InvalidInput:
        kind = " with points or for an executor" if most == MOST_LISTED else ""
        free = [name for name in NARROWING if getattr(self.fixed, name) is None]
        return InvalidInput.at(
            "",
            f"found more than {figure(most)} layouts of {figure(self.cluster.devices)} devices and a global "
            f"batch of {figure(self.global_batch)}; a search{kind} takes at most {figure(most)}. Fix parts "
            f"of the layout, such as {', '.join(free)}, or choose a global batch with fewer divisors.",
        )

    def _without_layouts(self) -> InvalidInput:
        fixed = ", ".join(f"{name} {value}" for name, value in self.fixed.given())
        others = enumerate_layouts(self.setting.model, self.cluster, self.global_batch, Fixed())
        return InvalidInput.at(
            "" if next(others, None) is None else "/fixed",
            f"no layout divides {self.cluster.devices} devices, the model and a global batch of "
            f"{self.global_batch}{f' with {fixed}' if fixed else ''}. Change the global batch or the "
            f"number of devices{', or leave these parts to the search' if fixed else ''}.",
        )

    def _check_layers(self) -> None:
        """Raise :class:`InvalidInput` if the executor has no such states, or recomputes no such layers."""
        if self.executor == FREE and (refusal := STATES[FREE].refusal(self.config.state)):
            raise InvalidInput.at("/parallel/precision", f"{FREE} requires {refusal}.")
        pairs, copies = self.config.parallel.pairs, self.config.parallel.copies
        for name, found in (("pairs", pairs), ("copies", copies)):
            if found != "none" and self.executor != FREE:
                detail = (
                    f"found {found} and executor {self.executor}; only orders of {FREE} have {name} here. "
                )
                raise InvalidInput.at(f"/parallel/{name}", detail + "Leave one of them out.")
        for number, group in enumerate(self.cluster.groups):
            at = f"/groups/{number}/device" if len(self.cluster.groups) > 1 else "/device"
            host_link(copies, group.device, at)
        if pairs == "experts" and self.config.model.experts is None:
            detail = "found experts; the model has none, so there is no all-to-all to hide. Leave it out."
            raise InvalidInput.at("/parallel/pairs", detail)
        layers, recompute = self.fixed.recompute_layers, self.fixed.recompute
        if layers is not None and recompute not in (None, "full"):
            detail = f"found {layers} recomputed layers and recompute {recompute}; it is full then."
            raise InvalidInput.at("/fixed/recompute_layers", f"{detail} Leave out one of them.")
        if layers is not None and self.executor == FREE:
            detail = f"found {layers} recomputed layers and executor {FREE}, which recomputes whole stages."
            detail += " Name executor megatron, or leave them out."
            raise InvalidInput.at("/fixed/recompute_layers", detail)


def parse_request(
    model: Any,
    cluster: AnyCluster,
    fixed: Fixed | None = None,
    presets: tuple[str, ...] = (),
    parallel: Mapping[str, Any] | None = None,
    executor: str = FREE,
    **batch: int | Sequence[str] | None,
) -> Request:
    """Parse a decoded ``model.json`` or ``config.json`` of transformers.

    Parameters
    ----------
    presets
        Names of further presets of models.
    parallel
        Keys of the section ``parallel`` that replace those of the document.
    batch
        Keys of :class:`BatchConfig`, where they replace those of the document.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    if not isinstance(model, dict):
        raise InvalidInput.at("", f"found {quoted(model)}; must be a JSON object.")
    if is_transformers_config(model):
        model = {"model": from_transformers(model)}
    own = {key: value for key, value in model.items() if key not in BatchConfig.model_fields}
    merged = with_presets(own, list(presets), {"parallel": dict(parallel)} if parallel else {})
    if merged.get("model", {}) == {}:
        raise _without_model(own.get("presets", []), presets)
    given = {key: model[key] for key in BatchConfig.model_fields if key in model}
    sizes = validated(BatchConfig, given | {key: value for key, value in batch.items() if value is not None})
    sections = _sections(merged, sizes)
    config = parse_config({**sections, "device": _NO_DEVICE})
    return Request(config, cluster, sizes.global_batch, fixed or Fixed(), executor=executor)


_NO_DEVICE = {"achieved_tflops": 1.0, "fp8_tflops": 1.0, "fp4_tflops": 1.0}
"""The cluster has the devices; an estimate's configuration needs some."""


def _sections(merged: Document, sizes: BatchConfig) -> Document:
    """The sections of a configuration: one pipeline rank and microbatch, as layouts replace these."""
    model, parallel = merged.get("model", {}), merged.get("parallel", {})
    if not isinstance(model, dict) or not isinstance(parallel, dict):
        wrong = "/model" if not isinstance(model, dict) else "/parallel"
        raise InvalidInput.at(wrong, f"found {quoted(merged[wrong[1:]])}; must be a JSON object.")
    given = {"sequence": sizes.sequence_length}
    given |= {key: getattr(sizes, key) for key in OF_MODEL}
    model = {**model, **{key: value for key, value in given.items() if value is not None}}
    unknown = [key for key in merged if key not in ("model", "parallel", "device")]
    return {
        **{key: merged[key] for key in unknown},
        "model": {**model, "microbatch_size": 1},
        "parallel": {
            "pp_degree": 1,
            "microbatches": 1,
            **{key: parallel[key] for key in KEPT if key in parallel},
        },
    }


def _without_model(own: list[str], further: tuple[str, ...]) -> InvalidInput:
    """The error of a document without a model; ``further`` are presets that the caller names."""
    if not own and not further:
        detail = "this section is absent. Give the sizes of a model, or name the preset of a model."
        return InvalidInput.at("/model", detail)
    named = (*own, *further)
    kind = "a preset of a device" if len(named) == 1 else "presets of devices"
    models = ", ".join(presets_of("model"))
    detail = f"found {', '.join(named)}, {kind}. Name a preset of a model: one of {models}."
    return InvalidInput.at("--preset" if further else "/presets", detail)
