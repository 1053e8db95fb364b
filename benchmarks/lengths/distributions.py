"""Distributions of sequence lengths, in tokens.

The three made distributions are models, not measurements; each parameter is stated in ``about``. The
published ones are histograms whose counts a source states (``published.json``).

Draws use only :meth:`random.Random.random`, whose sequence Python guarantees for a seed. The same name and
seed therefore give the same lengths with every version of Python and NumPy.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from statistics import NormalDist

LONGEST = 32_768
"""Longer draws are cut to this length, as a context window does."""
SHORTEST = 16
PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class LogNormal:
    """exp(N(ln median, sigma)), rounded and cut to ``SHORTEST`` … ``LONGEST``."""

    median: float
    sigma: float

    def draw(self, random: Random) -> int:
        """One length."""
        # The inverse is infinite at 0, which random() can return.
        normal = NormalDist().inv_cdf(max(random.random(), 1e-12))
        length = self.median * math.exp(self.sigma * normal)
        return min(LONGEST, max(SHORTEST, round(length)))


@dataclass(frozen=True)
class Constant:
    """Always the same length."""

    length: int

    def draw(self, random: Random) -> int:
        """The length; uses no random number."""
        return self.length


@dataclass(frozen=True)
class Mixture:
    """One of several distributions, chosen by share; the shares sum to 1."""

    parts: tuple[tuple[float, LogNormal | Constant], ...]

    def draw(self, random: Random) -> int:
        """One length."""
        chosen = random.random()
        for share, part in self.parts[:-1]:
            if chosen < share:
                return part.draw(random)
            chosen -= share
        return self.parts[-1][1].draw(random)


@dataclass(frozen=True)
class Histogram:
    """Counts of lengths in bins: ``counts[k]`` sequences of edges[k] + 1 … edges[k + 1] tokens.

    A draw chooses a bin by its count and is uniform within it. ``cut`` counts the sequences that the source
    has cut to the last edge; their bin does not count them.
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]
    cut: int

    def draw(self, random: Random) -> int:
        """One length."""
        sums = list(accumulate((*self.counts, self.cut)))
        place = bisect_right(sums, random.random() * sums[-1])
        if place == len(self.counts):
            return self.edges[-1]
        low, high = self.edges[place : place + 2]
        return min(LONGEST, low + 1 + int(random.random() * (high - low)))


@dataclass(frozen=True)
class Distribution:
    """A distribution of lengths."""

    name: str
    about: str
    """What it stands for, with its parameters."""
    law: LogNormal | Mixture | Histogram
    source: str = ""
    """Where the numbers come from; empty for a model."""

    def lengths(self, count: int, seed: str) -> list[int]:
        """The lengths of ``count`` sequences in order of arrival."""
        return list(islice(self.stream(seed), count))

    def stream(self, seed: str) -> Iterator[int]:
        """Lengths without end."""
        random = Random(f"{self.name} {seed}")
        while True:
            yield self.law.draw(random)


MADE = (
    Distribution(
        "web",
        "documents of the web: log-normal, median 600, sigma 1.1 (mean about 1100)",
        LogNormal(600, 1.1),
    ),
    Distribution(
        "bimodal",
        "chat and code: 70 % log-normal with median 300 and sigma 0.7, 30 % with median 4000 and sigma 0.8",
        Mixture(((0.7, LogNormal(300, 0.7)), (0.3, LogNormal(4000, 0.8)))),
    ),
    Distribution(
        "tail",
        "a long tail: 97.5 % log-normal with median 1024 and sigma 0.3, 2.5 % of exactly 32768",
        Mixture(((0.975, LogNormal(1024, 0.3)), (0.025, Constant(LONGEST)))),
    ),
)
"""The distributions of the planning instances."""


@cache
def distributions() -> tuple[Distribution, ...]:
    """All distributions: the made ones, then the published ones."""
    listed = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    published = [
        Distribution(
            each["name"],
            each["about"],
            Histogram(tuple(each["edges"]), tuple(each["counts"]), each["cut"]),
            each["source"],
        )
        for each in listed
    ]
    return (*MADE, *published)
