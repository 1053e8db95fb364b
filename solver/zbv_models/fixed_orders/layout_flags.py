"""Flags of Megatron-LM and torchtitan that say how many layers a stage has, and the numbers they mean.

Megatron-LM's flags of full recomputation may be among them, so that a layout is scored as it runs.

Megatron-LM: ``__post_init__`` in ``megatron/core/transformer/transformer_config.py`` has the rules,
``get_num_layers_to_build`` in ``megatron/core/transformer/transformer_block.py`` the numbers. torchtitan:
``_generate_llm_fqn_per_model_part`` in ``torchtitan/distributed/pipeline_parallel.py``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from zbv_solver.errors import InvalidInput

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
    """Flags as they were given.

    Attributes
    ----------
    numbers
        By the short names of this module; switches are 1.
    layout
        The value of ``--pipeline-model-parallel-layout``.
    recompute
        The method of full recomputation, and its number of layers.
    """

    numbers: dict[str, int]
    layout: str | None
    recompute: tuple[str, int] | None = None

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
