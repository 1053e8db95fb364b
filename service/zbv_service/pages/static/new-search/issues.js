// Shows the service's messages about invalid values at the fields they concern.

import { make } from "../dom.js";
import { cellId, issueId } from "./cells.js";
import { DELTAS, QUANTITIES } from "./problem-form.js";

const FIELDS = {
  "/problem/pp_degree": "pp_degree",
  "/problem/microbatches": "microbatches",
  "/problem/placement": "placement",
  "/problem/chunks": "chunks",
  "/problem/objective": "objective",
  "/problem/units/time": "time_unit",
  "/problem/units/memory": "memory_unit",
  "/options/effort": "effort",
  "/options/time_limit": "time_limit",
  "/options/seed": "seed",
  "/limit_fraction": "limit_fraction",
};

// The control that an issue concerns and the element that shows its message; null if it concerns no field.
function placeOf(pointer, form) {
  if (FIELDS[pointer] !== undefined) {
    return { control: FIELDS[pointer], holder: `issue-${FIELDS[pointer]}` };
  }
  if (pointer === "/problem/memory") {
    return { control: cellId(DELTAS[2].key, 0), holder: "issue-memory" };
  }
  const [, , part, name, index] = pointer.split("/");
  const quantity = QUANTITIES.find(({ key }) => key === `${part}.${name}`);
  if (quantity === undefined) {
    return null;
  }
  if (quantity.key === "memory.limit" && form.limitKind !== "amount") {
    return { control: "limit_fraction", holder: "issue-limit_fraction" };
  }
  return { control: cellId(quantity.key, cellOf(quantity.key, index, form)), holder: issueId(quantity.key) };
}

// The field of the value at an index of the document's list, or of the stage that it was expanded to.
function cellOf(key, index, form) {
  const values = form.values[key];
  const { shape } = form;
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
    for (const id of Object.values(FIELDS)) {
      const holder = make("p", { className: "issue", id: `issue-${id}`, hidden: true });
      document.getElementById(id)?.closest(".field")?.append(holder);
    }
  }

  show(issues) {
    this.clear();
    this.shown = issues.map((issue) => ({ ...issue, place: placeOf(issue.pointer, this.form) }));
    for (const { detail, place } of this.shown) {
      const holder = place === null ? null : document.getElementById(place.holder);
      if (holder !== null) {
        holder.textContent = holder.textContent ? `${holder.textContent} ${detail}` : detail;
        holder.hidden = false;
        holder.closest(".issue-row")?.removeAttribute("hidden");
        const control = document.getElementById(place.control);
        control?.setAttribute("aria-invalid", "true");
        control?.setAttribute("aria-describedby", place.holder);
      }
    }
  }

  clear() {
    for (const holder of document.querySelectorAll(/** @type {"p"} */ (".issue"))) {
      holder.textContent = "";
      holder.hidden = true;
      holder.closest(".issue-row")?.setAttribute("hidden", "");
    }
    for (const control of document.querySelectorAll("[aria-invalid]")) {
      control.removeAttribute("aria-invalid");
      control.removeAttribute("aria-describedby");
    }
    this.shown = [];
  }

  // Issues that concern no field.
  get homeless() {
    return this.shown.filter(({ place }) => place === null || document.getElementById(place.holder) === null);
  }

  // Shows all issues as a list of links and focuses it.
  summarise(summary, title) {
    const items = this.shown.map(({ pointer, detail, place }) => {
      const control = place === null ? null : document.getElementById(place.control);
      if (control === null) {
        return make("li", {}, `${pointer || "the document"}: ${detail}`);
      }
      const name = control.getAttribute("aria-label") ?? /** @type {HTMLInputElement} */ (control).labels?.[0]?.textContent ?? pointer;
      const link = make("a", { href: `#${control.id}` }, `${name}: ${detail}`);
      link.addEventListener("click", (event) => {
        event.preventDefault();
        document.getElementById(control.id)?.focus();
      });
      return make("li", {}, link);
    });
    summary.replaceChildren(make("h2", {}, title), make("ul", {}, ...items));
    summary.hidden = false;
    summary.focus();
  }
}
