// The content of the form, to and from documents. Unknown keys are kept and sent unchanged.

import { Layers } from "./layers.js";
import { Shape, Values, isObject, isValue, typed } from "./values.js";

export const COSTS = [
  { key: "costs.forward", label: "Forward", letter: "F", per: "stage", start: "1000" },
  { key: "costs.backward_input", label: "Backward, input", letter: "I", per: "stage", start: "1100" },
  { key: "costs.backward_weight", label: "Backward, weight", letter: "W", per: "stage", start: "700" },
  { key: "costs.backward", label: "Full backward", letter: "B", per: "stage", start: "", hint: "I + W" },
  { key: "costs.p2p", label: "Transfer between stages", letter: "", per: "boundary", start: "0" },
];
export const DELTAS = [
  { key: "memory.forward", label: "Forward", letter: "F", per: "stage", start: "2" },
  { key: "memory.backward_input", label: "Backward, input", letter: "I", per: "stage", start: "-1" },
  { key: "memory.backward_weight", label: "Backward, weight", letter: "W", per: "stage", start: "-1" },
];
export const STATIC = { key: "memory.static", label: "Static", letter: "", per: "rank", start: "0" };
export const LIMIT = { key: "memory.limit", label: "Limit", letter: "", per: "rank", start: "16" };
export const QUANTITIES = [...COSTS, ...DELTAS, STATIC, LIMIT];

const LAYERED = ["layers", "devices", "cut", "partition", "recompute"];
const LARGEST_TABLE = 1024;
const SIMPLE = ["pp_degree", "microbatches", "chunks"];
const CHOICES = { placement: ["v", "loop", "single"], objective: ["span", "makespan"] };
const isZero = (value) => value === 0 || (Array.isArray(value) && value.every((each) => each === 0));

// Keys of a file that no field shows, by part. The objects have no prototype, so that every name is an ordinary key.
const nothing = () =>
  Object.fromEntries(["problem", "costs", "memory", "units", "options"].map((part) => [part, Object.create(null)]));

export class ProblemForm {
  constructor() {
    this.texts = { pp_degree: "4", microbatches: "16", chunks: "2", limit_fraction: "1" };
    this.texts = { ...this.texts, time_unit: "", memory_unit: "", effort: "standard", time_limit: "", seed: "0" };
    this.placement = "v";
    this.objective = "span";
    this.hasMemory = true;
    this.limitKind = "fraction";
    this.values = Object.fromEntries(QUANTITIES.map(({ key, per, start }) => [key, new Values(per, start)]));
    this.kept = nothing();
    /** @type {any} */
    this.layers = null; // a Layers, in place of the costs and memory of stages
    this.ranks = 4;
  }

  // The shape of the tables; the previous one while a field holds no valid count.
  get shape() {
    const ranks = typed(this.texts.pp_degree);
    const chunks = typed(this.texts.chunks);
    if (Number.isInteger(ranks) && ranks >= 1 && ranks <= LARGEST_TABLE) {
      this.ranks = ranks;
    }
    return new Shape(this.ranks, this.placement, Number.isInteger(chunks) && chunks >= 1 && chunks <= 64 ? chunks : 2);
  }

  // ---- to documents

