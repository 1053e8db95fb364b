"""What an executor calls the layers of a model: embedding, transformer layers, MTP layers, and loss.

Executors cut between whole modules. Layers of a finer model belong to the module before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from zbv_solver.errors import InvalidInput
from zbv_solver.executors.runs import First
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem

EMBEDDING, DECODER, MTP, LOSS, PART = "E", "t", "m", "L", ""
"""Megatron-LM's letters of modules, and the mark of a layer that belongs to the module before it."""

_RULES = (
    (PART, r"norm|\.(mlp|ffn|feed_forward|moe)$|^final_"),
    (MTP, r"mtp|nextn|^prediction"),
    (EMBEDDING, r"embed|wte"),
    (LOSS, r"head|loss|logits|classifier|^output"),
)
"""Letters by what a layer's name contains; any other layer is a transformer layer."""


@dataclass(frozen=True)
class Modules:
    """The letter of every layer, copies counted.

    Raises :class:`InvalidInput` unless at most the first layer is an embedding, transformer layers come next,
    then MTP layers, and at most one loss is last.
    """

    model: Model
    letters: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, letter in zip(self.model.names, self.letters, strict=True):
            if letter not in (EMBEDDING, DECODER, MTP, LOSS, PART):
                raise InvalidInput.at(
                    "/layers",
                    f"found letter {letter!r} for layer {name!r}; must be E, t, m, L, or empty for a part of "
                    f"the module before it.",
                )
        if not re.fullmatch("E?t+m*L?", "".join(self.letters)) or self.letters[0] == PART:
            raise InvalidInput.at(
                "/layers",
                f"found layers with the letters {_short(''.join(self.letters))}; executors take an embedding "
                f"(E), then transformer layers (t), MTP layers (m) and the loss (L). Name the layers like "
                f"that, or give the letters.",
            )

    @classmethod
    def of(cls, model: Model, letters: Mapping[str, str] | None = None) -> Modules:
        """The modules of a model.

        Parameters
        ----------
        letters
            Letters by name of a layer (without the number of the copy). Other layers have letters by their
            names, such as ``embedding``, ``mtp`` and ``head``.
        """
        given = letters or {}
        unknown = set(given) - {layer.name for layer in model.layers}
        if unknown:
            raise InvalidInput.at("/layers", f"found a letter for {min(unknown)!r}, which is not a layer.")
        return cls(model, tuple(given.get(layer.name, _letter(layer.name)) for layer in model.each))

    @property
    def late(self) -> str | None:
        """The first MTP layer."""
        return self.model.names[self.letters.index(MTP)] if MTP in self.letters else None

    def of_stage(self, begin: int, end: int) -> str:
        """The letters of the layers ``[begin, end)``; an embedding and a loss without a layer are added."""
        text = "".join(self.letters[begin:end])
        if begin == 0 and EMBEDDING not in self.letters:
            text = EMBEDDING + text
        if end == len(self.letters) and LOSS not in self.letters:
            text += LOSS
        return text

    def kept_whole(self, problem: LayeredProblem) -> LayeredProblem:
        """The problem with rules that keep the modules whole, and all MTP layers in one stage."""
        names = self.model.names
        groups = [
            (before, name)
            for (before, name), letter in zip(pairwise(names), self.letters[1:], strict=True)
            if letter == PART
        ]
        mtp = tuple(name for name, letter in zip(names, self.letters, strict=True) if letter == MTP)
        groups += [(mtp[0], mtp[-1])] if len(mtp) > 1 else []
        rules = replace(problem.rules, together=(*problem.rules.together, *groups))
        return replace(problem, rules=rules)

    def first_blocks(self, problem: LayeredProblem) -> First | None:
        """The first transformer layers of stages, as what is recomputed.

        None if these cannot be counted: some cannot be recomputed, or cannot be cut apart.
        """
        modules: list[str] = []
        for letter in self.letters:
            modules.append(letter or modules[-1])
        able = [layer.recompute is not None for layer in self.model.each]
        parts = pairwise(self.kept_whole(problem).places.tolist())
        if any(self.letters[begin:end].count(DECODER) > 1 for begin, end in parts) or not all(
            is_able for is_able, module in zip(able, modules, strict=True) if module == DECODER
        ):
            return None
        of = zip(self.model.names, able, modules, strict=True)
        return First(others=frozenset(name for name, is_able, module in of if is_able and module != DECODER))

    def bounds(self, stages: tuple[str, ...]) -> tuple[int, ...]:
        """The boundaries, as layer indices, of stages with these letters.

        Raises :class:`InvalidInput` when the stages have other modules than the model.
        """
        expected = self.of_stage(0, len(self.letters))
        found = "".join(stages)
        if found != expected:
            raise InvalidInput.at("", f"found the modules {_short(found)}; the model has {_short(expected)}.")
        # The places where modules begin; an embedding or a loss without a layer lies in no layer.
        begins = [at for at, letter in enumerate(self.letters) if letter != PART]
        begins = [0] * (EMBEDDING not in self.letters) + begins
        begins += [len(self.letters)] * (1 + (LOSS not in self.letters))
        bounds, done = [0], 0
        for stage in stages:
            done += len(stage)
            bounds.append(begins[done])
        bounds[-1] = len(self.letters)
        return tuple(bounds)


def _letter(name: str) -> str:
    lowered = name.lower()
    return next((letter for letter, pattern in _RULES if re.search(pattern, lowered)), DECODER)


def _short(letters: str) -> str:
    """``Etttt`` as ``Et*4``."""
    return re.sub(r"(.)\1{3,}", lambda run: f"{run[1]}*{len(run[0])}", letters)
