// The part of the time axis that the charts of a page show. It always lies within [0, last] and is never shorter than
// `shortest`.

const SHOWN_LENGTHS = 24; // lengths of an action that are shown after zooming to it

export class TimeRange {
  /** @param {import("./timeline.js").Timeline[]} timelines all charts share this range */
  constructor(timelines) {
    let longest = 0;
    this.last = Math.max(0, ...timelines.map(({ makespan }) => makespan)) || 1;
    for (const { start, end, count } of timelines) {
      for (let action = 0; action < count; action += 1) {
        longest = Math.max(longest, end[action] - start[action]);
      }
    }
    this.shortest = Math.min(this.last, (longest || this.last) / 8);
    this.start = 0;
    this.end = this.last;
    /** Called after every change. */
    this.changed = () => {};
  }

  get length() {
    return this.end - this.start;
  }

  /**
   * Show a stretch of time around a middle, as far as the limits allow.
   * @param {number} middle
   * @param {number} length
   */
  show(middle, length) {
    const shown = Math.min(this.last, Math.max(this.shortest, length));
    this.start = Math.min(Math.max(0, middle - shown / 2), this.last - shown);
    this.end = this.start + shown;
    this.changed();
  }

  /** @param {number} by time to move by, towards later times if positive */
  pan(by) {
    this.show((this.start + this.end) / 2 + by, this.length);
  }

  /**
   * Zoom around a time, which stays where it is on the screen.
   * @param {number} factor of the length that is shown; less than 1 zooms in
   * @param {number} at
   */
  zoom(factor, at) {
    const length = Math.min(this.last, Math.max(this.shortest, factor * this.length));
    this.show(at + ((this.start + this.end) / 2 - at) * (length / this.length), length);
  }

  /** @param {string} how "left" and "right" by half of what is shown, "in", "out", or "all" */
  move(how) {
    const middle = (this.start + this.end) / 2;
    if (how === "all") {
      this.show(this.last / 2, this.last);
    } else if (how === "in" || how === "out") {
      this.zoom(how === "in" ? 0.5 : 2, middle);
    } else {
      this.pan((how === "left" ? -0.5 : 0.5) * this.length);
    }
  }

  /**
   * Show an action and its neighbours.
   * @param {import("./timeline.js").Timeline} timeline
   * @param {number} action
   */
  zoomTo({ start, end }, action) {
    this.show((start[action] + end[action]) / 2, SHOWN_LENGTHS * (end[action] - start[action]));
  }
}