  // The problem, without its limit if that is a fraction: the service turns it into an amount.
  problem(limit = undefined) {
    const { shape, texts, kept } = this;
    const problem = { pp_degree: typed(texts.pp_degree), microbatches: typed(texts.microbatches) };
    problem.placement = this.placement;
    if (this.placement === "loop") {
      problem.chunks = typed(texts.chunks);
    }
    problem.objective = this.objective;
    if (this.layers !== null) {
      return this.#withLayers(problem);
    }
    problem.costs = {};
    for (const { key } of COSTS) {
      const value = this.values[key].toJson(shape);
      if (key !== "costs.backward" || value !== "") {
        problem.costs[key.split(".")[1]] = value;
      }
    }
    if (this.hasMemory) {
      problem.memory = Object.fromEntries(
        [...DELTAS, STATIC].map(({ key }) => [key.split(".")[1], this.values[key].toJson(shape)]),
      );
      problem.memory.limit = this.#limit(limit);
    }
    for (const part of ["costs", "memory"]) {
      if (problem[part] !== undefined || Object.keys(kept[part]).length > 0) {
        problem[part] = { ...problem[part], ...kept[part] };
      }
    }
    return { ...problem, ...this.#units(), ...kept.problem };
  }

  #withLayers(problem) {
    const { shape, kept } = this;
    const memory = { static: this.values[STATIC.key].toJson(shape), limit: this.#limit(), ...kept.memory };
    return { ...problem, ...this.layers.document(), memory, ...this.#units(), ...kept.problem };
  }

  #units() {
    const { texts, kept } = this;
    const units = {};
    for (const [key, text] of [["time", texts.time_unit], ["memory", texts.memory_unit]]) {
      if (text.trim() !== "") {
        units[key] = text.trim();
      }
    }
    Object.assign(units, kept.units);
    return Object.keys(units).length === 0 ? {} : { units };
  }

  #limit(limit) {
    if (this.limitKind === "amount") {
      return this.values[LIMIT.key].toJson(this.shape);
    }
    if (this.limitKind === "none" || limit === undefined || limit === null) {
      return null;
    }
    return limit.every((each) => each === limit[0]) ? limit[0] : limit;
  }

  options() {
    const { texts, kept } = this;
    const options = { effort: texts.effort };
    if (texts.time_limit.trim() !== "") {
      options.time_limit = typed(texts.time_limit);
    }
    if (texts.seed.trim() !== "0") {
      options.seed = typed(texts.seed);
    }
    return { ...options, ...kept.options };
  }

  get hasFraction() {
    return this.layers === null && this.hasMemory && this.limitKind === "fraction";
  }

  // The body of a check.
  question() {
    const body = { problem: this.problem(), options: this.options() };
    return this.hasFraction ? { ...body, limit_fraction: typed(this.texts.limit_fraction) } : body;
  }

  // ---- from documents

  // Reads a problem document; returns the keys that no field shows.
  read(problem, options = {}, limitFraction = null) {
    if (!isObject(problem)) {
      throw new TypeError("a problem is a JSON object");
    }
    this.kept = nothing();
    this.layers = Layers.of(problem);
    for (const key of SIMPLE) {
      if (isValue(problem[key])) {
        this.texts[key] = String(problem[key]);
      } else if (problem[key] !== undefined && problem[key] !== null) {
        this.kept.problem[key] = problem[key];
      } else if (key !== "chunks") {
        this.texts[key] = ""; // the file does not set it
      }
    }
    for (const [key, choices] of Object.entries(CHOICES)) {
      const known = key === "placement" && this.layers !== null ? [...choices, "auto"] : choices;
      this[key] = known.includes(problem[key]) ? problem[key] : known[0];
      if (problem[key] !== undefined && !known.includes(problem[key])) {
        this.kept.problem[key] = problem[key];
      }
    }
    if (this.layers === null) {
      this.#readPart("costs", problem.costs ?? {}, COSTS);
      this.#readMemory(problem.memory, limitFraction);
    } else {
      this.#readMemoryBeside(problem.memory);
    }
    this.#readUnits(problem.units);
    this.#readOptions(options);
    const known = [...SIMPLE, ...Object.keys(CHOICES), "costs", "memory", "units"];
    for (const [key, value] of Object.entries(problem)) {
      if (!known.includes(key) && !(this.layers !== null && LAYERED.includes(key))) {
        this.kept.problem[key] = value;
      }
    }
    return this.#unshown();
  }

