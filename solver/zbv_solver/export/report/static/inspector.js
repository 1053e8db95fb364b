// The selected action: its microbatch through the stages, its critical path, and both in words.

import { make, part } from "./dom.js";
import { memory, number, time } from "./numbers.js";
import { terms } from "./tooltip.js";
import { featuresInWords, idleBefore, spentInWords, waitedFor } from "./words.js";

/** @typedef {"rank" | "microbatch"} Along */

/** @type {Map<string, [Along, number]>} */
const STEPS = new Map([
  ["ArrowLeft", ["rank", -1]],
  ["ArrowRight", ["rank", 1]],
  ["ArrowUp", ["microbatch", -1]],
  ["ArrowDown", ["microbatch", 1]],
]);
const AROUND = 40; // px kept free above and below a selected action

/** @param {number} count */
const actions = (count) => (count === 1 ? "1 action" : `${number(count)} actions`);

export class Inspector {
  /**
   * @param {import("./chart.js").Chart} chart
   * @param {HTMLElement} panel
   */
  constructor(chart, panel) {
    this.chart = chart;
    this.gantt = chart.gantts[0];
    this.timeline = this.gantt.timeline;
    this.panel = panel;
    const words = (/** @type {string} */ name) => part(panel, `[data-part="${name}"]`, HTMLElement);
    this.parts = { head: words("head"), facts: words("facts"), waited: words("waited"), path: words("path") };
    this.field = part(document, "#find-action", HTMLInputElement);
    this.complaint = part(document, "#find-complaint", HTMLElement);
    this.summary = part(document, "#critical-path", HTMLElement);
    this.showsWholePath = false;
    this.#listen();
  }

