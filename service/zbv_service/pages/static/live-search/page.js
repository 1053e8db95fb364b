// The page of a search: numbers, chart and state follow its events; buttons stop and delete it. When the search ends,
// the page shows the server's summary.

import { at, input, make, part } from "../dom.js";
import { amount, duration, percent } from "../numbers.js";
import { Chart } from "./chart.js";
import { follow } from "./stream.js";

const TICK = 250; // ms between two updates of the clock
const SAY_EVERY = 5000; // ms between two announcements for screen readers
const QUEUE_EVERY = 3000;
const LINES = {
  open: ["live", "Live"],
  broken: ["broken", "Connection lost; reconnecting …"],
  asking: ["asking", "Polling every two seconds: event streams do not get through"],
  hidden: ["asking", "Polling slowly while the page is hidden"],
  "signed-out": ["broken", "You are signed out; reload the page to sign in"],
};

const search = JSON.parse(at("search").textContent);
const find = (/** @type {string} */ id) => document.getElementById(id); // null if the page has no such part
const set = (/** @type {string} */ name, /** @type {string} */ text) => {
  part(document, `[data-value="${name}"]`, HTMLElement).textContent = text;
};
const gapOf = (/** @type {number | null} */ gap) => (gap === null ? "–" : percent(gap));
const isOpen = search.state === "queued" || search.state === "running";
const holder = find("course"); // a search that ended without a plan has none
const chart = holder === null ? null : new Chart(holder, search.unit);
const points = []; // {seconds, best, bound, gap, method}

let { state } = search;
let isStopping = false;
let attempts = 0;
let end = null; // the last event
let began = isOpen && search.seconds !== null ? performance.now() - 1000 * search.seconds : null;
let spoken = -Infinity;
let frame = null;

const isActive = () => isOpen && end === null;

function elapsed() {
  const running = began === null ? null : (performance.now() - began) / 1000;
  return end?.seconds ?? (isOpen ? running : search.seconds);
}

function receive(event) {
  if (event.event === "state" || event.event === "end") {
    ({ state } = event);
  }
  if (event.event === "state") {
    attempts = event.attempts;
    isStopping = event.cancel_requested;
    if (isOpen && state === "running" && began === null) {
      began = performance.now() - Math.max(0, 1000 * (event.seconds ?? 0));
    }
  }
  const last = points.at(-1);
  const isKnown = event.event === "end" && event.objective === last?.best && event.lower_bound === last?.bound;
  if ((event.objective ?? null) !== null && !isKnown) {
    const { objective: best, lower_bound: bound, gap, method } = event;
    // The first plan may be older than this search, if an earlier one found it.
    points.push({ seconds: Math.max(event.seconds ?? 0, last?.seconds ?? 0), best, bound, gap, method });
  }
  if (event.event === "end") {
    end = event;
  }
  // Several events may arrive at once: they are drawn together.
  frame ??= requestAnimationFrame(show);
  if (end !== null && isOpen) {
    finish();
  }
}

function show() {
  frame = null;
  at("state").textContent = isStopping && end === null ? "stopping" : state;
  at("state").className = `state ${state}`;
  if (attempts > 1) {
    set("attempts", `started ${attempts} times`);
  }
  const empty = find("course-empty");
  if (empty !== null && (end !== null || state === "running")) {
    empty.textContent = end !== null ? "No plan was found." : "Looking for a first plan …";
  }
  if (isStopping && find("stop") !== null) {
    stopping();
  }
  if (points.length > 0) {
    showNumbers(points.at(-1));
  }
  showSteps();
  chart?.show(points, elapsed() ?? 0);
}