  #readPart(part, found, quantities) {
    const values = isObject(found) ? found : {};
    if (found !== undefined && found !== null && !isObject(found)) {
      this.kept.problem[part] = found;
    }
    const { shape } = this;
    for (const { key, per, start } of quantities) {
      const value = values[key.split(".")[1]];
      const absent = key === "costs.backward" ? "" : key === "costs.p2p" || key === STATIC.key ? "0" : "";
      this.values[key] = new Values(per, isObject(found) ? absent : start);
      if (value !== undefined && value !== null) {
        this.values[key].fromJson(value, shape);
      }
    }
    const known = quantities.map(({ key }) => key.split(".")[1]);
    for (const [key, value] of Object.entries(values)) {
      if (!known.includes(key)) {
        this.kept[part][key] = value;
      }
    }
  }

  #readMemory(found, limitFraction) {
    const none = found === undefined || found === null;
    const parts = [...DELTAS, STATIC].map(({ key }) => found?.[key.split(".")[1]]);
    const isSilent = isObject(found) && (found.limit ?? null) === null && parts.every((each) => isZero(each));
    this.#readPart("memory", none || isSilent ? undefined : found, [...DELTAS, STATIC, LIMIT]);
    this.hasMemory = !none && !isSilent;
    const limit = isObject(found) ? (found.limit ?? null) : null;
    this.limitKind = limitFraction !== null ? "fraction" : limit === null ? "none" : "amount";
    if (limitFraction !== null) {
      this.texts.limit_fraction = String(limitFraction);
      this.values[LIMIT.key] = new Values("rank", "");
    }
  }

  // The memory that ranks hold apart from their layers. The memory of layers is ignored, because it follows from them.
  #readMemoryBeside(found) {
    const { static_beside_layers: beside, ...others } = isObject(found) ? found : {};
    for (const name of this.layers.hasCut ? DELTAS.map(({ key }) => key.split(".")[1]) : []) {
      delete others[name];
    }
    const own = beside === undefined ? others : { ...others, static: beside };
    this.#readPart("memory", isObject(found) || (found ?? null) === null ? own : found, [STATIC, LIMIT]);
    this.hasMemory = true;
    this.limitKind = (others.limit ?? null) === null ? "none" : "amount";
  }

  #readUnits(found) {
    const units = isObject(found) ? found : {};
    for (const [key, name] of [["time", "time_unit"], ["memory", "memory_unit"]]) {
      this.texts[name] = typeof units[key] === "string" ? units[key] : "";
    }
    for (const [key, value] of Object.entries(units)) {
      if (!["time", "memory"].includes(key) || (typeof value !== "string" && value !== null)) {
        this.kept.units[key] = value;
      }
    }
    if (found !== undefined && found !== null && !isObject(found)) {
      this.kept.problem.units = found;
    }
  }

  #readOptions(options) {
    const { effort, time_limit: timeLimit, seed, ...others } = isObject(options) ? options : {};
    const isKnown = ["quick", "standard", "thorough"].includes(effort);
    this.texts.effort = isKnown ? effort : "standard";
    Object.assign(this.kept.options, others, isKnown || effort === undefined ? {} : { effort });
    for (const [key, value, absent] of [["time_limit", timeLimit, ""], ["seed", seed, "0"]]) {
      this.texts[key] = isValue(value) ? String(value) : absent;
      if (!isValue(value) && value !== undefined && value !== null) {
        this.kept.options[key] = value;
      }
    }
  }

  // A field that is edited replaces the value of the file.
  forget(name) {
    const [part, key] = { time_unit: ["units", "time"], memory_unit: ["units", "memory"] }[name] ?? [null, name];
    for (const kept of part === null ? [this.kept.problem, this.kept.options] : [this.kept[part]]) {
      delete kept[key];
    }
  }

  // Names of values that are sent but not shown.
  #unshown() {
    const names = Object.keys(this.kept.problem);
    for (const part of ["costs", "memory", "units", "options"]) {
      names.push(...Object.keys(this.kept[part]).map((key) => `${part}.${key}`));
    }
    names.push(...QUANTITIES.filter(({ key }) => this.values[key].asIs !== undefined).map(({ key }) => key));
    return names;
  }

  // ---- W follows F and I

  get isBalanced() {
    return this.#sums().every((sum) => Math.abs(sum) <= 1e-9);
  }

  #sums() {
    const [forward, inputs, weights] = DELTAS.map(({ key }) => this.values[key].spread(this.shape).map(typed));
    return forward.map((value, at) => value + inputs[at] + weights[at]);
  }

  // Sets W to -(F + I); returns false if they are not numbers.
  balance() {
    const [forward, inputs] = DELTAS.map(({ key }) => this.values[key].spread(this.shape).map(typed));
    const left = forward.map((value, at) => Number((0 - value - inputs[at]).toPrecision(12)));
    if (!left.every(Number.isFinite)) {
      return false;
    }
    this.values["memory.backward_weight"].fill(left.map(String), this.shape);
    return true;
  }
}
