// Draws a timeline on a canvas: bars while few enough actions are in view, otherwise an image; microbatch numbers
// where there is room; idle time, a critical path and highlighted actions.

import { DIMMED, channels, idleBounds, raster } from "./raster.js";
import { FONT, Surface } from "./surface.js";

const BAR_HEIGHT = 0.84; // of a row
const BAR_ABOVE_LANES = 0.6; // of a row with lanes of copies below
const LANES = /** @type {const} */ ([0.72, 0.85]); // their tops, of copies out and back
const LANE_HEIGHT = 0.1;
const LABEL_HEIGHT = 14; // px of a row below which bars carry no numbers
const LABEL_PADDING = 4;
const DIGIT_WIDTH = 6.6; // px, with the font of the labels
const LABEL_FONT = FONT.replace("12px", "11px");
const MAX_LABELS = 3000;
const EDGE_FROM = 5; // px of the average bar from which a gap separates it from its neighbour
const SLACK = 4; // pixels around an action that still count as pointing at it
const PATH_AT = 0.46; // of a row below its middle
const ROW_NAME_HEIGHT = 14; // px

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {{ left: number[], right: number[], rank: number[] }} Stretches */

/**
 * @typedef {object} Drawn what the last drawing shows
 * @property {number[]} bars actions
 * @property {Uint8ClampedArray | null} pixels RGBA of the image that replaces the bars
 * @property {Stretches} idle
 * @property {{ x: number[], y: number[] }} path
 * @property {string[]} labels
 * @property {number} copies
 */

export class Gantt {
  /**
   * @param {HTMLCanvasElement} canvas its data attributes say how much room is above and below the rows
   * @param {Timeline} timeline
   * @param {import("./range.js").TimeRange} range
   */
  constructor(canvas, timeline, range) {
    const { top, bottom, title, axis, idle } = canvas.dataset;
    this.surface = new Surface(canvas, range, { top: Number(top), bottom: Number(bottom) });
    this.timeline = timeline;
    this.range = range;
    this.title = title ?? "";
    this.axis = axis ?? null;
    /** @type {string[]} */
    this.notes = idle === undefined || idle === "" ? [] : idle.split(" ");
    this.showsIdle = false;
    /** @type {Uint8Array | null} */
    this.highlighted = null; // 1 for actions that keep their colour while the others are dimmed
    /** @type {number[]} */
    this.outlined = []; // actions that must show however small they are
    this.selected = -1;
    /** @type {number[]} */
    this.path = [];
    /** @type {Drawn} */
    this.drawn = { bars: [], pixels: null, idle: { left: [], right: [], rank: [] }, path: { x: [], y: [] }, labels: [], copies: 0 };
    this.image = document.createElement("canvas");
  }

  get rowHeight() {
    return this.surface.frame.height / this.timeline.ranks;
  }

  /** Draw what the range shows. Returns the number of bars, 0 for an image. */
  draw() {
    const { surface, timeline, range } = this;
    const context = surface.begin();
    const windows = timeline.visible(range.start, range.end);
    const count = windows.reduce((sum, [first, stop]) => sum + stop - first, 0);
    const asBars = count <= timeline.facts.max_glyphs;
    surface.grid();
    surface.clipped(() => {
      this.drawn = {
        bars: asBars ? this.#bars(context, windows, (surface.frame.width * timeline.ranks) / Math.max(1, count)) : [],
        pixels: asBars ? null : this.#image(context),
        idle: this.#idle(context, asBars && this.showsIdle ? windows : []),
        path: this.#path(context),
        labels: asBars ? this.#labels(context, windows) : [],
        copies: asBars ? this.#copies(context) : 0,
      };
      if (!asBars) {
        this.#outline(context, this.outlined, 1, this.barHeight);
      }
      this.#outline(context, this.selected < 0 ? [] : [this.selected], 2.5, 1);
    });
    this.#names(context);
    if (this.axis !== null) {
      surface.timeAxis(this.axis);
    }
    return asBars ? count : 0;
  }

  get hasLanes() {
    return this.timeline.copies.all.length > 0;
  }

  get barHeight() {
    return this.hasLanes ? BAR_ABOVE_LANES : BAR_HEIGHT;
  }

