// Layers of a problem file: shown, and sent unchanged. If the file divides them into stages, the reader may discard
// that division, so that the planner chooses one.

import { at, input, make, part } from "../dom.js";
import { amount, number, storage } from "../numbers.js";
import { isObject, mean } from "./values.js";

const MOST_SHOWN = 512; // the maximum number of layers

export class Layers {
  constructor(problem) {
    this.layers = problem.layers;
    this.costs = problem.costs;
    this.cut = problem.cut;
    this.devices = problem.devices;
    this.partition = problem.partition ?? undefined;
    this.recompute = problem.recompute;
    this.hasCut = this.partition !== undefined;
    this.keepsCut = this.hasCut;
  }

  // Returns null if the problem gives stages.
  static of(problem) {
    return Array.isArray(problem.layers) ? new Layers(problem) : null;
  }

  // The problem with the memory that ranks hold in addition to their layers. That of layers follows from them.
  beside(problem) {
    if (!isObject(problem.memory ?? {})) {
      return problem;
    }
    const { static_beside_layers: beside, ...memory } = problem.memory ?? {};
    for (const name of this.hasCut ? ["forward", "backward_input", "backward_weight"] : []) {
      delete memory[name];
    }
    return { ...problem, memory: beside === undefined ? memory : { ...memory, static: beside } };
  }

  // The layers' part of a problem document. Recomputation without stages is invalid; the service reports it.
  document() {
    const { layers, devices, cut, partition, recompute, keepsCut } = this;
    const ofCut = keepsCut || !this.hasCut ? { recompute, ...(keepsCut ? { partition } : {}) } : {};
    const found = { layers, devices, costs: this.#costs(), cut, ...ofCut };
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

  draw(table, units) {
    const objects = this.layers.map((layer) => (isObject(layer) ? layer : {}));
    const held = (value) => (typeof value === "number" ? storage(value, units.memory) : textOf(value));
    /** @type {[string, (layer: any) => string][]} */
    const columns = [
      ["F", ({ forward }) => textOf(forward)],
      ["I", ({ backward_input: value }) => textOf(value)],
      ["W", ({ backward_weight: value }) => textOf(value)],
      ["B", ({ backward }) => textOf(backward ?? "I + W")],
      ["Forward holds", ({ memory }) => held(memory?.forward ?? 0)],
      ["Static", ({ memory, parameters_bytes: bytes }) => held(memory?.static ?? bytes ?? 0)],
      ["Output", ({ output_bytes: bytes }) => amountOf(bytes ?? 0)],
      ["Recomputed", ({ recompute: it }) => (isObject(it) ? `holds ${held(it.memory?.forward ?? "as much")}` : "–")],
    ];
    const optional = { B: "backward", Recomputed: "recompute" };
    const shown = columns.filter(([name]) => !(name in optional) || objects.some((each) => (each[optional[name]] ?? null) !== null));
    const head = ["Layer", ...shown.map(([name]) => name)].map((name) => make("th", { scope: "col" }, name));
    const lines = objects.slice(0, MOST_SHOWN).map((layer) => {
      const copies = (layer.repeat ?? null) === null ? [] : [make("span", { className: "muted" }, ` × ${textOf(layer.repeat)}`)];
      const name = make("th", { scope: "row" }, textOf(layer.name), ...copies);
      return make("tr", {}, name, ...shown.map(([, of]) => make("td", {}, of(layer))));
    });
    const more = objects.length - lines.length;
    const rest = more > 0 ? [make("tr", {}, make("td", {}, `and ${number(more)} more`))] : [];
    table.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines, ...rest));
  }

  // The constraints on the stages and the costs of transfers, in words.
  inWords(units) {
    const rules = isObject(this.cut) ? this.cut : {};
    const { link, p2p } = isObject(this.costs) ? this.costs : {};
    const time = units.time ? ` ${units.time}` : "";
    const found = [
      Array.isArray(link) && "Every rank has its own link to the next one.",
      isObject(link) && `Transfers have a latency of ${textOf(link.latency ?? 0)}${time} and a bandwidth of ${amountOf(link.bandwidth)} per ${units.time || "unit of time"}.`,
      link === undefined && typeof p2p === "number" && `Transfers take ${textOf(p2p)}${time}.`,
      ...[rules.together ?? []].flat().map((group) => `${[group].flat().map(textOf).join(", ")} stay together.`),
      ...["first", "last"].map((key) => (rules[key] ?? null) !== null && `The ${key} stage has ${textOf(rules[key])} transformer layers.`),
      rules.allow_empty === true && "Stages may be empty.",
    ];
    return found.filter(Boolean).join(" ");
  }
}

function textOf(value) {
  if (typeof value === "number") {
    return number(value);
  }
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "–");
  return text.length > 40 ? `${text.slice(0, 37)}…` : text;
}

const amountOf = (bytes) => (typeof bytes === "number" ? storage(bytes, "bytes") : textOf(bytes));

// Shows the parts that a problem needs; `layers` is null if it gives stages.
export function showLayers(layers, units) {
  const hasLayers = layers !== null;
  at("layers-panel").hidden = !hasLayers;
  at("keep_cut-field").hidden = !layers?.hasCut;
  for (const id of ["costs-panel", "memory-deltas", "has_memory-field", "what-if"]) {
    at(id).hidden = hasLayers;
  }
  // The memory of 1F1B is unknown before the layers are divided, and only then can the planner choose a placement.
  for (const [choice, isHidden] of /** @type {[string, boolean][]} */ ([["#limit_kind [value=fraction]", hasLayers], ["#placement [value=auto]", !hasLayers]])) {
    Object.assign(part(document, choice, HTMLOptionElement), { hidden: isHidden, disabled: isHidden });
  }
  if (hasLayers) {
    layers.draw(at("table-layers"), units);
    at("layers-said").textContent = layers.inWords(units);
    input("keep_cut").checked = layers.keepsCut;
  }
}

const NAMES = { v: "V", single: "one stage per rank" };

// Facts about layers before they are divided into stages, as terms and texts.
export function layerFactsOf(facts, units) {
  const placements = facts.placements.map(({ placement, chunks }) => NAMES[placement] ?? `interleaved × ${chunks}`);
  const cuts = facts.parts === facts.layers ? "" : `, ${number(facts.parts - 1)} possible cut points`;
  const held = [["Static memory of all layers", facts.static], ["Memory of a microbatch's forwards", facts.held]];
  return [
    ["Layers", number(facts.layers) + cuts],
    ["Placements tried", placements.join(", ")],
    ["Minimum work of the busiest rank", amount(facts.least_busy, units.time)],
    ...held.filter(([, size]) => size > 0).map(([name, size]) => [name, storage(size, units.memory)]),
  ];
}
