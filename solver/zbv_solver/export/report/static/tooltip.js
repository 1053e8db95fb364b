// A box next to the pointer that describes the action under it.

import { make } from "./dom.js";
import { time } from "./numbers.js";
import { featuresInWords, idleBefore, waitedFor } from "./words.js";

const DISTANCE = 14; // px from the pointer
const MARGIN = 4; // px from the edges of the window

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {[string, string][]} Rows terms and values */

export class Tooltip {
  constructor() {
    this.box = make("div", { className: "tip", hidden: true });
    document.body.append(this.box);
    /** @type {string | number | null} */
    this.shown = null;
    window.addEventListener("scroll", () => this.hide(), { passive: true });
  }

  hide() {
    this.box.hidden = true;
    this.shown = null;
  }

  /**
   * Describe what a pointer is over. `describe` returns a key and a function for the content, or null for nothing.
   * @param {HTMLElement} element
   * @param {(event: PointerEvent) => { key: string | number, content: () => Node[] } | null} describe
   */
  follow(element, describe) {
    element.addEventListener("pointerleave", () => this.hide());
    element.addEventListener("pointermove", (event) => {
      const found = event.buttons === 0 ? describe(event) : null;
      if (found === null) {
        this.hide();
        return;
      }
      if (found.key !== this.shown) {
        this.box.replaceChildren(...found.content());
        this.box.hidden = false;
        this.shown = found.key;
      }
      this.#place(event);
    });
  }

  /** @param {PointerEvent} event */
  #place({ clientX, clientY }) {
    const { width, height } = this.box.getBoundingClientRect();
    const right = clientX + DISTANCE;
    const left = right + width > window.innerWidth ? clientX - DISTANCE - width : right;
    const below = clientY + DISTANCE;
    const top = below + height > window.innerHeight ? clientY - DISTANCE - height : below;
    this.box.style.left = `${Math.max(MARGIN, left)}px`;
    this.box.style.top = `${Math.max(MARGIN, top)}px`;
  }
}

/**
 * @param {Timeline} timeline
 * @param {number} action
 * @param {Rows} more
 */
export function describeAction(timeline, action, more) {
  const { facts } = timeline;
  const head = make("p");
  head.append(make("b", { textContent: timeline.text(action) }), ` ${timeline.name(action)}`);
  return [
    head,
    terms([
      ["start", time(timeline.start[action], facts)],
      ["end", time(timeline.end[action], facts)],
      ["rank", String(timeline.rankOf(action))],
      ["stage", `${timeline.stage[action]} (chunk ${timeline.chunk[action]})`],
      ["microbatch", String(timeline.microbatch[action])],
      ...(facts.features.length > 0 ? [/** @type {[string, string]} */ (["features", featuresInWords(timeline, action)])] : []),
      ["waited for", waitedFor(timeline, action)],
      ["idle before", idleBefore(timeline, action)],
      ...more,
    ]),
  ];
}

/**
 * A list of terms and values.
 * @param {Rows} rows
 */
export function terms(rows) {
  const list = make("dl");
  for (const [term, value] of rows) {
    list.append(make("dt", { textContent: term }), make("dd", { textContent: value }));
  }
  return list;
}
