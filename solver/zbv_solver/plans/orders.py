"""Execution orders: the list of actions of every rank, as arrays and as text.

An action is a stage, a letter and a microbatch, such as ``7I3``. Plans may have millions of actions, so the
actions of all ranks are kept in three flat arrays, rank after rank. A pair, such as ``0F5+3I2``, is an F and
an I or B that a rank runs together: two actions, one after the other, of which the first is marked. Copies to
the host, such as ``0O3``, take no time of their rank: they are kept apart, each with the action it precedes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray
from zbv_solver.problem.numeric import MAX_CELLS
from zbv_solver.problem.problem import COPY_LETTERS, LETTERS, B, F, I, Problem, W
from zbv_solver.problem.stages import pair_duration

_ALL_LETTERS = LETTERS + COPY_LETTERS
_ACTION = re.compile(rf"(0|[1-9][0-9]{{0,8}})([{_ALL_LETTERS}])(0|[1-9][0-9]{{0,8}})")


class Action(NamedTuple):
    """One action or copy: ``letter`` is one of F, I, W, B, and O, D, R of a copy to the host."""

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
                "",
                f"found {str(text)[:60]!r}; an action is a stage, one of F, I, W, B (or O, D, R of a copy to "
                f"the host), and a microbatch: 7I3.",
            )
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, eq=False)
class Orders:
    """Action lists of p ranks, n actions in all."""

    stage: NDArray[np.int32]
    letter: NDArray[np.int8]
    """(n,) int8 codes, indices into ``LETTERS``."""
    microbatch: NDArray[np.int32]
    """(n,) int32, like the stage."""
    offset: NDArray[np.int64]
    """(p + 1,) int64: rank r's actions are ``offset[r]:offset[r + 1]``."""
    paired: BoolArray | None = None
    """(n,) whether an F runs as a pair with the action after it; None if there are no pairs."""
    copies: NDArray[np.int32] | None = None
    """(k, 4) int32, entries of copies in the order of the list: the index of the action that each precedes,
    its letter code, stage and microbatch. None if there are no copies."""

    @classmethod
    def from_actions(cls, ranks: Sequence[Sequence[tuple[int, str, int]]]) -> Orders:
        """Pack lists of actions and copies."""
        rows = [[(s, _ALL_LETTERS.index(letter), j) for s, letter, j in actions] for actions in ranks]
        return cls.of_entries([np.array(row, dtype=np.int32).reshape(-1, 3) for row in rows])

    @classmethod
    def pack(cls, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> Orders:
        """Pack lists of (stage, letter code, microbatch)."""
        return cls.of_rows([np.array(actions, dtype=np.int32).reshape(-1, 3) for actions in ranks])

    @classmethod
    def of_rows(cls, ranks: Sequence[NDArray[np.int32]]) -> Orders:
        """Pack one (n, 3) array per rank: stage, letter code, microbatch."""
        rows = np.concatenate(ranks) if ranks else np.empty((0, 3), dtype=np.int32)
        return cls(
            np.ascontiguousarray(rows[:, 0]),
            rows[:, 1].astype(np.int8),
            np.ascontiguousarray(rows[:, 2]),
            _offsets(ranks),
        )

    @classmethod
    def of_entries(cls, ranks: Sequence[NDArray[np.int32]], paired: BoolArray | None = None) -> Orders:
        """Pack one (n, 3) array per rank whose letter codes may be those of copies.

        ``paired`` says, of all entries of all ranks, which begin a pair.
        """
        rows = np.concatenate(ranks) if ranks else np.empty((0, 3), dtype=np.int32)
        is_copy = rows[:, 1] >= len(LETTERS)
        actions = [rank[rank[:, 1] < len(LETTERS)] for rank in ranks]
        orders = cls.of_rows(actions)
        if paired is not None and paired.any():
            orders = replace(orders, paired=paired[~is_copy])
        if not is_copy.any():
            return orders
        precedes = np.cumsum(~is_copy)[is_copy]  # as many actions come before it
        return replace(
            orders, copies=np.column_stack([precedes, rows[is_copy][:, [1, 0, 2]]]).astype(np.int32)
        )

    @classmethod
    def from_text(cls, ranks: Sequence[Sequence[str]]) -> Orders:
        """Parse lists of actions and pairs as texts; errors point at ``/ranks/{rank}/{index}``."""
        parsed = _parse([text for texts in ranks for text in texts])
        if parsed is None:
            return cls.from_actions(_parse_each(ranks))
        stage, letter, microbatch, paired = parsed
        offset = _offsets(ranks)
        if paired.any():
            begins = np.append(np.flatnonzero(~np.append(False, paired[:-1])), len(paired))  # of entries
            offset = begins[offset]
        if (letter < len(LETTERS)).all():
            return cls(stage, letter, microbatch, offset, paired if paired.any() else None)
        for rank, (begin, end) in enumerate(pairwise(offset.tolist())):
            if begin < end and letter[end - 1] >= len(LETTERS):
                rule = "a copy must come before the backward of its microbatch, on the same rank"
                raise InvalidInput.at(
                    f"/ranks/{rank}/{len(ranks[rank]) - 1}", f"found {ranks[rank][-1]!r}; {rule}."
                )
        rows = np.column_stack([stage, letter.astype(np.int32), microbatch])
        return cls.of_entries([rows[begin:end] for begin, end in pairwise(offset.tolist())], paired)

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
        """The slice of the flat arrays with a rank's actions."""
        return slice(int(self.offset[rank]), int(self.offset[rank + 1]))

    def renamed(self, entry: IntArray) -> Orders:
        """The same order with microbatch ``entry[k]`` (m,) in the place of microbatch k."""
        name = entry.astype(np.int32)
        renamed = replace(self, microbatch=name[self.microbatch])
        if self.copies is None:
            return renamed
        return replace(
            renamed, copies=np.column_stack([self.copies[:, :3], name[self.copies[:, 3]]]).astype(np.int32)
        )

    def without_pairs(self) -> Orders:
        """The same order, in which the actions of every pair run one after the other."""
        return self if self.paired is None else replace(self, paired=None)

    def without_copies(self) -> Orders:
        """The same order, in which everything stays on the device."""
        return self if self.copies is None else replace(self, copies=None)

    def entries(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Actions and copies in the order of the lists, and where each rank's begin.

        Returns
        -------
        rows
            (n + k, 3) stage, letter code, microbatch.
        offset
            (p + 1,) rank r's entries are ``offset[r]:offset[r + 1]``.
        """
        rows = np.column_stack([self.stage, self.letter.astype(np.int32), self.microbatch])
        if self.copies is None:
            return rows, self.offset
        before = self.copies[:, 0]
        rows = np.insert(rows, before, self.copies[:, [2, 1, 3]], axis=0)
        # A copy before the first action of a rank is an entry of this rank.
        return rows, self.offset + np.searchsorted(before, self.offset, side="left")

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

    def pairs(self, rank: int) -> tuple[int, ...]:
        """The places in :meth:`actions` of the F's that run as a pair with the action after them."""
        if self.paired is None:
            return ()
        return tuple(np.flatnonzero(self.paired[self.slice_of(rank)]).tolist())

    def copies_of(self, rank: int) -> tuple[tuple[int, Action], ...]:
        """A rank's copies in their order, each with the place in :meth:`actions` of the action after it."""
        if self.copies is None:
            return ()
        part = self.slice_of(rank)
        rows = self.copies[(part.start <= self.copies[:, 0]) & (self.copies[:, 0] < part.stop)]
        return tuple(
            (at - part.start, Action(stage, _ALL_LETTERS[letter], microbatch))
            for at, letter, stage, microbatch in rows.tolist()
        )

    def text_at(self, index: int) -> str:
        """The action at an index of the flat arrays as text, for messages; letter codes may be invalid."""
        code = int(self.letter[index])
        letter = LETTERS[code] if 0 <= code < len(LETTERS) else f"(letter {code})"
        return f"{self.stage[index]}{letter}{self.microbatch[index]}"

    def text(self, rank: int, at_most: int | None = None) -> list[str]:
        """A rank's actions, pairs and copies as text, or those of its first ``at_most`` actions."""
        part = self.slice_of(rank)
        stop = part.stop if at_most is None else min(part.stop, part.start + at_most)
        return self._texts(slice(part.start, stop))

    def all_text(self) -> list[list[str]]:
        """The actions, pairs and copies of all ranks as text, as in a plan file."""
        if self.paired is not None or self.copies is not None:
            return [self.text(rank) for rank in range(self.pp_degree)]
        texts = self._texts(slice(None))
        return [texts[begin:end] for begin, end in pairwise(self.offset.tolist())]

    def _texts(self, part: slice) -> list[str]:
        """Actions, pairs and copies as text."""
        texts = self._action_texts(part)
        if self.paired is None and self.copies is None:
            return texts
        is_first = np.zeros(len(texts), np.bool_) if self.paired is None else self.paired[part]
        is_second = np.append(False, is_first[:-1])
        before: dict[int, list[str]] = {}
        for at, letter, stage, microbatch in [] if self.copies is None else self.copies.tolist():
            before.setdefault(at - part.start, []).append(f"{stage}{_ALL_LETTERS[letter]}{microbatch}")
        found: list[str] = []
        for at, (text, first, second) in enumerate(zip(texts, is_first, is_second, strict=True)):
            found += before.get(at, ())
            if not second:
                found.append(f"{text}+{texts[at + 1]}" if first and at + 1 < len(texts) else text)
        return found

    def _action_texts(self, part: slice) -> list[str]:
        stage, letter, microbatch = self.stage[part], self.letter[part], self.microbatch[part]
        if not all(n.min(initial=0) >= 0 and n.max(initial=0) <= MAX_CELLS for n in (stage, microbatch)):
            # Orders that are not verified yet may have such numbers, for which a table would be too large.
            return [
                f"{s}{LETTERS[k]}{j}"
                for s, k, j in zip(stage.tolist(), letter.tolist(), microbatch.tolist(), strict=True)
            ]
        heads = _spelled(
            stage * np.int32(len(LETTERS)) + letter,
            lambda k: f"{k // len(LETTERS)}{LETTERS[k % len(LETTERS)]}",
        )
        texts: list[str] = (heads + _spelled(microbatch, str)).tolist()
        return texts


def _spelled(numbers: NDArray[np.int32], spell: Callable[[int], str]) -> NDArray[np.object_]:
    """The text of every number; equal numbers are converted once."""
    seen = np.flatnonzero(np.bincount(numbers))
    table = np.empty(int(seen.max(initial=-1)) + 1, dtype=object)
    table[seen] = [spell(number) for number in seen.tolist()]
    return table[numbers]


def _offsets(ranks: Sequence[Sequence[object] | NDArray[np.int32]]) -> NDArray[np.int64]:
    """Begin of every list in their concatenation, and the end of the last one."""
    offset = np.zeros(len(ranks) + 1, dtype=np.int64)
    np.cumsum([len(actions) for actions in ranks], out=offset[1:])
    return offset


def _parse_each(ranks: Sequence[Sequence[str]]) -> list[list[Action]]:
    """Parse entry by entry, which is slow but finds the wrong one."""
    parsed = []
    for rank, texts in enumerate(ranks):
        actions = []
        for index, text in enumerate(texts):
            try:
                actions += _parse_entry(text)
            except InvalidInput as error:
                raise error.below(f"/ranks/{rank}/{index}") from None
        parsed.append(actions)
    return parsed


def _parse_entry(text: str) -> list[Action]:
    """One action, or the two of a pair."""
    actions = [Action.parse(part) for part in (text.split("+") if isinstance(text, str) else [text])]
    letters = "".join(action.letter for action in actions)
    if len(letters) > 1 and letters not in ("FI", "FB"):
        raise InvalidInput.at("", f"found {text[:60]!r}; a pair is an F and then an I or B: 0F5+3I2.")
    return actions


_Parsed = tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32], BoolArray]


