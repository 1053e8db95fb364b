"""Measures what an F and a backward of one stage or layer hide of each other when they run together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean
from typing import Any

import torch
from zbv_solver.plans.orders import Action

from zbv_worker.execution.binding import Bound, BoundPair
from zbv_worker.execution.pairs import Pairs
from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.execution.timeline import CudaTimeline, HostTimeline, Patience
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.measure.profile.captured import Captured, action_of
from zbv_worker.measure.profile.profile import PairProfile, Spread
from zbv_worker.measure.profile.stopwatch import Seconds, stopwatch

_WARM_UP = 2
"""The first pair of each kind only notices collectives."""


def pair_profiles(
    captured: Mapping[int, Captured],
    device: torch.device,
    repeats: int,
    timeout: float,
    meet: Callable[[], None],
) -> dict[int, PairProfile]:
    """Measure pairs of every stage or layer that has collectives in both halves, by index.

    Collective over all ranks: those of a stage must start their collectives in one order.

    Parameters
    ----------
    meet
        Called before every round; waits for the other ranks.
    """
    timeline = CudaTimeline(device) if device.type == "cuda" else HostTimeline()
    stages = {index: each.stage for index, each in captured.items()}
    pairs = Pairs(
        stages,
        device,
        timeline,
        0,
        progress=CurrentProgress(),
        queued=None,
        check=lambda: None,
        done=None,
        overlap=None,
    )
    watch, patience = stopwatch(device), Patience(timeout)
    saved: defaultdict[tuple[int, str], list[Callable[[], float]]] = defaultdict(list)
    for turn in range(_WARM_UP + repeats):
        meet()
        timeline.begin()
        for index, each in captured.items():
            for letter in "IB":
                pair = BoundPair(_bound(each, "F", 1, letter), _bound(each, letter, 0, letter))
                found = _round(each, letter, partial(pairs.walk, pair, turn, turn, patience), watch.time)
                if turn >= _WARM_UP:
                    saved[index, letter].append(found)
        watch.settle()
    profiles = {}
    for index in captured:
        forward, *backwards = (pairs.collectives(Action(index, letter, 0)) for letter in "FIB")
        if forward and all(backwards):
            with_input, with_backward = (
                Spread.of([seconds() for seconds in saved[index, letter]]) for letter in "IB"
            )
            share = forward / (forward + backwards[0])
            profiles[index] = PairProfile(with_input, with_backward, share)
    return profiles


def _round(
    captured: Captured, letter: str, pair: Callable[[], Any], timed: Callable[[Callable[[], object]], Seconds]
) -> Callable[[], float]:
    """Run two microbatches alone, and then with a pair; returns what the pair saves, in seconds."""

    def run(which: str, microbatch: int) -> Callable[[], Any]:
        return action_of(captured, which, microbatch, split=letter == "I")

    def end(microbatch: int) -> None:
        if letter == "I":
            run("W", microbatch)()

    forwards = [timed(run("F", microbatch)) for microbatch in range(2)]
    backwards = []
    for microbatch in range(2):
        backwards.append(timed(run(letter, microbatch)))
        end(microbatch)
    run("F", 0)()
    together = timed(pair)
    end(0)
    run(letter, 1)()
    end(1)
    return lambda: mean(each() for each in forwards) + mean(each() for each in backwards) - together()


def _bound(captured: Captured, which: str, microbatch: int, backward: str) -> Bound:
    """An action that takes nothing from other ranks and passes nothing on."""
    is_split = backward == "I"
    instruction = Instruction(
        Action(captured.stage.index, which, microbatch),
        None,
        None,
        is_split,
        completes_stage=False,
        peer=None,
    )
    return Bound(instruction, None, action_of(captured, which, microbatch, split=is_split), None)
