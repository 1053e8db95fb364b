// Several Gantt charts above each other that share one time axis. A click on an action points out its microbatch in
// all of them; Escape, or a click beside the actions, ends that.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const DRAGGED = 4; // px between press and release that are no click

  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  function pointOut(gantts, microbatch, draw) {
    for (const gantt of gantts) {
      const { timeline } = gantt;
      gantt.emphasis = microbatch === null ? null : Uint8Array.from(timeline.microbatch, (each) => Number(each === microbatch));
      gantt.marked = [];
      if (microbatch !== null) {
        timeline.microbatch.forEach((each, action) => each === microbatch && gantt.marked.push(action));
      }
    }
    const status = document.getElementById("pointed-out");
    if (status !== null) {
      status.textContent = microbatch === null ? "" : `Microbatch ${microbatch} is pointed out in every schedule. Escape ends it.`;
    }
    draw();
  }

  function listen(gantts, target, draw) {
    for (const gantt of gantts) {
      const { el } = gantt.view;
      let pressed = null;
      el.addEventListener("pointerdown", (event) => {
        pressed = [event.clientX, event.clientY];
      });
      el.addEventListener("click", (event) => {
        const moved = pressed === null ? 0 : Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]);
        if (moved <= DRAGGED) {
          const action = gantt.pointedAt(event);
          pointOut(gantts, action < 0 ? null : gantt.timeline.microbatch[action], draw);
        }
      });
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        pointOut(gantts, null, draw);
      }
    });
    const { range } = gantts[0];
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => zbv.move(range, button.dataset.move));
    }
    target.addEventListener("keydown", (event) => {
      const how = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "-": "out", 0: "all" }[event.key];
      if (how !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        zbv.move(range, how);
      }
    });
  }

  // rowsOf(timelines, lane, action) may add rows to what hovering an action of a lane says.
  async function show(target, rowsOf) {
    const lanes = read("chart-lanes");
    const loading = Promise.all(lanes.map(({ facts, url, data }) => zbv.loadTimeline(facts, { url, data })));
    const figures = [];
    const doc = await zbv.embed(target, read("chart-item"), read("chart-rules"), () => zbv.wipeEdges(figures));
    const timelines = await loading;
    const gantts = lanes.map(({ name }, index) => new zbv.Gantt(doc, name, timelines[index]));
    figures.push(...gantts.map((gantt) => gantt.figure), doc.get_model_by_name("overview"));
    const draw = zbv.follow(gantts, target, (counts) => {
      zbv.fit(figures, target);
      zbv.wipeEdges(figures);
      target.dataset.bars = counts.join(" ");
      target.dataset.window = `${gantts[0].range.start} ${gantts[0].range.end}`;
    });
    target.querySelector(".loading").remove();
    for (const figure of figures) {
      figure.below.forEach(zbv.formatAxis);
    }
    zbv.overview(doc, "overview", timelines[0]);
    gantts.forEach((gantt, lane) => zbv.explain(gantt, (_, action) => rowsOf(timelines, lane, action)));
    if (window.matchMedia("(pointer: coarse)").matches) {
      // A finger on the chart scrolls the page; the buttons move through time.
      for (const figure of figures) {
        figure.toolbar.active_drag = null;
      }
    }
    listen(gantts, target, draw);
    draw();
    target.dataset.state = "ready";
  }

  zbv.showLanes = function showLanes(rowsOf = () => []) {
    const target = document.getElementById("chart");
    if (target === null) {
      return;
    }
    show(target, rowsOf).catch((error) => {
      target.dataset.state = "failed";
      target.textContent = `The chart could not be drawn (${error.message}). The numbers on this page are complete.`;
      throw error;
    });
  };
})();
