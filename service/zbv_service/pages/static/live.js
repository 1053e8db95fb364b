// Keeps a page up to date while something is going on: as long as an element has data-open, the script fetches the page
// again and replaces elements with data-live. Selected text, open details, focus and scroll positions are kept. The
// value of data-open, if any, is the time between two fetches.

import { at } from "./dom.js";

const EVERY = 2500; // ms
const SLOWEST = 30000; // ms, while the service does not answer
const AT_ONCE = 400; // ms after the page becomes visible again

const live = (page) => [...page.querySelectorAll("[data-live]")];
const every = () => Math.min(...live(document).filter((part) => "open" in part.dataset).map((part) => Number(part.dataset.open) || EVERY));

let wait = every();
let timer = null;

function replace(old, fresh) {
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const taken = document.importNode(fresh, true);
  if (taken.matches("tr")) {
    taken.classList.toggle("fresh", old.matches("[data-open]") && !taken.matches("[data-open]"));
  }
  for (const shown of old.querySelectorAll("details[open][id]")) {
    taken.querySelector(`#${CSS.escape(shown.id)}`)?.setAttribute("open", "");
  }
  for (const given of old.querySelectorAll("select[id], input[id]")) {
    const same = taken.querySelector(`#${CSS.escape(given.id)}`);
    if (same !== null) {
      same.value = given.value;
    }
  }
  const scrolled = old.querySelector(".scroll")?.scrollLeft;
  old.replaceWith(taken);
  if (scrolled) {
    taken.querySelector(".scroll").scrollLeft = scrolled;
  }
  if (focused !== null) {
    const same = [...taken.querySelectorAll(focused.localName)];
    const name = (part) => part.id || part.getAttribute("href") || part.getAttribute("aria-label") || part.textContent;
    same.find((part) => name(part) === name(focused))?.focus({ preventScroll: true });
  }
}

const bare = (part) => {
  const copy = part.cloneNode(true);
  copy.classList.remove("fresh");
  copy.querySelectorAll("details[open]").forEach((shown) => shown.removeAttribute("open"));
  return copy.outerHTML.replace(' class=""', "");
};

// Updates the page; returns what is wrong, or nothing.
async function refresh() {
  const answer = await fetch(window.location.href, { headers: { Accept: "text/html" } }).catch(() => null);
  if (answer?.status === 404) {
    return "This page is gone: somebody deleted what it shows.";
  }
  if (answer?.status === 401 || answer?.redirected) {
    return "You are signed out. Reload the page to sign in.";
  }
  if (!answer?.ok) {
    return "Connection lost; reconnecting …"; // the service may be restarting; the page stays as it is
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = new Map(live(page).map((part) => [part.dataset.live, part]));
  const selected = window.getSelection();
  document.title = page.title;
  for (const old of live(document)) {
    const now = fresh.get(old.dataset.live);
    const isSelected = selected !== null && !selected.isCollapsed && selected.containsNode(old, true);
    if (now !== undefined && !isSelected && bare(old) !== bare(now)) {
      replace(old, now);
    }
  }
  return "";
}

async function turn() {
  timer = null;
  const wrong = await refresh();
  wait = wrong ? Math.min(2 * wait, SLOWEST) : every();
  at("away").hidden = !wrong;
  at("away").textContent = wrong;
  plan(wait);
}

function plan(delay) {
  if (timer === null && !document.hidden && Number.isFinite(every())) {
    timer = window.setTimeout(turn, delay);
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden && timer !== null) {
    window.clearTimeout(timer);
    timer = null;
  }
  plan(AT_ONCE);
});
plan(wait);
