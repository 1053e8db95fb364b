"""Problems whose microbatches differ, and batches to pack, from the distributions of this folder.

Documents are as in docs/formats.md. The caller's order is the order of arrival.

**Planning instances.** Sequences arrive one after another. A microbatch takes them until it has at least the
budget of tokens, so one that meets a long sequence is several times as large as the others.

**Memory limits.** A limit is a share of what 1F1B holds on its fullest rank, but never below the smallest
limit of any rank. On rank r of p, 1F1B holds p - r consecutive microbatches, so its memory is the largest sum
of as many consecutive forwards. There are two kinds of limits:

- ``mem``: for these microbatches in the given order. 1F1B just fits at 1.0, so memory is tight: a large
  microbatch may fill a rank alone.
- ``max``: for microbatches that are all as large as the largest. A training job knows the largest microbatch
  and not the batches to come, so this is how its memory is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.lengths.distributions import LONGEST, MADE, Distribution
from benchmarks.lengths.model_costs import costs_and_memory

LimitKind = Literal["mem", "max"]
SHARES = (0.6, 1.0, 1.5)
SIZES = ((4, 16), (4, 32), (8, 16), (8, 32), (8, 64), (16, 32), (16, 64))
"""Ranks and microbatches."""
LEFT_OUT = (16, 64, 1.5)
"""Makes 60 instances of 63 for each kind of limit. Memory is plentiful there."""
BUDGETS = {"web": 2048, "bimodal": 4096, "tail": 8192}
"""Tokens at which a microbatch of a planning instance is full."""
UNITS = {"time": "us", "memory": "bytes"}


@dataclass(frozen=True)
class PlanningInstance:
    """One problem to plan."""

    law: Distribution
    pp_degree: int
    microbatches: int
    share: float
    """Memory limit as a share of 1F1B's memory."""
    limit_kind: LimitKind = "mem"
    """What 1F1B's memory is: see above."""
    seed: int = 0

    @property
    def name(self) -> str:
        """Such as ``tail-p8-m32-mem0.6``."""
        return f"{self.law.name}-p{self.pp_degree}-m{self.microbatches}-{self.limit_kind}{self.share}"

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Lengths of every microbatch's sequences, in order of arrival."""
        arriving = self.law.stream(f"{self.seed} {self.pp_degree} {self.microbatches}")
        return [_filled(arriving, BUDGETS[self.law.name]) for _ in range(self.microbatches)]

    def document(self) -> dict[str, Any]:
        """The problem's document."""
        costs, memory = costs_and_memory(self.pp_degree)
        tokens = [sum(each) for each in self.sequences]
        if self.limit_kind == "max":
            tokens = [max(tokens)] * self.microbatches
        return {
            "pp_degree": self.pp_degree,
            "microbatches": self.microbatches,
            "sequences": self.sequences,
            "costs": costs,
            "memory": {**memory, "limit": limit(memory["forward"]["tokens"], tokens, self.share)},
            "units": UNITS,
        }


def instances() -> list[PlanningInstance]:
    """The problems of the comparison with other schedules: 60 for each kind of limit."""
    return [
        PlanningInstance(law, p, m, share, kind)
        for kind in get_args(LimitKind)
        for p, m in SIZES
        for law in MADE
        for share in SHARES
        if (p, m, share) != LEFT_OUT
    ]


@dataclass(frozen=True)
class PackingInstance:
    """One global batch to pack."""

    law: Distribution
    pp_degree: int
    replicas: int
    count: int
    """Sequences of the batch."""
    share: float
    """Memory limit as a share of what 1F1B holds for microbatches of the largest size."""
    seed: int = 0
    max_tokens: int = LONGEST

    @property
    def name(self) -> str:
        """Such as ``tail-p4-r4-n512-mem1.0``."""
        return f"{self.law.name}-p{self.pp_degree}-r{self.replicas}-n{self.count}-mem{self.share}"

    def document(self) -> dict[str, Any]:
        """The batch's document, which ``zbv pack`` takes."""
        costs, memory = costs_and_memory(self.pp_degree)
        full = [self.max_tokens] * self.pp_degree
        return {
            "sequences": self.law.lengths(self.count, str(self.seed)),
            "max_tokens": self.max_tokens,
            "replicas": self.replicas,
            "problem": {
                "pp_degree": self.pp_degree,
                "costs": costs,
                "memory": {**memory, "limit": limit(memory["forward"]["tokens"], full, self.share)},
                "units": UNITS,
            },
        }


def packing_instances() -> list[PackingInstance]:
    """Batches over four replicas; those for eight ranks are twice as large."""
    counts = {"web": 960, "bimodal": 512, "tail": 512}
    return [
        PackingInstance(law, p, 4, counts[law.name] * p // 4, share)
        for law in MADE
        for p in (4, 8)
        for share in (0.6, 1.0)
    ]


def limit(bytes_per_token: Sequence[int], tokens: Sequence[int], share: float) -> int:
    """A memory limit in bytes: a share of 1F1B's memory, or the smallest limit if that is larger.

    Parameters
    ----------
    bytes_per_token
        Of the forward of every stage, in model order; placement V.
    tokens
        Of every microbatch, in the given order.
    """
    stages = len(bytes_per_token)
    p = stages // 2
    sums = np.concatenate([[0], np.cumsum(tokens)])
    held = [int((sums[k:] - sums[:-k]).max()) for k in range(1, min(p, len(tokens)) + 1)]
    # 1F1B has one stage per rank: two neighbouring stages of these.
    merged = [bytes_per_token[s] + bytes_per_token[s + 1] for s in range(0, stages, 2)]
    used = max(merged[rank] * held[min(p - rank, len(held)) - 1] for rank in range(p))
    smallest = max(bytes_per_token[r] + bytes_per_token[stages - 1 - r] for r in range(p)) * max(tokens)
    return max(round(share * used), smallest)


def _filled(arriving: Iterator[int], budget: int) -> list[int]:
    microbatch = [next(arriving)]
    while sum(microbatch) < budget:
        microbatch.append(next(arriving))
    return microbatch
