"""What an executor calls the layers of a model: vision, embedding, transformer, MTP, and loss.

Executors cut between whole modules. Layers of a finer model belong to the module before them, and a vision
encoder to the stage of the embedding: Megatron-LM's layouts have no letter for it, and the models of
Megatron-Bridge build it where the first stage does its work before the decoder (``pre_process``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from zbv_solver.errors import InvalidInput
from zbv_solver.partition.runs import First
from zbv_solver.problem.layer import DECODER, EMBEDDING, LOSS, MTP, PART, VISION, Model, letter_of
from zbv_solver.problem.layered_problem import LayeredProblem


@dataclass(frozen=True)
class Modules:
    """The letter of every layer, copies counted.

    Raises :class:`InvalidInput` unless a vision encoder and an embedding come first, as far as there are any,
    transformer layers next, then MTP layers, and at most one loss is last.
    """

    model: Model
    letters: tuple[str, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch("v*E?t+m*L?", "".join(self.letters)) or self.letters[0] == PART:
            raise InvalidInput.at(
                "/layers",
                f"found layers with the letters {short(''.join(self.letters))}; executors take a vision "
                f"encoder (v), an embedding (E), then transformer layers (t), MTP layers (m) and the loss "
                f"(L). Letters follow from names: rename the layers, such as vision, embedding, block, mtp, "
                f"head.",
            )

    @classmethod
    def of(cls, model: Model) -> Modules:
        """The modules of a model, by the names of its layers, such as ``embedding``, ``mtp`` and ``head``."""
        return cls(model, tuple(letter_of(layer.name) for layer in model.each))

    @property
    def late(self) -> str | None:
        """The first MTP layer."""
        return self.model.names[self.letters.index(MTP)] if MTP in self.letters else None

    def of_stage(self, begin: int, end: int) -> str:
        """The letters of the layers ``[begin, end)``; an embedding and a loss without a layer are added."""
        text = "".join(self.letters[begin:end])
        if begin == 0 and EMBEDDING not in self.letters:
            text = re.sub(f"^{VISION}*", rf"\g<0>{EMBEDDING}", text)
        if end == len(self.letters) and LOSS not in self.letters:
            text += LOSS
        return text

    def kept_whole(self, problem: LayeredProblem) -> LayeredProblem:
        """The problem with rules: modules stay whole, and so do all MTP layers, and vision with embedding."""
        names = self.model.names
        groups = [
            (before, name)
            for (before, name), letter in zip(pairwise(names), self.letters[1:], strict=True)
            if letter == PART
        ]
        for joined in ((MTP,), (VISION, EMBEDDING)):
            own = [name for name, letter in zip(names, self.letters, strict=True) if letter in joined]
            groups += [(own[0], own[-1])] if len(own) > 1 else []
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

    def can_group(self, problem: LayeredProblem) -> bool:
        """Whether transformer layers, and no others, are recomputed, so that several may keep one input.

        Megatron-LM refuses groups with multi-token prediction (``multi_token_prediction.py``).
        """
        return self.first_blocks(problem) == First() and problem.model.can_recompute

    def bounds(self, stages: tuple[str, ...]) -> tuple[int, ...]:
        """The boundaries, as layer indices, of stages with these letters; those of vision may be left out.

        Raises :class:`InvalidInput` when the stages have other modules than the model.
        """
        named = without_vision(stages)
        (expected,), found = without_vision((self.of_stage(0, len(self.letters)),)), "".join(named)
        if found != expected:
            raise InvalidInput.at("", f"found the modules {short(found)}; the model has {short(expected)}.")
        # The places where modules begin; an embedding or a loss without a layer lies in no layer.
        begins = [at for at, letter in enumerate(self.letters) if letter not in (PART, VISION)]
        begins = [0, *begins[EMBEDDING in self.letters :]]
        begins += [len(self.letters)] * (1 + (LOSS not in self.letters))
        bounds, done = [0], 0
        for stage in named:
            done += len(stage)
            bounds.append(begins[done])
        bounds[-1] = len(self.letters)
        return tuple(bounds)


def without_vision(stages: tuple[str, ...]) -> tuple[str, ...]:
    """The letters of stages without the vision encoder, which belongs to the embedding."""
    return tuple(stage.replace(VISION, "") for stage in stages)


def short(letters: str) -> str:
    """``Etttt`` as ``Et*4``."""
    return re.sub(r"(.)\1{3,}", lambda run: f"{run[1]}*{len(run[0])}", letters)
