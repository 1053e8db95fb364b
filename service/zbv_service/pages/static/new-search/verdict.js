// The service's check of the problem, in words.

import { make } from "../dom.js";
import { amount, number, storage } from "../numbers.js";

const MOST_TOLD = 8; // issues that are listed; further ones are counted

// A smallest fraction, rounded up to four digits, so that it fits when it is used.
function roundedUp(fraction) {
  const unit = 10 ** (Math.floor(Math.log10(fraction)) - 3);
  return number(Math.ceil(fraction / unit - 1e-6) * unit);
}

// Whether the problem is valid: [tone, words]; `homeless` are issues that no field shows.
export function verdictOf(facts, issues, homeless) {
  if (issues.length > 0) {
    const others = homeless.slice(0, MOST_TOLD).map(({ pointer, detail }) => `${pointer || "the document"}: ${detail}`);
    if (homeless.length > MOST_TOLD) {
      others.push(`And ${homeless.length - MOST_TOLD} more.`);
    }
    const count = issues.length === 1 ? "1 error to correct." : `${issues.length} errors to correct.`;
    return ["bad", [count, ...others].join(" ")];
  }
  if (facts.fits) {
    return ["good", "Ready to search."];
  }
  const least = facts.smallest_fraction;
  const more = least === null ? "" : ` The smallest feasible one is ${roundedUp(least)} × 1F1B.`;
  return ["bad", `No plan fits this memory limit.${more}`];
}

// The meaning of the memory limit.
export function meaningOf(facts, isFraction, unit) {
  if (facts.limit === null) {
    return "Plans may use any amount of memory.";
  }
  const [low, high] = [Math.min(...facts.limit), Math.max(...facts.limit)];
  const limit = [...new Set([storage(low, unit), storage(high, unit)])].join(" to ");
  const fraction = facts.limit_fraction === null ? "" : `, ${number(facts.limit_fraction, 3)} of 1F1B's memory`;
  const least = facts.smallest_fraction === null ? "" : `; no plan fits below ${roundedUp(facts.smallest_fraction)}`;
  return isFraction ? `That is ${limit} per rank${least}.` : `That is ${limit}${fraction}${least}.`;
}

// Facts as rows of a list of terms.
export function factRows(facts, units) {
  const busiest = Math.max(...facts.busy);
  const found = [
    ["Actions", `${number(facts.actions, 7)} on ${facts.stages} stages`],
    ["Work of the busiest rank", `${amount(busiest, units.time)} (rank ${facts.busy.indexOf(busiest)})`],
  ];
  if (facts.one_f_one_b_memory > 0) {
    found.push(["Memory of 1F1B", storage(facts.one_f_one_b_memory, units.memory)]);
    found.push(["Smallest limit", `${roundedUp(facts.smallest_fraction)} × 1F1B`]);
  }
  return termRows(found);
}

// Terms and texts as rows of a list.
export const termRows = (/** @type {string[][]} */ terms) =>
  terms.map(([name, text]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: text })));
