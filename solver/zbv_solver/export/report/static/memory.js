// What the ranks hold over time: every step of what is in view, or the peak of every column of the screen where
// the steps are too many.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const MAX_STEPS = 20_000; // points of all lines together
  const FADED = 0.22; // of a line's opacity while another rank's is pointed out

  class Memory {
    // doc: Bokeh's document with a figure of memory_chart.py, or none; timeline: zbv.Timeline
    constructor(doc, timeline) {
      const named = (name) => doc.get_model_by_name(name);
      this.figure = named("memory");
      this.timeline = timeline;
      if (this.figure === null) {
        return;
      }
      [this.scale] = this.figure.tags;
      this.band = named("memory:band");
      this.one = named("memory:one");
      this.label = named("memory:one-label");
      this.mark = named("memory:chosen");
      const ranks = Array.from({ length: timeline.ranks }, (_, rank) => rank);
      this.lines = this.band === null ? ranks.map((rank) => named(`memory:${rank}`)) : [];
      this.renderers = this.band === null ? ranks.map((rank) => named(`memory:${rank}-line`)) : [];
      this.fullest = named("memory:one-line")?.tags[0];
      this.fullestLabel = this.label?.label;
    }

    // Draw [start, end) with `columns` pixels; `chosen` is an action whose rank is pointed out, or -1.
    draw(start, end, columns, chosen) {
      if (this.figure === null) {
        return;
      }
      const { timeline } = this;
      const rank = chosen < 0 ? -1 : timeline.rankOf(chosen);
      const steps = timeline.visible(start, end).reduce((sum, [first, stop]) => sum + 2 * (stop - first), 0);
      const heldBy = (each) =>
        steps <= MAX_STEPS ? this.steps(each, start, end) : this.peaks(each, start, end, columns);
      this.lines.forEach((source, each) => {
        source.data = heldBy(each);
        this.renderers[each].glyph.line_alpha = rank < 0 || rank === each ? 1 : FADED;
      });
      if (this.band !== null) {
        this.band.data = this.least(start, end, columns);
        const shown = rank < 0 ? this.fullest : rank;
        this.one.data = heldBy(shown);
        this.label.label = rank < 0 ? this.fullestLabel : { value: `rank ${rank}` };
      }
      this.mark.visible = chosen >= 0;
      if (chosen >= 0) {
        this.mark.left = timeline.start[chosen];
        this.mark.right = timeline.end[chosen];
      }
    }

    // Every change of what a rank holds in a window, and what it holds from then on.
    steps(rank, start, end) {
      const { timeline, scale } = this;
      const { during, after } = timeline.profile();
      const [first, stop] = timeline.window(rank, start, end);
      const at = [Math.max(0, start)];
      const held = [timeline.heldBefore(rank, first) / scale];
      const add = (time, amount) => {
        if (amount !== held.at(-1)) {
          at.push(time);
          held.push(amount);
        }
      };
      for (let action = first; action < stop; action += 1) {
        add(timeline.start[action], during[action] / scale);
        add(timeline.end[action], after[action] / scale);
      }
      at.push(Math.min(end, timeline.makespan));
      held.push(held.at(-1));
      return { at, held };
    }

    // The most that a rank holds in every column of a window; none of columns before the first and after the
    // last end of all. Written for speed: of a large plan it runs through every action.
    peaks(rank, start, end, columns) {
      const { timeline, scale } = this;
      const { during, after } = timeline.profile();
      const { start: starts, end: ends } = timeline;
      const [first, stop] = timeline.window(rank, start, end);
      const perColumn = columns / (end - start);
      const low = Math.max(0, Math.floor(-start * perColumn));
      const high = Math.min(columns - 1, Math.floor((timeline.makespan - start) * perColumn));
      const highest = new Float64Array(columns);
      let holds = timeline.heldBefore(rank, first);
      let column = low;
      for (let action = first; action <= stop; action += 1) {
        // What is held until the action starts, then while it runs.
        const begins = action < stop ? Math.min(high, Math.floor((starts[action] - start) * perColumn)) : high;
        for (; column < begins; column += 1) {
          highest[column] = Math.max(highest[column], holds);
        }
        if (column >= low && column <= high) {
          highest[column] = Math.max(highest[column], holds);
        }
        if (action < stop) {
          const finishes = Math.min(high, Math.floor((ends[action] - start) * perColumn));
          const amount = during[action];
          for (; column < finishes; column += 1) {
            highest[column] = Math.max(highest[column], amount);
          }
          if (column >= low && column <= high) {
            highest[column] = Math.max(highest[column], amount);
          }
          holds = after[action];
        }
      }
      const at = [];
      const held = [];
      for (column = low; column <= high; column += 1) {
        at.push(Math.max(0, start + column / perColumn));
        held.push(highest[column] / scale);
      }
      return { at, held };
    }

    // The peaks of the least and of the most loaded rank in every column of a window.
    least(start, end, columns) {
      const { at, held } = this.peaks(0, start, end, columns);
      if (at.length === 0) {
        return { at: [start], low: [0], high: [0] }; // Bokeh paints an area without any point for ever
      }
      const [low, high] = [Float64Array.from(held), Float64Array.from(held)];
      for (let rank = 1; rank < this.timeline.ranks; rank += 1) {
        const { held: amounts } = this.peaks(rank, start, end, columns);
        for (let column = 0; column < amounts.length; column += 1) {
          low[column] = Math.min(low[column], amounts[column]);
          high[column] = Math.max(high[column], amounts[column]);
        }
      }
      return { at, low, high };
    }
  }

  zbv.Memory = Memory;
})();
