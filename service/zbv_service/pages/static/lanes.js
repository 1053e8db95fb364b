// Several schedules above each other on one time axis: those of a comparison, or a plan and a measured step. A click
// on an action highlights its microbatch in all of them; Escape, or a click next to the actions, ends that.

import { Chart } from "./chart.js";
import { number, time } from "./numbers.js";
import { loadTimeline } from "./timeline.js";

/**
 * @typedef {object} Lane
 * @property {import("./timeline.js").Facts} facts
 * @property {string | null} url
 * @property {string | null} data
 */

/**
 * How long an action was planned to take and how long it took, for a plan above its measured times.
 * @param {Chart} chart
 * @returns {import("./chart.js").MoreRows}
 */
const durations = (chart) => (gantt, action) => {
  const [planned, measured] = chart.gantts.map(({ timeline }) => {
    const at = timeline.find(gantt.timeline.text(action));
    return at < 0 ? null : timeline.end[at] - timeline.start[at];
  });
  if (planned === null || measured === null) {
    return [];
  }
  const ratio = planned > 0 ? ` (${number(measured / planned)} ×)` : "";
  const { facts } = gantt.timeline;
  return [["planned", time(planned, facts)], ["measured", `${time(measured, facts)}${ratio}`]];
};

/**
 * @param {Chart} chart
 * @param {number | null} microbatch null for none
 */
function highlight(chart, microbatch) {
  for (const gantt of chart.gantts) {
    const isOf = Uint8Array.from(gantt.timeline.microbatch, (each) => Number(each === microbatch));
    gantt.highlighted = microbatch === null ? null : isOf;
    gantt.outlined = microbatch === null ? [] : [...isOf.keys()].filter((action) => isOf[action] === 1);
  }
  const status = document.getElementById("highlighted");
  if (status !== null) {
    status.textContent =
      microbatch === null ? "" : `Microbatch ${microbatch} is highlighted in every schedule. Press Escape to end this.`;
  }
  chart.draw();
}

async function show(/** @type {HTMLElement} */ target) {
  const lanes = /** @type {Lane[]} */ (JSON.parse(document.getElementById("chart-lanes")?.textContent ?? "[]"));
  const timelines = await Promise.all(lanes.map(({ facts, url, data }) => loadTimeline(facts, { url, data })));
  const isMeasured = lanes.some(({ facts }) => facts.is_measured);
  const chart = new Chart(target, timelines, (gantt, action) => (isMeasured ? durations(chart)(gantt, action) : []));
  chart.clicked = (gantt, action) => highlight(chart, action < 0 ? null : gantt.timeline.microbatch[action]);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      highlight(chart, null);
    }
  });
  target.querySelector(".loading")?.remove();
  target.dataset.state = "ready";
  Object.assign(globalThis, { zbv: { chart } }); // for the console and for tests
}

const target = document.getElementById("chart");
if (target !== null) {
  show(target).catch((error) => {
    target.dataset.state = "failed";
    const place = target.querySelector(".loading") ?? target;
    place.textContent = `The chart could not be drawn (${error.message}). The numbers on this page are complete.`;
    throw error;
  });
}
