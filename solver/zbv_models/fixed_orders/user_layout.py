"""A cut as people write it: for Megatron-LM, for torchtitan, or as numbers of layers.

What a text is follows from its form (:func:`read_layout`):

======================================  ==============================================================
``Et*3|(tt|)*29m|L``                    Megatron-LM's ``--pipeline-model-parallel-layout``
``8,7,7,8`` or ``[10, 12x6, 10]``       transformer layers per stage, ``12x6`` for six stages of 12
``--decoder-first-pipeline-…``          flags of Megatron-LM
``[["embedding", "decoder"], …]``       Megatron-LM's layout as a list
``[["tok_embeddings", "layers.0"], …]`` torchtitan's ``module_fqns_per_model_part``
``[["embedding", "block.0"], …]``       the names of the problem's layers, as in a plan's ``partition``
======================================  ==============================================================
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.cut import cut_of_partition
from zbv_solver.problem.layer import DECODER, EMBEDDING, LOSS, MTP, PART, VISION

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
    """A cut that a person gave."""

    bounds: tuple[int, ...]
    """(S+1,) boundaries as layer indices."""
    group: int | None = None
    """The group size that flags name, if any."""
    recompute: tuple[str, int] | None = None
    """The method of recomputation that flags name, ``uniform`` or ``block``, and its number of layers."""

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


_NUMBERS = {
    "--decoder-first-pipeline-num-layers": "first",
    "--decoder-last-pipeline-num-layers": "last",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
    "--num-layers-per-virtual-pipeline-stage": "each",
    "--microbatch-group-size-per-virtual-pipeline-stage": "group",
    "--num-layers": "blocks",
    "--mtp-num-layers": "mtp",
    "--pipeline-model-parallel-size": "ranks",
    "--recompute-num-layers": "recomputed",
    "--parallelism.pipeline_parallel_first_stage_less_layers": "input",
    "--parallelism.pipeline_parallel_last_stage_less_layers": "output",
}
_SWITCHES = {
    "--account-for-embedding-in-pipeline-split": "embedding",
    "--account-for-loss-in-pipeline-split": "loss",
}
_LAYOUT = "--pipeline-model-parallel-layout"
_RECOMPUTE = {"--recompute-granularity": ("full",), "--recompute-method": ("uniform", "block")}
"""The values that are taken. Which modules selective recomputation repeats is part of the problem."""
_PLACING = ("first", "last", "embedding", "loss", "chunks", "each", "input", "output")
"""What a layout says, too; ``megatron/training/arguments.py`` refuses most of them together with it."""


@dataclass(frozen=True)
class Words:
    """Flags as they were given."""

    numbers: dict[str, int]
    """By the short names of this module; switches are 1."""
    layout: str | None
    """The value of ``--pipeline-model-parallel-layout``."""
    recompute: tuple[str, int] | None = None
    """The method of full recomputation, and its number of layers."""

    @property
    def group(self) -> int | None:
        """Megatron-LM's group size."""
        return self.numbers.get("group")

    def has(self, *names: str) -> bool:
        """Whether any of these was given."""
        return any(name in self.numbers for name in names)

    def require(self, **own: int) -> None:
        """Raise :class:`InvalidInput` if flags say other numbers than those of the problem."""
        for name, number in own.items():
            if self.numbers.get(name, number) != number:
                (flag,) = (flag for flag, short in _NUMBERS.items() if short == name)
                raise InvalidInput.at(
                    "", f"found {flag} {self.numbers[name]}; the problem has {number}. Leave it out."
                )