function showNumbers({ best, bound, gap, method }) {
  set("best", amount(best, search.unit));
  set("bound", amount(bound, search.unit));
  set("gap", gapOf(gap));
  set("gap-note", gap === 0 ? "proved optimal" : "between best and bound");
  part(document, '[data-card="gap"]', HTMLElement).classList.toggle("good", gap === 0);
  const [name, ...details] = (method ?? "–").split("(");
  set("method", name);
  set("details", details.join("(").replace(/\)$/, "") || "method of the best plan");
  if (end === null && gap !== null) {
    document.title = `${percent(gap)} gap · ${search.title} · zbv`;
  }
  if (isActive() && performance.now() - spoken >= SAY_EVERY) {
    spoken = performance.now();
    at("said").textContent = `Best ${amount(best, search.unit)}, gap ${gapOf(gap)}`;
  }
}

function showSteps() {
  const steps = /** @type {HTMLDetailsElement | null} */ (find("steps"));
  if (steps?.open) {
    const rows = points.map(({ seconds, best, bound, gap, method }) => {
      const cells = [amount(best, search.unit), amount(bound, search.unit), gapOf(gap)].map((text) => make("td", {}, text));
      return make("tr", {}, make("th", { scope: "row" }, duration(seconds)), ...cells, make("td", { className: "left" }, method ?? "–"));
    });
    at("steps-body").replaceChildren(...rows);
  }
}

function line(name) {
  if (isActive()) {
    const [style, text] = LINES[name];
    at("line").className = `line-state ${style}`;
    at("line").textContent = text;
  }
}

function complain(text) {
  at("complaint").hidden = false;
  at("complaint").textContent = text;
}

// Replaces the parts of the page that change at the end by those of the server's page.
async function finish() {
  at("line").textContent = "";
  find("controls")?.remove();
  if (state === "discarded") {
    find("delete")?.parentElement?.remove();
    at("outcome").textContent = "This search was deleted. Its plan, if any, is kept.";
    return;
  }
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const place of answer.ok ? ["#outcome", ".cards.live", "#state"] : []) {
      const found = page.querySelector(place);
      part(document, place, HTMLElement).replaceWith(...(found === null ? [] : [document.adoptNode(found)]));
    }
    if (page.getElementById("course-panel") === null) {
      at("course-panel").remove();
    }
  } catch {
    complain("The search has ended; reload the page to see its result.");
  }
  document.title = `${state} · ${search.title} · zbv`;
}

function stopping() {
  input("stop").disabled = true;
  at("stop").textContent = "Stopping …";
}

// A button that changes the search.
function connect(id, method, address, then) {
  find(id)?.addEventListener("click", async () => {
    input(id).disabled = true;
    const answer = await fetch(address, { method }).catch(() => null);
    if (answer?.ok) {
      then();
      return;
    }
    input(id).disabled = false;
    const refusal = await answer?.json().catch(() => ({}));
    complain(answer === null ? "The service does not answer; try again in a moment." : (refusal.detail ?? `The service answered with status ${answer.status}.`));
  });
}

async function askQueue() {
  if (state !== "queued" || end !== null) {
    return;
  }
  // The state of the connection already says if there is no answer.
  const answer = await fetch(search.address, { headers: { Accept: "application/json" } }).catch(() => null);
  const before = answer?.ok ? (await answer.json()).queued_before : null;
  const empty = find("course-empty");
  if (empty !== null && before !== null && state === "queued") {
    const others = before === 1 ? "1 search" : `${before} searches`;
    empty.textContent = before === 0 ? "Next in the queue." : `Waiting in the queue after ${others}.`;
  }
  setTimeout(askQueue, QUEUE_EVERY);
}

connect("stop", "POST", `${search.address}/cancel`, stopping);
connect("delete", "DELETE", search.address, () => location.assign(search.list));
find("steps")?.addEventListener("toggle", showSteps);
if (isOpen) {
  setInterval(() => {
    const seconds = elapsed();
    if (end === null && seconds !== null) {
      set("elapsed", duration(seconds));
      chart?.show(points, seconds);
    }
  }, TICK);
  askQueue();
}
if (chart !== null) {
  follow(`${search.address}/events`, receive, line);
}
