"""A cut as people write it: for Megatron-LM, for torchtitan, or as numbers of layers.

What a text is follows from its form (:func:`read_layout`):

======================================  ==============================================================
``Et*3|(tt|)*29m|L``                    Megatron-LM's ``--pipeline-model-parallel-layout``
``8,7,7,8`` or ``[10, 12x6, 10]``       transformer layers per stage, ``12x6`` for six stages of 12
``--decoder-first-pipeline-…``          flags of Megatron-LM (:mod:`.layout_flags`)
``[["embedding", "decoder"], …]``       Megatron-LM's layout as a list
``[["tok_embeddings", "layers.0"], …]`` torchtitan's ``module_fqns_per_model_part``
``[["embedding", "block.0"], …]``       the names of the problem's layers, as in a plan's ``partition``
======================================  ==============================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.cut import cut_of_partition
from zbv_solver.problem.layer_letters import DECODER, EMBEDDING, LOSS, MTP, PART, VISION

from zbv_models.fixed_orders.layout_flags import counts_of_flags, words_of
from zbv_models.fixed_orders.megatron_layout import Stages, parse_layout

_COUNTS = re.compile(r"\[?\s*\d+(\s*[x*]\s*\d+)?(\s*[-,;/\s]\s*\d+(\s*[x*]\s*\d+)?)*\s*\]?")
_NAMES = (
    (EMBEDDING, r"E|embedding|tok_embeddings"),
    (DECODER, r"t|decoder|layers\.\d+"),
    (MTP, r"m|mtp"),
    (LOSS, r"L|loss|lm_head|output"),
    (PART, r"norm"),
    (VISION, r"vision_\w+|perception_emb_norm"),
)
"""Names of modules: those of ``LayerType`` in ``megatron/core/transformer/enums.py``, and those that
``_generate_llm_fqn_per_model_part`` in ``torchtitan/distributed/pipeline_parallel.py`` writes."""


@dataclass(frozen=True)
class UserLayout:
    """A cut that a person gave.

    Attributes
    ----------
    bounds
        (S+1,) boundaries as layer indices.
    group
        The group size that flags name, if any.
    recompute
        The method of recomputation that flags name, ``uniform`` or ``block``, and its number of layers.
    """

    bounds: tuple[int, ...]
    group: int | None = None
    recompute: tuple[str, int] | None = None

    @property
    def n_stages(self) -> int:
        """Number of stages S."""
        return len(self.bounds) - 1


def read_layout(text: str, modules: Modules, ranks: int, virtual_stages: int | None = None) -> UserLayout:
    """The cut that a text stands for.

    Parameters
    ----------
    virtual_stages
        Stages per rank, for flags that do not say it.

    Raises
    ------
    InvalidInput
        When the text has no known form, or stands for other layers than those of the model.
    """
    text = text.strip()
    if not text:
        raise InvalidInput.at("", "found nothing; give a layout such as Et*8|t*7|t*7|t*8L, or 8,7,7,8.")
    group = recompute = None
    if re.match(r"-\s*\d", text):
        raise InvalidInput.at("", f"found {text[:60]!r}; numbers of layers must be at least 0.")
    if text.startswith("-"):
        words = words_of(text)
        letters = modules.letters
        words.require(blocks=letters.count(DECODER), mtp=letters.count(MTP), ranks=ranks)
        group, recompute = words.group, words.recompute
        if words.layout is not None:
            text = words.layout
        else:
            counts = counts_of_flags(words, letters.count(DECODER), ranks, virtual_stages)
            return UserLayout(modules.bounds(_of_counts(counts, modules)), group, recompute)
    if _COUNTS.fullmatch(text):
        return UserLayout(modules.bounds(_of_counts(_counts(text), modules)), group, recompute)
    if text.startswith("["):
        return UserLayout(_of_names(_lists(text), modules), group, recompute)
    return UserLayout(modules.bounds(parse_layout(text)), group, recompute)


def _counts(text: str) -> list[int]:
    found: list[int] = []
    for each in re.finditer(r"(\d+)(?:\s*[x*]\s*(\d+))?", text):
        found += [int(each[1])] * min(int(each[2] or 1), 100_000)
    return found


def _of_counts(counts: Sequence[int], modules: Modules) -> Stages:
    """Stages with these numbers of transformer layers; MTP layers and the loss are in the last one."""
    blocks = modules.letters.count(DECODER)
    if sum(counts) != blocks:
        lost = blocks - sum(counts)
        wrong = f"so {lost} would be lost" if lost > 0 else f"{-lost} fewer"
        raise InvalidInput.at(
            "",
            f"found {sum(counts)} transformer layers on {len(counts)} stages; the model has {blocks}, "
            f"{wrong}. Give numbers that add up to {blocks}.",
        )
    stages = [DECODER * count for count in counts]
    stages[0] = EMBEDDING + stages[0]
    stages[-1] += MTP * modules.letters.count(MTP) + LOSS
    return tuple(stages)


def _lists(text: str) -> list[list[str]]:
    rule = "a list of stages, each a list of names"
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidInput.at("", f"found {text[:60]!r}; it begins like {rule}, but is not JSON.") from None
    if not isinstance(found, list) or not found:
        raise InvalidInput.at("", f"found {text[:60]!r}; must be {rule}.")
    for stage in found:
        if not isinstance(stage, list) or not all(isinstance(name, str) for name in stage):
            raise InvalidInput.at("", f"found the stage {json.dumps(stage)[:60]}; must be {rule}.")
    return found


def _of_names(parts: list[list[str]], modules: Modules) -> tuple[int, ...]:
    """The boundaries of stages given by names."""
    model = modules.model
    named = [name for part in parts for name in part]
    if set(named) <= set(model.names):
        return cut_of_partition(model, parts)
    numbers = [int(name.removeprefix("layers.")) for name in named if re.fullmatch(r"layers\.\d+", name)]
    if numbers != list(range(len(numbers))):
        raise InvalidInput.at("", "found layers that are not layers.0, layers.1, … in this order, each once.")
    letters = ["".join(map(_letter, part)) for part in parts]
    if EMBEDDING not in "".join(letters)[:1] or LOSS not in "".join(letters)[-1:]:
        raise InvalidInput.at(
            "",
            "found stages that do not begin with the embedding (tok_embeddings, embedding) and end with the "
            "head (lm_head, output, loss).",
        )
    return modules.bounds(tuple(letters))


def _letter(name: str) -> str:
    for letter, pattern in _NAMES:
        if re.fullmatch(pattern, name.strip(), re.IGNORECASE if len(name) > 1 else 0):
            return "" if letter == VISION else letter
    raise InvalidInput.at(
        "",
        f"found the module {name!r}; known are embedding, decoder, mtp and loss of Megatron-LM, "
        f"tok_embeddings, layers.N, norm and lm_head of torchtitan, and the names of the problem's layers.",
    )
