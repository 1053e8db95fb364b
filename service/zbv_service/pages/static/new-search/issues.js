// The service's check of a problem: messages at the fields they concern, and the rest in words.

import { at, make } from "../dom.js";
import { amount, number, storage } from "../numbers.js";
import { cellId, issueId } from "./cells.js";
import { DELTAS, FIELDS, QUANTITIES } from "./problem-form.js";

const MOST_LISTED = 8; // issues that are listed; further ones are counted
const NAMED = Object.fromEntries(Object.entries(FIELDS).map(([id, { path = id }]) => [`/${path.replaceAll(".", "/")}`, id]));
const find = (id) => document.getElementById(id);

// The ids of the control that an issue concerns and of the element that shows its message; null if there is none.
function placeOf(pointer, form) {
  const [, , part, name, index] = pointer.split("/");
  const quantity = QUANTITIES.find(({ key }) => key === `${part}.${name}`)?.key;
  const isFraction = quantity === "memory.limit" && at("limit_kind")["value"] !== "amount";
  const id = isFraction ? "limit_fraction" : NAMED[pointer];
  if (id !== undefined) {
    return { control: id, holder: issueId(id) };
  }
  if (pointer === "/problem/memory") {
    return { control: cellId(DELTAS[2].key, 0), holder: issueId("memory") };
  }
  return quantity === undefined ? null : { control: cellId(quantity, cellOf(form.values[quantity], index, form.shape)), holder: issueId(quantity) };
}

// The field of the value at an index of the document's list, or of the stage that it was expanded to.
function cellOf(values, index, shape) {
  if (index === undefined || values.mode === "same" || values.asIs !== undefined) {
    return 0;
  }
  const hasText = [values.toJson(shape)].flat().some((value) => typeof value === "string");
  return values.mode === "chunk" && !hasText ? Math.floor(Number(index) / shape.ranks) : Number(index);
}

export class Issues {
  constructor(form) {
    this.form = form;
    this.shown = [];
    for (const id of Object.values(NAMED)) {
      find(id)?.closest(".field")?.append(make("p", { className: "issue", id: issueId(id), hidden: true }));
    }
  }

  show(issues) {
    for (const holder of document.querySelectorAll(/** @type {"p"} */ (".issue"))) {
      holder.textContent = "";
      holder.hidden = true;
      holder.closest(".issue-row")?.setAttribute("hidden", "");
    }
    for (const control of document.querySelectorAll("[aria-invalid]")) {
      control.removeAttribute("aria-invalid");
      control.removeAttribute("aria-describedby");
    }
    this.shown = issues.map((issue) => ({ ...issue, place: placeOf(issue.pointer, this.form) }));
    for (const { detail, place } of this.shown) {
      const holder = find(place?.holder);
      if (holder !== null) {
        if (!holder.textContent.includes(detail)) {
          holder.textContent = [holder.textContent, detail].filter(Boolean).join(" ");
        }
        holder.hidden = false;
        holder.closest(".issue-row")?.removeAttribute("hidden");
        const control = find(place.control);
        control?.setAttribute("aria-invalid", "true");
        control?.setAttribute("aria-describedby", place.holder);
      }
    }
  }

  // Shows all issues as a list of links and focuses it.
  summarise(title) {
    const items = this.shown.map(({ pointer, detail, place }) => {
      const control = find(place?.control);
      if (control === null) {
        return make("li", {}, `${pointer || "the document"}: ${detail}`);
      }
      const name = control.getAttribute("aria-label") ?? /** @type {HTMLInputElement} */ (control).labels?.[0]?.textContent ?? pointer;
      const link = make("a", { href: `#${control.id}` }, `${name}: ${detail}`);
      link.addEventListener("click", (event) => {
        event.preventDefault();
        find(control.id)?.focus();
      });
      return make("li", {}, link);
    });
    at("summary").replaceChildren(make("h2", {}, title), make("ul", {}, ...items));
    at("summary").hidden = false;
    at("summary").focus();
  }

  // Whether the problem is valid: [tone, words]. Issues that no field shows are listed.
  verdict(facts) {
    if (this.shown.length > 0) {
      const homeless = this.shown.filter(({ place }) => find(place?.holder) === null);
      const others = homeless.slice(0, MOST_LISTED).map(({ pointer, detail }) => `${pointer || "the document"}: ${detail}`);
      const more = homeless.length > MOST_LISTED ? [`And ${homeless.length - MOST_LISTED} more.`] : [];
      const count = this.shown.length === 1 ? "1 error" : `${this.shown.length} errors`;
      return ["bad", [`${count} to correct.`, ...others, ...more].join(" ")];
    }
    if (facts === null || facts.fits) {
      return ["good", "Ready to search."];
    }
    const least = facts.smallest_fraction;
    const more = least === null ? "" : ` The smallest feasible one is ${roundedUp(least)} × 1F1B.`;
    return ["bad", `No plan fits this memory limit.${more}`];
  }
}

// A smallest fraction, rounded up to four digits, so that it fits when it is used.
function roundedUp(fraction) {
  const unit = 10 ** (Math.floor(Math.log10(fraction)) - 3);
  return number(Math.ceil(fraction / unit - 1e-6) * unit);
}

// The meaning of the memory limit.
export function meaningOf(facts, isFraction, unit) {
  if (facts.limit === null) {
    return "Plans may use any amount of memory.";
  }
  const ends = [Math.min(...facts.limit), Math.max(...facts.limit)].map((each) => storage(each, unit));
  const fraction = isFraction ? " per rank" : facts.limit_fraction === null ? "" : `, ${number(facts.limit_fraction, 3)} of 1F1B's memory`;
  const least = facts.smallest_fraction === null ? "" : `; no plan fits below ${roundedUp(facts.smallest_fraction)}`;
  return `That is ${[...new Set(ends)].join(" to ")}${fraction}${least}.`;
}

// Facts as terms and texts.
export function factsOf(facts, units) {
  const busiest = Math.max(...facts.busy);
  const found = [
    ["Actions", `${number(facts.actions, 7)} on ${facts.stages} stages`],
    ["Work of the busiest rank", `${amount(busiest, units.time)} (rank ${facts.busy.indexOf(busiest)})`],
  ];
  if (facts.one_f_one_b_memory > 0) {
    found.push(["Memory of 1F1B", storage(facts.one_f_one_b_memory, units.memory)]);
    found.push(["Smallest limit", `${roundedUp(facts.smallest_fraction)} × 1F1B`]);
  }
  return found;
}