  /**
   * The top of a bar.
   * @param {number} rank
   */
  #top(rank, share = this.barHeight) {
    return this.surface.frame.top + (rank + (1 - Math.max(share, BAR_HEIGHT)) / 2) * this.rowHeight;
  }

  /** @param {number} action */
  #alpha(action) {
    return this.highlighted === null || this.highlighted[action] === 1 ? 1 : DIMMED;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {[number, number][]} windows
   * @param {number} average width of a bar
   */
  #bars(context, windows, average) {
    const { timeline, surface } = this;
    const gap = average >= EDGE_FROM ? 1 : 0;
    const height = this.barHeight * this.rowHeight;
    const bars = /** @type {number[]} */ ([]);
    windows.forEach(([first, stop], rank) => {
      const top = this.#top(rank);
      for (let action = first; action < stop; action += 1) {
        const left = surface.x(timeline.start[action]);
        const width = surface.x(timeline.end[action]) - left;
        context.globalAlpha = this.#alpha(action);
        context.fillStyle = timeline.facts.fills[timeline.kind[action]];
        context.fillRect(left, top, Math.max(width - gap, width / 2), height);
        bars.push(action);
      }
    });
    context.globalAlpha = 1;
    return bars;
  }

  /**
   * Two thin lanes below every rank: copies to the host, and back. Returns their number.
   * @param {CanvasRenderingContext2D} context
   */
  #copies(context) {
    const { surface, timeline, range } = this;
    const of = this.selected < 0 ? -1 : timeline.microbatch[this.selected];
    const found = timeline.copies.all.filter(({ start, end }) => end > range.start && start < range.end);
    context.fillStyle = surface.colour("muted");
    for (const { rank, microbatch, isBack, start, end } of found) {
      const left = surface.x(start);
      const top = surface.frame.top + (rank + LANES[Number(isBack)]) * this.rowHeight;
      context.globalAlpha = of < 0 || of === microbatch ? 1 : DIMMED;
      context.fillRect(left, top, Math.max(1, surface.x(end) - left - 1), LANE_HEIGHT * this.rowHeight);
    }
    context.globalAlpha = 1;
    return found.length;
  }

  /**
   * One pixel per column of the screen and row, stretched to the height of the rows.
   * @param {CanvasRenderingContext2D} context
   */
  #image(context) {
    const { timeline, surface, range, image } = this;
    const { left, top, width, height } = surface.frame;
    const columns = Math.max(1, Math.round(width * window.devicePixelRatio));
    const idle = this.showsIdle ? { fill: rgbOf(surface.colour("idle")), hatch: rgbOf(surface.colour("muted")) } : null;
    const pixels = raster(timeline, range.start, range.end, columns, { highlighted: this.highlighted, idle });
    [image.width, image.height] = [columns, timeline.ranks];
    image.getContext("2d")?.putImageData(new ImageData(pixels, columns, timeline.ranks), 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, top, width, height);
    context.fillStyle = surface.colour("chart");
    const gap = Math.max(1, (1 - BAR_HEIGHT) * this.rowHeight);
    for (let rank = 1; rank < timeline.ranks; rank += 1) {
      context.fillRect(left, top + rank * this.rowHeight - gap / 2, width, gap);
    }
    return pixels;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {[number, number][]} windows
   */
  #idle(context, windows) {
    const { timeline, surface } = this;
    const idle = idleStretches(timeline, windows);
    const fills = windows.length > 0 ? [surface.colour("idle"), hatch(context, surface.colour("muted"))] : [];
    for (const fill of fills) {
      context.fillStyle = fill;
      idle.rank.forEach((rank, at) => {
        const left = surface.x(idle.left[at]);
        context.fillRect(left, this.#top(rank), surface.x(idle.right[at]) - left, this.barHeight * this.rowHeight);
      });
    }
    return idle;
  }

  /** @param {CanvasRenderingContext2D} context */
  #path(context) {
    const { surface } = this;
    const line = pathLine(this.timeline, this.path);
    context.lineJoin = "round";
    for (const [width, colour] of /** @type {[number, string][]} */ ([[6, "chart"], [2.5, "text"]])) {
      context.lineWidth = width;
      context.strokeStyle = surface.colour(colour);
      context.beginPath();
      line.x.forEach((time, at) => {
        context.lineTo(surface.x(time), surface.frame.top + (line.y[at] + 0.5) * this.rowHeight);
      });
      context.stroke();
    }
    return line;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number[]} actions
   * @param {number} lineWidth
   * @param {number} share of the height of a row
   */
  #outline(context, actions, lineWidth, share) {
    const { timeline, surface } = this;
    context.strokeStyle = surface.colour("text");
    context.lineWidth = lineWidth;
    for (const action of actions) {
      const [left, top] = [surface.x(timeline.start[action]), this.#top(timeline.rankOf(action), share)];
      const [width, height] = [surface.x(timeline.end[action]) - left, share * this.rowHeight];
      context.fillStyle = timeline.facts.fills[timeline.kind[action]];
      if (share < 1) {
        context.fillRect(left, top, width, height);
      }
      context.strokeRect(left, top, width, height);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {[number, number][]} windows
   */
  #labels(context, windows) {
    const { timeline, surface, range } = this;
    const labels = /** @type {string[]} */ ([]);
    if (this.rowHeight < LABEL_HEIGHT) {
      return labels;
    }
    context.font = LABEL_FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    // The room of the longest number: otherwise the numbers would end at 9 where bars are narrow.
    const needed = DIGIT_WIDTH * String(timeline.facts.microbatches - 1).length + LABEL_PADDING;
    windows.forEach(([first, stop], rank) => {
      const middle = this.#top(rank) + (this.barHeight / 2) * this.rowHeight;
      for (let action = first; action < stop && labels.length < MAX_LABELS; action += 1) {
        const left = surface.x(Math.max(range.start, timeline.start[action]));
        const right = surface.x(Math.min(range.end, timeline.end[action]));
        if (right - left >= needed) {
          const text = String(timeline.microbatch[action]);
          context.globalAlpha = this.#alpha(action);
          context.fillStyle = timeline.facts.inks[timeline.kind[action]];
          context.fillText(text, (left + right) / 2, middle);
          labels.push(text);
        }
      }
    });
    context.globalAlpha = 1;
    return labels;
  }

  /**
   * The names of the rows, the notes at their right, and the title.
   * @param {CanvasRenderingContext2D} context
   */
  #names(context) {
    const { surface, timeline } = this;
    const { left, top, width } = surface.frame;
    const every = Math.max(1, Math.ceil(ROW_NAME_HEIGHT / this.rowHeight));
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = surface.colour("muted");
    const hasNotes = !surface.isNarrow && this.notes.length > 0;
    for (let rank = 0; rank < timeline.ranks; rank += every) {
      const middle = top + (rank + 0.5) * this.rowHeight;
      context.textAlign = "right";
      context.fillText(`rank ${rank}`, left - 8, middle);
      if (hasNotes) {
        context.textAlign = "left";
        context.fillText(this.notes[rank], left + width + 8, middle);
      }
    }
    context.textBaseline = "bottom";
    context.textAlign = "left";
    if (hasNotes) {
      context.fillText("idle", left + width + 8, top - 3);
    }
    context.fillStyle = surface.colour("text");
    context.font = `600 ${FONT.replace("12px", "13px")}`;
    context.fillText(this.title, left, top - 4);
  }

  /**
   * The action under a pointer, or -1.
   * @param {{ clientX: number, clientY: number }} event
   */
  actionAt(event) {
    const { y, time, isInside } = this.surface.locate(event);
    const slack = (SLACK / this.surface.frame.width) * this.range.length;
    return isInside ? this.timeline.at(Math.floor(y * this.timeline.ranks), time, slack) : -1;
  }

  /**
   * The middle of an action on the screen, as events have it.
   * @param {number} action
   */
  place(action) {
    const { timeline, surface } = this;
    const corner = surface.canvas.getBoundingClientRect();
    const middle = (timeline.start[action] + timeline.end[action]) / 2;
    const row = timeline.rankOf(action) + 0.5;
    return { x: corner.left + surface.x(middle), y: corner.top + surface.frame.top + row * this.rowHeight };
  }
}