def _parse(texts: list[str]) -> _Parsed | None:
    """Stages, letters and microbatches of all actions at once, and which of them begin a pair.

    None if a text is neither an action nor a pair.
    """
    try:
        joined = "\n".join([*texts, ""]).encode("ascii")
    except (TypeError, UnicodeEncodeError):
        return None
    characters = np.frombuffer(joined, dtype=np.uint8)
    code = _CODE[characters]
    ends, letters = np.flatnonzero(code == _END), np.flatnonzero((code >= 0) & (code < _END))
    paired = characters[ends] == _PLUS
    if len(ends) != len(texts) + paired.sum() or len(letters) != len(ends) or (code == _STRANGE).any():
        return None
    stage = _numbers(characters, np.concatenate([[0], ends[:-1] + 1]), letters)
    microbatch = _numbers(characters, letters + 1, ends)
    if stage is None or microbatch is None:
        return None
    letter = code[letters]
    first, second = letter[:-1][paired[:-1]], letter[1:][paired[:-1]]
    if (first != F).any() or ((second != I) & (second != B)).any():
        return None
    return stage, letter, microbatch, paired


def _numbers(
    characters: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int32] | None:
    """The decimal numbers at ``begin:end``; None unless all have 1 to 9 digits and no leading zeros."""
    width = end - begin
    if not len(width):
        return np.zeros(0, dtype=np.int32)
    if width.min() < 1 or width.max() > 9 or ((width > 1) & (characters[begin] == ord("0"))).any():
        return None
    value = np.zeros(len(begin), dtype=np.int32)
    for place in range(int(width.max())):
        # Shorter numbers read their last digit again, and ignore it.
        digit = characters[np.minimum(begin + place, end - 1)] - np.int32(ord("0"))
        value = np.where(place < width, value * 10 + digit, value)
    return value


