// The form's part for layers: what stages cost and hold follows from them, so it stands in place of those parts.

import { figure, storage, withUnit } from "../numbers.js";

const at = (id) => document.getElementById(id);

// Shows the part that a problem needs; `layers` is null where it is given by stages.
export function showLayers(layers, units) {
  const hasLayers = layers !== null;
  for (const [id, isHidden] of [
    ["layers-panel", !hasLayers],
    ["costs-panel", hasLayers],
    ["memory-deltas", hasLayers],
    ["has_memory-field", hasLayers],
    ["keep_cut-field", !hasLayers || !layers.hasCut],
    ["what-if", hasLayers],
  ]) {
    at(id).hidden = isHidden;
  }
  // Of what 1F1B takes nothing is known before the cut; and only a planner that cuts can choose a placement.
  for (const [choice, value, isOffered] of [["limit_kind", "fraction", !hasLayers], ["placement", "auto", hasLayers]]) {
    const option = at(choice).querySelector(`[value="${value}"]`);
    option.hidden = !isOffered;
    option.disabled = !isOffered;
  }
  if (hasLayers) {
    layers.draw(at("table-layers"), units);
    at("layers-said").textContent = layers.said(units);
    at("keep_cut").checked = layers.keepsCut;
  }
}

const NAMES = { v: "V", single: "one stage per rank" };

// What the service says of layers before they are cut, as rows of a list of names and texts.
export function layerRows(facts, units) {
  const placements = facts.placements.map(({ placement, chunks }) => NAMES[placement] ?? `interleaved × ${chunks}`);
  const found = [
    ["Layers", facts.parts === facts.layers ? figure(facts.layers) : `${figure(facts.layers)}, to be cut at ${figure(facts.parts - 1)} places`],
    ["Placements tried", placements.join(", ")],
    ["Some rank works at least", withUnit(facts.least_busy, units.time)],
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
