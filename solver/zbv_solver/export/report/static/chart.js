// One or several Gantt charts above each other, with the memory of the ranks and an overview: they share a time axis
// and are drawn together, whenever the range, the width or the theme changes.

import { Gantt } from "./gantt.js";
import { moveByPointer } from "./gestures.js";
import { Memory } from "./memory.js";
import { Overview } from "./overview.js";
import { TimeRange } from "./range.js";
import { Tooltip, describeAction, terms } from "./tooltip.js";

const KEYS = new Map([["+", "in"], ["-", "out"], ["0", "all"]]);
const ARROWS = new Map([["ArrowLeft", "left"], ["ArrowRight", "right"]]);

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {(gantt: Gantt, action: number) => [string, string][]} MoreRows rows that the tooltip of an action adds */

export class Chart {
  /**
   * @param {HTMLElement} element with a canvas "gantt" per timeline, perhaps a canvas "memory", and a canvas "overview"
   * @param {Timeline[]} timelines
   * @param {MoreRows} [moreRows]
   */
  constructor(element, timelines, moreRows = () => []) {
    const canvas = (/** @type {string} */ name) => element.querySelectorAll(/** @type {"canvas"} */ (`canvas.${name}`));
    this.element = element;
    this.range = new TimeRange(timelines);
    this.gantts = timelines.map((timeline, at) => new Gantt(canvas("gantt")[at], timeline, this.range));
    const legend = /** @type {HTMLElement} */ (element.querySelector(".memory-legend"));
    this.memory = legend === null ? null : new Memory(canvas("memory")[0], legend, timelines[0], this.range);
    this.overview = new Overview(canvas("overview")[0], timelines[0], this.range);
    this.tooltip = new Tooltip();
    this.frame = 0;
    /** Called with the Gantt chart and the action, or -1, that was clicked. */
    this.clicked = (/** @type {Gantt} */ _gantt, /** @type {number} */ _action) => {};
    this.#listen(moreRows);
    this.draw();
  }

  /** Draw now. */
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const counts = this.gantts.map((gantt) => gantt.draw());
    if (this.memory !== null) {
      this.memory.selected = this.gantts[0].selected;
      this.memory.draw();
    }
    this.overview.draw();
    this.element.dataset.bars = counts.join(" ");
    this.element.dataset.window = `${this.range.start} ${this.range.end}`;
  }

  /** Draw in the next frame: many changes, one drawing. */
  drawSoon() {
    if (this.frame === 0) {
      this.frame = requestAnimationFrame(() => this.draw());
    }
  }

  /** @param {MoreRows} moreRows */
  #listen(moreRows) {
    const { range, memory, element, tooltip } = this;
    const soon = () => this.drawSoon();
    range.changed = soon;
    document.addEventListener("zbv:theme", soon);
    window.matchMedia("print").addEventListener("change", () => this.draw());
    new ResizeObserver(soon).observe(element);
    for (const gantt of this.gantts) {
      const { canvas } = gantt.surface;
      const { isDrag } = moveByPointer(gantt.surface, (selection) => this.#select(selection));
      canvas.addEventListener("click", (event) => {
        if (!isDrag()) {
          this.clicked(gantt, gantt.actionAt(event));
        }
      });
      tooltip.follow(canvas, (event) => {
        const action = gantt.actionAt(event);
        const content = () => describeAction(gantt.timeline, action, moreRows(gantt, action));
        return action < 0 ? null : { key: action, content };
      });
    }
    if (memory !== null) {
      memory.changed = soon;
      moveByPointer(memory.surface, (selection) => this.#select(selection));
      tooltip.follow(memory.surface.canvas, (event) => {
        const rows = memory.rowsAt(event);
        return rows.length === 0 ? null : { key: rows.join(), content: () => [terms(rows)] };
      });
    }
    for (const button of document.querySelectorAll(/** @type {"button"} */ ("button[data-move]"))) {
      button.addEventListener("click", () => range.move(button.dataset.move ?? "all"));
    }
    document.querySelector("button[data-save]")?.addEventListener("click", () => this.#save());
    element.addEventListener("keydown", (event) => this.#press(event));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const how = KEYS.get(event.key) ?? (this.gantts.length > 1 || event.shiftKey ? ARROWS.get(event.key) : undefined);
    if (how !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.range.move(how);
    }
  }

  /** @param {import("./gestures.js").Selection} selection */
  #select(selection) {
    this.draw();
    for (const { surface } of selection === null ? [] : [...this.gantts, ...(this.memory === null ? [] : [this.memory])]) {
      const { context, frame } = surface;
      context.fillStyle = context.strokeStyle = surface.colour("accent");
      const box = /** @type {const} */ ([selection?.left ?? 0, frame.top, (selection?.right ?? 0) - (selection?.left ?? 0), frame.height]);
      context.lineWidth = 1;
      context.strokeRect(...box);
      context.globalAlpha = 0.15;
      context.fillRect(...box);
      context.globalAlpha = 1;
    }
  }

  /** Save what is shown as a PNG file. */
  #save() {
    const parts = [...this.gantts, ...(this.memory === null ? [] : [this.memory])].map(({ surface }) => surface);
    const whole = document.createElement("canvas");
    whole.width = parts[0].canvas.width;
    whole.height = parts.reduce((sum, { canvas }) => sum + canvas.height, 0);
    const context = whole.getContext("2d");
    if (context === null) {
      return;
    }
    context.fillStyle = parts[0].colour("surface");
    context.fillRect(0, 0, whole.width, whole.height);
    let top = 0;
    for (const { canvas } of parts) {
      context.drawImage(canvas, 0, top);
      top += canvas.height;
    }
    whole.toBlob((image) => {
      if (image !== null) {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(image);
        link.download = "schedule.png";
        link.click();
        URL.revokeObjectURL(link.href);
      }
    });
  }
}
