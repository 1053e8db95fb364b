"""Thumbnails of plans for lists: only the bars of the schedule.

Idle time is transparent, so that thumbnails suit light and dark pages.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from zbv_solver.export.timeline import Timeline, image, timeline
from zbv_solver.plans.plan import Plan

WIDTH, HEIGHT = 600, 150
"""Size in pixels. Lists show thumbnails at half this size, so that they are sharp on dense screens."""

_NARROWEST_BAR = 5.0
_ROWS_WITH_GAPS = HEIGHT // 6


def thumbnail(plan: Plan) -> bytes:
    """The schedule as a PNG of :data:`WIDTH` by :data:`HEIGHT` pixels."""
    from PIL import Image  # only thumbnails need it

    line = timeline(plan)
    pixels = image(line, WIDTH)
    _part_bars(line, pixels)
    rows = _rows(pixels)
    picture = Image.fromarray(rows.view(np.uint8).reshape(*rows.shape, 4), "RGBA")
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()


def _part_bars(line: Timeline, pixels: NDArray[np.uint32]) -> None:
    """Clear the first column of every bar that is wide enough, so that neighbours are distinct."""
    if line.makespan <= 0:
        return
    scale = WIDTH / line.makespan
    wide = (line.end - line.start) * scale >= _NARROWEST_BAR
    columns = np.clip((line.start[wide] * scale).astype(np.int64), 0, WIDTH - 1)
    pixels[line.rank[wide], columns] = 0


def _rows(pixels: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Stretch or shrink one row per rank to the picture's height."""
    ranks = len(pixels)
    if ranks > HEIGHT:
        return _averaged(pixels)
    rows = np.zeros((HEIGHT, pixels.shape[1]), np.uint32)
    gap = max(2, HEIGHT // ranks // 8) if ranks <= _ROWS_WITH_GAPS else 0
    for rank in range(ranks):
        top = rank * HEIGHT // ranks
        rows[top : (rank + 1) * HEIGHT // ranks - gap] = pixels[rank]
    return rows


def _averaged(pixels: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shrink to the picture's height: each row is the mean of several ranks, weighted by opacity."""
    channels = pixels.view(np.uint8).reshape(*pixels.shape, 4).astype(np.float64)
    weighted = np.concatenate([channels[..., :3] * channels[..., 3:], channels[..., 3:]], axis=2)
    starts = np.arange(HEIGHT) * len(pixels) // HEIGHT
    counts = np.diff(starts, append=len(pixels))[:, None, None]
    mean = np.add.reduceat(weighted, starts, axis=0) / counts
    mean[..., :3] /= np.maximum(mean[..., 3:], 1e-6)
    return np.rint(mean).astype(np.uint8).view(np.uint32)[..., 0]
