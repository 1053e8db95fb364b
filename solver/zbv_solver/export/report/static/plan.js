// The page of a plan: loads its actions, draws them and connects the controls.

import { Chart } from "./chart.js";
import { Inspector } from "./inspector.js";
import { loadTimeline } from "./timeline.js";

/**
 * The text of an element with data; null if the page has none.
 * @param {string} id
 */
const textOf = (id) => document.getElementById(id)?.textContent ?? null;

async function show(/** @type {HTMLElement} */ target, /** @type {HTMLElement} */ panel) {
  // A file that opens from disk carries its actions; a page of the service fetches them.
  const source = { url: target.dataset.actions, data: textOf("chart-data") };
  const timeline = await loadTimeline(JSON.parse(textOf("chart-timeline") ?? ""), source);
  const chart = new Chart(target, [timeline]);
  const inspector = new Inspector(chart, panel);
  target.querySelector(".loading")?.remove();
  target.dataset.state = "ready";
  Object.assign(globalThis, { zbv: { chart, inspector } }); // for the console and for tests
  // The benchmark of the page reads when this was painted.
  requestAnimationFrame(() => window.setTimeout(() => performance.mark("zbv:drawn")));
}

const [target, panel] = ["chart", "inspector"].map((id) => document.getElementById(id));
if (target !== null && panel !== null) {
  show(target, panel).catch((error) => {
    target.dataset.state = "failed";
    const place = target.querySelector(".loading") ?? target;
    place.textContent = `The chart could not be drawn (${error.message}). The numbers and lists below are complete.`;
    throw error;
  });
}
