"""From measured durations of microbatches that differ to the coefficients of their features.

Every stage is fitted on its own, by least squares over the medians of its kinds of microbatch. Residuals
count relative to these medians, so that short microbatches count as much as long ones. No coefficient is
negative, because a feature is an amount of work.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.problem.problem import Problem

_EPSILON = float(np.finfo(np.float64).eps)
_NEGLIGIBLE = 1e-9
"""A coefficient that never adds more than this share of the largest median is a rounding error. Medians below
it count as much as this share."""
_MOST_STEPS = 10
"""Largest number of steps of a fit, times the number of coefficients; rounding could let it cycle."""


def regressors(problem: Problem) -> FloatArray:
    """The amounts that a cost is a sum of, (K, 1 + f): 1 and the features of every kind of microbatch.

    Features that nothing depends on are 0: they may differ within a kind.
    """
    kind_of = problem.arrays.kind_of
    first = [int(np.argmax(kind_of == kind)) for kind in range(problem.arrays.kinds)]
    columns = [np.ones(len(first))]
    for each in problem.features:
        matters = any(any(values) for values in each.coefficients.values())
        columns.append(np.array(each.value)[first] * matters)
    return np.stack(columns, axis=1)


def fitted(amounts: FloatArray, planned: FloatArray, medians: FloatArray) -> FloatArray:
    """The fixed part and the coefficients (1 + f, n) that medians (n, K) show; nan without measurements.

    Parameters
    ----------
    amounts
        (K, 1 + f), see :func:`regressors`.
    planned
        (1 + f, n). They are scaled where too few kinds were measured to tell the features apart.
    """
    found = np.zeros_like(planned)
    used = amounts.any(axis=0)
    for place, measured in enumerate(medians):
        known = np.isfinite(measured)
        design, target = amounts[known][:, used], measured[known]
        if not len(target):
            found[:, place] = np.nan
            continue
        size = np.abs(design).max(axis=0)
        design = design / np.where(size > 0, size, 1.0)
        if np.linalg.matrix_rank(design) < design.shape[1]:
            found[:, place] = _scaled(planned[:, place], amounts[known], target)
            continue
        weight = 1 / np.maximum(target, _NEGLIGIBLE * target.max() or 1.0)
        fit = non_negative_least_squares(design * weight[:, None], target * weight)
        found[used, place] = np.where(fit > _NEGLIGIBLE * target.max(), fit / size, 0.0)
    return found


def _scaled(planned: FloatArray, amounts: FloatArray, measured: FloatArray) -> FloatArray:
    """Planned coefficients that add up to the measured total; the fixed part alone if none are planned."""
    total = float((amounts @ planned).sum())
    if total > 0:
        scaled: FloatArray = planned * (float(measured.sum()) / total)
        return scaled
    return np.append(measured.mean(), np.zeros(len(planned) - 1))


def non_negative_least_squares(design: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 (k,) with the smallest |design x - target|, for a design (n, k) of full rank.

    The active-set method NNLS of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    count = design.shape[1]
    x, passive = np.zeros(count), np.zeros(count, dtype=np.bool_)
    tolerance = (
        10 * _EPSILON * float(np.abs(design).sum(axis=0).max()) * float(np.abs(target).max(initial=1.0))
    )
    for _ in range(_MOST_STEPS * count):
        gradient = design.T @ (target - design @ x)
        free = ~passive & (gradient > tolerance)
        if not free.any():
            break
        passive[np.argmax(np.where(free, gradient, -np.inf))] = True
        while passive.any():
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(design[:, passive], target, rcond=None)[0]
            wrong = passive & (trial <= 0)
            if not wrong.any():
                x = trial
                break
            step = float((x[wrong] / (x[wrong] - trial[wrong])).min())
            x = x + step * (trial - x)
            passive &= x > _EPSILON * float(x.max(initial=0.0))
            x[~passive] = 0.0
    return x
