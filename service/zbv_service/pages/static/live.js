// Keeps a page up to date while something is going on: as long as an element has data-open, the script fetches the page
// again and replaces elements with data-live. Selected text, open details, focus and scroll positions are kept.

const EVERY = 2500; // ms
const SLOWEST = 30000; // ms, while the service does not answer
const AT_ONCE = 400; // ms after the page becomes visible again

let wait = EVERY;
let timer = null;

const live = (page) => page.querySelectorAll("[data-live]");
const isOpen = () => [...live(document)].some((part) => part.matches("[data-open]"));

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

async function refresh() {
  const answer = await fetch(window.location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) {
    throw new Error(`status ${answer.status}`);
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = new Map([...live(page)].map((part) => [part.dataset.live, part]));
  const selected = window.getSelection();
  for (const old of live(document)) {
    const now = fresh.get(old.dataset.live);
    const isSelected = selected !== null && !selected.isCollapsed && selected.containsNode(old, true);
    if (now !== undefined && !isSelected && bare(old) !== bare(now)) {
      replace(old, now);
    }
  }
}

async function turn() {
  timer = null;
  try {
    await refresh();
    wait = EVERY;
  } catch {
    wait = Math.min(2 * wait, SLOWEST); // the service may be restarting; the page stays as it is
  }
  plan(wait);
}

function plan(delay) {
  if (timer === null && !document.hidden && isOpen()) {
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
plan(EVERY);