/**
 * The idle time of every rank in its window of actions.
 * @param {Timeline} timeline
 * @param {[number, number][]} windows
 */
export function idleStretches(timeline, windows) {
  const idle = /** @type {Stretches} */ ({ left: [], right: [], rank: [] });
  windows.forEach(([first, stop], rank) => {
    const [from, to] = idleBounds(timeline, rank);
    let free = first > timeline.offset[rank] ? timeline.end[first - 1] : from;
    const add = (/** @type {number} */ until) => {
      if (until > free) {
        idle.left.push(free);
        idle.right.push(until);
        idle.rank.push(rank);
      }
    };
    for (let action = first; action < stop; action += 1) {
      add(timeline.start[action]);
      free = timeline.end[action];
    }
    add(stop < timeline.offset[rank + 1] ? timeline.start[stop] : to);
  });
  return idle;
}

/**
 * A path as a line: consecutive actions of a rank are one piece, transfers lead from rank to rank.
 * @param {Timeline} timeline
 * @param {number[]} path
 */
export function pathLine(timeline, path) {
  const line = { x: /** @type {number[]} */ ([]), y: /** @type {number[]} */ ([]) };
  path.forEach((action, at) => {
    const rank = timeline.rankOf(action);
    const follows = at > 0 && path[at - 1] === action - 1 && action > timeline.offset[rank];
    const isFollowed = path[at + 1] === action + 1 && action + 1 < timeline.offset[rank + 1];
    if (!follows) {
      line.x.push(timeline.start[action]);
      line.y.push(rank + PATH_AT);
    }
    if (!isFollowed) {
      line.x.push(timeline.end[action]);
      line.y.push(rank + PATH_AT);
    }
  });
  return line;
}

/**
 * Diagonal lines as a fill.
 * @param {CanvasRenderingContext2D} context
 * @param {string} colour
 */
function hatch(context, colour) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [8, 8];
  const pen = tile.getContext("2d");
  if (pen !== null) {
    pen.strokeStyle = colour;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 8);
      pen.lineTo(shift + 8, 0);
    }
    pen.stroke();
  }
  return context.createPattern(tile, "repeat") ?? colour;
}

/**
 * Red, green and blue of a computed colour, `rgb(1, 2, 3)` or `#010203`.
 * @param {string} colour
 */
const rgbOf = (colour) => (colour.startsWith("#") ? channels(colour) : (colour.match(/\d+/g) ?? []).slice(0, 3).map(Number));
