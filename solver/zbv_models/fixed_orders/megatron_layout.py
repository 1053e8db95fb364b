"""Megatron-LM's ``--pipeline-model-parallel-layout``: reading, checking and writing it, and the flags around.

The grammar is that of ``PipelineParallelLayerLayout.parse_str_to_list`` and the rules are those of
``validate_layer_layout``, both in ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: stages
between ``|``, letters for modules, ``x*n`` and ``(…)*n`` for repetitions, and commas without a meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import without_vision
from zbv_solver.problem.layer import DECODER, EMBEDDING, LOSS, MTP

LONGEST = 100_000
"""Most characters of an expanded layout."""
SPELLED = 4
"""Most equal letters that are written one by one."""
_TOKEN = re.compile(
    r"\((?P<group>[^)]+)\)\*(?P<times>\d+)|(?P<one>.)\*(?P<count>\d+)|(?P<plain>.)", re.DOTALL
)

Stages = tuple[str, ...]
"""The letters of every stage, in model order."""


def parse_layout(text: str) -> Stages:
    """The stages of a layout.

    Raises
    ------
    InvalidInput
        When the text breaks the grammar.
    """
    expanded = _expanded(_expanded(text.replace(",", ""), groups=True), groups=False)
    wrong = re.search(f"[^{EMBEDDING}{DECODER}{MTP}{LOSS}|]", expanded)
    if wrong:
        raise InvalidInput.at(
            "",
            f"found {wrong[0]!r} in the layout {text[:200]!r}; it consists of E, t, m, L, |, x*n and (…)*n.",
        )
    return tuple(expanded.split("|"))


def _expanded(text: str, *, groups: bool) -> str:
    """The text with its groups repeated, or with its single characters repeated."""
    parts, length = [], 0
    for token in _TOKEN.finditer(text):
        part = token[0]
        if token["group"] is not None and groups:
            part, times = token["group"], int(token["times"])
        elif token["one"] is not None and not groups:
            part, times = token["one"], int(token["count"])
        else:
            times = 1
        length += len(part) * times
        if length > LONGEST:
            raise InvalidInput.at("", f"found a layout of more than {LONGEST} letters; repeat them less.")
        parts.append(part * times)
    return "".join(parts)


def check_layout(stages: Stages, ranks: int) -> int:
    """The virtual stages per rank of a layout that Megatron-LM accepts.

    Raises
    ------
    InvalidInput
        When the layout breaks a rule.
    """
    stages = without_vision(stages)
    chunks, rest = divmod(len(stages), ranks)
    letters = "".join(stages)
    last_chunk = stages[len(stages) - ranks :]
    rules = (
        (not rest, f"{len(stages)} stages; their number must be a multiple of the {ranks} ranks"),
        (letters[:1] == EMBEDDING and letters.count(EMBEDDING) == 1, "no single E at the beginning"),
        (letters[-1:] == LOSS and letters.count(LOSS) == 1, "no single L at the end"),
        (MTP not in letters or DECODER not in letters[letters.index(MTP) :], "a t behind an m"),
        (sum(MTP in stage for stage in stages) <= 1, "m in several stages; they must be in one"),
        (
            letters.count(MTP) == "".join(last_chunk).count(MTP),
            "an m before the last virtual stage of its rank",
        ),
    )
    for is_kept, found in rules:
        if not is_kept:
            raise InvalidInput.at("", f"Megatron-LM does not accept the layout: found {found}.")
    return chunks


def write_layout(stages: Stages) -> str:
    """A short text of a layout; a vision encoder has no letter in it."""
    # The last stage has no | behind it, so it does not join a repetition.
    *head, last = map(_spelled, without_vision(stages))
    parts = []
    for stage, run in groupby(head):
        count = len(list(run))
        parts.append(f"({stage}|)*{count}" if count > 1 else f"{stage}|")
    return "".join(parts) + last


def _spelled(stage: str) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(stage)]
    return "".join(letter * count if count <= SPELLED else f"{letter}*{count}" for letter, count in runs)


def layout_flags(stages: Stages, ranks: int, group: int | None) -> tuple[str, ...]:
    """The flags of ``pretrain_gpt.py`` that a layout needs, one ``--name value`` each.

    Parameters
    ----------
    group
        Microbatches per virtual stage in a row; None without virtual stages.

    Raises
    ------
    InvalidInput
        When Megatron-LM does not accept the layout.
    """
    check_layout(stages, ranks)
    letters = "".join(stages)
    flags = [
        f"--num-layers {letters.count(DECODER)}",
        f"--pipeline-model-parallel-size {ranks}",
    ]
    if len(stages) > 1:
        flags.append(f'--pipeline-model-parallel-layout "{write_layout(stages)}"')
    if MTP in letters:
        flags.append(f"--mtp-num-layers {letters.count(MTP)}")
    if group is not None:
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    return tuple(flags)


def recompute_flags(recompute: str, layers: int | None = None, modules: Sequence[str] = ()) -> list[str]:
    """The flags of recomputation, which ``TransformerConfig.__post_init__`` checks.

    Parameters
    ----------
    recompute
        ``none``, ``all`` or ``block``: Megatron-LM cannot recompute some stages and not others.
    layers
        With ``block``, the transformer layers of every virtual stage that are recomputed, its first ones. MTP
        layers are not (``megatron/core/transformer/multi_token_prediction.py``). With ``all``, those that
        keep one input together; None for 1.
    modules
        What is repeated of every layer; all of it, if empty.

    Raises
    ------
    InvalidInput
        When Megatron-LM cannot recompute like that.
    """
    if recompute == "none":
        return []
    if recompute not in ("all", "block"):
        raise InvalidInput.at(
            "", f"found recomputation {recompute!r}; Megatron-LM recomputes all stages alike, or none."
        )
    if modules:
        # Recomputation of activations of experts needs grouped products.
        grouped = ["--moe-grouped-gemm"] if "moe_act" in modules else []
        return [*grouped, "--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
    method = "uniform" if recompute == "all" else "block"
    return [
        "--recompute-granularity full",
        f"--recompute-method {method}",
        f"--recompute-num-layers {layers or 1}",
    ]
