"""Problems whose microbatches differ, and batches to pack, from three distributions of sequence lengths.

Documents are as in docs/formats.md. The caller's order is the order of arrival.

**Distributions** are models, not measurements; each parameter is stated. Draws use only
:meth:`random.Random.random`, whose sequence Python guarantees for a seed, so the same name and seed give the
same lengths with every version of Python and NumPy.

**Planning instances.** Sequences arrive one after another. A microbatch takes them until it has at least the
budget of tokens, so one that meets a long sequence is several times as large as the others.

**Memory limits.** A limit is a share of what 1F1B holds on its fullest rank, but never below the smallest
limit of any rank. On rank r of p, 1F1B holds p - r consecutive microbatches, so its memory is the largest sum
of as many consecutive forwards. There are two kinds of limits:

- ``mem``: for these microbatches in the given order. 1F1B just fits at 1.0, so memory is tight: a large
  microbatch may fill a rank alone.
- ``max``: for microbatches that are all as large as the largest. A training job knows the largest microbatch
  and not the batches to come, so this is how its memory is planned.

**Costs** are those of a GPT of 6.2 B parameters on H100 with flash attention. zbv's estimate is a polynomial
in the length of a sequence: linear layers, norms and memory grow with its tokens, attention with their
square, and the accumulation of weight gradients is fixed. Three lengths determine the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from random import Random
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
from zbv_models.estimate.config import estimate_layers, parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.sections import with_presets

LONGEST = 32_768
"""Longer draws are cut to this length, as a context window does."""
SHORTEST = 16
LimitKind = Literal["mem", "max"]
SHARES = (0.6, 1.0, 1.5)
SIZES = ((4, 16), (4, 32), (8, 16), (8, 32), (8, 64), (16, 32), (16, 64))
"""Ranks and microbatches."""
LEFT_OUT = (16, 64, 1.5)
"""Makes 60 instances of 63 for each kind of limit. Memory is plentiful there."""
BUDGETS = {"web": 2048, "bimodal": 4096, "tail": 8192}
"""Tokens at which a microbatch of a planning instance is full."""
UNITS = {"time": "us", "memory": "bytes"}
PRESETS = ["gpt-6.2b", "h100-80gb"]
MODEL = {
    "microbatch_size": 1,
    "attention": "flash",
    "dropout": False,
    "dtype": "bfloat16",
    "positions": "rotary",
}
"""The preset is of 2023; these are usual today for sequences of 32 k tokens."""
LENGTHS = (1024, 8192, 32_768)
NAMES = ("fixed", "tokens", "tokens_squared")
ACTIONS = ("forward", "backward_input", "backward_weight")
BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""
LAYERS = 32
"""Embedding, 30 blocks and head: they divide evenly into 8, 16 and 32 stages."""


@dataclass(frozen=True)
class Distribution:
    """A distribution of lengths, in tokens."""

    name: str
    draw: Callable[[Random], int]

    def lengths(self, count: int, seed: str) -> list[int]:
        """The lengths of ``count`` sequences in order of arrival."""
        return list(islice(self.stream(seed), count))

    def stream(self, seed: str) -> Iterator[int]:
        """Lengths without end."""
        random = Random(f"{self.name} {seed}")
        while True:
            yield self.draw(random)


def _log_normal(random: Random, median: float, sigma: float) -> int:
    """exp(N(ln median, sigma)), rounded and cut to ``SHORTEST`` … ``LONGEST``."""
    # The inverse is infinite at 0, which random() can return.
    normal = NormalDist().inv_cdf(max(random.random(), 1e-12))
    return min(LONGEST, max(SHORTEST, round(median * math.exp(sigma * normal))))


def _bimodal(random: Random) -> int:
    return _log_normal(random, *((300, 0.7) if random.random() < 0.7 else (4000, 0.8)))


def _tail(random: Random) -> int:
    return _log_normal(random, 1024, 0.3) if random.random() < 0.975 else LONGEST


LAWS = {
    each.name: each
    for each in (
        # documents of the web
        Distribution("web", lambda random: _log_normal(random, 600, 1.1)),
        # chat (70 %) and code (30 %)
        Distribution("bimodal", _bimodal),
        # a long tail: 2.5 % have the longest length
        Distribution("tail", _tail),
    )
}
"""The distributions by name."""


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
        for law in LAWS.values()
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
        for law in LAWS.values()
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


def costs_and_memory(pp_degree: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``costs`` and ``memory`` (without a limit) of a problem document for 4, 8 or 16 ranks.

    Microseconds and bytes. Placement V, with the same number of layers on every stage.
    """
    layers = _layers()
    per_stage = LAYERS // (2 * pp_degree)
    sums = [layers[first : first + per_stage].sum(axis=0) for first in range(0, LAYERS, per_stage)]
    stages = np.array(sums)  # (S, 5, 3): F, I, W, bytes after F, bytes after I; by feature
    costs: dict[str, Any] = {
        action: {name: _rounded(stages[:, row, column]) for column, name in enumerate(NAMES)}
        for row, action in enumerate(ACTIONS)
    }
    config = _config(LENGTHS[0])
    per_token = config.model.hidden * config.model.dtype_bytes
    bandwidth = (config.device.link_bandwidth or np.inf) * BYTES_PER_MICROSECOND
    costs["p2p"] = {"fixed": config.device.link_latency, "tokens": float(f"{per_token / bandwidth:.6g}")}
    after_forward, after_input = (np.rint(stages[:, row, 1]).astype(int).tolist() for row in (3, 4))
    memory = {
        "forward": {"tokens": after_forward},
        "backward_input": {"tokens": [b - a for a, b in zip(after_forward, after_input, strict=True)]},
        "backward_weight": {"tokens": [-each for each in after_input]},
    }
    return costs, memory


@cache
def _layers() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Coefficients of all layers, (32, 5, 3)."""
    samples = np.array([[_figures(layer) for layer in _estimated(length)] for length in LENGTHS])
    powers = np.vander(np.array(LENGTHS, dtype=np.float64), 3, increasing=True)
    return np.moveaxis(np.tensordot(np.linalg.inv(powers), samples, axes=1), 0, 2)


def _estimated(length: int) -> list[LayerEstimate]:
    layers = estimate_layers(_config(length))
    return [layer for layer in layers for _ in range(layer.repeat or 1)]


def _config(length: int) -> Any:
    return parse_config(with_presets({}, PRESETS, {"model": {**MODEL, "sequence": length}}))


def _figures(layer: LayerEstimate) -> list[float]:
    running, times = layer.plain, layer.plain.times
    durations = [times.forward, times.backward_input, times.backward_weight]
    return [*durations, running.after_forward, running.after_input]


def _rounded(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Six digits; 0 where the fit leaves less than rounding errors."""
    return [float(f"{value:.6g}") if value > 1e-12 else 0.0 for value in values]
