// The chart of a plan's page. No eval, no network but the page's own service.
"use strict";

(() => {
  const zbv = globalThis.zbv;
  const LEGEND_WIDTH = 84; // px of an entry of the legend
  const LONG_LEGEND_WIDTH = 200; // px, where the entries are sentences

  const target = document.getElementById("chart");
  if (target === null) {
    return;
  }

  // What the chart is drawn with: in a file that opens from disk it is in the page.
  async function chartDocument() {
    const inside = document.getElementById("chart-document");
    if (inside !== null) {
      return JSON.parse(inside.textContent);
    }
    const answer = await fetch(target.dataset.chart);
    if (!answer.ok) {
      throw new Error(`the service answered ${answer.status} for the chart`);
    }
    return answer.json();
  }

  function fitLegend(legend, width) {
    const entry = legend.items.length > 2 ? LEGEND_WIDTH : LONG_LEGEND_WIDTH;
    legend.ncols = Math.max(1, Math.min(8, Math.floor(width / entry)));
  }

  function connect(id, isOn, change) {
    const button = document.getElementById(id);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      change(on);
    });
    button.setAttribute("aria-pressed", String(isOn));
  }

  async function show() {
    const source = { url: target.dataset.actions ?? null, data: document.getElementById("chart-data")?.textContent };
    const { item, rules, facts } = await chartDocument();
    const loading = zbv.loadTimeline(facts, source);
    const doc = await zbv.embed(target, item, rules, () => zbv.wipeEdges(figures));
    const figures = ["gantt", "memory", "overview"].map((name) => doc.get_model_by_name(name)).filter((found) => found !== null);
    const legend = doc.get_model_by_name("legend");
    const gantt = new zbv.Gantt(doc, "gantt", await loading);
    const memory = new zbv.Memory(doc, gantt.timeline);
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
    for (const figure of figures) {
      figure.below.forEach(zbv.formatAxis);
      figure.left.filter(() => figure.name === "memory").forEach(zbv.formatAxis);
    }
    zbv.overview(doc, "overview", gantt.timeline);
    zbv.explain(gantt);

    const inspector = new zbv.Inspector(gantt, draw, document.getElementById("inspector"));
    connect("show-idle", false, (isOn) => inspector.showIdle(isOn));
    connect("show-path", false, (isOn) => inspector.showWhole(isOn));
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => zbv.move(gantt.range, button.dataset.move));
    }
    if (window.matchMedia("(pointer: coarse)").matches) {
      // A finger on the chart scrolls the page; the buttons move through time.
      for (const figure of figures) {
        figure.toolbar.active_drag = null;
      }
    }
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

  show().catch((error) => {
    target.dataset.state = "failed";
    target.textContent = `The chart could not be drawn (${error.message}). The numbers and lists below are complete.`;
    throw error;
  });
})();
