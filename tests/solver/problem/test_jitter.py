"""Draws: distributions and common random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems import uniform
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.jitter import Jitter, Spread, draw
from zbv_solver.problem.problem import B, F, I

PROBLEM = uniform(4, 64, p2p=1)
ALL = Jitter.of(0.05, 0.2, 0.1)
NORMAL = np.random.default_rng(1).standard_normal(100_000)


def test_a_factor_has_mean_1_and_the_stated_deviation_or_is_one_of_the_samples() -> None:
    factors = Spread(0.2).factors(NORMAL)
    assert factors.mean() == pytest.approx(1, abs=2e-3)
    assert factors.std() == pytest.approx(0.2, rel=1e-2)
    assert factors.min() > 0
    values, counts = np.unique(Spread(samples=(2.0, 0.5, 1.0)).factors(NORMAL), return_counts=True)
    assert values.tolist() == [0.5, 1.0, 2.0]
    assert counts == pytest.approx(len(NORMAL) / 3, rel=0.03)


def test_draws_do_not_depend_on_what_else_is_drawn() -> None:
    together = draw(ALL, PROBLEM, 7, range(4), 3)
    for many, one in zip(together, draw(ALL, PROBLEM, 7, [2], 3), strict=True):
        assert np.array_equal(many[:, 2:3], one)
    for kind in ("action", "transfer", "rank"):
        only = draw(Jitter.of(**{kind: 0.2}), PROBLEM, 7, range(4), 3)
        assert all((part == 1).all() == (name != kind) for name, part in only._asdict().items())
    alone = draw(Jitter.of(transfer=0.2), PROBLEM, 7, range(4), 3)
    assert np.array_equal(alone.transfer, together.transfer)


def test_scenarios_differ() -> None:
    keys = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    first, *others = (draw(ALL, PROBLEM, seed, [chain], iteration).action for seed, chain, iteration in keys)
    assert all(not np.array_equal(first, other) for other in others)


def test_a_fused_backward_shares_the_draw_of_its_input_half() -> None:
    action = draw(ALL, PROBLEM, 0, [0], 0).action.reshape(4, -1)
    assert np.array_equal(action[B], action[I])
    assert not np.array_equal(action[F], action[I])


def test_every_rank_may_have_its_own_spread() -> None:
    rank = draw(Jitter(rank=(Spread(), *[Spread(0.1)] * 3)), PROBLEM, 0, range(2), 0).rank
    assert (rank[0] == 1).all()
    assert (rank[1:] != 1).all()
    with pytest.raises(InvalidInput, match="/rank: found 2 values; must be one, or one per rank"):
        draw(Jitter(rank=(Spread(), Spread())), PROBLEM, 0, [0], 0)
