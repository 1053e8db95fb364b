// The first picture of a plan, until the chart is drawn: it lies where the chart's rows will be, and answers to
// the pointer already. What was pointed out in it, the chart takes over.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const SLACK = 4; // px beside an action that still point at it

  // For whoever uses a zbv.Gantt: it shows all of the time, and no more than a frame around one action.
  class Preview {
    // picture: the image of the schedule; timeline: zbv.Timeline
    constructor(picture, timeline) {
      this.timeline = timeline;
      this.view = { el: picture };
      this.frame = document.createElement("span");
      this.frame.className = "frame";
      this.frame.hidden = true;
      picture.after(this.frame);
      this.showsIdle = false;
      this.emphasis = null;
      this.marked = [];
      this.chosen = -1;
      this.path = [];
      new ResizeObserver(() => this.draw()).observe(picture);
    }

    // Time 0 to the makespan, whatever the chart will show.
    get range() {
      return { start: 0, end: this.timeline.makespan || 1 };
    }

    pointedAt(event) {
      const { left, top, width, height } = this.view.el.getBoundingClientRect();
      const [x, y] = [(event.clientX - left) / width, (event.clientY - top) / height];
      if (!(x >= 0 && x <= 1)) {
        return -1;
      }
      const { end } = this.range;
      return this.timeline.at(Math.floor(y * this.timeline.ranks), x * end, (SLACK / width) * end);
    }

    place(action) {
      const { left, top, width, height } = this.view.el.getBoundingClientRect();
      const { timeline } = this;
      const middle = (timeline.start[action] + timeline.end[action]) / 2;
      return {
        x: left + (middle / this.range.end) * width,
        y: top + ((timeline.rankOf(action) + 0.5) / timeline.ranks) * height,
      };
    }

    draw() {
      this.frame.hidden = this.chosen < 0;
      if (this.chosen >= 0) {
        const { timeline, chosen } = this;
        const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = this.view.el;
        const [scale, row] = [offsetWidth / this.range.end, offsetHeight / timeline.ranks];
        const place = {
          left: offsetLeft + timeline.start[chosen] * scale,
          top: offsetTop + timeline.rankOf(chosen) * row,
          width: (timeline.end[chosen] - timeline.start[chosen]) * scale,
          height: row,
        };
        for (const [name, pixels] of Object.entries(place)) {
          this.frame.style[name] = `${pixels}px`;
        }
      }
    }
  }

  zbv.Preview = Preview;
})();
