// The form's part for layers: what stages cost and hold follows from them, so it stands in place of those parts.

import { at, input, part } from "../dom.js";
import { amount, number, storage } from "../numbers.js";


// Shows the part that a problem needs; `layers` is null where it is given by stages.
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
  // Of what 1F1B takes nothing is known before the cut; and only a planner that cuts can choose a placement.
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

// What the service says of layers before they are cut, as rows of a list of names and texts.
export function layerRows(facts, units) {
  const placements = facts.placements.map(({ placement, chunks }) => NAMES[placement] ?? `interleaved × ${chunks}`);
  const found = [
    ["Layers", facts.parts === facts.layers ? number(facts.layers) : `${number(facts.layers)}, to be cut at ${number(facts.parts - 1)} places`],
    ["Placements tried", placements.join(", ")],
    ["Some rank works at least", amount(facts.least_busy, units.time)],
  ];
  if (facts.static > 0) {
    found.push(["All layers hold", storage(facts.static, units.memory)]);
  }
  if (facts.held > 0) {
    found.push(["A microbatch's forwards hold", storage(facts.held, units.memory)]);
  }
  return found.map(([name, text]) => {
    const row = document.createElement("div");
    row.append(Object.assign(document.createElement("dt"), { textContent: name }));
    row.append(Object.assign(document.createElement("dd"), { textContent: text }));
    return row;
  });
}
