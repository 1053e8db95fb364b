// A schedule as pixels: what is drawn when its actions are too many, or too thin, to be drawn one by one.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const DIMMED = 0.16; // of the weight of an action that is not among those that are emphasised
  const STRIPE = 4; // columns from one line of the hatch of idle time to the next

  zbv.channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  zbv.DIMMED = DIMMED;

  // Pixels of [start, end): a row per rank, a column's colour the mean of what runs in it; idle time is
  // transparent, or hatched where `idle` has its two colours. `emphasis` marks actions with 1 (Uint8Array).
  zbv.raster = function raster(timeline, start, end, columns, { emphasis = null, idle = null } = {}) {
    const scale = columns / (end - start);
    const fills = timeline.facts.fills.map(zbv.channels);
    const [red, green, blue] = [0, 1, 2].map((channel) => Float32Array.from(fills, (fill) => fill[channel]));
    const pixels = new Uint32Array(columns * timeline.ranks);
    const bytes = new Uint8ClampedArray(pixels.buffer);
    const sums = new Float32Array(4 * columns); // red, green, blue, weight
    const busy = new Float32Array(idle === null ? 0 : columns);
    timeline.visible(start, end).forEach(([first, stop], rank) => {
      sums.fill(0);
      busy.fill(0);
      for (let action = first; action < stop; action += 1) {
        const left = Math.max(0, (timeline.start[action] - start) * scale);
        const right = Math.min(columns, (timeline.end[action] - start) * scale);
        const kind = timeline.kind[action];
        const weight = emphasis === null || emphasis[action] === 1 ? 1 : DIMMED;
        for (let column = Math.floor(left); column < right; column += 1) {
          const covered = Math.min(right, column + 1) - Math.max(left, column);
          const share = weight * covered;
          const at = 4 * column;
          sums[at] += share * red[kind];
          sums[at + 1] += share * green[kind];
          sums[at + 2] += share * blue[kind];
          sums[at + 3] += share;
          if (idle !== null) {
            busy[column] += covered;
          }
        }
      }
      if (idle !== null) {
        addIdle(timeline, rank, start, scale, sums, busy, idle);
      }
      const row = 4 * columns * rank;
      for (let at = 0; at < 4 * columns; at += 4) {
        const weight = sums[at + 3];
        if (weight > 0) {
          bytes[row + at] = sums[at] / weight;
          bytes[row + at + 1] = sums[at + 1] / weight;
          bytes[row + at + 2] = sums[at + 2] / weight;
          bytes[row + at + 3] = 255 * weight;
        }
      }
    });
    return pixels;
  };

  function addIdle(timeline, rank, start, scale, sums, busy, idle) {
    const [from, to] = zbv.idleBounds(timeline, rank).map((time) => (time - start) * scale);
    for (let column = Math.max(0, Math.floor(from)); column < Math.min(busy.length, to); column += 1) {
      const covered = Math.min(to, column + 1) - Math.max(from, column);
      const share = covered - busy[column];
      if (share > 1e-3) {
        const colour = column % STRIPE === 0 ? idle.hatch : idle.fill;
        for (let channel = 0; channel < 3; channel += 1) {
          sums[4 * column + channel] += share * colour[channel];
        }
        sums[4 * column + 3] += share;
      }
    }
  }

  // Between which times a rank that runs nothing counts as idle. In the steady state, whose time the span is,
  // what is before its first and after its last action belongs to the iterations before and after.
  zbv.idleBounds = function idleBounds(timeline, rank) {
    const [first, stop] = [timeline.offset[rank], timeline.offset[rank + 1]];
    if (timeline.facts.objective === "makespan") {
      return [0, timeline.makespan];
    }
    return first === stop ? [0, 0] : [timeline.start[first], timeline.end[stop - 1]];
  };
})();
