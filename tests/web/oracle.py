"""The wait of every action of a plan, computed independently of the scripts."""

from __future__ import annotations

from zbv_solver.plans.orders import Action
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS
from zbv_solver.timing.start_times import earliest_times


class Oracle:
    """The wait of every action of a plan, from the definitions alone."""

    def __init__(self, plan: Plan):
        orders, problem = plan.orders, plan.problem
        start, end = earliest_times(problem, orders)
        self.start, self.end = start.tolist(), end.tolist()
        self.texts = [text for texts in orders.without_copies().all_text() for text in texts]
        self.rank = orders.rank_index().tolist()
        where = {text: at for at, text in enumerate(self.texts)}
        rank_of = problem.placement.rank_of
        copied, roots = self._copies(plan, where)
        self.waits: list[tuple[str, int]] = []
        for at, text in enumerate(self.texts):
            stage, letter, microbatch = int(orders.stage[at]), self.letter(at), int(orders.microbatch[at])
            before = at - 1 if at > 0 and self.rank[at - 1] == self.rank[at] else None
            other = stage - 1 if letter == "F" else stage + 1
            letters = {"F": "F", "I": "IB", "B": "IB", "W": ""}[letter]
            names = (f"{other}{each}{microbatch}" for each in letters)
            source = next((where[name] for name in names if name in where), None)
            free = -1.0 if before is None else self.end[before]
            arrival = -1.0
            if source is not None:
                is_sent = rank_of[stage] != rank_of[other]
                boundary = min(stage, other)
                p2p = problem.costs.p2p[boundary]
                p2p += sum(it.costs.p2p[boundary] * it.value[microbatch] for it in problem.features)
                arrival = self.end[source] + (p2p if is_sent else 0)
            copy = copied.get(text, -1.0)
            assert start[at] == max(0, free, arrival, copy), text
            if copy > max(0, free, arrival):
                self.waits.append(("copy", roots[text]))
            elif source is not None and arrival > free:
                self.waits.append(("input", source))
            elif before is not None:
                self.waits.append(("rank", before))
            else:
                self.waits.append(("nothing", -1))

    def _copies(self, plan: Plan, where: dict[str, int]) -> tuple[dict[str, float], dict[str, int]]:
        """By action: when the last copy ends that its rank waits for before it, and what led to that copy."""
        copied, roots = dict[str, float](), dict[str, int]()
        durations = plan.problem.copies
        for texts in plan.orders.all_text():
            engines, ends = {"O": (-1.0, -1), "R": (-1.0, -1)}, dict[str, tuple[float, int]]()
            now, led, waits = 0.0, -1, (-1.0, -1)
            for text in texts:
                stage, letter, microbatch = Action.parse(text)
                cell = f"{stage}·{microbatch}"
                if letter in "OR":
                    assert durations is not None
                    takes = (durations.offload if letter == "O" else durations.reload)[stage]
                    free, by = engines[letter]
                    began, by = (free, by) if free >= now else (now, led)
                    engines[letter] = ends[letter + cell] = began + takes, by
                elif letter == "D":
                    waits = max(waits, ends["O" + cell], key=lambda each: each[0])
                    now, led = waits if waits[0] > now else (now, led)
                else:
                    if letter in "IB" and "R" + cell in ends:
                        waits = max(waits, ends["R" + cell], key=lambda each: each[0])
                    copied[text], roots[text] = waits
                    now, led, waits = self.end[where[text]], where[text], (-1.0, -1)
        return copied, roots

    def letter(self, at: int) -> str:
        """Of an action."""
        return next(letter for letter in LETTERS if letter in self.texts[at])

    def idle(self, at: int) -> float | None:
        """How long its rank idled before it; None for the first."""
        is_first = at == 0 or self.rank[at - 1] != self.rank[at]
        return None if is_first else self.start[at] - self.end[at - 1]

    def path(self, at: int) -> list[int]:
        """The critical path to an action, from the beginning."""
        found = [at]
        while (awaited := self.waits[found[-1]][1]) >= 0:
            found.append(awaited)
        return found[::-1]
