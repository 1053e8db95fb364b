// Sliders that change a problem without changing the form: costs, memory limit and microbatches.

import { number } from "../numbers.js";
import { isObject, mean } from "./values.js";

const SCALES = [
  { name: "forward", label: "F" },
  { name: "backward_input", label: "I" },
  { name: "backward_weight", label: "W" },
  { name: "p2p", label: "Transfers" },
];
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
    this.changed = changed;
    /** @type {any} */
    this.base = null;
    this.inputs = new Map();
    holder.addEventListener("input", () => {
      this.#say();
      this.changed();
    });
  }

  // Starts over with a valid problem; `isFraction`: its limit is a fraction of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.base = { problem, facts, isFraction };
    this.inputs.clear();
    const sliders = SCALES.map(({ name, label }) => this.#slider(name, label, 0.5, 2, 0.05, 1));
    if (facts.limit !== null && facts.smallest_fraction !== null) {
      const least = Math.ceil(facts.smallest_fraction * 100) / 100;
      const own = facts.limit_fraction;
      sliders.push(this.#slider("limit", "Memory limit", Math.min(least, own), Math.max(LARGEST_FRACTION, own), 0.01, own));
    }
    const { microbatches } = problem;
    // Features are given for every microbatch of the problem, and not for others.
    if ((problem.features ?? problem.sequences ?? null) === null) {
      sliders.push(this.#slider("microbatches", "Microbatches", 1, Math.max(4 * microbatches, 8), 1, microbatches));
    }
    this.holder.replaceChildren(...sliders);
    this.#say();
  }

  #slider(name, label, min, max, step, value) {
    const input = Object.assign(document.createElement("input"), { type: "range", id: `what-if-${name}` });
    // "any" allows the form's value between two steps; keys still move by whole steps.
    Object.assign(input, { min, max, step: "any" });
    input.value = String(value);
    input.dataset.step = step;
    input.addEventListener("keydown", (event) => this.#step(event, input, step));
    const output = Object.assign(document.createElement("output"), { htmlFor: input.id });
    const title = Object.assign(document.createElement("label"), { htmlFor: input.id, textContent: label });
    this.inputs.set(name, { input, output, own: Number(input.value), step });
    const row = Object.assign(document.createElement("div"), { className: "slider" });
    row.append(title, input, output);
    return row;
  }

  #step(event, input, step) {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      input.value = String(Math.round(Number(input.value) / step + by) * step);
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
  }

  // The value of a slider: the form's value, or a whole number of steps.
  #value(name) {
    const { input, own, step } = this.inputs.get(name);
    const value = Number(input.value);
    return Math.abs(value - own) < step / 2 ? own : Number((Math.round(value / step) * step).toPrecision(12));
  }

  #moved(name) {
    return this.inputs.has(name) && this.#value(name) !== this.inputs.get(name).own;
  }

  get isNeutral() {
    return [...this.inputs.keys()].every((name) => !this.#moved(name));
  }

  #say() {
    for (const [name, { input, output }] of this.inputs) {
      const value = this.#value(name);
      const text = name === "microbatches" ? String(value) : `${number(value, 3)} ×${name === "limit" ? " 1F1B" : ""}`;
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
      output.classList.toggle("moved", this.#moved(name));
    }
  }

  reset() {
    for (const { input, own } of this.inputs.values()) {
      input.value = String(own);
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

  // The problem with the values of the sliders, and its limit if that is a fraction of 1F1B's memory.
  question() {
    const { problem, facts, isFraction } = this.base;
    const costs = { ...problem.costs };
    for (const { name } of SCALES) {
      if (costs[name] !== undefined && this.#moved(name)) {
        costs[name] = scaled(costs[name], this.#value(name));
      }
    }
    // The fused backward grows like the sum of I and W.
    if (costs.backward !== undefined && costs.backward !== null) {
      costs.backward = scaled(costs.backward, this.#growth(problem.costs, costs));
    }
    const asked = { ...problem, costs };
    if (this.inputs.has("microbatches")) {
      asked.microbatches = this.#value("microbatches");
    }
    if (!this.inputs.has("limit") || (!isFraction && !this.#moved("limit"))) {
      return { problem: asked };
    }
    const fraction = this.#moved("limit") ? this.#value("limit") : facts.limit_fraction;
    return { problem: { ...asked, memory: { ...problem.memory, limit: null } }, limit_fraction: fraction };
  }
}
