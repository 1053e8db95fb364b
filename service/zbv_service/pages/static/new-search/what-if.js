// Sliders that change a problem without changing the form: costs, memory limit and microbatches.

import { make } from "../dom.js";
import { number } from "../numbers.js";
import { isObject, mean } from "./values.js";

const SCALES = { forward: "F", backward_input: "I", backward_weight: "W", p2p: "Transfers" };
const LARGEST_FRACTION = 2;

// An object has the fixed part of a cost and the coefficients of features, by name.
const scaled = (value, factor) =>
  isObject(value)
    ? Object.fromEntries(Object.entries(value).map(([name, each]) => [name, scaled(each, factor)]))
    : Array.isArray(value)
      ? value.map((each) => scaled(each, factor))
      : Number((value * factor).toPrecision(12));

const average = (value) => (Array.isArray(value) ? mean(value) : value);

export class WhatIf {
  // Calls changed() when a slider moves.
  constructor(holder, changed) {
    this.holder = holder;
    /** @type {any} */
    this.base = null;
    this.sliders = new Map();
    holder.addEventListener("input", () => {
      this.#say();
      changed();
    });
  }

  // Starts over with a valid problem; `isFraction`: its limit is a fraction of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.base = { problem, facts, isFraction };
    this.sliders.clear();
    for (const [name, label] of Object.entries(SCALES)) {
      this.#add(name, label, 0.5, 2, 0.05, 1);
    }
    if (facts.limit !== null && facts.smallest_fraction !== null) {
      const least = Math.ceil(facts.smallest_fraction * 100) / 100;
      const initial = facts.limit_fraction;
      this.#add("limit", "Memory limit", Math.min(least, initial), Math.max(LARGEST_FRACTION, initial), 0.01, initial);
    }
    // Features are given for every microbatch of the problem, and not for others.
    if ((problem.features ?? problem.sequences ?? null) === null) {
      this.#add("microbatches", "Microbatches", 1, Math.max(4 * problem.microbatches, 8), 1, problem.microbatches);
    }
    const rows = [...this.sliders.values()].map(({ input, output, label }) =>
      make("div", { className: "slider" }, make("label", { htmlFor: input.id }, label), input, output),
    );
    this.holder.replaceChildren(...rows);
    this.#say();
  }

  #add(name, label, min, max, step, initial) {
    // "any" allows the form's value between two steps; keys still move by whole steps.
    const input = document.createElement("input");
    Object.assign(input, { type: "range", id: `what-if-${name}`, min, max, step: "any", value: initial });
    input.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
      if (by !== undefined) {
        event.preventDefault();
        input.value = String(Math.round(Number(input.value) / step + by) * step);
        input.dispatchEvent(new Event("input", { bubbles: true }));
      }
    });
    this.sliders.set(name, { input, output: make("output"), label, initial, step });
  }

  // The value of a slider: the form's value, or a whole number of steps.
  #value(name) {
    const { input, initial, step } = this.sliders.get(name);
    const value = Number(input.value);
    return Math.abs(value - initial) < step / 2 ? initial : Number((Math.round(value / step) * step).toPrecision(12));
  }

  #moved(name) {
    return this.sliders.has(name) && this.#value(name) !== this.sliders.get(name).initial;
  }

  get isNeutral() {
    return [...this.sliders.keys()].every((name) => !this.#moved(name));
  }

  #say() {
    for (const [name, { input, output }] of this.sliders) {
      const value = this.#value(name);
      const text = name === "microbatches" ? String(value) : `${number(value, 3)} ×${name === "limit" ? " 1F1B" : ""}`;
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
      output.classList.toggle("moved", this.#moved(name));
    }
  }

  reset() {
    for (const { input, initial } of this.sliders.values()) {
      input.value = String(initial);
    }
    this.#say();
  }

  // The factor from the mean of I + W before to that after.
  #growth(before, after) {
    const halves = [before.backward_input, before.backward_weight, after.backward_input, after.backward_weight];
    if (halves.some(isObject)) {
      return (this.#value("backward_input") + this.#value("backward_weight")) / 2;
    }
    const [inputs, weights, newInputs, newWeights] = halves.map(average);
    return inputs + weights > 0 ? (newInputs + newWeights) / (inputs + weights) : 1;
  }

  // The body of a check: the problem with the values of the sliders, and its limit if that is a fraction.
  question() {
    const { problem, facts, isFraction } = this.base;
    const costs = { ...problem.costs };
    for (const name of Object.keys(SCALES)) {
      if (costs[name] !== undefined && this.#moved(name)) {
        costs[name] = scaled(costs[name], this.#value(name));
      }
    }
    // The fused backward grows like the sum of I and W.
    if ((costs.backward ?? null) !== null) {
      costs.backward = scaled(costs.backward, this.#growth(problem.costs, costs));
    }
    const asked = { ...problem, costs };
    if (this.sliders.has("microbatches")) {
      asked.microbatches = this.#value("microbatches");
    }
    if (!this.sliders.has("limit") || (!isFraction && !this.#moved("limit"))) {
      return { problem: asked };
    }
    const fraction = this.#moved("limit") ? this.#value("limit") : facts.limit_fraction;
    return { problem: { ...asked, memory: { ...problem.memory, limit: null } }, limit_fraction: fraction };
  }
}
