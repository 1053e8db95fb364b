"""Orders of the independent model: from the library's orders, renumbered, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zbv_solver.plans.orders import Orders

from benchmarks.soak.pipeline import LETTERS, B, I, Order, W


def order_of(orders: Orders) -> Order:
    """The library's orders as the independent model has them."""
    return tuple(
        tuple((LETTERS.index(letter), stage, j) for stage, letter, j in orders.actions(rank))
        for rank in range(orders.pp_degree)
    )


def ascending(order: Order) -> Order:
    """The same order with the microbatches of every stage and letter renumbered to ascend.

    I and B count as one letter; the W's of split microbatches keep their order.
    """
    renumbered = []
    for actions in order:
        counts: Counter[tuple[int, int]] = Counter()
        split: dict[int, list[int]] = {}
        mine = []
        for letter, stage, _ in actions:
            if letter == W:
                mine.append((W, stage, split[stage].pop(0)))
                continue
            at = (I if letter == B else letter), stage
            j = counts[at]
            counts[at] += 1
            if letter == I:
                split.setdefault(stage, []).append(j)
            mine.append((letter, stage, j))
        renumbered.append(tuple(mine))
    return tuple(renumbered)


def separated(actions: tuple[tuple[int, int, int], ...], pays: list[bool]) -> Iterator[tuple[int, int, int]]:
    """Replace each B that never pays by I and W."""
    for letter, stage, j in actions:
        if letter == B and not pays[stage]:
            yield I, stage, j
            yield W, stage, j
        else:
            yield letter, stage, j


def text(order: Order) -> str:
    """An order in the notation of plans."""
    return " | ".join(
        " ".join(f"{stage}{LETTERS[letter]}{j}" for letter, stage, j in actions) for actions in order
    )
