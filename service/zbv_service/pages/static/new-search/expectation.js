// The estimate next to the form: for its problem, or for the values of the sliders. Its bars are a verified plan of a
// very short search and the classical schedules.

import { at, input, make } from "../dom.js";
import { amount, percent } from "../numbers.js";
import { latest, said } from "./service.js";
import { WhatIf } from "./what-if.js";

const PAUSE = 350; // ms after the last change
const CUTS = ["histogram-cut", "even-cut", "v", "loop-2", "loop-3", "loop-4", "single"]; // of layers
const CLASSICAL = { "zb-v": "ZB-V", "dualpipe-v": "DualPipeV", "v-half": "V-half", "v-min": "V-min", "zb-h1": "ZB-H1", "interleaved-1f1b": "Interleaved 1F1B", "eager-1f1b": "Eager 1F1B", "1f1b": "1F1B", gpipe: "GPipe" };
// Of microbatches that differ: small ones at both ends, as in practice, and the schedule made for them.
const PRACTICE = Object.fromEntries(Object.entries(CLASSICAL).map(([name, label]) => [`${name}-practice`, `${label}, sorted`]));
const ORDER = [...CUTS, ...Object.keys(CLASSICAL), ...Object.keys(PRACTICE), "dynapipe"];
const CUT_NAMES = { "histogram-cut": "Histogram cut", "even-cut": "Even cut", v: "V", "loop-2": "Interleaved, 2", "loop-3": "Interleaved, 3", "loop-4": "Interleaved, 4", single: "One stage per rank" };
const NAMES = { ...CUT_NAMES, ...CLASSICAL, ...PRACTICE, dynapipe: "DynaPipe" };

// An element with a class.
const styled = (name, className, ...children) => make(name, { className }, ...children);

// The rows of an estimate, in a form that can be drawn and compared with another estimate.
function rowsOf(estimate) {
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

export class Expectation {
  // timeUnit() returns the current unit; take(document, note) puts a document into the form.
  constructor(service, timeUnit, take) {
    this.service = service;
    this.timeUnit = timeUnit;
    this.problem = null; // the form's problem while it is valid
    this.own = null; // the estimate of that problem
    this.whatIf = new WhatIf(at("sliders"), () => this.#moved());
    this.soon = latest((wish, isNewest) => this.#estimate(wish, isNewest), PAUSE);
    at("what-if-reset").addEventListener("click", () => {
      this.whatIf.reset();
      this.#moved();
    });
    at("what-if-take").addEventListener("click", () => {
      const { problem, limit_fraction: fraction = null } = this.whatIf.question();
      take({ problem, limit_fraction: fraction }, "The form has the values of the sliders.");
    });
  }

  // Start for a valid problem; `isFraction`: its limit is a fraction of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.problem = problem;
    this.whatIf.start(problem, facts, isFraction);
    this.#moved();
  }

  // Start for a problem with layers, whose costs the sliders do not change.
  startLayers(problem) {
    this.problem = problem;
    this.#ask({ of: problem, question: null });
  }

  // The form has no valid problem: show why there is no estimate.
  refuse(why) {
    this.problem = null;
    this.own = null;
    this.#fail(why);
  }

  #fail(why) {
    at("bars").replaceChildren();
    at("bars").classList.remove("stale");
    at("promise-state").textContent = why;
  }

  #moved() {
    const isOwn = this.whatIf.isNeutral;
    input("what-if-reset").disabled = isOwn;
    input("what-if-take").disabled = isOwn;
    if (this.problem !== null) {
      this.#ask({ of: this.problem, question: isOwn ? null : this.whatIf.question() });
    }
  }

  // Until the answer arrives, the bars belong to the previous values.
  #ask(wish) {
    at("bars").classList.add("stale");
    this.soon(wish);
  }

  async #estimate({ of, question }, isNewest) {
    const isPast = () => this.problem !== of || !isNewest();
    if (isPast()) {
      return;
    }
    at("promise-state").textContent = "computing …";
    const problem = question === null ? of : await this.#limited(question);
    if (problem === null || isPast()) {
      return;
    }
    const answer = await this.service.post("/v1/problems/estimate", { problem });
    if (question === null && answer.ok && this.problem === of) {
      this.own = answer.body;
    }
    if (isPast()) {
      return;
    }
    if (!answer.ok) {
      this.#fail(said(answer));
      return;
    }
    at("bars").classList.remove("stale");
    drawBars(at("bars"), answer.body, this.timeUnit(), question === null ? null : this.own);
    at("promise-state").textContent = question === null ? "" : "ticks: values of the form";
  }

  // The problem with the values of the sliders and its limit; null if it is invalid, with the reason on the page.
  async #limited(question) {
    const { ok, body } = await this.service.post("/v1/problems/check", question);
    if (!ok || !body.is_valid || !body.facts.fits) {
      at("promise-state").textContent = `Not possible: ${body.issues?.[0]?.detail ?? "no plan fits this memory limit."}`;
      return null;
    }
    const { problem } = question;
    return problem.memory ? { ...problem, memory: { ...problem.memory, limit: body.facts.limit } } : problem;
  }
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
function drawBars(list, estimate, unit, before = null) {
  const rows = rowsOf(estimate);
  const old = before === null ? [] : rowsOf(before);
  const bound = estimate.lower_bound;
  const most = Math.max(...rows.map(({ value }) => value), ...old.map(({ value }) => value), bound) || 1;
  const hasChange = old.length > 0;
  const items = [
    styled("li", "head", ...["", estimate.problem_summary.objective, "idle", ...(hasChange ? ["change"] : [])].map((text) => styled("span", "", text))),
  ];
  list.classList.toggle("compared", hasChange);
  items.push(...rows.map((row) => {
    const was = old.find(({ name }) => name === row.name);
    const fill = styled("i", "busy");
    fill.style.width = `${(100 * row.value * (1 - row.idle)) / most}%`;
    const idle = styled("i", "idle");
    idle.style.width = `${(100 * row.value * row.idle) / most}%`;
    const bar = styled("span", "bar", fill, idle);
    const mark = styled("i", "mark");
    mark.style.left = `${(100 * bound) / most}%`;
    bar.append(mark);
    if (was !== undefined) {
      const ghost = styled("i", "ghost");
      ghost.style.left = `${(100 * was.value) / most}%`;
      bar.append(ghost);
    }
    const name = styled("span", "name", row.label);
    if (!row.fits) {
      name.append(styled("small", "too-much", "over the limit"));
    }
    const cells = [name, styled("b", "", amount(row.value, unit)), styled("span", "share", percent(row.idle, 1))];
    if (was !== undefined) {
      cells.push(styled("span", toneOf(row.value, was.value), change(row.value, was.value)));
    }
    return styled("li", row.name === "plan" ? "own" : "", ...cells, bar);
  }));
  const status = estimate.plan === null ? "" : gapOf(estimate);
  const floor = `Lower bound: ${amount(bound, unit)}${status}`;
  items.push(styled("li", "floor", styled("span", "name", floor)));
  list.replaceChildren(...items);
}

function gapOf({ plan }) {
  if (plan.gap === 0) {
    return ": the plan is proved optimal";
  }
  return plan.gap === null ? "" : `; the plan is ${percent(plan.gap, 1)} above it`;
}
