"""What a type of ``config.json`` has that its keys do not say: records, which the files of families fill.

The sources are the modeling files of transformers 5 (``models/TYPE/modeling_TYPE.py``), and for types that
transformers does not have the files in the repositories of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys

Window = Literal["all", "alternate", "switch"]
SPARE = "abcdefghijklmnopqrstuvwxyz"
"""Letters of variants."""
SLIDING = ("sliding_window", "sliding_window_size")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model in order."""

    letters: tuple[str, ...]
    """Letters of ``pattern``: two for a block, one for half a block, none for a block that does nothing."""
    variants: tuple[Section, ...] = ()
    """The variants that lower-case letters stand for."""

    def places(self, half: int, likes: str) -> list[int]:
        """The places of blocks, from 0, whose half (0 or 1) is like one of some letters."""
        known = {each["letter"]: each["like"] for each in self.variants}
        return [
            place
            for place, block in enumerate(self.letters)
            if len(block) > half and known.get(block[half], block[half]) in likes
        ]

    def varied(self, half: int, places: Collection[int], **sizes: Any) -> Blocks:
        """The same, where a half (0 or 1) of the blocks at some places has other sizes.

        ``sizes`` are keys of the section ``model``; None leaves one out.
        """
        kept = {key: value for key, value in sizes.items() if value is not None}
        known = {each["letter"]: each for each in self.variants}
        letters, variants, new = list(self.letters), list(self.variants), dict[str, str]()
        for place in places if kept else ():
            block = letters[place]
            old = block[half]
            if old not in new:
                taken = {each["letter"] for each in variants}
                new[old] = next((each for each in SPARE if each not in taken), "")
                variants.append({**known.get(old, {"like": old}), "letter": new[old], **kept})
            letters[place] = block[:half] + new[old] + block[half + 1 :]
        used = set("".join(letters))
        return Blocks(tuple(letters), tuple(each for each in variants if each["letter"] in used))


@dataclass(frozen=True)
class TextKind:
    """A type of language model."""

    model: Section = field(default_factory=dict)
    """Values of the section ``model`` that are not those of Llama: RMSNorm, a gate, rotary positions, no
    biases."""
    window: Window | None = None
    """Which blocks have the window: ``all``, ``alternate`` (all but every n-th; ``full_every``),
    ``switch`` (with ``use_sliding_window``, those from ``max_window_layers``), or none."""
    state_space: Callable[[Keys], Section] | None = None
    """The costs of blocks that have no attention."""
    chunked: bool = False
    """Whether the window is a piece of the sequence."""
    halves: bool = False
    """Whether a layer is half a block."""
    full_every: int | None = None
    """Every n-th block attends to all tokens, unless the file says so."""
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    """The keys of the widths of experts, and of MLPs."""
    shared_experts: int = 0
    """Shared experts that the file does not count."""
    defaults: str = ""
    """The type whose defaults it has, if these are not its own."""
    computed: Section = field(default_factory=dict)
    """Defaults that transformers computes."""
    mixers: Mapping[Any, str] = field(default_factory=dict)
    """Letters of ``pattern`` by the names of layers, where those of other types do not fit."""
    without_effect: str = ""
    """Keys of this type alone that change no costs, with spaces between."""
    first: Callable[[Keys, int], str] | None = None
    second: Callable[[Keys, int], str] | None = None
    """Letters of the first and of the second halves of a number of blocks, where the file has no list of
    their names, and keys of other types do not say them either."""
    blocks: Callable[[Keys, int], Blocks] | None = None
    """The blocks of a number of layers, where the keys of other types do not say what they are."""
    translate: Callable[[Section], Section] | None = None
    """Replaces keys that only this type has by those that zbv reads: from the file to such a file."""
    vary: Callable[[Keys, Blocks], Blocks] | None = None
    """Blocks that differ in their sizes."""
    more: Callable[[Keys], Section] | None = None
    """Further values of the section ``model``."""

    @property
    def window_keys(self) -> tuple[str, ...]:
        """The names of the key of the window's width."""
        return ("attention_chunk_size",) if self.chunked else SLIDING


@dataclass(frozen=True)
class VisionKind:
    """A type of vision encoder."""

    model: Section = field(default_factory=dict)
    """Values of the section ``vision`` that are not those of CLIP: LayerNorm, biases, no gate, learned
    positions."""
    defaults: str = ""
    """The type whose defaults it has, if these are not its own."""
    width: tuple[str, ...] = ("hidden_size", "vt_hidden_size")
    ffn: tuple[str, ...] = ("intermediate_size", "vt_intermediate_size")
    """The names of the key of its width, and of that of the width of its MLPs."""


@dataclass(frozen=True)
class Wrapper:
    """A type of model with a language model and a vision encoder."""

    text: str
    vision: str = ""
    """The types of its parts, where the file does not name them; of an encoder without formulas, none: the
    language model is read alone."""
    merged: str | None = None
    """The key of how many patches become one token, in each direction; None for one patch."""
    projector: tuple[str, ...] = ("model",)
    """Widths between the projector's matrices: of the merged patches (``merged``), of a patch (``patch``),
    of the model (``model``), or what a key says."""
    pooled: bool = False
    """Whether merged patches are averaged."""
    flat: bool = False
    """Whether files may have the language model's keys without ``text_config``, next to ``vision_config``."""
    tied: Literal["file", "text", "either"] = "file"
    """Which ``tie_word_embeddings`` counts where the file and its ``text_config`` differ."""
