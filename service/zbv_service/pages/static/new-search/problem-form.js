// The content of the form, to and from documents. Keys that no field shows are kept and sent unchanged.

import { at, input } from "../dom.js";
import { Layers } from "./layers.js";
import { Shape, Values, isObject, isValue, typed } from "./values.js";

const stage = { per: "stage", absent: "" };
export const COSTS = [
  { ...stage, key: "costs.forward", label: "Forward", letter: "F", start: "1000" },
  { ...stage, key: "costs.backward_input", label: "Backward, input", letter: "I", start: "1100" },
  { ...stage, key: "costs.backward_weight", label: "Backward, weight", letter: "W", start: "700" },
  { ...stage, key: "costs.backward", label: "Full backward", letter: "B", start: "", hint: "I + W" },
  { per: "boundary", absent: "0", key: "costs.p2p", label: "Transfer between stages", letter: "", start: "0" },
];
export const DELTAS = [
  { ...stage, key: "memory.forward", label: "Forward", letter: "F", start: "2" },
  { ...stage, key: "memory.backward_input", label: "Backward, input", letter: "I", start: "-1" },
  { ...stage, key: "memory.backward_weight", label: "Backward, weight", letter: "W", start: "-1" },
];
export const STATIC = { per: "rank", absent: "0", key: "memory.static", label: "Static", letter: "", start: "0" };
export const LIMIT = { per: "rank", absent: "", key: "memory.limit", label: "Limit", letter: "", start: "16" };
export const QUANTITIES = [...COSTS, ...DELTAS, STATIC, LIMIT];

// The other fields, by their ids. `path` is their place in the body of a search; what a field shows by `default` is
// left out of it.
/** @type {Record<string, any>} */
export const FIELDS = {
  pp_degree: { path: "problem.pp_degree" },
  microbatches: { path: "problem.microbatches" },
  placement: { path: "problem.placement", isChoice: true },
  chunks: { path: "problem.chunks" },
  objective: { path: "problem.objective", isChoice: true },
  time_unit: { path: "problem.units.time", default: "", isText: true },
  memory_unit: { path: "problem.units.memory", default: "", isText: true },
  effort: { path: "options.effort", isChoice: true },
  time_limit: { path: "options.time_limit", default: "" },
  seed: { path: "options.seed", default: "0" },
  limit_kind: {},
  limit_fraction: {},
  has_memory: {},
  keep_cut: {},
};
const LARGEST_TABLE = 1024;
const PARTS = ["costs", "memory", "units"];
const LAYERED = ["layers", "devices", "cut", "costs", "partition", "recompute"];

const keyOf = (quantity) => quantity.key.split(".")[1];
const isNothing = (value) => value === 0 || (Array.isArray(value) && value.every((each) => each === 0));
const collapsed = (values) => (values.every((each) => each === values[0]) ? values[0] : values);

// The value at a path of a document, and the object that holds it.
function look(document, path) {
  const keys = path.split(".");
  const holder = keys.slice(0, -1).reduce((found, key) => (isObject(found) ? found[key] : undefined), document);
  const key = keys.at(-1);
  return { holder: isObject(holder) ? holder : {}, key, value: isObject(holder) ? holder[key] : undefined };
}

function removed(document, path) {
  const { holder, key, value } = look(document, path);
  delete holder[key];
  return value ?? null;
}

// Both documents as one; the second takes precedence.
const merged = (one, other) =>
  isObject(one) && isObject(other)
    ? Object.fromEntries([...Object.entries(one), ...Object.entries(other).map(([key, value]) => [key, merged(one[key], value)])])
    : other;

export class ProblemForm {
  constructor() {
    this.values = Object.fromEntries(QUANTITIES.map(({ key, per, start }) => [key, new Values(per, start)]));
    this.kept = { problem: {}, options: {} };
    /** @type {any} */
    this.layers = null; // a Layers, in place of the costs and memory of stages
    this.ranks = 4;
  }

  // The shape of the tables; the previous one while a field holds no valid count.
  get shape() {
    const [ranks, chunks] = ["pp_degree", "chunks"].map((id) => typed(input(id).value));
    if (Number.isInteger(ranks) && ranks >= 1 && ranks <= LARGEST_TABLE) {
      this.ranks = ranks;
    }
    const hasChunks = Number.isInteger(chunks) && chunks >= 1 && chunks <= 64;
    return new Shape(this.ranks, input("placement").value, hasChunks ? chunks : 2);
  }

  get hasFraction() {
    return this.layers === null && input("has_memory").checked && input("limit_kind").value === "fraction";
  }

  // ---- to documents