def words_of(text: str) -> Words:
    """Split flags, ``--name value`` or ``--name=value``; raises :class:`InvalidInput` for other ones."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InvalidInput.at("", f"found {text[:60]!r}, which a shell cannot split: {error}.") from None
    numbers: dict[str, int] = {}
    layout, named = None, dict[str, str]()
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    at = 0
    while at < len(words):
        name, at = words[at], at + 1
        if name in _SWITCHES:
            numbers[_SWITCHES[name]] = 1
            continue
        if name not in (_LAYOUT, *_NUMBERS, *_RECOMPUTE):
            known = ", ".join((_LAYOUT, *_NUMBERS, *_SWITCHES, *_RECOMPUTE))
            raise InvalidInput.at("", f"found {name!r}; the flags of a layout are {known}. Leave it out.")
        if at == len(words):
            raise InvalidInput.at("", f"found {name} without a value.")
        value, at = words[at], at + 1
        if name == _LAYOUT:
            layout = value
        elif name in _RECOMPUTE:
            if value not in _RECOMPUTE[name]:
                rule = f"must be {' or '.join(_RECOMPUTE[name])}"
                rest = (
                    "" if value != "selective" else "; recompute_modules of the problem says what is repeated"
                )
                raise InvalidInput.at("", f"found {name} {value!r}; {rule}{rest}. Leave it out.")
            named[name] = value
        elif value.isdecimal() and len(value) < 7:
            numbers[_NUMBERS[name]] = int(value)
        else:
            raise InvalidInput.at("", f"found {name} {value!r}; must be a whole number.")
    placed = Words(numbers, layout, _recomputed(named, numbers))
    if layout is not None and placed.has(*_PLACING):
        raise InvalidInput.at("", f"found {_LAYOUT} with flags that also place layers; give one of them.")
    return placed


def _recomputed(named: dict[str, str], numbers: dict[str, int]) -> tuple[str, int] | None:
    """The method of recomputation; ``TransformerConfig.__post_init__`` needs all three flags."""
    layers = numbers.get("recomputed")
    if not named and layers is None:
        return None
    if len(named) < len(_RECOMPUTE) or not layers:
        raise InvalidInput.at(
            "",
            "found some flags of recomputation; Megatron-LM needs --recompute-granularity full, "
            "--recompute-method uniform or block, and --recompute-num-layers of at least 1.",
        )
    return named["--recompute-method"], layers


def counts_of_flags(words: Words, blocks: int, ranks: int, virtual_stages: int | None) -> list[int]:
    """The transformer layers of every stage.

    Raises
    ------
    InvalidInput
        When the executor would refuse these flags, or would lose layers.
    """
    given = words.numbers
    if words.has("input", "output"):
        return _of_torchtitan(words, blocks, ranks * (virtual_stages or 1))
    chunks = given.get("chunks", virtual_stages or 1)
    if "each" in given:
        effective = blocks + given.get("embedding", 0) + given.get("loss", 0)
        per_rank = _divided(effective, ranks, "layers", "ranks")
        chunks = _divided(per_rank, given["each"], "layers of a rank", "layers of a virtual stage")
    if virtual_stages not in (None, chunks):
        raise InvalidInput.at(
            "",
            f"found {chunks} virtual stages in the flags, and --virtual-stages {virtual_stages}; give one.",
        )
    if words.has("first", "last"):
        if words.has("embedding", "loss", "each"):
            raise InvalidInput.at(
                "",
                "found numbers of the first or the last stage with --account-for-… or with layers per "
                "virtual stage; Megatron-LM does not take both.",
            )
        per_rank_counts = _uneven(given.get("first"), given.get("last"), blocks, ranks)
        each = [_divided(count, chunks, "layers of a rank", "virtual stages") for count in per_rank_counts]
        return each * chunks
    effective = blocks + given.get("embedding", 0) + given.get("loss", 0)
    per_rank = _divided(effective, ranks, "layers, with those that stand for embedding and loss,", "ranks")
    counts = [_divided(per_rank, chunks, "layers of a rank", "virtual stages")] * (ranks * chunks)
    counts[0] -= given.get("embedding", 0)
    counts[-1] -= given.get("loss", 0)
    if min(counts) < 0:
        raise InvalidInput.at(
            "", "found too few layers: an end stage has none to stand for embedding or loss."
        )
    return counts


def _uneven(first: int | None, last: int | None, blocks: int, ranks: int) -> list[int]:
    """The transformer layers of every rank, given those of the first or the last one."""
    if 0 in (first, last):
        raise InvalidInput.at("", "found 0 layers for the first or the last stage; Megatron-LM needs more.")
    ends = [count for count in (first, last) if count is not None]
    left, middle = blocks - sum(ends), ranks - len(ends)
    if middle < 0 or left < 0 or (middle == 0) != (left == 0):
        wrong = (
            f"{left} would be lost"
            if left > 0
            else f"{-left} more than it has"
            if left < 0
            else "none is left"
        )
        raise InvalidInput.at(
            "",
            f"found {' and '.join(map(str, ends))} layers on the end stages and {middle} stages between "
            f"them; the model has {blocks} transformer layers, {wrong}. Megatron-LM does not accept that.",
        )
    each = _divided(left, middle, "layers between the end stages", "ranks there") if middle else 0
    return [
        *([] if first is None else [first]),
        *[each] * middle,
        *([] if last is None else [last]),
    ]


def _of_torchtitan(words: Words, blocks: int, stages: int) -> list[int]:
    """The transformer layers of every stage, with embedding and head counted as some layers."""
    if len(words.numbers) > words.has("input") + words.has("output"):
        raise InvalidInput.at("", "found flags of torchtitan and of Megatron-LM; give those of one.")
    weights = words.numbers.get("input", 1), words.numbers.get("output", 1)
    if stages == 1:
        return [blocks]
    each, more = divmod(blocks + sum(weights), stages)
    if each == 0 or max(weights) > each:
        raise InvalidInput.at(
            "",
            f"found {blocks} layers and weights {weights[0]} and {weights[1]} on {stages} stages; torchtitan "
            f"needs one layer per stage, and no weight may exceed the {each} of the smallest stage.",
        )
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= weights[0]
    counts[-1] -= weights[1]
    return counts


def _divided(number: int, by: int, what: str, parts: str) -> int:
    share, rest = divmod(number, max(1, by))
    if rest or by < 1:
        raise InvalidInput.at("", f"found {number} {what} for {by} {parts}; they must divide evenly.")
    return share
