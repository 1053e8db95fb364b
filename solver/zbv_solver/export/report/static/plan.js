// The chart of a plan's page: first a picture that answers to the pointer, then, once Bokeh is there, the chart
// itself. No eval, no network but the page's own service.
"use strict";

(() => {
  const zbv = globalThis.zbv;
  const LEGEND_WIDTH = 84; // px of an entry of the legend
  const LONG_LEGEND_WIDTH = 200; // px, where the entries are sentences
  const PICTURE_COLUMNS = 600;
  const PATIENCE = 200; // ms to wait for a frame: a page in the background has none

  const target = document.getElementById("chart");
  if (target === null) {
    return;
  }
  // What a file that opens from disk carries inside, and a page of the service fetches.
  const inside = (id) => document.getElementById(id)?.textContent ?? null;

  const frame = () =>
    new Promise((done) => {
      window.setTimeout(done, PATIENCE);
      requestAnimationFrame(() => window.setTimeout(done, 0));
    });

  async function chartDocument() {
    const found = inside("chart-document");
    if (found !== null) {
      return JSON.parse(found);
    }
    const answer = await fetch(target.dataset.chart);
    if (!answer.ok) {
      throw new Error(`the service answered ${answer.status} for the chart`);
    }
    return answer.json();
  }

  // Bokeh takes long to run, so that it only begins once there is something to look at.
  function bokeh() {
    return new Promise((done, fail) => {
      if (target.dataset.bokeh === undefined) {
        const isRead = document.readyState !== "loading";
        return isRead ? done() : document.addEventListener("DOMContentLoaded", done);
      }
      const script = document.createElement("script");
      script.addEventListener("load", done);
      script.addEventListener("error", () => fail(new Error("Bokeh's script did not load")));
      script.src = target.dataset.bokeh;
      document.head.append(script);
    });
  }

  // The service's picture of the schedule; a file draws its own.
  function pictureOf(timeline) {
    const found = target.querySelector(".placeholder .picture");
    if (found instanceof HTMLCanvasElement) {
      [found.width, found.height] = [PICTURE_COLUMNS, timeline.ranks];
      const pixels = zbv.raster(timeline, 0, timeline.makespan || 1, PICTURE_COLUMNS);
      const image = new ImageData(new Uint8ClampedArray(pixels.buffer), PICTURE_COLUMNS, timeline.ranks);
      found.getContext("2d").putImageData(image, 0, 0);
    }
    return found;
  }

  function fitLegend(legend, width) {
    const entry = legend.items.length > 2 ? LEGEND_WIDTH : LONG_LEGEND_WIDTH;
    legend.ncols = Math.max(1, Math.min(8, Math.floor(width / entry)));
  }

  // The chart of a document of Bokeh: { gantt, memory, draw }.
  function chartOf(doc, figures, timeline) {
    const gantt = new zbv.Gantt(doc, "gantt", timeline);
    const memory = new zbv.Memory(doc, timeline);
    const legend = doc.get_model_by_name("legend");
    const draw = zbv.follow([gantt], target, ([bars]) => {
      memory.draw(gantt.range.start, gantt.range.end, Math.round(gantt.width), gantt.chosen);
      zbv.fit(figures, target);
      if (legend !== null) {
        fitLegend(legend, gantt.width);
      }
      zbv.wipeEdges(figures);
      target.dataset.bars = String(bars);
      target.dataset.window = `${gantt.range.start} ${gantt.range.end}`;
    });
    zbv.overview(doc, "overview", timeline);
    return { gantt, memory, draw };
  }

  function prepare(figures) {
    for (const figure of figures) {
      figure.below.forEach(zbv.formatAxis);
      figure.left.filter(() => figure.name === "memory").forEach(zbv.formatAxis);
      if (window.matchMedia("(pointer: coarse)").matches) {
        figure.toolbar.active_drag = null; // a finger on the chart scrolls the page; buttons move through time
      }
    }
  }

  async function embed(timeline) {
    const [{ item, rules }] = await Promise.all([chartDocument(), bokeh()]);
    const figures = [];
    const doc = await zbv.embed(target, item, rules, () => zbv.wipeEdges(figures));
    figures.push(...["gantt", "memory", "overview"].map((name) => doc.get_model_by_name(name)).filter((found) => found !== null));
    prepare(figures);
    return chartOf(doc, figures, timeline);
  }

  // Buttons work from the beginning: what needs the chart is done once it is there.
  function connect(inspector, chart) {
    for (const [id, change] of [
      ["show-idle", (isOn) => inspector.showIdle(isOn)],
      ["show-path", (isOn) => inspector.showWhole(isOn)],
    ]) {
      const button = document.getElementById(id);
      button.addEventListener("click", () => {
        const isOn = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isOn));
        change(isOn);
      });
    }
    const withChart = (change) => chart.then(change, () => {}); // that there is none, the page says
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => withChart(({ gantt }) => zbv.move(gantt.range, button.dataset.move)));
    }
    document.querySelector("#inspector [data-zoom]").addEventListener("click", () => {
      const action = inspector.gantt.chosen;
      withChart(({ gantt }) => zbv.zoomTo(gantt, action));
    });
  }

  async function show() {
    const data = { url: target.dataset.actions ?? null, data: inside("chart-data") };
    const timeline = await zbv.loadTimeline(JSON.parse(inside("chart-timeline")), data);
    const preview = new zbv.Preview(pictureOf(timeline), timeline);
    const inspector = new zbv.Inspector(preview, document.getElementById("inspector"));
    const endHover = zbv.explain(preview);
    const chart = frame().then(() => embed(timeline));
    connect(inspector, chart);
    performance.mark("zbv:answers");

    const { gantt, memory, draw } = await chart;
    endHover();
    inspector.adopt(gantt, draw);
    zbv.explain(gantt);
    draw();
    zbv.page = { gantt, memory, inspector }; // for the console, and for tests
    target.dataset.state = "ready";
    // Bokeh paints in the next frame; `zbv-service bench page` reads when that was.
    requestAnimationFrame(() =>
      requestAnimationFrame(() => {
        target.querySelector(".placeholder").remove();
        performance.mark("zbv:drawn");
      }),
    );
  }

  // The first picture stays: it may answer although the chart does not come.
  show().catch((error) => {
    target.dataset.state = "failed";
    target.querySelector(".loading").textContent =
      `The chart could not be drawn (${error.message}). The numbers and lists below are complete.`;
    throw error;
  });
})();
