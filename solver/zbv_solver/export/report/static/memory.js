// The memory of every rank over time: all changes that are in view, or the peak of every column of the screen where
// the changes are too many. A band from the least to the most loaded rank replaces the lines of many ranks. With copies
// to the host, a dashed line says what the selected or the fullest rank would hold without them.

import { make } from "./dom.js";
import { amount, axisNumbers, ticks, time } from "./numbers.js";
import { FONT, Surface } from "./surface.js";

const MAX_STEPS = 20_000; // points of all lines together
const MAX_LINES = 16; // ranks above which a band replaces the lines
const FADED = 0.22; // opacity of a line while another rank is selected
const MUTED = 0.08; // and of a line that the legend switched off
const TOP = 8;
const BOTTOM = 6;
const FAR_LIMIT = 3; // a limit this many times above the highest peak would flatten the lines
const NEAR = 12; // pixels around a line that still count as pointing at it

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {{ at: number[], held: number[] }} Steps `held` from each time of `at` to the next */

export class Memory {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} legend
   * @param {Timeline} timeline
   * @param {import("./range.js").TimeRange} range
   */
  constructor(canvas, legend, timeline, range) {
    const { limits, scale } = timeline.facts.memory;
    this.surface = new Surface(canvas, range, { top: TOP, bottom: BOTTOM });
    this.timeline = timeline;
    this.range = range;
    this.peaks = peaksOf(timeline);
    this.fullest = this.peaks.indexOf(Math.max(...this.peaks));
    this.isBand = timeline.ranks > MAX_LINES;
    this.alone = timeline.copies.all.length === 0 ? null : timeline.withoutCopies();
    const peak = Math.max(...this.peaks, ...(this.alone === null ? [] : peaksOf(this.alone)));
    const limit = Math.max(0, ...limits);
    this.top = (1.08 * (limit <= FAR_LIMIT * (peak || 1) ? Math.max(peak, limit) : peak)) / scale || 1;
    this.selected = -1;
    this.changed = () => {};
    /** @type {{ rank: number, steps: Steps }[]} */
    this.drawn = [];
    /** @type {{ rank: number, steps: Steps } | null} */
    this.drawnAlone = null;
    /** @type {{ at: number[], low: number[], high: number[] } | null} */
    this.band = null;
    this.entries = this.isBand ? ["all ranks, least to most", ""] : this.peaks.map((_, rank) => `rank ${rank}`);
    this.buttons = this.entries.map((label, at) => this.#entry(label, at));
    this.withoutCopies = this.alone === null ? -1 : this.buttons.push(this.#entry("", this.buttons.length)) - 1;
    legend.replaceChildren(...this.buttons);
  }

  /**
   * A button of the legend, which switches a line off and on.
   * @param {string} label
   * @param {number} at
   */
  #entry(label, at) {
    const className = `plain line-${at % 8}${at >= 8 ? " dotted" : ""}`;
    const button = make("button", { type: "button", className, textContent: label });
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      this.changed();
    });
    return button;
  }

  /** @param {number} at */
  #isMuted(at) {
    return this.buttons[at].getAttribute("aria-pressed") !== "true";
  }

  draw() {
    const { surface, timeline, range, selected } = this;
    const context = surface.begin();
    const columns = Math.max(1, Math.round(surface.frame.width));
    const steps = timeline.visible(range.start, range.end).reduce((sum, [first, stop]) => sum + 2 * (stop - first), 0);
    const stepsOf = (/** @type {number} */ rank, of = timeline) =>
      steps <= MAX_STEPS
        ? stepsIn(of, rank, range.start, range.end)
        : columnPeaks(of, rank, range.start, range.end, columns);
    const rank = selected < 0 ? -1 : timeline.rankOf(selected);
    const one = rank < 0 ? this.fullest : rank;
    const ranks = this.isBand ? [one] : this.peaks.map((_, each) => each);
    this.drawn = ranks.map((each) => ({ rank: each, steps: stepsOf(each) }));
    if (this.alone !== null) {
      this.drawnAlone = { rank: one, steps: stepsOf(one, this.alone) };
      this.buttons[this.withoutCopies].textContent = `rank ${one} without copies`;
      this.buttons[this.withoutCopies].className = `plain line-${this.isBand ? 1 : one % 8} dashed`;
    }
    this.band = this.isBand ? extremes(timeline, range.start, range.end, columns) : null;
    if (this.isBand) {
      this.buttons[1].textContent = rank < 0 ? `rank ${one}, the highest peak` : `rank ${one}`;
    }
    surface.grid();
    this.#axis(context);
    surface.clipped(() => {
      if (selected >= 0) {
        const left = surface.x(timeline.start[selected]);
        context.globalAlpha = 0.12;
        context.fillStyle = surface.colour("text");
        context.fillRect(left, TOP, surface.x(timeline.end[selected]) - left, surface.frame.height);
      }
      this.#band(context);
      for (const { rank: each, steps: found } of this.drawn) {
        const entry = this.isBand ? 1 : each;
        const isFaded = !this.isBand && rank >= 0 && rank !== each;
        context.globalAlpha = this.#isMuted(entry) ? MUTED : isFaded ? FADED : 1;
        this.#line(context, found, entry, entry >= 8 ? [2, 3] : []);
      }
      if (this.drawnAlone !== null) {
        context.globalAlpha = this.#isMuted(this.withoutCopies) ? MUTED : 1;
        this.#line(context, this.drawnAlone.steps, this.withoutCopies, [7, 4]);
      }
      context.globalAlpha = 1;
      this.#limits(context);
    });
  }

  /** @param {number} held in the unit of the axis */
  #y(held) {
    const { top, height } = this.surface.frame;
    return top + height * (1 - held / this.top);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Steps} steps
   * @param {number} entry
   * @param {number[]} dashes
   */
  #line(context, { at, held }, entry, dashes) {
    const { surface, timeline } = this;
    const { scale } = timeline.facts.memory;
    context.strokeStyle = getComputedStyle(this.buttons[entry]).getPropertyValue("--line-colour");
    context.lineWidth = 1.6;
    context.setLineDash(dashes);
    context.beginPath();
    at.forEach((when, index) => {
      if (index > 0) {
        context.lineTo(surface.x(when), this.#y(held[index - 1] / scale));
      }
      context.lineTo(surface.x(when), this.#y(held[index] / scale));
    });
    context.stroke();
    context.setLineDash([]);
  }

  /** @param {CanvasRenderingContext2D} context */
  #band(context) {
    if (this.band === null) {
      return;
    }
    const { at, low, high } = this.band;
    const { scale } = this.timeline.facts.memory;
    const width = this.surface.frame.width / Math.max(1, Math.round(this.surface.frame.width));
    context.globalAlpha = this.#isMuted(0) ? MUTED : 0.3;
    context.fillStyle = getComputedStyle(this.buttons[0]).getPropertyValue("--line-colour");
    at.forEach((when, index) => {
      const top = this.#y(high[index] / scale);
      context.fillRect(this.surface.x(when), top, width, Math.max(1, this.#y(low[index] / scale) - top));
    });
    context.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} context */
  #limits(context) {
    const { limits, scale } = this.timeline.facts.memory;
    const { left, width } = this.surface.frame;
    context.strokeStyle = this.surface.colour("limit");
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    for (const limit of limits.slice(0, MAX_LINES)) {
      context.beginPath();
      context.moveTo(left, this.#y(limit / scale));
      context.lineTo(left + width, this.#y(limit / scale));
      context.stroke();
    }
    context.setLineDash([]);
  }

  /** @param {CanvasRenderingContext2D} context */
  #axis(context) {
    const { left, top, height } = this.surface.frame;
    const { unit } = this.timeline.facts.memory;
    const found = ticks(0, this.top, 5);
    context.font = FONT;
    context.fillStyle = this.surface.colour("muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    axisNumbers(found).forEach((text, at) => context.fillText(text, left - 8, this.#y(found[at])));
    context.save();
    context.translate(12, top + height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(unit === "" ? "memory" : `memory [${unit}]`, 0, 0);
    context.restore();
  }

  /**
   * The terms and values of the line under a pointer; none if there is no line.
   * @param {{ clientX: number, clientY: number }} event
   * @returns {[string, string][]}
   */
  rowsAt(event) {
    const { time: when, y, isInside } = this.surface.locate(event);
    const { facts } = this.timeline;
    const { height } = this.surface.frame;
    let nearest = NEAR;
    let rows = /** @type {[string, string][]} */ ([]);
    const lines = this.drawn.map(({ rank, steps }) => ({ rank, steps, name: "held", entry: this.isBand ? 1 : rank }));
    if (this.drawnAlone !== null) {
      lines.push({ ...this.drawnAlone, name: "held without copies", entry: this.withoutCopies });
    }
    for (const { rank, steps, name, entry } of isInside ? lines : []) {
      const index = steps.at.findLastIndex((at) => at <= when);
      const held = steps.held[Math.max(0, index)] / facts.memory.scale;
      const distance = Math.abs(y * height - (this.#y(held) - TOP));
      if (index >= 0 && distance < nearest && !this.#isMuted(entry)) {
        nearest = distance;
        rows = [["rank", String(rank)], ["from", time(steps.at[index], facts)], [name, amount(held, facts.memory.unit)]];
      }
    }
    return rows;
  }
}

/**
 * The peak of every rank.
 * @param {Timeline} timeline
 */
function peaksOf(timeline) {
  const { during } = timeline.profile();
  const { changes } = timeline.copies;
  return timeline.facts.memory.static.map((fixed, rank) => {
    let peak = fixed;
    for (let action = timeline.offset[rank]; action < timeline.offset[rank + 1]; action += 1) {
      peak = Math.max(peak, during[action], ...(changes.get(action) ?? []).map(({ held }) => held));
    }
    return peak;
  });
}

/**
 * Every change of a rank's memory in a window, with the memory held from then on.
 * @param {Timeline} timeline
 * @param {number} rank
 * @param {number} start
 * @param {number} end
 * @returns {Steps}
 */
export function stepsIn(timeline, rank, start, end) {
  const { during, after } = timeline.profile();
  const [first, stop] = timeline.window(rank, start, end);
  const at = [Math.max(0, start)];
  const held = [timeline.heldBefore(rank, first)];
  const add = (/** @type {number} */ when, /** @type {number} */ amountHeld) => {
    if (amountHeld !== held.at(-1)) {
      at.push(when);
      held.push(amountHeld);
    }
  };
  for (let action = first; action <= stop; action += 1) {
    const isAction = action < stop;
    const isOfRank = isAction || action < timeline.offset[rank + 1];
    for (const change of isOfRank ? (timeline.copies.changes.get(action) ?? []) : []) {
      add(change.time, change.held);
    }
    if (isAction) {
      add(timeline.start[action], during[action]);
      add(timeline.end[action], after[action]);
    }
  }
  at.push(Math.min(end, timeline.makespan));
  held.push(held[held.length - 1]);
  return { at, held };
}

/**
 * The most that a rank holds in every column of a window; nothing for columns before the first start or after the
 * last end. Written for speed: for a large plan it visits every action.
 * @param {Timeline} timeline
 * @param {number} rank
 * @param {number} start
 * @param {number} end
 * @param {number} columns
 * @returns {Steps}
 */
export function columnPeaks(timeline, rank, start, end, columns) {
  const { during, after } = timeline.profile();
  const { start: starts, end: ends } = timeline;
  const [first, stop] = timeline.window(rank, start, end);
  const perColumn = columns / (end - start);
  const low = Math.max(0, Math.floor(-start * perColumn));
  const high = Math.min(columns - 1, Math.floor((timeline.makespan - start) * perColumn));
  const highest = new Float64Array(columns);
  let holds = timeline.heldBefore(rank, first);
  let column = low;
  const { changes } = timeline.copies;
  for (let action = first; action <= stop; action += 1) {
    const isOfRank = action < timeline.offset[rank + 1];
    for (const change of isOfRank && changes.size > 0 ? (changes.get(action) ?? []) : []) {
      const until = Math.min(high, Math.floor((change.time - start) * perColumn));
      for (; column < until; column += 1) {
        highest[column] = Math.max(highest[column], holds);
      }
      if (column >= low && column <= high) {
        highest[column] = Math.max(highest[column], holds, change.held);
      }
      holds = change.held;
    }
    // First the memory held until the action starts, then the memory held while it runs.
    const begins = action < stop ? Math.min(high, Math.floor((starts[action] - start) * perColumn)) : high;
    for (; column < begins; column += 1) {
      highest[column] = Math.max(highest[column], holds);
    }
    if (column >= low && column <= high) {
      highest[column] = Math.max(highest[column], holds);
    }
    if (action < stop) {
      const finishes = Math.min(high, Math.floor((ends[action] - start) * perColumn));
      const running = during[action];
      for (; column < finishes; column += 1) {
        highest[column] = Math.max(highest[column], running);
      }
      if (column >= low && column <= high) {
        highest[column] = Math.max(highest[column], running);
      }
      holds = after[action];
    }
  }
  const at = [];
  const held = [];
  for (column = low; column <= high; column += 1) {
    at.push(Math.max(0, start + column / perColumn));
    held.push(highest[column]);
  }
  return { at, held };
}

/**
 * The peaks of the least and of the most loaded rank in every column of a window.
 * @param {Timeline} timeline
 * @param {number} start
 * @param {number} end
 * @param {number} columns
 */
export function extremes(timeline, start, end, columns) {
  const { at, held } = columnPeaks(timeline, 0, start, end, columns);
  const [low, high] = [[...held], [...held]];
  for (let rank = 1; rank < timeline.ranks; rank += 1) {
    columnPeaks(timeline, rank, start, end, columns).held.forEach((amountHeld, column) => {
      low[column] = Math.min(low[column], amountHeld);
      high[column] = Math.max(high[column], amountHeld);
    });
  }
  return { at, low, high };
}