  #listen() {
    this.chart.clicked = (_gantt, action) => {
      if (action >= 0) {
        this.select(action === this.gantt.selected ? -1 : action);
      }
    };
    document.addEventListener("keydown", (event) => this.#press(event));
    for (const button of this.panel.querySelectorAll(/** @type {"button"} */ ("button[data-step]"))) {
      const step = STEPS.get(button.dataset.step ?? "");
      button.addEventListener("click", () => step !== undefined && this.step(...step));
    }
    part(this.panel, "[data-close]", HTMLElement).addEventListener("click", () => this.close());
    part(this.panel, "[data-zoom]", HTMLElement).addEventListener("click", () => {
      this.chart.range.zoomTo(this.timeline, this.gantt.selected);
    });
    this.field.form?.addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(this.field.value);
    });
    this.field.addEventListener("input", () => this.#complain(""));
    this.#toggle("#show-idle", (isOn) => {
      this.gantt.showsIdle = isOn;
    });
    this.#toggle("#show-path", (isOn) => {
      this.showsWholePath = isOn;
      this.#trace();
    });
  }

  /**
   * @param {string} selector of a button
   * @param {(isOn: boolean) => void} change
   */
  #toggle(selector, change) {
    const button = part(document, selector, HTMLElement);
    button.addEventListener("click", () => {
      const isOn = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isOn));
      change(isOn);
      this.chart.draw();
    });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    if (event.key === "Escape" && this.gantt.selected >= 0) {
      this.close();
      return;
    }
    const step = STEPS.get(event.key);
    const isHere = event.target instanceof Element && event.target.closest("#chart, #inspector") !== null;
    const inField = event.target === this.field && step?.[0] === "microbatch";
    if (step !== undefined && (isHere || inField)) {
      event.preventDefault();
      this.step(...step);
    }
  }

  /** @param {string} text an action as `7I3` */
  find(text) {
    const action = this.timeline.find(text);
    if (action >= 0) {
      this.select(action);
    } else if (text.trim() === "") {
      this.close();
    } else {
      const example = this.timeline.count > 0 ? this.timeline.text(0) : "0F0";
      this.#complain(
        `${text.trim().slice(0, 20)} not found. Type a stage, a letter and a microbatch, for example ${example}.`,
      );
    }
  }

  /** @param {string} text */
  #complain(text) {
    this.complaint.textContent = text;
    this.complaint.hidden = text === "";
    this.field.setAttribute("aria-invalid", String(text !== ""));
  }

  /**
   * Select the next (1) or previous (-1) action of the same rank or microbatch; the first action if none is selected.
   * @param {Along} along
   * @param {number} by
   */
  step(along, by) {
    const { selected } = this.gantt;
    if (selected < 0) {
      this.select(this.timeline.count > 0 ? 0 : -1);
      return;
    }
    const all = along === "rank" ? this.#ofRank(selected) : this.#ofMicrobatch(selected);
    const next = all[all.indexOf(selected) + by];
    if (next !== undefined) {
      this.select(next);
    }
  }

  /** @param {number} action */
  #ofRank(action) {
    const { offset } = this.timeline;
    const rank = this.timeline.rankOf(action);
    return Array.from({ length: offset[rank + 1] - offset[rank] }, (_, at) => offset[rank] + at);
  }

  /**
   * In the order of time; lower stages first among those that start together.
   * @param {number} action
   */
  #ofMicrobatch(action) {
    const { microbatch, start, stage, count } = this.timeline;
    const found = [];
    for (let other = 0; other < count; other += 1) {
      if (microbatch[other] === microbatch[action]) {
        found.push(other);
      }
    }
    return found.sort((one, other) => start[one] - start[other] || stage[one] - stage[other] || one - other);
  }

  /** @param {number} action -1 for none */
  select(action) {
    const { gantt, timeline } = this;
    gantt.selected = action;
    gantt.outlined = action < 0 ? [] : this.#ofMicrobatch(action);
    gantt.highlighted = action < 0 ? null : new Uint8Array(timeline.count);
    for (const other of gantt.outlined) {
      gantt.highlighted?.fill(1, other, other + 1);
    }
    this.panel.hidden = action < 0;
    this.#trace();
    if (action >= 0) {
      this.field.value = timeline.text(action);
      this.#complain("");
      this.#describe(action);
      this.#reveal(action);
    }
    this.chart.draw();
  }

  close() {
    const hadFocus = this.panel.contains(document.activeElement);
    this.field.value = "";
    this.select(-1);
    if (hadFocus) {
      this.field.focus();
    }
  }

  /** Update the path that is drawn: that of the selected action, or the whole one on request. */
  #trace() {
    const { gantt, timeline } = this;
    const isWhole = gantt.selected < 0 && this.showsWholePath;
    const path = timeline.criticalPath(isWhole ? timeline.last : gantt.selected);
    gantt.path = path;
    this.summary.hidden = !isWhole;
    if (isWhole) {
      const first = path.length > 0 ? timeline.text(path[0]) : "nothing";
      const end = time(timeline.makespan, timeline.facts);
      const caveat =
        timeline.facts.objective === "span"
          ? " This is the path through the iteration shown; the span, from one iteration to the next, may be limited elsewhere."
          : "";
      this.summary.textContent =
        `Critical path: ${actions(path.length)} from ${first} to the last end at ${end}${this.#spent(path)}.${caveat}`;
    }
  }

  /**
   * Bring an action into view without changing the zoom.
   * @param {number} action
   */
  #reveal(action) {
    const { range } = this.chart;
    const [from, to] = [this.timeline.start[action], this.timeline.end[action]];
    if (from < range.start || to > range.end) {
      range.show((from + to) / 2, range.length);
    }
    // The panel sticks to the bottom of the window: it must cover no rank if all fit above it, and never the action.
    const room = Math.min(window.innerHeight, this.panel.getBoundingClientRect().top);
    const rows = this.gantt.surface.canvas.getBoundingClientRect();
    const { y } = this.gantt.place(action);
    const [top, bottom] = rows.height <= room ? [rows.top, rows.bottom] : [y - AROUND, y + AROUND];
    if (top < 0 || bottom > room) {
      window.scrollBy({ top: top < 0 ? top : bottom - room });
    }
  }

  /** @param {number} action */
  #describe(action) {
    const { timeline } = this;
    const { facts } = timeline;
    const rank = timeline.rankOf(action);
    const { during, after } = timeline.memory(action);
    this.parts.head.replaceChildren(
      make("b", { textContent: timeline.text(action) }),
      ` ${timeline.name(action)}, rank ${rank}, stage ${timeline.stage[action]} (chunk ${timeline.chunk[action]}), microbatch ${timeline.microbatch[action]}`,
    );
    /** @type {[string, string][]} */
    const rows = [
      ["Start", time(timeline.start[action], facts)],
      ["End", time(timeline.end[action], facts)],
      ["Duration", time(timeline.end[action] - timeline.start[action], facts)],
      ["Idle before", idleBefore(timeline, action)],
    ];
    if (facts.features.length > 0) {
      rows.push([`Microbatch ${timeline.microbatch[action]}`, featuresInWords(timeline, action)]);
    }
    if (facts.memory.is_known) {
      rows.push([`Memory of rank ${rank}`, `${memory(during, facts)}, then ${memory(after, facts)}`]);
    }
    const copies = timeline.copies.of(timeline.stage[action], timeline.microbatch[action]);
    if (copies !== undefined && copies[1] !== null) {
      const [out, back] = copies.map((copy) => `${time(copy?.start ?? 0, facts)} to ${time(copy?.end ?? 0, facts)}`);
      rows.push(["Copied to the host", out], ["And back", back]);
    }
    this.parts.facts.replaceChildren(terms(rows));
    this.parts.waited.replaceChildren(...this.#waitInWords(action));
    const path = this.gantt.path;
    this.parts.path.textContent =
      path.length === 1
        ? "Critical path to it: only this action."
        : `Critical path to it: ${actions(path.length)} from ${timeline.text(path[0])}${this.#spent(path)}.`;
  }

  /** @param {number[]} path */
  #spent(path) {
    const words = spentInWords(this.timeline, path);
    return words === "" ? "" : `; its time is spent on ${words}`;
  }

  /** @param {number} action */
  #waitInWords(action) {
    const { timeline } = this;
    const { by, action: awaited } = timeline.wait(action);
    if (by === "nothing") {
      return ["It waited for nothing."];
    }
    if (by === "copy") {
      return [`It waited for ${waitedFor(timeline, action)}.`];
    }
    const link = make("button", { type: "button", className: "link", textContent: timeline.text(awaited) });
    link.addEventListener("click", () => this.select(awaited));
    const at = time(timeline.end[awaited], timeline.facts);
    if (by === "rank") {
      return ["It waited for its rank, which ran ", link, ` until ${at}.`];
    }
    const transfer = timeline.arrival(action) - timeline.end[awaited];
    const way = transfer > 0 ? ` and took ${time(transfer, timeline.facts)} to arrive` : "";
    return ["It waited for its input from ", link, ` on rank ${timeline.rankOf(awaited)}, which ended at ${at}${way}.`];
  }
}
