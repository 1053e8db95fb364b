// Layers of a problem file: shown, and sent unchanged. If the file divides them into stages, the reader may discard
// that division, so that the planner chooses one.

import { number, storage } from "../numbers.js";

const MOST_SHOWN = 512; // the maximum number of layers
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

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
      const name = Object.assign(document.createElement("th"), { scope: "row", textContent: told(found.name) });
      if ((found.repeat ?? null) !== null) {
        name.append(Object.assign(document.createElement("span"), { className: "muted", textContent: ` × ${told(found.repeat)}` }));
      }
      line.prepend(name);
      return line;
    });
    const more = this.layers.length - lines.length;
    if (more > 0) {
      lines.push(row("td", [`and ${number(more)} more`]));
    }
    const [thead, tbody] = ["thead", "tbody"].map((name) => document.createElement(name));
    thead.append(head);
    tbody.append(...lines);
    table.replaceChildren(thead, tbody);
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

function row(kind, texts) {
  const line = document.createElement("tr");
  line.append(...texts.map((text) => Object.assign(document.createElement(kind), { textContent: text })));
  return line;
}
