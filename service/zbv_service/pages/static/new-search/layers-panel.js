// The part of the form for layers. It replaces costs and memory of stages, which follow from the layers.

import { at, input, part } from "../dom.js";
import { amount, number, storage } from "../numbers.js";


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
  return found.map(([name, text]) => {
    const row = document.createElement("div");
    row.append(Object.assign(document.createElement("dt"), { textContent: name }));
    row.append(Object.assign(document.createElement("dd"), { textContent: text }));
    return row;
  });
}
