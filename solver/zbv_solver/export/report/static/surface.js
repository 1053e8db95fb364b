// A canvas as wide as its container, measured in CSS pixels and sharp on every screen, with a frame for data and room
// for axes around it. The template gives it its height.

import { axisNumbers, ticks } from "./numbers.js";

const LEFT = 66; // px for names of rows and numbers of a vertical axis
const RIGHT = 74; // px for notes at the right of the rows
const NARROW = 560; // px of a canvas below which the notes give way
const NARROW_RIGHT = 14;
const TICK_WIDTH = 90; // px for a number of the time axis
const TICK = 4; // px
export const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/** @typedef {{ left: number, top: number, width: number, height: number }} Box */

export class Surface {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import("./range.js").TimeRange} range
   * @param {{ top?: number, bottom?: number }} room px above and below the frame
   */
  constructor(canvas, range, { top = 0, bottom = 0 } = {}) {
    const context = canvas.getContext("2d");
    if (context === null) {
      throw new Error("this browser cannot draw on a canvas");
    }
    this.canvas = canvas;
    this.context = context;
    this.range = range;
    this.height = canvas.height;
    this.room = { top, bottom };
    canvas.style.width = "100%";
    canvas.style.transition = "none"; // colour() reads a colour right after setting it
    canvas.style.height = `${this.height}px`;
    this.frame = this.#measure();
  }

  get isNarrow() {
    return this.canvas.clientWidth < NARROW;
  }

  /**
   * The part of the canvas that shows data, in px from its corner.
   * @returns {Box}
   */
  #measure() {
    const { top, bottom } = this.room;
    const right = this.isNarrow ? NARROW_RIGHT : RIGHT;
    return {
      left: LEFT,
      top,
      width: Math.max(1, this.canvas.clientWidth - LEFT - right),
      height: this.height - top - bottom,
    };
  }

  /** @param {number} time */
  x(time) {
    const { left, width } = this.frame;
    return left + ((time - this.range.start) / this.range.length) * width;
  }

  /**
   * The time at a pointer, and where the pointer is in the frame: 0 to 1 from left to right and from top to bottom.
   * @param {{ clientX: number, clientY: number }} event
   */
  locate(event) {
    const corner = this.canvas.getBoundingClientRect();
    const { left, top, width, height } = this.frame;
    const x = (event.clientX - corner.left - left) / width;
    const y = (event.clientY - corner.top - top) / height;
    return { x, y, time: this.range.start + x * this.range.length, isInside: x >= 0 && x <= 1 && y >= 0 && y < 1 };
  }

  /**
   * The colour of a CSS custom property in the theme that holds.
   * @param {string} name
   */
  colour(name) {
    this.canvas.style.color = `var(--${name})`;
    return getComputedStyle(this.canvas).color;
  }

  /** Clear the canvas and paint the background of the frame. */
  begin() {
    const { canvas, context } = this;
    this.frame = this.#measure();
    const scale = window.devicePixelRatio;
    const [width, height] = [Math.round(canvas.clientWidth * scale), Math.round(this.height * scale)];
    if (canvas.width !== width || canvas.height !== height) {
      [canvas.width, canvas.height] = [width, height];
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, this.height);
    const { left, top, width: inner, height: rows } = this.frame;
    context.fillStyle = this.colour("chart");
    context.fillRect(left, top, inner, rows);
    context.lineWidth = 1;
    context.font = FONT;
    return context;
  }

  /**
   * Draw inside the frame only.
   * @param {() => void} draw
   */
  clipped(draw) {
    const { left, top, width, height } = this.frame;
    this.context.save();
    this.context.beginPath();
    this.context.rect(left, top, width, height);
    this.context.clip();
    draw();
    this.context.restore();
  }

  get ticks() {
    const count = Math.max(2, Math.min(10, Math.floor(this.frame.width / TICK_WIDTH)));
    return ticks(this.range.start, this.range.end, count);
  }

  /** Vertical lines at the ticks of the time axis, and the outline of the frame. */
  grid() {
    const { context } = this;
    const { left, top, width, height } = this.frame;
    context.strokeStyle = this.colour("line");
    context.beginPath();
    for (const tick of this.ticks) {
      const x = Math.round(this.x(tick)) + 0.5;
      context.moveTo(x, top);
      context.lineTo(x, top + height);
    }
    context.rect(left + 0.5, top + 0.5, width - 1, height - 1);
    context.stroke();
  }

  /**
   * Numbers below the frame, and what they are.
   * @param {string} title
   */
  timeAxis(title) {
    const { context } = this;
    const { left, top, width, height } = this.frame;
    const bottom = top + height;
    context.strokeStyle = this.colour("line");
    context.fillStyle = this.colour("muted");
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "top";
    const found = this.ticks;
    axisNumbers(found).forEach((text, at) => {
      const x = Math.round(this.x(found[at])) + 0.5;
      context.beginPath();
      context.moveTo(x, bottom);
      context.lineTo(x, bottom + TICK);
      context.stroke();
      context.fillText(text, x, bottom + TICK + 3);
    });
    if (title !== "") {
      context.fillText(title, left + width / 2, bottom + TICK + 19);
    }
  }
}
