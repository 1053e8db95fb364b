// The chart of a plan's page. It embeds the Bokeh document that the page carries as JSON, keeps its colours
// in step with the light or dark theme, and puts microbatch numbers on bars that have room. A large plan is
// drawn as an image of what is in view, and bar by bar once few enough are. No eval, no network.
"use strict";

(() => {
  const LABEL_HEIGHT = 11; // px; lower rows carry no numbers
  const DIGIT_WIDTH = 6.6; // px of one digit, with the label's font
  const LABEL_PADDING = 4;
  const EDGE_FROM = 5; // px of the average bar from which a line separates it from its neighbours
  const TICK_WIDTH = 90; // px that the number at a tick needs
  const LEGEND_WIDTH = 84; // px of an entry of the legend
  const LONG_LEGEND_WIDTH = 200; // px, where the entries are sentences
  const MAX_LABELS = 3000;
  const SETTLE = 60; // ms without a change of range before anything is redrawn

  const target = document.getElementById("chart");
  if (target === null) {
    return;
  }
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function named(doc, name) {
    return doc.get_model_by_name(name);
  }

  // Colours that differ between the themes; the server names the model, the property and both colours.
  function paint(doc, rules) {
    for (const rule of rules) {
      const model = doc.get_model_by_id(rule.model);
      if (model !== null) {
        model[rule.property] = dark.matches ? rule.dark : rule.light;
      }
    }
  }

  // The same in the document as it was sent, so that nothing is drawn in the wrong theme first.
  function paintSent(node, rules) {
    if (node === null || typeof node !== "object") {
      return;
    }
    for (const rule of rules) {
      if (node.id === rule.model && node.attributes !== undefined) {
        const sent = node.attributes[rule.property];
        const colour = dark.matches ? rule.dark : rule.light;
        node.attributes[rule.property] = sent?.type === "value" ? { ...sent, value: colour } : colour;
      }
    }
    for (const child of Object.values(node)) {
      paintSent(child, rules);
    }
  }

  // Bokeh moves its canvases' origin by half a pixel and then clears from there, so that the first row and
  // column keep a trace of whatever was painted before the layout was final.
  function wipeEdges(figures) {
    for (const figure of figures) {
      const { canvas_view: view } = Bokeh.index.find_one_by_id(figure.id);
      for (const { canvas, ctx } of [view.primary, view.overlays]) {
        const edge = Math.ceil(window.devicePixelRatio / 2);
        ctx.save();
        ctx.setTransform(1, 0, 0, 1, 0, 0);
        ctx.clearRect(0, 0, canvas.width, edge);
        ctx.clearRect(0, 0, edge, canvas.height);
        ctx.restore();
      }
    }
  }

  // The plan's actions, unpacked lazily from what the server packed.
  class Actions {
    constructor(gantt) {
      const [packed, facts] = gantt.tags;
      this.columns = Object.fromEntries(
        ["start", "letter", "chunk", "microbatch"].map((name) => [name, packed.get_column(name)]),
      );
      this.facts = facts;
      this.ranks = facts.offset.length - 1;
    }

    stage(rank, at) {
      return this.facts.stages[rank][this.columns.chunk[at]];
    }

    end(rank, at) {
      return this.columns.start[at] + this.facts.durations[this.columns.letter[at]][this.stage(rank, at)];
    }

    kind(at) {
      const { shades } = this.facts;
      return shades * this.columns.letter[at] + (this.columns.chunk[at] % shades);
    }

    // Actions of a rank that overlap [begin, end): a range of indices, found by bisection.
    visible(rank, begin, end) {
      const { offset } = this.facts;
      const first = this.bisect(offset[rank], offset[rank + 1], begin);
      return [Math.max(offset[rank], first - 1), this.bisect(offset[rank], offset[rank + 1], end)];
    }

    bisect(low, high, time) {
      const { start } = this.columns;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (start[middle] < time) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      return low;
    }
  }

  class Chart {
    constructor(doc, figures) {
      this.figures = figures;
      this.gantt = named(doc, "gantt");
      this.range = this.gantt.x_range;
      this.frame = Bokeh.index.find_one_by_id(this.gantt.id);
      this.actions = new Actions(this.gantt);
      this.drawn = named(doc, "drawn");
      this.labels = named(doc, "labels");
      this.bars = named(doc, "bars");
      this.picture = named(doc, "picture"); // null in a plan that is drawn bar by bar from the start
      this.separators = named(doc, "separators");
      this.fills = this.actions.facts.fills.map((fill) => [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16)));
      this.tickers = ["gantt", "memory"].flatMap((name) => named(doc, name)?.below.map((axis) => axis.ticker) ?? []);
      this.legend = named(doc, "legend");
      this.home = [this.range.start, this.range.end];
    }

    draw() {
      const { start, end } = this.range;
      const windows = [];
      let count = 0;
      for (let rank = 0; rank < this.actions.ranks; rank += 1) {
        const window = this.actions.visible(rank, start, end);
        windows.push(window);
        count += window[1] - window[0];
      }
      const asBars = this.picture === null || count <= this.actions.facts.max_glyphs;
      if (this.picture !== null) {
        this.drawn.data = this.barsOf(asBars ? windows : []);
        this.picture.visible = !asBars;
        if (!asBars) {
          this.picture.data_source.data = this.pixelsOf(windows, start, end);
        }
        if (this.separators !== null) {
          this.separators.visible = !asBars;
        }
      }
      const width = this.frame.frame.bbox.width;
      if (this.legend !== null) {
        const entry = this.legend.items.length > 2 ? LEGEND_WIDTH : LONG_LEGEND_WIDTH;
        this.legend.ncols = Math.max(1, Math.min(8, Math.floor(width / entry)));
      }
      for (const ticker of this.tickers) {
        ticker.desired_num_ticks = Math.max(2, Math.min(10, Math.floor(width / TICK_WIDTH)));
      }
      const average = (width * this.actions.ranks) / Math.max(1, count);
      this.bars.glyph.line_width = average >= EDGE_FROM ? 1 : 0;
      this.labels.data = this.labelsOf(asBars ? windows : [], width / (end - start));
      wipeEdges(this.figures);
      target.dataset.bars = asBars ? String(count) : "0";
      target.dataset.window = `${start} ${end}`;
    }

    // The visible window as one image, a pixel per column of the screen, each the mean of what runs in it.
    pixelsOf(windows, start, end) {
      const columns = Math.max(1, Math.round(this.frame.frame.bbox.width * window.devicePixelRatio));
      const scale = columns / (end - start);
      const pixels = new Uint32Array(columns * windows.length);
      const bytes = new Uint8ClampedArray(pixels.buffer);
      windows.forEach(([first, stop], rank) => {
        const sums = new Float32Array(4 * columns); // red, green, blue, busy share
        for (let at = first; at < stop; at += 1) {
          const left = Math.max(0, (this.actions.columns.start[at] - start) * scale);
          const right = Math.min(columns, (this.actions.end(rank, at) - start) * scale);
          const fill = this.fills[this.actions.kind(at)];
          for (let column = Math.floor(left); column < right; column += 1) {
            const share = Math.min(right, column + 1) - Math.max(left, column);
            for (let channel = 0; channel < 3; channel += 1) {
              sums[4 * column + channel] += share * fill[channel];
            }
            sums[4 * column + 3] += share;
          }
        }
        const row = 4 * columns * rank;
        for (let column = 0; column < columns; column += 1) {
          const busy = sums[4 * column + 3];
          for (let channel = 0; busy > 0 && channel < 3; channel += 1) {
            bytes[row + 4 * column + channel] = sums[4 * column + channel] / busy;
          }
          bytes[row + 4 * column + 3] = 255 * busy;
        }
      });
      // Bokeh takes images as its own arrays with a shape; the one that the server sent has their class.
      const ImageArray = this.picture.data_source.data.image[0].constructor;
      const image = new ImageArray(pixels, [windows.length, columns]);
      return { image: [image], x: [start], dw: [end - start] };
    }

    barsOf(windows) {
      const data = { left: [], right: [], rank: [], kind: [], stage: [], chunk: [], microbatch: [], action: [], name: [] };
      const { columns, facts } = this.actions;
      windows.forEach(([first, stop], rank) => {
        for (let at = first; at < stop; at += 1) {
          const stage = this.actions.stage(rank, at);
          const letter = columns.letter[at];
          data.left.push(columns.start[at]);
          data.right.push(this.actions.end(rank, at));
          data.rank.push(rank);
          data.kind.push(this.actions.kind(at));
          data.stage.push(stage);
          data.chunk.push(columns.chunk[at]);
          data.microbatch.push(columns.microbatch[at]);
          data.action.push(`${stage}${facts.letters[letter]}${columns.microbatch[at]}`);
          data.name.push(facts.names[letter]);
        }
      });
      return data;
    }

    labelsOf(windows, pixels) {
      const data = { x: [], y: [], text: [], ink: [] };
      if (this.frame.frame.bbox.height / this.actions.ranks < LABEL_HEIGHT + 3) {
        return data;
      }
      const { start: from, end: to } = this.range;
      windows.forEach(([first, stop], rank) => {
        for (let at = first; at < stop && data.x.length < MAX_LABELS; at += 1) {
          const begin = Math.max(from, this.actions.columns.start[at]);
          const end = Math.min(to, this.actions.end(rank, at));
          const text = String(this.actions.columns.microbatch[at]);
          if ((end - begin) * pixels >= DIGIT_WIDTH * text.length + LABEL_PADDING) {
            data.x.push((begin + end) / 2);
            data.y.push(rank);
            data.text.push(text);
            data.ink.push(this.actions.facts.inks[this.actions.kind(at)]);
          }
        }
      });
      return data;
    }

    // Buttons: every gesture of the chart is there for keyboard and touch as well.
    move(how) {
      const { start, end } = this.range;
      const [low, high] = this.home;
      const factor = { in: 0.5, out: 2 }[how] ?? 1;
      const shift = { left: -0.5, right: 0.5 }[how] ?? 0;
      let length = Math.min(high - low, (end - start) * factor);
      length = how === "all" ? high - low : Math.max(length, this.range.min_interval ?? 0);
      let begin = (start + end) / 2 + shift * (end - start) - length / 2;
      begin = Math.min(Math.max(low, begin), high - length);
      this.range.setv({ start: begin, end: begin + length });
    }
  }

  async function show() {
    Bokeh.set_log_level("warn");
    const rules = read("chart-rules");
    const item = read("chart-item");
    paintSent(item.doc.roots, rules);
    const views = await Bokeh.embed.embed_item(item, target);
    target.querySelector(".loading").remove();
    const [root] = views.roots ?? [views];
    const doc = root.model.document;
    const chart = new Chart(doc, root.model.children);
    dark.addEventListener("change", () => {
      paint(doc, rules);
      wipeEdges(root.model.children);
    });
    let timer = 0;
    const later = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => chart.draw(), SETTLE);
    };
    chart.range.properties.start.change.connect(later);
    chart.range.properties.end.change.connect(later);
    new ResizeObserver(later).observe(target);

    if (window.matchMedia("(pointer: coarse)").matches) {
      // A finger on the chart scrolls the page; the buttons move through time.
      for (const figure of root.model.children) {
        figure.toolbar.active_drag = null;
      }
    }
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => chart.move(button.dataset.move));
    }
    chart.draw();
    target.dataset.state = "ready";
  }

  show().catch((error) => {
    target.dataset.state = "failed";
    target.textContent = `The chart could not be drawn (${error.message}). The numbers and lists below are complete.`;
    throw error;
  });
})();