  // The body of a search, without its limit if that is a fraction: the service turns it into an amount.
  body(limit = null) {
    const found = { problem: {}, options: {} };
    for (const [id, { path, isChoice, isText, default: usual }] of Object.entries(FIELDS)) {
      const text = input(id).value.trim();
      if (path !== undefined && text !== usual && (id !== "chunks" || input("placement").value === "loop")) {
        const [part, ...keys] = path.split(".");
        const value = isChoice || isText ? text : typed(text);
        found[part] = merged(found[part], keys.reduceRight((inner, key) => ({ [key]: inner }), /** @type {any} */ (value)));
      }
    }
    const amounts = (quantities) => Object.fromEntries(quantities.map((each) => [keyOf(each), this.values[each.key].toJson(this.shape)]));
    const { problem } = found;
    if (this.layers !== null) {
      Object.assign(problem, this.layers.document(), { memory: { ...amounts([STATIC]), limit: this.#limit(limit) } });
    } else {
      const { backward, ...costs } = amounts(COSTS);
      const isGiven = [backward].flat().some((value) => value !== "");
      problem.costs = isGiven ? { ...costs, backward } : costs;
      if (input("has_memory").checked) {
        problem.memory = { ...amounts([...DELTAS, STATIC]), limit: this.#limit(limit) };
      }
    }
    return merged(found, this.kept);
  }

  #limit(amounts) {
    if (input("limit_kind").value === "amount") {
      return this.values[LIMIT.key].toJson(this.shape);
    }
    return this.hasFraction && amounts !== null ? collapsed(amounts) : null;
  }

  // The body of a check.
  question() {
    return this.hasFraction ? { ...this.body(), limit_fraction: typed(input("limit_fraction").value) } : this.body();
  }

  // ---- from documents

  // Reads the body of a search; returns the names of the values that are sent but not shown.
  read({ problem, options = {}, limit_fraction: fraction = null }) {
    this.layers = Layers.of(problem);
    this.kept = structuredClone({ problem: this.layers?.beside(problem) ?? problem, options });
    for (const key of this.layers === null ? [] : LAYERED) {
      delete this.kept.problem[key];
    }
    for (const [id, field] of Object.entries(FIELDS)) {
      if (field.path !== undefined) {
        this.#readField(id, field);
      }
    }
    const limit = look(this.kept, "problem.memory.limit").value ?? null;
    input("has_memory").checked = this.#hasMemory(limit);
    input("limit_kind").value = fraction !== null ? "fraction" : limit === null ? "none" : "amount";
    if (fraction !== null) {
      input("limit_fraction").value = String(fraction);
    }
    const shown = this.layers === null ? QUANTITIES : [STATIC, LIMIT];
    for (const { key, per, start, absent } of shown) {
      const part = this.kept.problem[key.split(".")[0]] ?? (key.startsWith("costs.") ? {} : null);
      this.values[key] = new Values(per, isObject(part) ? absent : start);
      const value = removed(this.kept, `problem.${key}`);
      if (value !== null) {
        this.values[key].fromJson(value, this.shape);
      }
    }
    for (const part of PARTS) {
      const value = this.kept.problem[part] ?? {};
      if (isObject(value) && Object.keys(value).length === 0) {
        delete this.kept.problem[part];
      }
    }
    return this.#unshown(shown);
  }

  #readField(id, { path, isChoice, isText, default: usual = "" }) {
    const { value } = look(this.kept, path);
    const offered = isChoice ? [.../** @type {any} */ (at(id)).options].filter((each) => each.value !== "auto" || this.layers !== null) : [];
    const isShown = isChoice ? offered.some((each) => each.value === value) : isText ? typeof value === "string" : isValue(value);
    if (isShown || (value ?? null) === null) {
      removed(this.kept, path);
    }
    if (isShown) {
      input(id).value = String(value);
    } else if (isChoice) {
      input(id).value = (offered.find((each) => each.defaultSelected) ?? offered[0]).value;
    } else if (id !== "chunks") {
      input(id).value = usual; // the document does not set it
    }
  }

  // Whether memory matters. A document whose actions hold none and that has no limit is as one without memory.
  #hasMemory(limit) {
    const { memory } = this.kept.problem;
    const held = [...DELTAS, STATIC].map(({ key }) => look(this.kept, `problem.${key}`).value);
    if (this.layers === null && isObject(memory) && limit === null && held.every(isNothing)) {
      delete this.kept.problem.memory;
      return false;
    }
    return this.layers !== null || (memory ?? null) !== null;
  }

  #unshown(quantities) {
    const names = Object.entries(this.kept.problem).flatMap(([key, value]) =>
      PARTS.includes(key) && isObject(value) ? Object.keys(value).map((inner) => `${key}.${inner}`) : [key],
    );
    const asIs = quantities.filter(({ key }) => this.values[key].asIs !== undefined).map(({ key }) => key);
    return [...names, ...Object.keys(this.kept.options).map((key) => `options.${key}`), ...asIs];
  }

  // A field that is edited replaces the value of the file. Returns false if it is none of these fields.
  edited(id) {
    if (FIELDS[id]?.path !== undefined) {
      removed(this.kept, FIELDS[id].path);
    }
    if (id === "keep_cut") {
      this.layers.keepsCut = input(id).checked;
    }
    return FIELDS[id] !== undefined;
  }

  // ---- W follows F and I

  get #deltas() {
    return DELTAS.map(({ key }) => this.values[key].spread(this.shape).map(typed));
  }

  get isBalanced() {
    const [forward, inputs, weights] = this.#deltas;
    return forward.every((value, index) => Math.abs(value + inputs[index] + weights[index]) <= 1e-9);
  }

  // Sets W to -(F + I); returns false if they are not numbers.
  balance() {
    const [forward, inputs] = this.#deltas;
    const left = forward.map((value, index) => Number((0 - value - inputs[index]).toPrecision(12)));
    if (!left.every(Number.isFinite)) {
      return false;
    }
    this.values["memory.backward_weight"].fill(left.map(String), this.shape);
    return true;
  }
}
