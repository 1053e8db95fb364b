// The estimate as bars: a verified plan of a very short search and the classical schedules.

import { amount, percent } from "../numbers.js";

const CUTS = ["histogram-cut", "even-cut", "v", "loop-2", "loop-3", "loop-4", "single"]; // of layers
const CLASSICAL = { "zb-v": "ZB-V", "dualpipe-v": "DualPipeV", "v-half": "V-half", "v-min": "V-min", "zb-h1": "ZB-H1", "interleaved-1f1b": "Interleaved 1F1B", "eager-1f1b": "Eager 1F1B", "1f1b": "1F1B", gpipe: "GPipe" };
// Of microbatches that differ: small ones at both ends, as in practice, and the schedule made for them.
const PRACTICE = Object.fromEntries(Object.entries(CLASSICAL).map(([name, label]) => [`${name}-practice`, `${label}, sorted`]));
const ORDER = [...CUTS, ...Object.keys(CLASSICAL), ...Object.keys(PRACTICE), "dynapipe"];
const CUT_NAMES = { "histogram-cut": "Histogram cut", "even-cut": "Even cut", v: "V", "loop-2": "Interleaved, 2", "loop-3": "Interleaved, 3", "loop-4": "Interleaved, 4", single: "One stage per rank" };
const NAMES = { ...CUT_NAMES, ...CLASSICAL, ...PRACTICE, dynapipe: "DynaPipe" };

function make(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

// The rows of an estimate, in a form that can be drawn and compared with another estimate.
export function rowsOf(estimate) {
  const objective = estimate.problem_summary.objective;
  const row = (name, label, found, fits) => ({
    name,
    label,
    value: found[objective],
    idle: 1 - ((1 - found.bubble_rate) * found.span) / (found[objective] || 1),
    fits,
  });
  const isCut = (estimate.problem_summary.layers ?? null) !== null; // dividing layers takes longer than the search itself
  const label = isCut ? "zbv, short search" : "zbv in 0.5 s";
  const plans = estimate.plan === null ? [] : [row("plan", label, estimate.plan, true)];
  const known = ORDER.map((name) => estimate.baselines.find((each) => each.name === name)).filter(Boolean);
  return [...plans, ...known.map((each) => row(each.name, NAMES[each.name], each, each.fits))];
}

const SAME = 0.0005; // a change too small for its text

function change(value, before) {
  const share = value / before - 1;
  return Math.abs(share) < SAME ? "±0" : `${share > 0 ? "+" : ""}${percent(share, 1)}`;
}

function toneOf(value, before) {
  const share = value / before - 1;
  return Math.abs(share) < SAME ? "share" : share > 0 ? "worse" : "better";
}

// Draws an estimate; `before` is the estimate of the form if the sliders have other values.
export function drawBars(list, estimate, unit, before = null) {
  const rows = rowsOf(estimate);
  const old = before === null ? [] : rowsOf(before);
  const bound = estimate.lower_bound;
  const most = Math.max(...rows.map(({ value }) => value), ...old.map(({ value }) => value), bound) || 1;
  const hasChange = old.length > 0;
  const items = [
    make("li", "head", ...["", estimate.problem_summary.objective, "idle", ...(hasChange ? ["change"] : [])].map((text) => make("span", "", text))),
  ];
  list.classList.toggle("compared", hasChange);
  items.push(...rows.map((row) => {
    const was = old.find(({ name }) => name === row.name);
    const fill = make("i", "busy");
    fill.style.width = `${(100 * row.value * (1 - row.idle)) / most}%`;
    const idle = make("i", "idle");
    idle.style.width = `${(100 * row.value * row.idle) / most}%`;
    const bar = make("span", "bar", fill, idle);
    const mark = make("i", "mark");
    mark.style.left = `${(100 * bound) / most}%`;
    bar.append(mark);
    if (was !== undefined) {
      const ghost = make("i", "ghost");
      ghost.style.left = `${(100 * was.value) / most}%`;
      bar.append(ghost);
    }
    const name = make("span", "name", row.label);
    if (!row.fits) {
      name.append(make("small", "too-much", "over the limit"));
    }
    const cells = [name, make("b", "", amount(row.value, unit)), make("span", "share", percent(row.idle, 1))];
    if (was !== undefined) {
      cells.push(make("span", toneOf(row.value, was.value), change(row.value, was.value)));
    }
    return make("li", row.name === "plan" ? "own" : "", ...cells, bar);
  }));
  const status = estimate.plan === null ? "" : gapOf(estimate);
  const floor = `Lower bound: ${amount(bound, unit)}${status}`;
  items.push(make("li", "floor", make("span", "name", floor)));
  list.replaceChildren(...items);
}

function gapOf({ plan }) {
  if (plan.gap === 0) {
    return ": the plan is proved optimal";
  }
  return plan.gap === null ? "" : `; the plan is ${percent(plan.gap, 1)} above it`;
}
