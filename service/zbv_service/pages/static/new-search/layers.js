// Layers of a problem file: shown, and sent unchanged. If the file divides them into stages, the reader may discard
// that division, so that the planner chooses one.

import { at, input, make, part } from "../dom.js";
import { amount, number, storage } from "../numbers.js";
import { isObject, mean } from "./values.js";
import { termRows } from "./verdict.js";

const MOST_SHOWN = 512; // the maximum number of layers

export class Layers {
  constructor(problem) {
    this.layers = problem.layers;
    this.costs = problem.costs;
    this.rules = problem.cut;
    this.devices = problem.devices;
    this.partition = problem.partition ?? undefined;
    this.recompute = problem.recompute;
    this.keepsCut = this.hasCut;
  }

  // Returns null if the problem gives stages.
  static of(problem) {
    return Array.isArray(problem.layers) ? new Layers(problem) : null;
  }

  get hasCut() {
    return this.partition !== undefined;
  }

  // The layers' part of a problem document.
  document() {
    const found = { layers: this.layers, devices: this.devices, costs: this.#costs(), cut: this.rules };
    if (this.keepsCut) {
      Object.assign(found, { partition: this.partition, recompute: this.recompute });
    } else if (!this.hasCut) {
      found.recompute = this.recompute; // invalid without stages; the service reports it
    }
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  }

  // The costs of stages follow from the layers; only transfers have separate costs.
  #costs() {
    const { costs } = this;
    if (!this.hasCut || !isObject(costs)) {
      return costs;
    }
    if (costs.link !== undefined) {
      return { link: costs.link };
    }
    const isList = Array.isArray(costs.p2p) && costs.p2p.length > 0;
    return costs.p2p === undefined ? undefined : { p2p: isList && !this.keepsCut ? mean(costs.p2p) : costs.p2p };
  }

  // ---- as a table

  get #isFused() {
    return this.layers.some((layer) => (layer?.backward ?? null) !== null);
  }

  get #isRecomputed() {
    return this.layers.some((layer) => isObject(layer?.recompute));
  }

  draw(table, units) {
    const held = (value) => (typeof value === "number" ? storage(value, units.memory) : told(value));
    const columns = [
      ["F", ({ forward }) => told(forward)],
      ["I", ({ backward_input: value }) => told(value)],
      ["W", ({ backward_weight: value }) => told(value)],
      ...(this.#isFused ? [["B", ({ backward }) => (backward ?? null) === null ? "I + W" : told(backward)]] : []),
      ["Forward holds", ({ memory }) => held(memory?.forward ?? 0)],
      ["Static", ({ memory, parameters_bytes: bytes }) => held(memory?.static ?? bytes ?? 0)],
      ["Output", ({ output_bytes: bytes }) => amountOf(bytes ?? 0)],
      ...(this.#isRecomputed ? [["Recomputed", ({ recompute }) => recomputed(recompute, held)]] : []),
    ];
    const head = row("th", ["Layer", ...columns.map(([name]) => name)]);
    for (const cell of head.children) {
      cell.setAttribute("scope", "col");
    }
    const lines = this.layers.slice(0, MOST_SHOWN).map((layer) => {
      const found = isObject(layer) ? layer : {};
      const line = row("td", columns.map(([, of]) => /** @type {(layer: any) => string} */ (of)(found)));
      const name = make("th", { scope: "row" }, told(found.name));
      if ((found.repeat ?? null) !== null) {
        name.append(make("span", { className: "muted" }, ` × ${told(found.repeat)}`));
      }
      line.prepend(name);
      return line;
    });
    const more = this.layers.length - lines.length;
    if (more > 0) {
      lines.push(row("td", [`and ${number(more)} more`]));
    }
    table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines));
  }

  // The constraints on the stages and the costs of transfers, in words.
  said(units) {
    const rules = isObject(this.rules) ? this.rules : {};
    const time = units.time || "unit of time";
    const { link, p2p } = isObject(this.costs) ? this.costs : {};
    const found = [];
    if (Array.isArray(link)) {
      found.push("Every rank has its own link to the next one.");
    } else if (isObject(link)) {
      found.push(`Transfers have a latency of ${told(link.latency ?? 0)} ${units.time} and a bandwidth of ${amountOf(link.bandwidth)} per ${time}.`.replace("  ", " "));
    } else if (typeof p2p === "number") {
      found.push(`Transfers take ${told(p2p)} ${units.time}`.trim() + ".");
    }
    for (const group of Array.isArray(rules.together) ? rules.together : []) {
      found.push(`${[group].flat().map(told).join(", ")} stay together.`);
    }
    for (const [key, name] of [["first", "first"], ["last", "last"]]) {
      if ((rules[key] ?? null) !== null) {
        found.push(`The ${name} stage has ${told(rules[key])} transformer layers.`);
      }
    }
    if (rules.allow_empty === true) {
      found.push("Stages may be empty.");
    }
    return found.join(" ");
  }
}

function told(value) {
  if (typeof value === "number") {
    return number(value);
  }
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "–");
  return text.length > 40 ? `${text.slice(0, 37)}…` : text;
}

const amountOf = (bytes) => (typeof bytes === "number" ? storage(bytes, "bytes") : told(bytes));

function recomputed(alternative, held) {
  return isObject(alternative) ? `holds ${held(alternative.memory?.forward ?? "as much")}` : "–";
}

const row = (kind, texts) => make("tr", {}, ...texts.map((text) => make(kind, {}, text)));

// Shows the parts that a problem needs; `layers` is null if it gives stages.
export function showLayers(layers, units) {
  const hasLayers = layers !== null;
  /** @type {[string, boolean][]} */
  const parts = [
    ["layers-panel", !hasLayers],
    ["costs-panel", hasLayers],
    ["memory-deltas", hasLayers],
    ["has_memory-field", hasLayers],
    ["keep_cut-field", !hasLayers || !layers.hasCut],
    ["what-if", hasLayers],
  ];
  for (const [id, isHidden] of parts) {
    at(id).hidden = isHidden;
  }
  // The memory of 1F1B is unknown before the layers are divided, and only then can the planner choose a placement.
  for (const [choice, isOffered] of /** @type {[string, boolean][]} */ ([
    ['#limit_kind [value="fraction"]', !hasLayers],
    ['#placement [value="auto"]', hasLayers],
  ])) {
    const option = part(document, choice, HTMLOptionElement);
    option.hidden = !isOffered;
    option.disabled = !isOffered;
  }
  if (hasLayers) {
    layers.draw(at("table-layers"), units);
    at("layers-said").textContent = layers.said(units);
    input("keep_cut").checked = layers.keepsCut;
  }
}

const NAMES = { v: "V", single: "one stage per rank" };

// Facts about layers before they are divided into stages, as rows of a list of terms.
export function layerRows(facts, units) {
  const placements = facts.placements.map(({ placement, chunks }) => NAMES[placement] ?? `interleaved × ${chunks}`);
  const found = [
    ["Layers", facts.parts === facts.layers ? number(facts.layers) : `${number(facts.layers)}, ${number(facts.parts - 1)} possible cut points`],
    ["Placements tried", placements.join(", ")],
    ["Minimum work of the busiest rank", amount(facts.least_busy, units.time)],
  ];
  if (facts.static > 0) {
    found.push(["Static memory of all layers", storage(facts.static, units.memory)]);
  }
  if (facts.held > 0) {
    found.push(["Memory of a microbatch's forwards", storage(facts.held, units.memory)]);
  }
  return termRows(found);
}