_DIGIT, _END, _STRANGE = -1, len(_ALL_LETTERS), len(_ALL_LETTERS) + 1
_CODE = np.full(256, _STRANGE, dtype=np.int8)
"""Class of every character: the code of a letter, a digit, the end of an action, or anything else."""
_CODE[[ord(digit) for digit in "0123456789"]] = _DIGIT
_PLUS = ord("+")
_CODE[[ord("\n"), _PLUS]] = _END
_CODE[[ord(letter) for letter in _ALL_LETTERS]] = range(len(_ALL_LETTERS))


def durations(problem: Problem, orders: Orders, varying: FloatArray | None = None) -> FloatArray:
    """The time that every action takes of its rank, (n,); the second action of a pair takes that of both.

    Raises :class:`InvalidPlan` when there are pairs, and the problem does not say what they take.

    Parameters
    ----------
    varying
        (n, L) durations of the single actions in L scenarios, in place of the problem's. Communication then
        keeps its share of every action.
    """
    arrays = problem.arrays
    planned = arrays.durations(orders.stage, orders.letter, orders.microbatch)
    found = planned if varying is None else varying.copy()
    if orders.paired is None:
        return found
    if arrays.communication is None:
        raise InvalidPlan(
            "found a pair of actions; the problem states no costs.communication, so it has no pairs."
        )
    first = np.flatnonzero(orders.paired)
    hidden = arrays.hidden(orders.stage, orders.letter, orders.microbatch)
    if varying is not None:
        hidden = varying * (hidden / np.where(planned > 0, planned, 1.0))[:, None]
    both = hidden[first], hidden[first + 1]
    found[first + 1] = pair_duration(found[first], found[first + 1], both, problem.pair_factor)
    found[first] = 0.0
    return found


