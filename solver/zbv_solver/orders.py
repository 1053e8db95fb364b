"""Execution orders: every rank's list of actions, as arrays and as text.

An action is a stage, a letter and a microbatch; ``7I3`` in text. An order of p ranks keeps its actions
in three flat arrays, rank after rank, because plans reach hundreds of thousands of actions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput
from zbv_solver.problem import LETTERS, B, F, I, W

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")


class Action(NamedTuple):
    """One action: ``letter`` is one of F, I, W, B."""

    stage: int
    letter: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``7I3``; raises :class:`InvalidInput` on anything else, trailing characters included."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInput.at(
                "", f"found {text!r}; an action is a stage, one of F, I, W, B, and a microbatch, as in '7I3'."
            )
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, eq=False)
class Orders:
    """Action lists of p ranks, n actions in all.

    Attributes
    ----------
    stage, microbatch
        (n,) int32.
    letter
        (n,) int8 codes, indices into ``LETTERS``.
    offset
        (p + 1,) int64: rank r's actions are ``offset[r]:offset[r + 1]``.
    """

    stage: NDArray[np.int32]
    letter: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    offset: NDArray[np.int64]

    @classmethod
    def from_actions(cls, ranks: Sequence[Sequence[tuple[int, str, int]]]) -> Orders:
        """Pack lists of actions."""
        return cls.pack([[(s, LETTERS.index(letter), j) for s, letter, j in actions] for actions in ranks])

    @classmethod
    def pack(cls, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> Orders:
        """Pack lists of (stage, letter code, microbatch)."""
        rows = np.array([row for actions in ranks for row in actions], dtype=np.int32).reshape(-1, 3)
        offset = np.zeros(len(ranks) + 1, dtype=np.int64)
        np.cumsum([len(actions) for actions in ranks], out=offset[1:])
        return cls(
            np.ascontiguousarray(rows[:, 0]),
            rows[:, 1].astype(np.int8),
            np.ascontiguousarray(rows[:, 2]),
            offset,
        )

    @classmethod
    def from_text(cls, ranks: Sequence[Sequence[str]]) -> Orders:
        """Parse lists of action texts; errors point at ``/ranks/{rank}/{index}``."""
        parsed = []
        for rank, texts in enumerate(ranks):
            actions = []
            for index, text in enumerate(texts):
                try:
                    actions.append(Action.parse(text))
                except InvalidInput as error:
                    raise error.below(f"/ranks/{rank}/{index}") from None
            parsed.append(actions)
        return cls.from_actions(parsed)

    @property
    def pp_degree(self) -> int:
        """Number of ranks."""
        return len(self.offset) - 1

    def __len__(self) -> int:
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Orders):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays are compared, not hashed

    def slice_of(self, rank: int) -> slice:
        """Where a rank's actions lie in the flat arrays."""
        return slice(int(self.offset[rank]), int(self.offset[rank + 1]))

    def rank_index(self) -> NDArray[np.int32]:
        """The rank of every action, (n,)."""
        return np.repeat(np.arange(self.pp_degree, dtype=np.int32), np.diff(self.offset))

    def actions(self, rank: int) -> list[Action]:
        """A rank's actions in execution order."""
        part = self.slice_of(rank)
        return [
            Action(stage, LETTERS[letter], microbatch)
            for stage, letter, microbatch in zip(
                self.stage[part].tolist(),
                self.letter[part].tolist(),
                self.microbatch[part].tolist(),
                strict=True,
            )
        ]

    def text(self, rank: int) -> list[str]:
        """A rank's actions as text."""
        part = self.slice_of(rank)
        return [
            f"{stage}{LETTERS[letter]}{microbatch}"
            for stage, letter, microbatch in zip(
                self.stage[part].tolist(),
                self.letter[part].tolist(),
                self.microbatch[part].tolist(),
                strict=True,
            )
        ]

    def all_text(self) -> list[list[str]]:
        """Every rank's actions as text, as a plan file carries them."""
        return [self.text(rank) for rank in range(self.pp_degree)]


def first_in_first_out(orders: Orders, n_stages: int) -> Orders:
    """The same order with microbatches relabelled so that every stage runs every letter in ascending order.

    Always executable when the original is, and never slower: microbatches are alike, so the k-th action
    of a stage may as well be microbatch k's. I and B share one line; a W takes the oldest I without one.
    """
    letter, stage = orders.letter, orders.stage
    microbatch = np.zeros(len(orders), dtype=np.int32)
    _number(microbatch, stage, letter == F, n_stages)
    _number(microbatch, stage, (letter == I) | (letter == B), n_stages)
    inputs, weights = np.flatnonzero(letter == I), np.flatnonzero(letter == W)
    inputs = inputs[np.argsort(stage[inputs], kind="stable")]
    weights = weights[np.argsort(stage[weights], kind="stable")]
    microbatch[weights] = microbatch[inputs]
    return Orders(stage, letter, microbatch, orders.offset)


def _number(
    microbatch: NDArray[np.int32], stage: NDArray[np.int32], chosen: NDArray[np.bool_], n: int
) -> None:
    """Number the chosen actions of every stage 0, 1, 2, … in order."""
    at = np.flatnonzero(chosen)
    at = at[np.argsort(stage[at], kind="stable")]
    begins = np.searchsorted(stage[at], np.arange(n))
    microbatch[at] = np.arange(len(at)) - begins[stage[at]]
