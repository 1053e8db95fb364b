"""A schedule as pixels, for when its actions are too many or too thin to be drawn one by one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zbv_solver.export.palette import KIND_FILLS, rgb
from zbv_solver.export.timeline import Timeline


def coverage(line: Timeline, columns: int) -> NDArray[np.float32]:
    """Share of every time column that each rank spends on each kind of action.

    Returns
    -------
    (p, columns, kinds) float32 from 0 to 1; what the kinds leave of 1 is idle time.
    """
    shares = np.zeros((line.pp_degree, columns, len(KIND_FILLS)), dtype=np.float32)
    width = line.makespan / columns
    if width <= 0:
        return shares
    edges = np.linspace(0.0, line.makespan, columns + 1)
    for rank in range(line.pp_degree):
        part = line.slice_of(rank)
        if part.start == part.stop:
            continue
        start, end, kinds = line.start[part], line.end[part], line.kind[part]
        # Time spent on a kind up to t is piecewise linear with knots at starts and ends.
        knots = np.stack([start, end], axis=1).ravel()
        for kind in np.unique(kinds):
            spent = np.cumsum(np.where(kinds == kind, end - start, 0.0))
            values = np.stack([np.concatenate(([0.0], spent[:-1])), spent], axis=1).ravel()
            shares[rank, :, kind] = np.diff(np.interp(edges, knots, values)) / width
    return shares


def image(line: Timeline, columns: int) -> NDArray[np.uint32]:
    """The schedule as RGBA pixels (p, columns), one row per rank, idle time transparent."""
    shares = coverage(line, columns)
    fills = np.array([rgb(fill) for fill in KIND_FILLS], dtype=np.float32)
    busy = np.clip(shares.sum(axis=2), 0.0, 1.0)
    colour = (shares @ fills) / np.maximum(busy, 1e-6)[..., None]
    pixels = np.empty((*busy.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.clip(np.rint(colour), 0, 255)
    pixels[..., 3] = np.rint(255 * busy)
    return pixels.view(np.uint32)[..., 0]
