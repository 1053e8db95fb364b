// Draws a timeline into the layers of a figure that gantt.py made: bars while few enough actions are in view, a
// picture of them otherwise; microbatch numbers where there is room; idle time, a critical path and single
// actions where asked for.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const LABEL_HEIGHT = 11; // px; lower rows carry no numbers
  const DIGIT_WIDTH = 6.6; // px of one digit, with the label's font
  const LABEL_PADDING = 4;
  const EDGE_FROM = 5; // px of the average bar from which a line separates it from its neighbours
  const MAX_LABELS = 3000;
  const SLACK = 4; // px beside an action that still point at it
  const UNDER = 0.46; // of a row below its middle: where a path runs

  class Gantt {
    // doc: Bokeh's document; name: the figure's; timeline: a zbv.Timeline
    constructor(doc, name, timeline) {
      const named = (layer) => doc.get_model_by_name(`${name}:${layer}`);
      this.timeline = timeline;
      this.figure = doc.get_model_by_name(name);
      this.range = this.figure.x_range;
      this.layers = Object.fromEntries(
        ["picture", "pixels", "separators", "idle", "idle-bars", "drawn", "bars", "marks", "path", "chosen", "labels"].map(
          (layer) => [layer, named(layer)],
        ),
      );
      this.showsIdle = false;
      this.emphasis = null; // Uint8Array: 1 for actions that keep their colour while others are dimmed
      this.marked = []; // actions that are outlined, so that they show however small they are
      this.chosen = -1;
      this.path = [];
      this.mostLabels = 0;
    }

    get view() {
      return Bokeh.index.find_one_by_id(this.figure.id);
    }

    get width() {
      return this.view.frame.bbox.width;
    }

    // Draw what the range shows. Answers how many actions were drawn one by one, 0 for a picture of them.
    draw() {
      const { start, end } = this.range;
      const windows = this.timeline.visible(start, end);
      const count = windows.reduce((sum, [first, stop]) => sum + stop - first, 0);
      const asBars = count <= this.timeline.facts.max_glyphs;
      const { layers } = this;
      const average = (this.width * this.timeline.ranks) / Math.max(1, count);
      layers.picture.visible = !asBars;
      layers.separators.visible = !asBars;
      if (!asBars) {
        layers.pixels.data = this.pixelsOf(start, end);
      }
      layers.bars.glyph.line_width = average >= EDGE_FROM ? 1 : 0;
      layers.drawn.data = this.barsOf(asBars ? windows : []);
      layers.idle.data = this.idleOf(asBars && this.showsIdle ? windows : []);
      layers.marks.data = this.marksOf(asBars ? [] : this.marked);
      layers.labels.data = this.labelsOf(asBars ? windows : [], this.width / (end - start));
      layers.path.data = this.lineOf(this.path);
      layers.chosen.data = this.frameOf(this.chosen);
      return asBars ? count : 0;
    }

    // The visible window as one image, a pixel per column of the screen.
    pixelsOf(start, end) {
      const columns = Math.max(1, Math.round(this.width * window.devicePixelRatio));
      const { fill_color: fill, hatch_color: hatch } = this.layers["idle-bars"].glyph;
      const idle = this.showsIdle ? { fill: zbv.channels(fill.value ?? fill), hatch: zbv.channels(hatch.value ?? hatch) } : null;
      const pixels = zbv.raster(this.timeline, start, end, columns, { emphasis: this.emphasis, idle });
      return zbv.imageOf(this.layers.pixels, pixels, this.timeline.ranks, columns, start, end);
    }

    weight(action) {
      return this.emphasis === null || this.emphasis[action] === 1 ? 1 : zbv.DIMMED;
    }

    barsOf(windows) {
      const count = windows.reduce((sum, [first, stop]) => sum + stop - first, 0);
      const data = {
        left: new Float64Array(count),
        right: new Float64Array(count),
        rank: new Int32Array(count),
        kind: new Int32Array(count),
        alpha: new Float32Array(count),
      };
      let at = 0;
      windows.forEach(([first, stop], rank) => {
        for (let action = first; action < stop; action += 1, at += 1) {
          data.left[at] = this.timeline.start[action];
          data.right[at] = this.timeline.end[action];
          data.rank[at] = rank;
          data.kind[at] = this.timeline.kind[action];
          data.alpha[at] = this.weight(action);
        }
      });
      return data;
    }

    idleOf(windows) {
      const data = { left: [], right: [], rank: [] };
      windows.forEach(([first, stop], rank) => {
        const [from, to] = zbv.idleBounds(this.timeline, rank);
        let free = first > this.timeline.offset[rank] ? this.timeline.end[first - 1] : from;
        const add = (until) => {
          if (until > free) {
            data.left.push(free);
            data.right.push(until);
            data.rank.push(rank);
          }
        };
        for (let action = first; action < stop; action += 1) {
          add(this.timeline.start[action]);
          free = this.timeline.end[action];
        }
        add(stop < this.timeline.offset[rank + 1] ? this.timeline.start[stop] : to);
      });
      return data;
    }

    marksOf(actions) {
      const { timeline } = this;
      return {
        left: actions.map((action) => timeline.start[action]),
        right: actions.map((action) => timeline.end[action]),
        rank: actions.map((action) => timeline.rankOf(action)),
        kind: actions.map((action) => timeline.kind[action]),
      };
    }

    frameOf(action) {
      const { kind, ...data } = this.marksOf(action < 0 ? [] : [action]);
      return data;
    }

    // Stretches of actions of one rank become one piece of line; transfers lead from rank to rank.
    lineOf(path) {
      const { timeline } = this;
      const data = { x: [], y: [] };
      path.forEach((action, at) => {
        const rank = timeline.rankOf(action);
        const follows = at > 0 && path[at - 1] === action - 1 && action > timeline.offset[rank];
        const isFollowed = path[at + 1] === action + 1 && action + 1 < timeline.offset[rank + 1];
        if (!follows) {
          data.x.push(timeline.start[action]);
          data.y.push(rank + UNDER);
        }
        if (!isFollowed) {
          data.x.push(timeline.end[action]);
          data.y.push(rank + UNDER);
        }
      });
      return data;
    }

    labelsOf(windows, pixels) {
      const data = { x: [], y: [], text: [], ink: [], alpha: [] };
      const { timeline } = this;
      if (this.view.frame.bbox.height / timeline.ranks < LABEL_HEIGHT + 3) {
        return this.filledUp(data);
      }
      const { start: from, end: to } = this.range;
      windows.forEach(([first, stop], rank) => {
        for (let action = first; action < stop && data.x.length < MAX_LABELS; action += 1) {
          const begin = Math.max(from, timeline.start[action]);
          const end = Math.min(to, timeline.end[action]);
          const text = String(timeline.microbatch[action]);
          if ((end - begin) * pixels >= DIGIT_WIDTH * text.length + LABEL_PADDING) {
            data.x.push((begin + end) / 2);
            data.y.push(rank);
            data.text.push(text);
            data.ink.push(timeline.facts.inks[timeline.kind[action]]);
            data.alpha.push(this.weight(action));
          }
        }
      });
      return this.filledUp(data);
    }

    // Bokeh makes texts a moment after their colours, and reads colours for the former texts meanwhile: there must
    // never be fewer of them than there were.
    filledUp(data) {
      this.mostLabels = Math.max(this.mostLabels, data.x.length);
      while (data.x.length < this.mostLabels) {
        data.x.push(NaN);
        data.y.push(0);
        data.text.push(null);
        data.ink.push(this.timeline.facts.inks[0]);
        data.alpha.push(0);
      }
      return data;
    }

    // The action under a pointer (an event with clientX and clientY), or -1.
    pointedAt(event) {
      const { el, frame } = this.view;
      const box = el.getBoundingClientRect();
      const { left, top, width, height } = frame.bbox;
      const x = (event.clientX - box.left - left) / width;
      const y = (event.clientY - box.top - top) / height;
      if (x < 0 || x > 1 || y < 0 || y >= 1) {
        return -1;
      }
      const { start, end } = this.range;
      const slack = (SLACK / width) * (end - start);
      return this.timeline.at(Math.floor(y * this.timeline.ranks), start + x * (end - start), slack);
    }

    // Where an action is on the screen: { x, y } of its middle, as events have them.
    place(action) {
      const { el, frame } = this.view;
      const box = el.getBoundingClientRect();
      const { left, top, width, height } = frame.bbox;
      const { start, end } = this.range;
      const middle = (this.timeline.start[action] + this.timeline.end[action]) / 2;
      return {
        x: box.left + left + ((middle - start) / (end - start)) * width,
        y: box.top + top + ((this.timeline.rankOf(action) + 0.5) / this.timeline.ranks) * height,
      };
    }
  }

  // Data of a picture's source. Bokeh takes images as its own arrays with a shape; the one sent has their class.
  zbv.imageOf = function imageOf(source, pixels, rows, columns, start, end) {
    const ImageArray = source.data.image[0].constructor;
    return { image: [new ImageArray(pixels, [rows, columns])], x: [start], dw: [end - start] };
  };
  zbv.Gantt = Gantt;
})();
