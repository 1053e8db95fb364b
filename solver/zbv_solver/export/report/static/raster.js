// A schedule as pixels, for when its actions are too many or too thin to be drawn one by one.

/** @typedef {import("./timeline.js").Timeline} Timeline */

export const DIMMED = 0.16; // weight of an action that is not highlighted
const STRIPE = 4; // columns from one line of the idle hatch to the next

/**
 * Red, green and blue of a `#rrggbb` colour.
 * @param {string} colour
 */
export const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/**
 * Pixels of [start, end) as RGBA: one row per rank. The colour of a column is the mean of what runs in it. Idle time
 * is transparent, or hatched if `idle` gives its two colours. `highlighted` marks actions with 1; the others are dimmed.
 * @param {Timeline} timeline
 * @param {number} start
 * @param {number} end
 * @param {number} columns
 * @param {{ highlighted?: Uint8Array | null, idle?: { fill: number[], hatch: number[] } | null }} [options]
 */
export function raster(timeline, start, end, columns, { highlighted = null, idle = null } = {}) {
  const scale = columns / (end - start);
  const fills = timeline.facts.fills.map(channels);
  const [red, green, blue] = [0, 1, 2].map((channel) => Float32Array.from(fills, (fill) => fill[channel]));
  const bytes = new Uint8ClampedArray(4 * columns * timeline.ranks);
  const sums = new Float32Array(4 * columns); // red, green, blue, weight
  const busy = new Float32Array(idle === null ? 0 : columns);
  timeline.visible(start, end).forEach(([first, stop], rank) => {
    sums.fill(0);
    busy.fill(0);
    for (let action = first; action < stop; action += 1) {
      const left = Math.max(0, (timeline.start[action] - start) * scale);
      const right = Math.min(columns, (timeline.end[action] - start) * scale);
      const kind = timeline.kind[action];
      const weight = highlighted === null || highlighted[action] === 1 ? 1 : DIMMED;
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
      const bounds = idleBounds(timeline, rank).map((time) => (time - start) * scale);
      addIdle(bounds, sums, busy, idle);
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
  return bytes;
}

/**
 * Add the idle time between two columns to the sums of a row.
 * @param {number[]} bounds
 * @param {Float32Array} sums
 * @param {Float32Array} busy
 * @param {{ fill: number[], hatch: number[] }} idle
 */
function addIdle([from, to], sums, busy, idle) {
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

/**
 * The time between which a rank that runs nothing counts as idle. If the objective is the span, the time before the
 * first action and after the last one belongs to the neighbouring iterations.
 * @param {Timeline} timeline
 * @param {number} rank
 * @returns {[number, number]}
 */
export function idleBounds(timeline, rank) {
  const [first, stop] = [timeline.offset[rank], timeline.offset[rank + 1]];
  if (timeline.facts.objective === "makespan") {
    return [0, timeline.makespan];
  }
  return first === stop ? [0, 0] : [timeline.start[first], timeline.end[stop - 1]];
}
