// The page of a search: numbers, chart and state follow its events; buttons stop and delete it. When the search ends,
// the page shows the server's summary.

import { at, input, make, part } from "../dom.js";
import { amount, duration, percent } from "../numbers.js";
import { Chart } from "./chart.js";
import { Course } from "./course.js";
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
const value = (/** @type {string} */ name) => part(document, `[data-value="${name}"]`, HTMLElement);
const steps = /** @type {HTMLDetailsElement | null} */ (find("steps"));
const isOpen = search.state === "queued" || search.state === "running";

const course = new Course();
const holder = find("course"); // a search that ended without a plan has none
const chart = holder === null ? null : new Chart(holder, search.unit);
const began = search.seconds === null ? null : performance.now() - 1000 * search.seconds;
const clock = { began: isOpen ? began : null };
let spoken = -Infinity;
let wasShown = null;

function elapsed() {
  if (course.end?.seconds !== null && course.end?.seconds !== undefined) {
    return course.end.seconds;
  }
  if (clock.began !== null) {
    return (performance.now() - clock.began) / 1000;
  }
  return isOpen ? null : search.seconds;
}

function hear(event) {
  course.add(event);
  if (event.event === "state" && event.state === "running" && clock.began === null && isOpen) {
    clock.began = performance.now() - Math.max(0, 1000 * (event.seconds ?? 0));
  }
  show();
}

// Several events may arrive at once: they are drawn together.
function show() {
  if (wasShown === null) {
    wasShown = requestAnimationFrame(() => {
      wasShown = null;
      showState();
      showNumbers();
      showSteps();
      chart?.show(course.points, elapsed() ?? 0);
      say();
    });
  }
}

function showState() {
  const state = course.state ?? search.state;
  const badge = at("state");
  badge.textContent = course.isStopping && course.end === null ? "stopping" : state;
  badge.className = `state ${state}`;
  if (course.attempts > 1) {
    value("attempts").textContent = `started ${course.attempts} times`;
  }
  const empty = find("course-empty");
  if (empty !== null && course.end !== null) {
    empty.textContent = "No plan was found.";
  } else if (empty !== null && state === "running") {
    empty.textContent = "Looking for a first plan …";
  }
  if (find("stop") !== null && course.isStopping) {
    const stop = input("stop");
    stop.disabled = true;
    stop.textContent = "Stopping …";
  }
}

function showNumbers() {
  const newest = course.newest;
  if (newest === null) {
    return;
  }
  value("best").textContent = amount(newest.best, search.unit);
  value("bound").textContent = amount(newest.bound, search.unit);
  value("gap").textContent = newest.gap === null ? "–" : percent(newest.gap);
  value("gap-note").textContent = newest.gap === 0 ? "proved optimal" : "between best and bound";
  part(document, '[data-card="gap"]', HTMLElement).classList.toggle("good", newest.gap === 0);
  const [method, ...details] = (newest.method ?? "–").split("(");
  value("method").textContent = method;
  value("details").textContent = details.join("(").replace(/\)$/, "") || "method of the best plan";
  if (course.end === null && newest.gap !== null) {
    document.title = `${percent(newest.gap)} gap · ${search.title} · zbv`;
  }
}

function showSteps() {
  if (!steps?.open) {
    return;
  }
  const rows = course.points.map((point) => {
    const cells = [
      amount(point.best, search.unit),
      amount(point.bound, search.unit),
      point.gap === null ? "–" : percent(point.gap),
    ];
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, duration(point.seconds)),
      ...cells.map((text) => make("td", {}, text)),
      make("td", { className: "left" }, point.method ?? "–"),
    );
  });
  at("steps-body").replaceChildren(...rows);
}

function say() {
  const newest = course.newest;
  if (newest === null || course.end !== null || !isOpen || performance.now() - spoken < SAY_EVERY) {
    return;
  }
  spoken = performance.now();
  at("said").textContent = `Best ${amount(newest.best, search.unit)}, gap ${percent(newest.gap ?? Infinity)}`;
}

function line(name) {
  const [style, text] = LINES[name];
  at("line").className = `line-state ${style}`;
  at("line").textContent = text;
}

function complain(text) {
  const place = at("complaint");
  place.hidden = false;
  place.textContent = text;
}

// Replaces the parts of the page that change at the end by those of the server's page.
async function finish() {
  at("line").textContent = "";
  find("controls")?.remove();
  if (course.end.state === "discarded") {
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
  document.title = `${course.end.state} · ${search.title} · zbv`;
}

async function change(method, address, button, then) {
  button.disabled = true;
  let answer = null;
  try {
    answer = await fetch(address, { method });
  } catch {
    complain("The service does not answer; try again in a moment.");
  }
  if (answer?.ok) {
    then(button);
    return;
  }
  button.disabled = false;
  if (answer !== null) {
    const said = await answer.json().catch(() => ({}));
    complain(said.detail ?? `The service answered with status ${answer.status}.`);
  }
}

async function askQueue() {
  if ((course.state ?? search.state) !== "queued" || course.end !== null) {
    return;
  }
  const empty = find("course-empty");
  try {
    const answer = await fetch(search.address, { headers: { Accept: "application/json" } });
    const before = answer.ok ? (await answer.json()).queued_before : null;
    if (empty !== null && before !== null && course.state !== "running") {
      const others = before === 1 ? "1 search" : `${before} searches`;
      empty.textContent = before === 0 ? "Next in the queue." : `Waiting in the queue after ${others}.`;
    }
  } catch {
    // The state of the connection already says so.
  }
  setTimeout(askQueue, QUEUE_EVERY);
}

find("stop")?.addEventListener("click", (event) =>
  change("POST", `${search.address}/cancel`, event.currentTarget, (button) => {
    button.disabled = true;
    button.textContent = "Stopping …";
  }),
);
find("delete")?.addEventListener("click", (event) =>
  change("DELETE", search.address, event.currentTarget, () => location.assign(search.list)),
);
steps?.addEventListener("toggle", showSteps);

if (isOpen) {
  setInterval(() => {
    const seconds = elapsed();
    if (course.end === null && seconds !== null) {
      value("elapsed").textContent = duration(seconds);
      chart?.show(course.points, seconds);
    }
  }, TICK);
  askQueue();
}
if (chart !== null) {
  follow(`${search.address}/events`, {
    event(event) {
      hear(event);
      if (event.event === "end" && isOpen) {
        finish();
      }
    },
    line(name) {
      if (isOpen) {
        line(name);
      }
    },
  });
}
