// Best plan and lower bound against time: two step lines and the gap between them, as SVG.

import { amount, duration, number, percent, ticks } from "../numbers.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300;
const MARGIN = { top: 20, right: 16, bottom: 34 };
const TICK_GAP = 8; // px between a number and its axis
const DIGIT = 7; // px of a digit of an axis
const FAR = 6; // a first plan this many times farther from the bound than the best one is outside the chart

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, value);
  }
  if (text !== undefined) {
    made.textContent = text;
  }
  parent?.append(made);
  return made;
}

// The vertical range: from a little below the bound to the first plan, unless that is far away.
export function heights(points) {
  const low = Math.min(...points.map((point) => point.bound));
  const high = Math.max(...points.map((point) => point.best));
  const { best, bound } = points.at(-1);
  const usual = best + FAR * Math.max(best - bound, 0.02 * Math.abs(best));
  const top = Math.min(high, usual);
  const room = 0.08 * (top - low) || 0.05 * Math.abs(top) || 1;
  return { low: Math.max(0, low - room), high: top + room, isCut: high > top };
}

// Corners of a step line through (seconds, value), held until `end`.
function steps(points, key, x, y, end) {
  const corners = [];
  points.forEach((point, at) => {
    if (at > 0) {
      corners.push([x(point.seconds), y(points[at - 1][key])]);
    }
    corners.push([x(point.seconds), y(point[key])]);
  });
  corners.push([x(end), y(points.at(-1)[key])]);
  return corners;
}

const path = (corners) => corners.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

export class Chart {
  constructor(holder, unit) {
    this.holder = holder;
    this.unit = unit;
    this.points = [];
    this.end = 0;
    this.pointer = null;
    this.x = (/** @type {number} */ seconds) => seconds; // to px; draw() replaces both
    this.y = (/** @type {number} */ value) => value;
    this.tip = document.createElement("div");
    this.tip.className = "course-tip";
    this.tip.hidden = true;
    new ResizeObserver(() => this.draw()).observe(holder);
    holder.addEventListener("pointermove", (event) => this.point(event.clientX - holder.getBoundingClientRect().left));
    holder.addEventListener("pointerleave", () => this.point(null));
  }

  show(points, end) {
    this.points = points;
    this.end = Math.max(end, points.at(-1)?.seconds ?? 0, 0.5);
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth;
    if (this.points.length === 0 || width === 0) {
      return;
    }
    const range = heights(this.points);
    const values = ticks(range.low, range.high, 5);
    const left = TICK_GAP + DIGIT * Math.max(...values.map((value) => number(value).length));
    this.x = (seconds) => left + (seconds / this.end) * (width - left - MARGIN.right);
    this.y = (value) => {
      const share = Math.min(1, (value - range.low) / (range.high - range.low));
      return HEIGHT - MARGIN.bottom - share * (HEIGHT - MARGIN.top - MARGIN.bottom);
    };
    const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
    this.#axes(svg, values, left, width);
    this.#lines(svg, range.isCut);
    this.rule = element("line", { class: "rule", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" }, svg);
    this.holder.replaceChildren(svg, this.tip);
    this.holder.dataset.state = "drawn";
    this.holder.dataset.points = String(this.points.length);
    this.point(this.pointer);
  }

  #axes(svg, values, left, width) {
    const floor = HEIGHT - MARGIN.bottom;
    for (const value of values) {
      element("line", { class: "grid", x1: left, x2: width - MARGIN.right, y1: this.y(value), y2: this.y(value) }, svg);
      element("text", { x: left - TICK_GAP, y: this.y(value) + 4, "text-anchor": "end" }, svg, number(value));
    }
    element("line", { class: "axis", x1: left, x2: width - MARGIN.right, y1: floor, y2: floor }, svg);
    const times = ticks(0, this.end, width < 500 ? 3 : 8);
    for (const at of times) {
      element("line", { class: "axis", x1: this.x(at), x2: this.x(at), y1: floor, y2: floor + 4 }, svg);
      const anchor = at === 0 ? "start" : this.x(at) > width - 40 ? "end" : "middle";
      element("text", { x: this.x(at), y: floor + 18, "text-anchor": anchor }, svg, at < 100 ? `${number(at)} s` : duration(at));
    }
  }

  #lines(svg, isCut) {
    const best = steps(this.points, "best", this.x, this.y, this.end);
    const bound = steps(this.points, "bound", this.x, this.y, this.end);
    element("path", { class: "gap", d: `${path(best)}${path(bound.toReversed()).replace("M", "L")}Z` }, svg);
    element("path", { class: "bound", d: path(bound) }, svg);
    element("path", { class: "best", d: path(best) }, svg);
    if (this.points.length <= 60) {
      for (const point of this.points) {
        element("circle", { class: "best", cx: this.x(point.seconds), cy: this.y(point.best), r: 2.5 }, svg);
      }
    }
    if (isCut) {
      // Above all lines, and aligned so that it stays inside the chart.
      const first = `↑ first plan: ${amount(this.points[0].best, this.unit)}`;
      const left = this.x(this.points[0].seconds);
      const isLate = left > this.holder.clientWidth / 2;
      element("text", { x: left, y: MARGIN.top - 8, "text-anchor": isLate ? "end" : "start" }, svg, first);
    }
  }

  // Shows the values at a position of the pointer.
  point(left) {
    this.pointer = left;
    if (this.points.length === 0 || this.rule === undefined) {
      return;
    }
    const known = left === null ? undefined : this.points.findLast((point) => this.x(point.seconds) <= left + 3);
    this.tip.hidden = known === undefined;
    this.rule.setAttribute("visibility", known === undefined ? "hidden" : "visible");
    if (known === undefined) {
      return;
    }
    const at = this.x(known.seconds);
    this.rule.setAttribute("x1", at);
    this.rule.setAttribute("x2", at);
    const lines = [
      `after ${duration(known.seconds)}`,
      `best ${amount(known.best, this.unit)}`,
      `lower bound ${amount(known.bound, this.unit)}`,
      known.gap === null ? "" : `gap ${percent(known.gap)}`,
      known.method ?? "",
    ];
    this.tip.replaceChildren(
      ...lines.filter(Boolean).map((line) => Object.assign(document.createElement("div"), { textContent: line })),
    );
    const room = this.holder.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(0, Math.min(at + 12, room))}px`;
  }
}
