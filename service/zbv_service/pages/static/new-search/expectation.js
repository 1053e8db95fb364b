// The estimate next to the form: for its problem, or for the values of the sliders. Its bars are a verified plan of a
// very short search and the classical schedules.

import { at, input, make } from "../dom.js";
import { amount, percent } from "../numbers.js";
import { latest, messageOf, post } from "./service.js";
import { WhatIf } from "./what-if.js";

const PAUSE = 350; // ms after the last change
const SAME = 0.0005; // a change too small for its text
const CUTS = { "histogram-cut": "Histogram cut", "even-cut": "Even cut", v: "V", "loop-2": "Interleaved, 2", "loop-3": "Interleaved, 3", "loop-4": "Interleaved, 4", single: "One stage per rank" };
const CLASSICAL = { "zb-v": "ZB-V", "dualpipe-v": "DualPipeV", "v-half": "V-half", "v-min": "V-min", "zb-h1": "ZB-H1", "interleaved-1f1b": "Interleaved 1F1B", "eager-1f1b": "Eager 1F1B", "1f1b": "1F1B", gpipe: "GPipe" };
// Of microbatches that differ: small ones at both ends, as in practice, and the schedule made for them.
const PRACTICE = Object.fromEntries(Object.entries(CLASSICAL).map(([name, label]) => [`${name}-practice`, `${label}, sorted`]));
const NAMES = { ...CUTS, ...CLASSICAL, ...PRACTICE, dynapipe: "DynaPipe" };
const ORDER = Object.keys(NAMES);

// An element with a class.
const styled = (name, className, ...children) => make(name, { className }, ...children);

// A part of a bar, with a length or place in percent.
function mark(className, side, share) {
  const found = styled("i", className);
  found.style[side] = `${100 * share}%`;
  return found;
}

export class Expectation {
  // timeUnit() returns the current unit; apply(document, note) puts a document into the form.
  constructor(timeUnit, apply) {
    this.timeUnit = timeUnit;
    this.problem = null; // the form's problem while it is valid
    this.own = null; // the estimate of that problem
    this.whatIf = new WhatIf(at("sliders"), () => this.#moved());
    this.soon = latest((wish, isNewest) => this.#estimate(wish, isNewest), PAUSE);
    at("what-if-reset").addEventListener("click", () => {
      this.whatIf.reset();
      this.#moved();
    });
    at("what-if-take").addEventListener("click", () => apply(this.whatIf.question(), "The form has the values of the sliders."));
  }

  // Start for a valid problem. The sliders do not change the costs of layers, which have no `facts`; `isFraction`: the
  // limit is a fraction of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.problem = problem;
    if (facts === null) {
      this.#ask({ of: problem, question: null });
    } else {
      this.whatIf.start(problem, facts, isFraction);
      this.#moved();
    }
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
    const answer = await post("/v1/problems/estimate", JSON.stringify({ problem }));
    if (question === null && answer.ok && this.problem === of) {
      this.own = answer.body;
    }
    if (isPast()) {
      return;
    }
    if (!answer.ok) {
      this.#fail(messageOf(answer));
      return;
    }
    at("bars").classList.remove("stale");
    drawBars(at("bars"), answer.body, this.timeUnit(), question === null ? null : this.own);
    at("promise-state").textContent = question === null ? "" : "ticks: values of the form";
  }

  // The problem with the values of the sliders and its limit; null if it is invalid, with the reason on the page.
  async #limited(question) {
    const { ok, body } = await post("/v1/problems/check", JSON.stringify(question));
    if (!ok || !body.is_valid || !body.facts.fits) {
      at("promise-state").textContent = `Not possible: ${body.issues?.[0]?.detail ?? "no plan fits this memory limit."}`;
      return null;
    }
    const { problem } = question;
    return problem.memory ? { ...problem, memory: { ...problem.memory, limit: body.facts.limit } } : problem;
  }
}

// The rows of an estimate: its plan, and the schedules that it knows.
function rowsOf(estimate) {
  const { objective, layers } = estimate.problem_summary;
  const label = (layers ?? null) === null ? "zbv in 0.5 s" : "zbv, short search"; // dividing layers takes longer
  const known = ORDER.map((name) => estimate.baselines.find((each) => each.name === name)).filter(Boolean);
  const plans = estimate.plan === null ? [] : [{ ...estimate.plan, name: "plan", fits: true }];
  return [...plans, ...known].map(({ name, fits, bubble_rate: rate, span, [objective]: value }) => {
    const busy = (1 - rate) * span;
    return { name, label: NAMES[name] ?? label, fits, value, busy, idle: 1 - busy / (value || 1) };
  });
}

// How a value differs from an earlier one: [tone, text].
function change(value, before) {
  const share = value / before - 1;
  return Math.abs(share) < SAME ? ["share", "±0"] : share > 0 ? ["worse", `+${percent(share, 1)}`] : ["better", percent(share, 1)];
}

// Draws an estimate; `before` is the estimate of the form if the sliders have other values.
function drawBars(list, estimate, unit, before = null) {
  const { plan, lower_bound: bound } = estimate;
  const rows = rowsOf(estimate);
  const old = new Map(before === null ? [] : rowsOf(before).map(({ name, value }) => [name, value]));
  const most = Math.max(...rows.map(({ value }) => value), ...old.values(), bound) || 1;
  const titles = ["", estimate.problem_summary.objective, "idle", ...(old.size > 0 ? ["change"] : [])];
  const items = rows.map(({ name, label, fits, value, busy, idle }) => {
    const was = old.get(name);
    const shares = [mark("busy", "width", busy / most), mark("idle", "width", (value - busy) / most), mark("mark", "left", bound / most)];
    const [tone, text] = was === undefined ? [] : change(value, was);
    return styled(
      "li",
      name === "plan" ? "own" : "",
      styled("span", "name", label, ...(fits ? [] : [styled("small", "too-much", "over the limit")])),
      make("b", {}, amount(value, unit)),
      styled("span", "share", percent(idle, 1)),
      ...(was === undefined ? [] : [styled("span", tone, text)]),
      styled("span", "bar", ...shares, ...(was === undefined ? [] : [mark("ghost", "left", was / most)])),
    );
  });
  const gap = (plan?.gap ?? null) === null ? "" : plan.gap === 0 ? ": the plan is proved optimal" : `; the plan is ${percent(plan.gap, 1)} above it`;
  list.classList.toggle("compared", old.size > 0);
  list.replaceChildren(
    styled("li", "head", ...titles.map((text) => make("span", {}, text))),
    ...items,
    styled("li", "floor", styled("span", "name", `Lower bound: ${amount(bound, unit)}${gap}`)),
  );
}