def first_in_first_out(orders: Orders, n_stages: int, kind_of: NDArray[np.int32] | None = None) -> Orders:
    """The same order with equal microbatches relabelled so that they ascend on every stage.

    The result is executable if the original is, and never slower: on a stage, the k-th action of a kind may
    as well belong to the k-th microbatch of this kind. I and B are numbered together; a W takes the oldest I
    of its kind that has no W yet.

    Parameters
    ----------
    kind_of
        (m,) the kind of every microbatch: those of one kind are equal. None means that all are.
    """
    if kind_of is None:
        kind_of = np.zeros(int(orders.microbatch.max(initial=-1)) + 1, dtype=np.int32)
    letter, kind = orders.letter, kind_of[orders.microbatch]
    kinds = int(kind_of.max(initial=0)) + 1
    row = orders.stage.astype(np.int64) * kinds + kind
    number = np.zeros(len(orders), dtype=np.int64)
    _number(number, row, letter == F, n_stages * kinds)
    _number(number, row, (letter == I) | (letter == B), n_stages * kinds)
    inputs, weights = np.flatnonzero(letter == I), np.flatnonzero(letter == W)
    number[_by_row(weights, row)] = number[_by_row(inputs, row)]
    # Microbatches by kind, and each kind's first one among them.
    sorted_by_kind = np.argsort(kind_of, kind="stable").astype(np.int32)
    begins = np.searchsorted(kind_of[sorted_by_kind], np.arange(kinds))
    microbatch = sorted_by_kind[begins[kind] + number]
    return orders if np.array_equal(microbatch, orders.microbatch) else replace(orders, microbatch=microbatch)


def in_entry_order(orders: Orders, n_stages: int) -> Orders:
    """The same letters with microbatches relabelled so that all stages run them in the first stage's order.

    The result is the original if all stages have this order. Otherwise it is another order where microbatches
    differ, which may take longer or exceed the memory.
    """
    entry = orders.microbatch[(orders.stage == 0) & (orders.letter == F)]
    return first_in_first_out(orders, n_stages).renamed(entry.astype(np.int64))


def _by_row(at: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of actions, sorted by row and in order within each row."""
    rows = row[at]
    # NumPy uses radix sort for 16-bit numbers, which is several times faster.
    if rows.max(initial=0) <= np.iinfo(np.uint16).max:
        rows = rows.astype(np.uint16)
    return at[np.argsort(rows, kind="stable")]


def _number(number: NDArray[np.int64], row: NDArray[np.int64], chosen: BoolArray, n: int) -> None:
    """Number the chosen actions of every one of n rows 0, 1, 2, … in order."""
    at = _by_row(np.flatnonzero(chosen), row)
    begins = np.searchsorted(row[at], np.arange(n))
    number[at] = np.arange(len(at)) - begins[row[at]]
